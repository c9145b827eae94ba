"""Time, injected: actors ask their clock, so that a simulator can own it."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """Something that will happen, unless cancelled first. Can be referred to weakly."""

    def cancel(self) -> object:
        """Let it not happen; harmless when it already has."""


class Clock(Protocol):
    """A monotonic clock."""

    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""

    def call_later(self, delay: float, callback: Callable[[], object], /) -> Timer:
        """Call back once, `delay` seconds from now."""


class LoopClock:
    """The machine's monotonic clock, with the timers of the event loop that runs."""

    now = staticmethod(time.monotonic)  # uvloop's own clock stands still while a handler runs

    def call_later(self, delay: float, callback: Callable[[], object], /) -> Timer:
        """Call back once, `delay` seconds from now."""
        return asyncio.get_running_loop().call_later(delay, callback)


class ActorClock:
    """What a system's mailboxes and actors know of now: who acts, and when it began to.

    Time stands still while a handler runs: it is when its message was delivered, so that a recorded inbox replays.
    """

    __slots__ = ("acting", "seconds")

    def __init__(self) -> None:
        self.acting = ""
        self.seconds = 0.0

    def now(self) -> float:
        """When the message being handled was delivered."""
        return self.seconds
