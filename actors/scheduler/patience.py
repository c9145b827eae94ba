"""Whether a neighbour still answers: names the one that has been silent for longer than anything took before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cuelight.kernel import Timer

PATIENCE_SECONDS: Final = 30.0
"""The least that a neighbour may take."""

PATIENCE_FACTOR: Final = 10.0
"""It may also take so many times as long as its longest answer so far."""


class Patience:
    """One neighbour's unanswered questions. While there are any, a timer runs; it is not moved for each of them."""

    def __init__(self, wake_after: Callable[[float], Timer]) -> None:
        self._wake_after = wake_after
        self._asked: list[float] = []
        self._longest = 0.0
        self._timer: Timer | None = None

    @property
    def _limit(self) -> float:
        return max(PATIENCE_SECONDS, PATIENCE_FACTOR * self._longest)

    def asked(self, now: float) -> None:
        """It was asked something."""
        self._asked.append(now)
        if self._timer is None:
            self._timer = self._wake_after(self._limit)

    def answered(self, now: float) -> None:
        """It has answered what it was asked first."""
        self._longest = max(self._longest, now - self._asked.pop(0))
        if not self._asked:
            self.give_up()

    def give_up(self) -> None:
        """No answer is awaited any more."""
        self._asked.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def silence(self, now: float) -> float | None:
        """To be called when the timer is over: for how long it has been silent, where that is too long."""
        if self._timer is not None:
            self._timer.cancel()  # what is heard may be from one that was over just before it was cancelled
            self._timer = None
        if not self._asked:
            return None
        waited = now - self._asked[0]
        is_late = waited >= self._limit
        self._timer = self._wake_after(self._limit if is_late else self._limit - waited)
        return waited if is_late else None
