"""Whether an engine may be asked for anything now, and if not, why."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from cuelight import errors
from cuelight.config import is_positive, shown
from cuelight.errors import ConfigError
from cuelight.kernel import ActorCrashed


class Availability:
    """From the moment an engine is made until long after it has ended. Exceptions are made anew for everyone: one that
    is raised again gathers the tracebacks of all who met it.
    """

    def __init__(self) -> None:
        self._unavailable: Callable[[], errors.EngineUnavailable] | None = not_started
        self._thread_id = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self.drain: Drain | None = None
        """The drain that is under way."""

    def begin(self) -> None:
        """It is being started, on this thread. Raises EngineClosed where it was before."""
        if self._thread_id or self._unavailable is not not_started:
            raise errors.EngineClosed("an engine is started once; make another")
        self._thread_id, self._loop = threading.get_ident(), asyncio.get_running_loop()

    def open(self) -> None:
        """It has started."""
        self._unavailable = None

    def end(self, reason: Callable[[], errors.EngineUnavailable]) -> None:
        """It serves nobody any more."""
        self._unavailable = reason

    @property
    def is_open(self) -> bool:
        """Whether it serves."""
        return self._unavailable is None

    @property
    def is_closed(self) -> bool:
        """Whether somebody has stopped it."""
        return self._unavailable is closed

    @property
    def is_own_thread(self) -> bool:
        """Whether this is the thread whose event loop runs the engine."""
        return threading.get_ident() == self._thread_id

    def check_starting(self) -> None:
        """Raises EngineUnavailable once another task has stopped what is being started."""
        if self._unavailable is not None and self._unavailable is not not_started:
            raise self._unavailable()

    def check_open(self) -> None:
        """Raises EngineUnavailable."""
        if self._unavailable is not None:
            raise self._unavailable()

    def check(self) -> None:
        """Whether it serves whoever asks here. Raises EngineUnavailable."""
        self.check_open()
        self.check_here()

    def check_here(self) -> None:
        """Whether it is used where it was started. Raises EngineUnavailable."""
        if not self.is_own_thread or _running_loop() not in (self._loop, None):
            raise errors.EngineUnavailable(
                "an engine is used in the thread and the event loop in which it was started; from others, "
                "use asyncio.run_coroutine_threadsafe(engine.generate(...), loop)"
            )

    def check_takes_new(self) -> None:
        """Raises EngineUnavailable and EngineDraining."""
        self.check_open()
        self.check_not_draining()

    def check_not_draining(self) -> None:
        """Raises EngineDraining."""
        if self.drain is not None:
            raise errors.EngineDraining("the engine finishes what it has begun, and takes nothing new")


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """A request may be sent between two runs of the loop as well."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def not_started() -> errors.EngineUnavailable:
    """Before the start."""
    return errors.NotStarted("start the engine first: `async with Engine(...)`")


def closed() -> errors.EngineUnavailable:
    """After the stop."""
    return errors.EngineClosed("the engine is closed")


def broken(crash: ActorCrashed) -> errors.EngineUnavailable:
    """After a crash that nothing provides for."""
    error = errors.EngineBroken(str(crash))
    error.__cause__ = crash
    return error


class Drain:
    """One wait until nobody is left; `is_empty` says whether that is so, and may be asked at any time."""

    def __init__(self, is_empty: Callable[[], bool]) -> None:
        self._is_empty = is_empty
        self._empty = asyncio.Event()
        self.look()

    def look(self) -> None:
        """Somebody may have left."""
        if self._is_empty():
            self._empty.set()

    async def over(self, timeout_seconds: float) -> None:
        """Return once nobody is left, or after so long."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._empty.wait()
        except TimeoutError:
            pass


def check_timeout(seconds: object) -> float:
    """The deadline of a drain, in seconds. Raises ConfigError for one that cannot be met."""
    if not is_positive(seconds):
        raise ConfigError(f"timeout_seconds must be a number above 0, not {shown(seconds)}; `stop` waits for nobody")
    return float(seconds)
