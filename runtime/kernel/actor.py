"""What an actor is, and what it is given."""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from typing import Generic, Never, Protocol, TypeVar

from cuelight.kernel.clock import Moment, Timer
from cuelight.kernel.ref import Ref
from cuelight.kernel.role import Part, Role
from cuelight.kernel.worker import Worker

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)


class Actor(ABC, Generic[M_contra]):
    """State behind a mailbox. Handlers run to completion, one message at a time, and never await.

    Its life begins in its constructor and ends when it is stopped or when it raises anything: then it has crashed.
    """

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if inspect.iscoroutinefunction(cls.handle):
            raise TypeError(f"{cls.__name__}.handle must be synchronous: what must be waited for is a later message")

    def started(self) -> None:
        """Called once, before the first message."""

    @abstractmethod
    def handle(self, message: M_contra) -> None:
        """React to one message: change own state, tell others, or hand blocking work to a worker."""

    def stopped(self) -> None:
        """Called once, after the last message; not after a crash."""


class Surroundings(Protocol):
    """What a driver of actors does on behalf of one life of an actor."""

    def find(self, role: Role[M]) -> Ref[M]: ...
    def hire(self, name: str) -> Worker[object]: ...
    def after(self, seconds: float, message: object) -> Timer: ...
    def watch(self, role: Role[Never]) -> None: ...
    def spawn(self, part: Part[M]) -> Ref[M]: ...
    def dismiss(self, role: Role[Never], *, drop: bool) -> None: ...


class Context(Generic[M_contra]):
    """An actor's surroundings, for one life: its own address, the others', time, chance, timers and threads."""

    __slots__ = ("_chance", "_seed", "_surroundings", "clock", "ref")

    def __init__(self, ref: Ref[M_contra], clock: Moment, seed: int, surroundings: Surroundings) -> None:
        self.ref = ref
        self.clock = clock
        """Time as this actor sees it: `clock.now()` is when the message being handled was delivered."""
        self._seed = seed
        self._chance: random.Random | None = None
        self._surroundings = surroundings

    @property
    def chance(self) -> random.Random:
        """This life's own source of chance."""
        if self._chance is None:
            self._chance = random.Random(self._seed)
        return self._chance

    def find(self, role: Role[M]) -> Ref[M]:
        """The address of the actor that plays `role`. Raises KeyError for a role outside the cast."""
        return self._surroundings.find(role)

    def worker(self, name: str) -> Worker[M_contra]:
        """A new thread for blocking work, which posts its results to this actor. It ends with this life."""
        return self._surroundings.hire(name)

    def after(self, seconds: float, message: M_contra) -> Timer:
        """Post `message` to this actor once, `seconds` from now; not if it is cancelled or this life ends first."""
        return self._surroundings.after(seconds, message)

    def watch(self, role: Role[Never]) -> None:
        """Be told `Terminated` at the end of each life of the actor that plays `role`; at once if it has stopped.

        A watch outlives restarts of both. Raises KeyError for a role outside the cast, and NotAccepted unless this
        actor's own protocol has `Terminated`.
        """
        self._surroundings.watch(role)

    def spawn(self, part: Part[M]) -> Ref[M]:
        """Add an actor to the running system; see `System.spawn`."""
        return self._surroundings.spawn(part)

    def dismiss(self, role: Role[Never], *, drop: bool = False) -> None:
        """Stop an actor of the running system; see `System.dismiss`."""
        self._surroundings.dismiss(role, drop=drop)
