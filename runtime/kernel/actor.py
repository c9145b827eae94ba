"""What an actor is, and what it is given."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Never, TypeVar

from cuelight.kernel.clock import Clock
from cuelight.kernel.ref import Ref
from cuelight.kernel.role import Role
from cuelight.kernel.worker import Worker

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)


class Actor(ABC, Generic[M_contra]):
    """State behind a mailbox. Handlers run to completion, one message at a time, and never await."""

    def started(self) -> None:
        """Called once, before the first message."""

    @abstractmethod
    def handle(self, message: M_contra) -> None:
        """React to one message: change own state, tell others, or hand blocking work to a worker."""

    def stopped(self) -> None:
        """Called once, after the last message."""


class Context(Generic[M_contra]):
    """An actor's surroundings: its own address, the others', time, chance and threads."""

    def __init__(
        self,
        ref: Ref[M_contra],
        clock: Clock,
        chance: random.Random,
        find: Callable[[Role[Never]], Ref[object]],
        hire: Callable[[str], Worker[M_contra]],
    ) -> None:
        self.ref = ref
        self.clock = clock
        self.chance = chance
        self._find = find
        self._hire = hire

    def find(self, role: Role[M]) -> Ref[M]:
        """The address of the actor that plays `role`. Raises KeyError for a role outside the cast."""
        return self._find(role)

    def worker(self, name: str) -> Worker[M_contra]:
        """A new thread for blocking work, which posts its results to this actor. The system ends it."""
        return self._hire(name)
