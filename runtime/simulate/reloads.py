"""Reloads in a simulated run: new executors take over from the serving one, as in a reload of the engine."""

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
from cuelight.simulate.engine import Build, SimulatedEngine


class SimulatedReloads:
    """Reloads, one at a time, of the same model, so that outputs stay the same while executors change."""

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
        self._pending: Switch | None = None
        self.switch_count = 0

    def draw(self, rng: random.Random) -> None:
        """Draw the reloads of this run, and which of them are cancelled."""
        for _ in range(rng.choice((0, 0, 1, 2, 4))):
            at = rng.random()
            self._simulation.at(at, partial(self._begin, recompute=rng.random() < 0.5))
            if rng.random() < 0.2:
                self._simulation.at(at + 0.1 * rng.random(), self._cancel)

    def _begin(self, *, recompute: bool) -> None:
        if self._pending is not None:
            return
        self._latest = ExecutorId(self._latest + 1)
        self._engine.spawn_executor(self._latest, self._build(self._latest))
        self._pending = self._switch(self._latest, recompute)
        self.resend()

    def resend(self) -> None:
        """Send the pending switch to the scheduler again, since a restarted scheduler does not have it."""
        if self._pending is not None:
            self._engine.find(self._engine.roles.scheduler).tell(self._pending)

    def _cancel(self) -> None:
        if self._pending is not None:
            self._engine.find(self._engine.roles.scheduler).tell(CancelSwitch(self._pending.executor_id))

    def tell(self, message: Switched | SwitchFailed, /) -> None:
        """Receive the outcome of a switch from the scheduler."""
        if self._pending is None or message.executor_id != self._pending.executor_id:
            return
        self._pending = None
        leaving = self._latest
        if isinstance(message, Switched):
            self._active.executor_id, leaving = leaving, self._active.executor_id
            self.switch_count += 1
        self._simulation.at(self._engine.now(), partial(self._dismiss_executor, self._active.roles[leaving]))

    def _dismiss_executor(self, role: Role[ExecutorMessage]) -> None:
        with suppress(KeyError):
            self._simulation.dismiss(role, drop=True)

    def check(self) -> None:
        """Assert that no switch is pending and that the serving executor is the only one left."""
        assert self._pending is None, f"no outcome was received for {self._pending}"
        executors = [name for name in self._simulation.statistics() if name in self._engine.executor_names]
        assert executors == [self._active.role.name], f"{executors} are left, but {self._active.role.name} serves"
