"""Time, injected: actors ask their clock, so that a simulator can own it."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock."""

    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""


class LoopClock:
    """The event loop's own clock."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now = loop.time
