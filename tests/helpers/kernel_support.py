"""Shared by the kernel's tests: both event loops, a clock that the test advances, and actors that log."""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import TypeAlias

import pytest
import uvloop

from cuelight.kernel import (
    Actor,
    ActorCrashed,
    ActorSpec,
    Context,
    Event,
    ExitCause,
    Recipient,
    RestartPolicy,
    Role,
    System,
    Terminated,
)

NET_SECONDS = 30
"""Timeout of a test; no test waits for it."""


def on_each_loop(test: Callable[..., Coroutine[object, object, None]]) -> Callable[..., None]:
    """Run a test on asyncio's loop and on uvloop, and check that it leaves no thread behind."""

    def runs(loop_factory: Callable[[], asyncio.AbstractEventLoop], **arguments: object) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(NET_SECONDS):
                await test(**arguments)

        threads = set(threading.enumerate())
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(bounded())
        for thread in set(threading.enumerate()) - threads:
            thread.join(NET_SECONDS)  # the thread of an actor may still be ending
            assert not thread.is_alive()

    parameter = inspect.Parameter("loop_factory", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    runs.__signature__ = inspect.Signature([parameter, *inspect.signature(test).parameters.values()])
    runs.__name__, runs.__doc__ = test.__name__, test.__doc__
    runs.pytestmark = list(getattr(test, "pytestmark", []))
    factories = [asyncio.new_event_loop, uvloop.new_event_loop]
    return pytest.mark.parametrize("loop_factory", factories, ids=["asyncio", "uvloop"])(runs)


async def until(condition: Callable[[], bool]) -> None:
    """Run turns of the loop until the condition holds; `on_each_loop` has the timeout."""
    while not condition():  # noqa: ASYNC110  # the condition is any state, not an event
        await asyncio.sleep(0)


async def settle() -> None:
    """Run 50 turns of the loop: enough for everything that needs no thread and no timer."""
    for _ in range(50):
        await asyncio.sleep(0)


class ManualTimer:
    """A callback due at some time of a manual clock."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._timers: list[tuple[float, int, ManualTimer]] = []
        self._numbers = count()

    def now(self) -> float:
        return self.seconds

    def call_later(self, delay: float, callback: Callable[[], object], /) -> ManualTimer:
        timer = ManualTimer(callback)
        heappush(self._timers, (self.seconds + delay, next(self._numbers), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Advance the clock, and call the timers due meanwhile at their times."""
        end = self.seconds + seconds
        while self._timers and self._timers[0][0] <= end:
            self.seconds, _, timer = heappop(self._timers)
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()
        self.seconds = end

    @property
    def pending(self) -> int:
        """Number of timers that are neither cancelled nor fired."""
        return sum(timer.callback is not None for _, _, timer in self._timers)


class ConstantRandom(random.Random):
    """A random source whose `random()` always returns the same fraction."""

    def __init__(self, fraction: float) -> None:
        super().__init__(0)
        self.fraction = fraction

    def random(self) -> float:
        return self.fraction


@dataclass(frozen=True)
class Note:
    number: int


@dataclass(frozen=True)
class Urgent:
    number: int


@dataclass(frozen=True)
class Question:
    reply_to: Recipient[int]


@dataclass(frozen=True)
class Do:
    """Run the test's action in the handler."""

    action: Callable[[Context[object]], object]


def crash(_: Context[object]) -> None:
    """Raise an error, as an action of a handler."""
    raise ValueError("broken")


CRASH = Do(crash)

LoggedMessage: TypeAlias = Note | Urgent | Question | Do | Terminated


def role_of(name: str, capacity: int = 10_000) -> Role[LoggedMessage]:
    """Return the role of an actor of a harness."""
    return Role(name, LoggedMessage, capacity, urgent=(Urgent,))


class LoggingActor(Actor[LoggedMessage]):
    """Logs its events in the harness, as `name.life`."""

    def __init__(self, harness: SystemHarness, context: Context[object]) -> None:
        name = context.ref.name
        harness.lives[name] += 1
        self._context = context
        self._hooks = harness.hooks
        life = f"{name}.{harness.lives[name]}"
        self._write = lambda what: harness.log.append(f"{life} {what}")
        self._live("built", context)

    def started(self) -> None:
        self._live("started", self._context)

    def stopped(self) -> None:
        self._live("stopped", self._context)

    def _live(self, what: str, context: Context[object]) -> None:
        self._write(what)
        if (hook := self._hooks.get(f"{context.ref.name} {what}")) is not None:
            hook(context)

    def handle(self, message: LoggedMessage) -> None:
        match message:
            case Do(action):
                action(self._context)
            case Question(reply_to):
                reply_to.tell(42)
            case Terminated(actor, _, is_restarting, cause):
                follows = "restarts" if is_restarting else "does not restart"
                self._write(
                    f"is notified that {actor} {'stopped' if cause is ExitCause.STOPPED else 'crashed'} and {follows}"
                )
            case Note(number) | Urgent(number):
                self._write(f"{type(message).__name__} {number}")


class SystemHarness:
    """A system of logging actors, sinks first, on a manual clock; each name is given its restart policy."""

    def __init__(self, *, chance: random.Random | None = None, **policies: RestartPolicy) -> None:
        self.log: list[str] = []
        self.lives: Counter[str] = Counter()
        self.hooks: dict[str, Callable[[Context[object]], object]] = {}
        """Further actions when an actor is built, started or stopped, by `name event`."""
        self.failures: list[ActorCrashed] = []
        self.events: list[Event] = []
        self.clock = ManualClock()
        self.system = System(
            [self.part(name, restart_policy) for name, restart_policy in policies.items()],
            clock=self.clock,
            chance=chance or ConstantRandom(0.0),
            tap=self.events.append,
            on_failure=self.failures.append,
        )

    def part(self, name: str, restart_policy: RestartPolicy | None = None) -> ActorSpec[LoggedMessage]:
        return ActorSpec(role_of(name), lambda context: LoggingActor(self, context), restart_policy or RestartPolicy())

    def tell(self, name: str, *messages: LoggedMessage) -> None:
        for message in messages:
            self.system.find(role_of(name)).tell(message)

    async def pass_time(self, seconds: float) -> list[str]:
        """Let messages arrive and `seconds` pass; return the log lines since the last call."""
        await settle()
        self.clock.advance(seconds)
        await settle()
        return self.new_lines()

    def new_lines(self) -> list[str]:
        """Return the log lines since the last call."""
        new_lines, self.log[:] = list(self.log), []
        return new_lines
