"""A simulator that runs a cast of actors without an event loop: a seed decides the next step, and time is virtual."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Never, TypeVar

from cuelight.kernel.actor import Actor, ActorSpec, InLoop, InProcess
from cuelight.kernel.clock import Timer
from cuelight.kernel.errors import ActorCrashed, KernelError
from cuelight.kernel.events import Delivered, Event, Tap
from cuelight.kernel.simulation.faults import FaultInjector, Faults, SimulatedCrash
from cuelight.kernel.simulation.history import AddressIds, EventLog, MessageCopier
from cuelight.kernel.simulation.turns import Condition, LifeTask, SimulatedTask, SupervisionTask, always
from cuelight.kernel.simulation.virtual import VirtualClock, VirtualMailbox, VirtualWorker
from cuelight.kernel.supervision import ExitCause
from cuelight.kernel.table import ActorSlot, ActorTable, Life

M = TypeVar("M")

STEPS_MAX = 1_000_000
"""Steps after which a run counts as endless."""


class SimulationError(KernelError):
    """A simulation did not come to rest, or a trial failed; a trial's message names its seed."""


NO_FAULTS = Faults()


class Simulation(ActorTable):
    """A cast driven by a seed: the same seed gives the same history, byte for byte.

    The constructor builds the actors; all else happens in `run`. Each step is one delivery, one job of a worker or one
    act of supervision, drawn from all that are possible. Time stands still meanwhile, and jumps to the next timer when
    no step is possible. Placements are simulated as far as actors can observe them: messages that cross are encoded and
    decoded. Whether another process could import `build` is not checked.

    Messages arrive at most once, and in order for each sender, receiver and lane. Messages that wait in a mailbox
    survive the restart of its actor. Only these are lost:
    - the message that is being handled in a crash;
    - messages that an ended life's own workers and timers have posted, and those of a placed actor to itself;
    - with a process that is killed, also those sent to it and not yet begun, at most `WINDOW` with the one being
      handled, and the last of its own messages that are still in transit;
    - messages that wait when an actor stops for good.

    Args:
        cast: the specs of the actors, sinks first.
        seed: determines every draw, also those of the actors' `Context.chance`.
        tap: called with every event of a life and every delivery. An error that it raises is raised by `run`.
        faults: injected faults, in addition to the actors' own crashes.
        record: whether to keep `history`.
        on_crash: called with every crash, before its consequences.

    Raises:
        ActorCrashed: a constructor raised.
        NotSendable: a protocol's annotations cannot be resolved, and some actor is placed on a thread or in a process.
    """

    clock: VirtualClock

    def __init__(
        self,
        cast: Sequence[ActorSpec[Never]],
        seed: int,
        *,
        tap: Tap | None = None,
        faults: Faults = NO_FAULTS,
        record: bool = True,
        on_crash: Callable[[ActorCrashed], None] | None = None,
    ) -> None:
        super().__init__(cast, random.Random(seed), tap)
        self.clock = VirtualClock()
        self.on_crash = on_crash or (lambda _: None)
        self._injector = FaultInjector(faults, self._chance)
        self._delay_seconds_max = faults.delay_seconds_max
        self._ids = AddressIds(self.find_by_name)
        self._history = EventLog(self._ids) if record else None
        if record:
            self.tap = self._call_tap
        self._tasks: list[SimulatedTask] = []
        self._life_tasks: dict[str, LifeTask] = {}
        self._is_running = False
        for part in self._cast:
            self._add_slot(part)
        self._prepare_to_cross()
        for slot in self._slots.values():
            self._build(slot)
            self._begin_life(slot)

    @property
    def history(self) -> bytes:
        """The encoded events so far; empty without `record`."""
        return self._history.data() if self._history is not None else b""

    def at(self, seconds: float, action: Callable[[], object]) -> Timer:
        """Call `action` outside the actors at a time, or now if that has passed."""
        return self.clock.call_at(seconds, action)

    def run(self, *, steps_max: int = STEPS_MAX, until_seconds: float = math.inf) -> None:
        """Take steps until none is possible; with `until_seconds`, until none is possible by that time.

        Raises SimulationError when more steps are possible after `steps_max`.
        """
        assert not self._is_running, "a simulation runs once at a time"
        self._is_running = True
        try:
            for _ in range(steps_max):
                if not self.step(until_seconds):
                    return
        finally:
            self._is_running = False
        raise SimulationError(f"not at rest after {steps_max} steps, at {self.clock.now()} s")

    def stop(self, *, drop: bool = False, steps_max: int = STEPS_MAX) -> None:
        """Stop every actor, sources first, after it has handled its waiting messages (with `drop`, without).

        Restarts are cancelled. Runs to the end, unless called during `run`. Raises as `run`.
        """
        self.is_dropping = self.is_dropping or drop
        self._begin_to_close()
        if not self._is_running:
            self.run(steps_max=steps_max)

    def new_worker(self, name: str, post: Callable[[object], None]) -> VirtualWorker:
        """Return a new worker whose jobs run at steps that the seed draws."""
        self._tasks[:] = [each for each in self._tasks if not (isinstance(each, VirtualWorker) and each.is_over)]
        worker = VirtualWorker(post, self._chance)
        self._tasks.append(worker)
        return worker

    def _call_tap(self, event: Event) -> None:
        if self._history is not None:
            self._history.add(event)
        self._own_tap(event)

    def step(self, until_seconds: float = math.inf) -> bool:
        """Take one step; return False where none is possible."""
        if ready := [task for task in self._tasks if task.is_ready()]:
            ready[int(self._chance.random() * len(ready))].step()
            return True
        due = self.clock.next_due()
        if due is None or due > until_seconds:
            return False
        self.clock.jump()
        return True

    # Messages.

    def _new_mailbox(self, part: ActorSpec[object]) -> VirtualMailbox:
        delay, before_put = self._delay_seconds_max, self._injector.before_tell
        return VirtualMailbox(part, self.clock, self.actor_clock, self._chance, delay, before_put)

    def _prepare(self, slot: ActorSlot) -> None:
        self._prepare_to_cross()  # for all slots: the new role's messages may be part of the others' protocols, too

    def _prepare_to_cross(self) -> None:
        parts = [slot.part for slot in self._slots.values()]
        if all(isinstance(part.placement, InLoop) for part in parts):
            return
        copier = MessageCopier(parts, self._ids, self.actor_clock)
        for slot in self._slots.values():
            slot.mailbox.convert = partial(copier.copy_to, slot.name)

    # Lives.

    def _begin_life(self, slot: ActorSlot) -> None:
        life_task = self._life_tasks[slot.name] = LifeTask(slot, self._step_life)
        self._tasks.append(life_task)

    def _step_life(self, life_task: LifeTask) -> None:
        """Take one step of a life: its beginning, one message, or its end."""
        slot, life = life_task.slot, life_task.slot.life
        try:
            if life is None:
                self._build(slot)
            elif life.crash is not None:
                raise life.crash
            elif not life_task.is_started:
                life_task.is_started = True
                self._call_actor(slot, self.clock.now(), life.actor.started, "started")
            elif len(slot.mailbox):
                self._deliver(slot, life.actor)
            else:
                self._stop_life(life_task)
        except ActorCrashed as crash:
            self._end(slot, crash)

    def _stop_life(self, life_task: LifeTask) -> None:
        """End a life in order. Raises ActorCrashed."""
        life = life_task.slot.life
        assert life is not None
        if life.crash is not None:
            raise life.crash
        if not life_task.is_started:
            self._call_actor(life_task.slot, self.clock.now(), life.actor.started, "started")
        self._call_actor(life_task.slot, self.clock.now(), life.actor.stopped, "stopped")
        self._end(life_task.slot, None)

    def _deliver(self, slot: ActorSlot, actor: Actor[object]) -> None:
        message = self._take_message(slot)
        handle = partial(self._injector.handle, slot, partial(actor.handle, message))
        try:
            self._call_actor(slot, self.clock.now(), handle, type(message).__qualname__)
        except ActorCrashed as crash:
            crash.message = message
            raise

    def _take_message(self, slot: ActorSlot) -> object:
        _, sender, message = slot.mailbox.take()
        if self.tap is not None:
            self.tap(Delivered(self.clock.now(), sender, slot.name, message))
        return message

    def _end(self, slot: ActorSlot, crash: ActorCrashed | None) -> None:
        if (life_task := self._life_tasks.pop(slot.name, None)) is not None:
            self._tasks.remove(life_task)
        if is_killed := crash is not None and _is_kill(slot, crash):
            for _ in range(self._injector.lost_count(slot)):
                self._take_message(slot)
        for other in self._slots.values():
            assert isinstance(other.mailbox, VirtualMailbox)
            other.mailbox.sender_ended(slot.name, is_killed=is_killed)
        super()._end(slot, crash)

    # Supervision, and the end.

    def _report_crash(self, crash: ActorCrashed) -> None:
        if not isinstance(crash.__cause__, SimulatedCrash):
            super()._report_crash(crash)

    def _begin_restart(self, group: Sequence[ActorSlot], delay_seconds: float) -> None:
        self._tasks.append(SupervisionTask(self._tasks, self._restart(group, delay_seconds)))

    def _restart(self, group: Sequence[ActorSlot], delay_seconds: float) -> Iterator[Condition]:
        for slot in reversed(group):
            yield always
            if slot.restart is group and slot.life is not None:  # otherwise a larger restart has taken the slot over
                slot.life.request_stop()
                try:
                    self._stop_life(self._life_tasks[slot.name])
                except ActorCrashed as crash:
                    self._end(slot, crash)
        yield self._after(delay_seconds)
        for slot in group:
            if slot.restart is group:
                self._begin_next_life(slot)
                yield always

    def _begin_next_life(self, slot: ActorSlot) -> None:
        slot.restart = None
        try:
            self._injector.before_build()
            self._build(slot)
        except SimulatedCrash as fault:
            Life(self, slot)
            self._end(slot, ActorCrashed(slot.name, "construction", fault))
        except ActorCrashed as crash:
            self._end(slot, crash)
        else:
            self._begin_life(slot)

    def _after(self, seconds: float) -> Condition:
        due = self.clock.now() + seconds
        self.clock.call_at(due, lambda: None)
        return lambda: self.clock.now() >= due

    def _fail(self, slot: ActorSlot, crash: ActorCrashed) -> None:
        self.is_dropping = True
        self.failure = self.failure or crash
        slot.mailbox.close(drop=True)
        self._begin_to_close()

    def _begin_to_close(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            self._tasks[:] = [task for task in self._tasks if not isinstance(task, SupervisionTask)]
            self._forget_restarts()
            self._tasks.append(SupervisionTask(self._tasks, self._close()))

    def _forget_restarts(self) -> None:
        for slot in self._slots.values():
            slot.restart = None

    def _close(self) -> Iterator[Condition]:
        for slot in reversed(list(self._slots.values())):
            yield always
            slot.mailbox.close(drop=self.is_dropping)
            yield partial(self._has_ended, slot)
        for slot in self._slots.values():
            slot.mailbox.close(drop=True)

    def _has_ended(self, slot: ActorSlot) -> bool:
        return slot.name not in self._life_tasks


def _is_kill(slot: ActorSlot, crash: ActorCrashed) -> bool:
    """Return whether a process has died, with the messages sent to it."""
    return crash.cause is not ExitCause.CRASHED and isinstance(slot.part.placement, InProcess)


def for_each_seed(seeds: Iterable[int], trial: Callable[[int], object]) -> None:
    """Run a trial with each seed. Raises SimulationError, which names the seed, for any error of the trial."""
    for seed in seeds:
        try:
            trial(seed)
        except Exception as error:
            raise SimulationError(f"seed {seed}: {type(error).__name__}: {error}") from error
