"""How long each phase of a start takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Phases:
    """Seconds by name, as `now` tells."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what happens within; what happens under one name adds up."""
        began = self._now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - began

    def facts(self) -> dict[str, float]:
        """For the log."""
        return {f"{name}_seconds": round(seconds, 3) for name, seconds in self.seconds.items()}
