"""Whether an engine accepts calls now, and the exception that says why it does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from cuelight import errors
from cuelight.config import is_positive, shown
from cuelight.errors import ConfigError
from cuelight.kernel import ActorCrashed


class Availability:
    """The state of an engine as its methods check it: not started, open, draining, or ended.

    A new exception is made for each check, since an exception that is raised twice collects both tracebacks.
    """

    def __init__(self) -> None:
        self._unavailable: Callable[[], errors.EngineUnavailable] | None = not_started
        self._thread_id = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self.drain: Drain | None = None
        """The drain in progress."""

    def begin(self) -> None:
        """Bind the engine to this thread and its running event loop. Raises EngineClosed the second time."""
        if self._thread_id or self._unavailable is not not_started:
            raise errors.EngineClosed("this engine was started or stopped before: make another one")
        self._thread_id, self._loop = threading.get_ident(), asyncio.get_running_loop()

    def open(self) -> None:
        """Let the checks pass from now on."""
        self._unavailable = None

    def end(self, reason: Callable[[], errors.EngineUnavailable]) -> None:
        """Make the checks raise what `reason` returns from now on."""
        self._unavailable = reason

    @property
    def is_open(self) -> bool:
        """Whether the engine serves."""
        return self._unavailable is None

    @property
    def is_closed(self) -> bool:
        """Whether the engine was stopped, rather than broken or never started."""
        return self._unavailable is closed

    @property
    def is_own_thread(self) -> bool:
        """Whether this is the thread whose event loop runs the engine."""
        return threading.get_ident() == self._thread_id

    def check_starting(self) -> None:
        """Raise EngineUnavailable if another task has stopped the engine during its start."""
        if self._unavailable is not None and self._unavailable is not not_started:
            raise self._unavailable()

    def check_open(self) -> None:
        """Raise EngineUnavailable unless the engine serves."""
        if self._unavailable is not None:
            raise self._unavailable()

    def check(self) -> None:
        """Raise EngineUnavailable unless the engine serves and this is its thread and event loop."""
        self.check_open()
        self.check_here()

    def check_here(self) -> None:
        """Raise EngineUnavailable in another thread or event loop than the engine's."""
        if not self.is_own_thread or _running_loop() not in (self._loop, None):
            raise errors.EngineUnavailable(
                "an engine is used in the thread and the event loop in which it was started; from others, "
                "use asyncio.run_coroutine_threadsafe(engine.generate(...), loop)"
            )

    def check_takes_new(self) -> None:
        """Raise EngineUnavailable unless the engine accepts new requests."""
        self.check_open()
        self.check_not_draining()

    def check_not_draining(self) -> None:
        """Raise EngineDraining during a drain."""
        if self.drain is not None:
            raise errors.EngineDraining("the engine is draining: it finishes its requests and accepts no new ones")


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the running loop; None between two runs of a loop, when a request may be sent as well."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def not_started() -> errors.EngineUnavailable:
    """Return the exception for an engine that was not started."""
    return errors.NotStarted("start the engine first: `async with Engine(...)`")


def closed() -> errors.EngineUnavailable:
    """Return the exception for an engine that was stopped."""
    return errors.EngineClosed("the engine is closed")


def broken(crash: ActorCrashed) -> errors.EngineUnavailable:
    """Return the exception for an engine with an actor that crashed and was not restarted."""
    error = errors.EngineBroken(str(crash))
    error.__cause__ = crash
    return error


class Drain:
    """A wait until `is_empty()`, which is evaluated at each `look`."""

    def __init__(self, is_empty: Callable[[], bool]) -> None:
        self._is_empty = is_empty
        self._empty = asyncio.Event()
        self.look()

    def look(self) -> None:
        """Check again whether all requests have ended."""
        if self._is_empty():
            self._empty.set()

    async def over(self, timeout_seconds: float) -> None:
        """Return once all requests have ended, or after `timeout_seconds`."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._empty.wait()
        except TimeoutError:
            pass


def check_timeout(seconds: object) -> float:
    """Return the time limit of a drain as a float. Raises ConfigError unless it is a number above 0."""
    if not is_positive(seconds):
        raise ConfigError(
            f"timeout_seconds must be a number above 0, not {shown(seconds)}; to stop without waiting, call `stop`"
        )
    return float(seconds)
