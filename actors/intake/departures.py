"""How fast requests have been finishing, for the time after which a refused client may try again."""

from __future__ import annotations

from collections import deque
from typing import Final

WINDOW: Final = 64


class CompletionRate:
    """The moments at which the last 64 requests were finished."""

    def __init__(self) -> None:
        self._moments: deque[float] = deque(maxlen=WINDOW)

    def note(self, count: int, now: float) -> None:
        """So many requests have finished just now."""
        self._moments.extend([now] * count)

    def seconds_for(self, count: int) -> float | None:
        """How long until so many more have left, at the pace of the last ones; None while too few have."""
        if len(self._moments) < 2 or self._moments[-1] == self._moments[0]:
            return None
        return count * (self._moments[-1] - self._moments[0]) / (len(self._moments) - 1)
