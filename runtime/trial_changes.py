"""Changes of models in a history: executors that are to take over, as whoever opened the engine would have it."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Never

from cuelight.ensemble import ActiveExecutor
from cuelight.kernel import ActorSpec, Role
from cuelight.kernel.simulation import Simulation
from cuelight.messages.executor import ExecutorMessage
from cuelight.messages.observer import Switched, SwitchFailed
from cuelight.messages.request import FIRST_EXECUTOR, ExecutorId
from cuelight.messages.scheduler import CancelSwitch, SchedulerMessage, Switch


class Changes:
    """At most one at a time. The model stays the same, so that every output does; the executor does not."""

    def __init__(
        self,
        simulation: Simulation,
        scheduler: Role[SchedulerMessage],
        active: ActiveExecutor,
        part: Callable[[ExecutorId], ActorSpec[Never]],
        switch: Callable[[ExecutorId, bool], Switch],
    ) -> None:
        self._simulation = simulation
        self._scheduler = scheduler
        self._active = active
        self._part = part
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
        self._simulation.spawn(self._part(self._latest))
        self._asked = self._switch(self._latest, recompute)
        self.repeat()

    def repeat(self) -> None:
        """The scheduler may be new."""
        if self._asked is not None:
            self._simulation.find(self._scheduler).tell(self._asked)

    def _call_off(self) -> None:
        if self._asked is not None:
            self._simulation.find(self._scheduler).tell(CancelSwitch(self._asked.executor_id))

    def tell(self, message: Switched | SwitchFailed, /) -> None:
        """Hear from the scheduler."""
        if self._asked is None or message.executor_id != self._asked.executor_id:
            return
        self._asked = None
        leaving = self._latest
        if isinstance(message, Switched):
            self._active.executor_id, leaving = leaving, self._active.executor_id
            self.taken_over += 1
        self._simulation.at(self._simulation.clock.now(), partial(self._dismiss, self._active.roles[leaving]))

    def _dismiss(self, role: Role[ExecutorMessage]) -> None:
        with suppress(KeyError):
            self._simulation.dismiss(role, drop=True)

    def check(self) -> None:
        """At rest, every one has taken over or will not, and one executor is left."""
        assert self._asked is None, f"nobody says what has become of {self._asked}"
        names = {self._active.roles[ExecutorId(number)].name for number in range(FIRST_EXECUTOR, self._latest + 1)}
        executors = [name for name in self._simulation.statistics() if name in names]
        assert executors == [self._active.role.name], f"there are {executors}, and {self._active.role.name} serves"
