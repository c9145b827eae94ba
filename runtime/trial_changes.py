"""Changes of models in a history: executors that are to take over, as whoever opened the engine would have it."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from cuelight.kernel import Role
from cuelight.messages.executor import ExecutorMessage
from cuelight.messages.observer import Switched, SwitchFailed
from cuelight.messages.request import FIRST_EXECUTOR, ExecutorId
from cuelight.messages.scheduler import CancelSwitch, Switch
from cuelight.simulated_engine import Build, SimulatedEngine


class Changes:
    """At most one at a time. The model stays the same, so that every output does; the executor does not."""

    def __init__(
        self,
        engine: SimulatedEngine,
        build: Callable[[ExecutorId], Build],
        switch: Callable[[ExecutorId, bool], Switch],
    ) -> None:
        self._engine = engine
        self._simulation = engine.simulation
        self._active = engine.active
        self._build = build
        self._switch = switch
        self._latest = FIRST_EXECUTOR
        self._asked: Switch | None = None
        self.taken_over = 0

    def draw(self, chance: random.Random) -> None:
        """Some histories have changes, and some of those are called off."""
        for _ in range(chance.choice((0, 0, 1, 2, 4))):
            at = chance.random()
            self._simulation.at(at, partial(self._begin, recompute=chance.random() < 0.5))
            if chance.random() < 0.2:
                self._simulation.at(at + 0.1 * chance.random(), self._call_off)

    def _begin(self, *, recompute: bool) -> None:
        if self._asked is not None:
            return
        self._latest = ExecutorId(self._latest + 1)
        self._engine.spawn_executor(self._latest, self._build(self._latest))
        self._asked = self._switch(self._latest, recompute)
        self.repeat()

    def repeat(self) -> None:
        """The scheduler may be new."""
        if self._asked is not None:
            self._engine.find(self._engine.roles.scheduler).tell(self._asked)

    def _call_off(self) -> None:
        if self._asked is not None:
            self._engine.find(self._engine.roles.scheduler).tell(CancelSwitch(self._asked.executor_id))

    def tell(self, message: Switched | SwitchFailed, /) -> None:
        """Hear from the scheduler."""
        if self._asked is None or message.executor_id != self._asked.executor_id:
            return
        self._asked = None
        leaving = self._latest
        if isinstance(message, Switched):
            self._active.executor_id, leaving = leaving, self._active.executor_id
            self.taken_over += 1
        self._simulation.at(self._engine.now(), partial(self._dismiss, self._active.roles[leaving]))

    def _dismiss(self, role: Role[ExecutorMessage]) -> None:
        with suppress(KeyError):
            self._simulation.dismiss(role, drop=True)

    def check(self) -> None:
        """At rest, every one has taken over or will not, and one executor is left."""
        assert self._asked is None, f"nobody says what has become of {self._asked}"
        executors = [name for name in self._simulation.statistics() if name in self._engine.executor_names]
        assert executors == [self._active.role.name], f"there are {executors}, and {self._active.role.name} serves"
