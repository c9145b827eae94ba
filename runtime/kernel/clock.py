"""Injected time: actors read the clock of their context, which a simulator replaces."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A scheduled callback that can be cancelled. Supports weak references."""

    def cancel(self) -> object:
        """Cancel the callback; harmless after it was called."""


class Clock(Protocol):
    """A monotonic clock."""

    def now(self) -> float:
        """Return the seconds since some fixed moment; never decreases."""

    def call_later(self, delay: float, callback: Callable[[], object], /) -> Timer:
        """Call back once, `delay` seconds from now."""


class LoopClock:
    """The machine's monotonic clock, with the timers of the running event loop."""

    now = staticmethod(time.monotonic)  # uvloop's own clock stands still while a handler runs

    def call_later(self, delay: float, callback: Callable[[], object], /) -> Timer:
        """Call back once, `delay` seconds from now."""
        return asyncio.get_running_loop().call_later(delay, callback)


class ActorClock:
    """The clock of a system's actors and mailboxes: the name of the actor that acts, and the time of its message.

    Time stands still while a handler runs, at the delivery of its message, so that a recorded inbox replays.
    """

    __slots__ = ("acting", "seconds")

    def __init__(self) -> None:
        self.acting = ""
        self.seconds = 0.0

    def now(self) -> float:
        """Return the time at which the message being handled was delivered."""
        return self.seconds
