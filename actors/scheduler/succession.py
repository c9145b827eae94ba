"""Which executor computes, what its death and the cache manager's mean for the work, and who takes its place."""

from __future__ import annotations

from typing import assert_never

from cuelight.actors.scheduler import blame
from cuelight.actors.scheduler.outbox import Neighbours
from cuelight.actors.scheduler.recovery import Recovery
from cuelight.actors.scheduler.switching import Switching, confirm
from cuelight.actors.scheduler.tracked import Tracked
from cuelight.actors.scheduler.workload import CACHE, EXECUTOR, REPORT, START, Workload, token_capacity
from cuelight.kernel import Context, ExitCause, Terminated, get_logger
from cuelight.messages import executor, intake, observer
from cuelight.messages.address import Address
from cuelight.messages.request import FailureCause, FinishReason
from cuelight.messages.scheduler import (
    CancelSwitch,
    ExecutorFailed,
    ExecutorLoading,
    ExecutorReady,
    SchedulerMessage,
    Switch,
)

log = get_logger("cuelight.scheduler")


class Succession:
    """The executor that there is, from the moment at which it is found until another one is."""

    def __init__(
        self,
        context: Context[SchedulerMessage],
        work: Workload,
        recovery: Recovery,
        neighbours: Neighbours,
        context_length: int | None,
    ) -> None:
        self._context = context
        self._self: Address[SchedulerMessage] = context.ref
        self._now = context.clock.now
        self._work = work
        self._recovery = recovery
        self._neighbours = neighbours
        self._intake = neighbours.intake
        self._switching = Switching(context)
        self._context_length = context_length
        self._had_executor = False

    def begin(self) -> None:
        """Hear from now on of the deaths of those that hold blocks, and of the executor that there is."""
        for role in (self._neighbours.cache_role, self._neighbours.executor_role):
            if role is not None:
                self._context.watch(role)
        self._neighbours.executor.tell(executor.GetExecutorState(self._self))
        self._work.doubts[REPORT].asked(self._now())

    def hear(
        self, message: ExecutorLoading | ExecutorReady | ExecutorFailed | Terminated | Switch | CancelSwitch
    ) -> None:
        """React to what executors say, to deaths, and to the word that another one is to take over, or is not."""
        match message:
            case ExecutorLoading() | ExecutorReady() | ExecutorFailed():
                self._hear_executor(message)
            case Terminated():
                self._bereaved(message)
            case Switch():
                present = self._neighbours.executor_role
                if present is not None and message.executor == present.name:
                    confirm(message)  # it was told again just as this one had taken over
                else:
                    self._switching.ask(message, self._self)
            case CancelSwitch():
                if self._switching.concerns(message.executor):
                    self._give_up_switch("it was called off")
            case _:
                assert_never(message)

    def let_take_over(self) -> None:
        """Another executor takes the place of the one that is there, between two steps, once it may."""
        work = self._work
        is_computing = work.running or work.flights or work.reservation.asked is not None
        if not self._switching.recomputes and is_computing:
            return
        if not self._work.is_open or not self._switching.is_due(self._work.requests.values()):
            return
        self._switching.check(self._work.requests.values())
        self._hold_newcomers()
        if not self._switching.is_due(self._work.requests.values()):
            return
        switch, ready = self._switching.take()
        self._work.lose_blocks("another model takes over")
        self._neighbours = self._switching.neighbours(switch, self._neighbours)
        self._work.flights.send_to(self._neighbours.executor)
        self._recovery.replaced(self._neighbours)
        self._work.eos_token_ids = frozenset(switch.eos_token_ids)
        self._context_length = switch.context_length
        self._work.pool = None
        self._work.doubts[REPORT].give_up()
        self._work.door.holds_newcomers = False
        self._executor_ready(ready)
        confirm(switch)

    def serve(self) -> None:
        """Say what fits, if there is an executor."""
        if self._work.pool is None:
            return
        capacity, context_length = token_capacity(self._work.pool), self._context_length
        if self._switching.holds_newcomers and (limit := self._switching.token_limit) is not None:
            # Whoever comes now is served by the next one, unless that fails to take over.
            capacity = min(capacity, limit)
        self._intake.tell(intake.CapacityChanged(capacity, context_length))

    def fit(self, request: Tracked) -> None:
        """One that was on its way when another model took over, or was found ready to, knows nothing of its limits."""
        if self._switching.holds_newcomers:
            self._switching.check([request])
            self._hold_newcomers()
        if self._context_length is not None and self._work.pool is not None:
            limit = min(self._context_length, token_capacity(self._work.pool))
            request.limit_to(limit)
            if request.token_limit > limit:
                reason = f"the model that has taken over holds {limit} tokens"
                self._work.end(request, FinishReason.FAILED, reason, FailureCause.NO_ROOM)

    def _hear_executor(self, message: ExecutorLoading | ExecutorReady | ExecutorFailed) -> None:
        """From the executor that there is, or one that is to take over, or one that is not needed any more."""
        present = self._neighbours.executor_role
        if self._switching.concerns(message.executor):
            self._hear_successor(message)
            return
        if message.executor and present is not None and message.executor != present.name:
            log.debug("executor_not_needed", executor=message.executor)
            return
        self._work.doubts[REPORT].give_up()
        match message:
            case ExecutorLoading(phase):
                self._neighbours.observer.tell(observer.Loading(phase))
            case ExecutorReady():
                self._executor_ready(message)
            case ExecutorFailed(error):
                self._executor_failed(error)

    def _bereaved(self, death: Terminated) -> None:
        """A neighbour's life is over. In order, only where all end, or where somebody has arranged for it."""
        cache_role, executor_role = self._neighbours.cache_role, self._neighbours.executor_role
        if cache_role is not None and death.actor == cache_role.name:
            self._work.doubts[CACHE].begin_again()
            if death.cause is not ExitCause.STOPPED:
                self._recovery.lost(death.error, self._now())
            self._work.lose_blocks("the cache manager was lost")
            self._work.reset_cache()
        elif self._switching.concerns(death.actor):
            self._give_up_switch(f"the executor that was to take over has died: {death.error or 'it was stopped'}")
        elif executor_role is not None and death.actor == executor_role.name:
            self._work.doubts[EXECUTOR].begin_again()
            present = [each for plan in self._work.flights for each, _, _ in plan]
            self._work.pool = None
            self._work.lose_blocks("the executor was lost")
            self._work.doubts[START].give_up()
            if death.is_restarting:
                self._work.doubts[START].asked(self._now())
            if death.cause is not ExitCause.STOPPED:
                self._recovery.lost(death.error, self._now())
                self._inquire(death, [each for each in present if not each.is_over])

    def _executor_ready(self, ready: ExecutorReady) -> None:
        if self._work.pool is not None:
            if ready.life == self._work.pool.life:
                return
            self._work.lose_blocks("there is another executor")
        now = self._now()
        self._work.pool = ready
        self._had_executor = True
        self._work.flights.life = ready.life
        self._work.doubts[EXECUTOR].begin_again(ready.seconds)
        self._work.doubts[START].give_up()
        self._work.doubts[START].learn(ready.seconds)
        self._work.reset_cache()
        self.serve()
        self._recovery.ready(ready.seconds, now)
        self._neighbours.observer.tell(observer.Loaded(ready.seconds, ready.phases))

    def _executor_failed(self, error: str) -> None:
        if not self._had_executor:  # as far as this scheduler knows
            self._neighbours.observer.tell(observer.LoadFailed(error))
        if not self._recovery.kill(f"it cannot load the model: {error}"):
            self._recovery.give_up(f"the executor cannot load the model again: {error}")

    def _inquire(self, death: Terminated, present: list[Tracked]) -> None:
        """The executor has died with these on board."""
        from_outside = blame.is_from_outside(death, self._context.ref.name)
        culprit = blame.blame(present, from_outside=from_outside)
        self._recovery.died(death.error, is_explained=culprit is not None)
        if culprit is not None:
            reason = f"it has brought the executor down {culprit.crashes} times, at last alone with it: {death.error}"
            self._work.end(culprit, FinishReason.FAILED, reason, FailureCause.EXECUTOR_DEATHS)

    def _hear_successor(self, message: ExecutorLoading | ExecutorReady | ExecutorFailed) -> None:
        match message:
            case ExecutorLoading(phase):
                self._neighbours.observer.tell(observer.Loading(phase))
            case ExecutorReady():
                self._switching.found_ready(message, self._work.requests.values())
                self._hold_newcomers()
            case ExecutorFailed(error):
                self._give_up_switch(error)

    def _give_up_switch(self, reason: str) -> None:
        self._switching.fail(reason)
        self._hold_newcomers()

    def _hold_newcomers(self) -> None:
        """From now on those that have not begun wait for another executor, or do so no longer."""
        if self._work.door.holds_newcomers != self._switching.holds_newcomers:
            self._work.door.holds_newcomers = self._switching.holds_newcomers
            self._work.door.reopen(None)
            self.serve()
