"""How long each phase of a start takes, and which one has come: loaders say it, whoever waits for them hears it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Self


class LoadPhases:
    """Seconds by name, as a clock tells that is given by `timed_by`; `begun` is told of each phase as it begins."""

    def __init__(self, begun: Callable[[str], object] = lambda _: None) -> None:
        self._begun = begun
        self._now: Callable[[], float] = lambda: 0.0
        self.seconds: dict[str, float] = {}

    def timed_by(self, now: Callable[[], float]) -> Self:
        """This is the clock."""
        self._now = now
        return self

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what happens within; what happens under one name adds up."""
        self._begun(name)
        began = self._now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - began

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Whatever is loaded within is a part of this start."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def facts(self) -> dict[str, float]:
        """For the log."""
        return phase_facts(self.seconds.items())


_current: ContextVar[LoadPhases] = ContextVar("phases")


def current_phases(now: Callable[[], float]) -> LoadPhases:
    """Those of the start that is under way here, or new ones where nobody waits to hear of them."""
    return _current.get(LoadPhases()).timed_by(now)


def phase_facts(seconds: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Seconds by phase, as facts for the log."""
    return {f"{name.lower().replace(' ', '_')}_seconds": round(spent, 3) for name, spent in seconds}
