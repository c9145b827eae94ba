"""What the kernel's tests share: both event loops, a clock that the test moves, and actors that write a diary."""

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
"""A safety net: no test waits for it."""


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
            thread.join(NET_SECONDS)  # where an actor lived on it, it may be at its very end
            assert not thread.is_alive()

    parameter = inspect.Parameter("loop_factory", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    runs.__signature__ = inspect.Signature([parameter, *inspect.signature(test).parameters.values()])
    runs.__name__, runs.__doc__ = test.__name__, test.__doc__
    runs.pytestmark = list(getattr(test, "pytestmark", []))
    factories = [asyncio.new_event_loop, uvloop.new_event_loop]
    return pytest.mark.parametrize("loop_factory", factories, ids=["asyncio", "uvloop"])(runs)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until the condition holds; the net of `on_each_loop` is below."""
    while not condition():  # noqa: ASYNC110  # what it waits for is any state, not an event
        await asyncio.sleep(0)


async def settle() -> None:
    """Let everything happen that can happen without a thread or a timer: nothing here takes so many turns."""
    for _ in range(50):
        await asyncio.sleep(0)


class ManualTimer:
    """A callback that is due at some moment of a manual clock."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    """Time that passes only when the test says so."""

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
        """Let so much time pass, and what was due in it happen."""
        end = self.seconds + seconds
        while self._timers and self._timers[0][0] <= end:
            self.seconds, _, timer = heappop(self._timers)
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()
        self.seconds = end

    @property
    def pending(self) -> int:
        """How many timers will still do something."""
        return sum(timer.callback is not None for _, _, timer in self._timers)


class Steady(random.Random):
    """Chance that always draws the same fraction."""

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
    """Do what the test says."""

    action: Callable[[Context[object]], object]


def crash(_: Context[object]) -> None:
    """An action that is a mistake."""
    raise ValueError("broken")


BREAK = Do(crash)

Line: TypeAlias = Note | Urgent | Question | Do | Terminated


def player(name: str, capacity: int = 10_000) -> Role[Line]:
    """The role of one of a troupe."""
    return Role(name, Line, capacity, urgent=(Urgent,))


class Player(Actor[Line]):
    """Writes in its troupe's diary, as the life that it is."""

    def __init__(self, troupe: Troupe, context: Context[object]) -> None:
        name = context.ref.name
        troupe.lives[name] += 1
        self._context = context
        self._hooks = troupe.hooks
        life = f"{name}.{troupe.lives[name]}"
        self._write = lambda what: troupe.diary.append(f"{life} {what}")
        self._live("built", context)

    def started(self) -> None:
        self._live("started", self._context)

    def stopped(self) -> None:
        self._live("stopped", self._context)

    def _live(self, what: str, context: Context[object]) -> None:
        self._write(what)
        if (hook := self._hooks.get(f"{context.ref.name} {what}")) is not None:
            hook(context)

    def handle(self, message: Line) -> None:
        match message:
            case Do(action):
                action(self._context)
            case Question(reply_to):
                reply_to.tell(42)
            case Terminated(actor, _, is_restarting, cause):
                follows = "restarts" if is_restarting else "is gone"
                self._write(
                    f"hears that {actor} {'stopped' if cause is ExitCause.STOPPED else 'crashed'} and {follows}"
                )
            case Note(number) | Urgent(number):
                self._write(f"{type(message).__name__} {number}")


class Troupe:
    """A system of players, sinks first, on a clock that the test moves. Each name comes with its restart policy."""

    def __init__(self, *, chance: random.Random | None = None, **policies: RestartPolicy) -> None:
        self.diary: list[str] = []
        self.lives: Counter[str] = Counter()
        self.hooks: dict[str, Callable[[Context[object]], object]] = {}
        """What else happens when somebody is built, started or stopped, by name and event."""
        self.failures: list[ActorCrashed] = []
        self.events: list[Event] = []
        self.clock = ManualClock()
        self.system = System(
            [self.part(name, restart_policy) for name, restart_policy in policies.items()],
            clock=self.clock,
            chance=chance or Steady(0.0),
            tap=self.events.append,
            on_failure=self.failures.append,
        )

    def part(self, name: str, restart_policy: RestartPolicy | None = None) -> ActorSpec[Line]:
        return ActorSpec(player(name), lambda context: Player(self, context), restart_policy or RestartPolicy())

    def tell(self, name: str, *messages: Line) -> None:
        for message in messages:
            self.system.find(player(name)).tell(message)

    async def pass_time(self, seconds: float) -> list[str]:
        """Let so much time pass; what the diary has about it and what came before since the last look."""
        await settle()
        self.clock.advance(seconds)
        await settle()
        return self.news()

    def news(self) -> list[str]:
        """What has been written since the last look."""
        news, self.diary[:] = list(self.diary), []
        return news
