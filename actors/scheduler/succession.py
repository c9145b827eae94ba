"""Which executor computes, what its death and the cache manager's mean for the work, and who takes its place."""

from __future__ import annotations

from typing import assert_never

from cuelight.actors.scheduler import blame
from cuelight.actors.scheduler.next_step import StepLoop
from cuelight.actors.scheduler.outbox import Peers
from cuelight.actors.scheduler.patience import Watchdogs
from cuelight.actors.scheduler.recovery import RecoveryTracker
from cuelight.actors.scheduler.switching import ExecutorSwitch, confirm
from cuelight.actors.scheduler.tracked import Request
from cuelight.actors.scheduler.workload import SchedulerState, token_capacity
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


class ExecutorManager:
    """The executor that there is, from the moment at which it is found until another one is."""

    def __init__(
        self,
        context: Context[SchedulerMessage],
        state: SchedulerState,
        steps: StepLoop,
        watchdogs: Watchdogs,
        recovery: RecoveryTracker,
        peers: Peers,
        context_length: int | None,
    ) -> None:
        self._context = context
        self._self: Address[SchedulerMessage] = context.ref
        self._now = context.clock.now
        self._state = state
        self._steps = steps
        self._watchdogs = watchdogs
        self._recovery = recovery
        self._peers = peers
        self._intake = peers.intake
        self._switch = ExecutorSwitch(context, peers.executor_roles)
        self._context_length = context_length
        self._had_executor = False

    def start(self) -> None:
        """Hear from now on of the deaths of those that hold blocks, and of the executor that there is."""
        for role in (self._peers.cache_role, self._peers.executor_role):
            if role is not None:
                self._context.watch(role)
        self._peers.executor.tell(executor.GetExecutorState(self._self))
        self._watchdogs.report.asked(self._now())

    def handle(
        self, message: ExecutorLoading | ExecutorReady | ExecutorFailed | Terminated | Switch | CancelSwitch
    ) -> None:
        """React to what executors say, to deaths, and to the word that another one is to take over, or is not."""
        match message:
            case ExecutorLoading() | ExecutorReady() | ExecutorFailed():
                self._handle_executor(message)
            case Terminated():
                self._peer_died(message)
            case Switch():
                if message.executor_id == self._peers.executor_id:
                    confirm(message)  # it was told again just as this one had taken over
                else:
                    self._switch.ask(message, self._self)
            case CancelSwitch():
                if self._switch.concerns(message.executor_id):
                    self._give_up_switch("it was called off")
            case _:
                assert_never(message)

    def take_over_if_due(self) -> None:
        """Another executor takes the place of the one that is there, between two steps, once it may."""
        is_computing = self._state.running or self._steps.is_busy
        if not self._switch.recomputes and is_computing:
            return
        requests = self._state.requests.values()
        if not self._state.is_open or not self._switch.is_due(requests):
            return
        self._switch.check(requests)
        self._hold_new_requests()
        if not self._switch.is_due(requests):
            return
        switch, ready = self._switch.take()
        self._peers = self._switch.peers(switch, self._peers)
        self._steps.switch_executor(self._peers.executor, frozenset(switch.eos_token_ids))
        self._state.hold_new_requests(False)
        self._recovery.replaced(self._peers)
        self._context_length = switch.context_length
        self._watchdogs.report.give_up()
        self._executor_ready(ready)
        confirm(switch)

    def serve(self) -> None:
        """Say what fits, if there is an executor."""
        if self._state.pool is None:
            return
        capacity, context_length = token_capacity(self._state.pool), self._context_length
        if self._switch.holds_new_requests and (limit := self._switch.token_limit) is not None:
            # Whoever comes now is served by the next one, unless that fails to take over.
            capacity = min(capacity, limit)
        self._intake.tell(intake.CapacityChanged(capacity, context_length))

    def limit(self, request: Request) -> None:
        """One that was on its way when another model took over, or was found ready to, knows nothing of its limits."""
        if self._switch.holds_new_requests:
            self._switch.check([request])
            self._hold_new_requests()
        if self._context_length is not None and self._state.pool is not None:
            self._state.limit(request, min(self._context_length, token_capacity(self._state.pool)))

    def _handle_executor(self, message: ExecutorLoading | ExecutorReady | ExecutorFailed) -> None:
        """From the executor that there is, or one that is to take over, or one that is not needed any more."""
        if self._switch.concerns(message.executor_id):
            self._handle_next_executor(message)
            return
        if message.executor_id != self._peers.executor_id:
            log.debug("executor_not_needed", executor_id=message.executor_id)
            return
        self._watchdogs.report.give_up()
        match message:
            case ExecutorLoading(phase):
                self._peers.observer.tell(observer.Loading(phase))
            case ExecutorReady():
                self._executor_ready(message)
            case ExecutorFailed(error):
                self._executor_failed(error)

    def _peer_died(self, death: Terminated) -> None:
        """Recover from the end of a peer's life; without an error it was stopped, or its restart is arranged for."""
        cache_role, executor_role = self._peers.cache_role, self._peers.executor_role
        if cache_role is not None and death.actor == cache_role.name:
            if death.cause is not ExitCause.STOPPED:
                self._recovery.lost(death.error, self._now())
            self._steps.cache_lost()
        elif self._switch.is_death(death):
            self._give_up_switch(f"the executor that was to take over has died: {death.error or 'it was stopped'}")
        elif executor_role is not None and death.actor == executor_role.name:
            present = self._steps.executor_lost()
            self._watchdogs.start.give_up()
            if death.is_restarting:
                self._watchdogs.start.asked(self._now())
            if death.cause is not ExitCause.STOPPED:
                self._recovery.lost(death.error, self._now())
                self._attribute_crash(death, [each for each in present if not each.is_over])

    def _executor_ready(self, ready: ExecutorReady) -> None:
        if self._state.pool is not None and self._state.pool.life == ready.life:
            return
        now = self._now()
        self._had_executor = True
        self._steps.executor_ready(ready)
        self._watchdogs.start.give_up()
        self._watchdogs.start.learn(ready.seconds)
        self.serve()
        self._recovery.ready(ready.seconds, now)
        self._peers.observer.tell(observer.Loaded(ready.seconds, ready.phases))

    def _executor_failed(self, error: str) -> None:
        if not self._had_executor:  # as far as this scheduler knows
            self._peers.observer.tell(observer.LoadFailed(error))
        if not self._recovery.kill(f"it cannot load the model: {error}"):
            self._recovery.give_up(f"the executor cannot load the model again: {error}")

    def _attribute_crash(self, death: Terminated, present: list[Request]) -> None:
        """The executor has died with these on board."""
        from_outside = blame.is_from_outside(death, self._context.ref.name)
        culprit = blame.attribute_crash(present, from_outside=from_outside)
        self._recovery.died(death.error, is_explained=culprit is not None)
        if culprit is not None:
            reason = f"it has brought the executor down {culprit.crashes} times, at last alone with it: {death.error}"
            self._state.end(culprit, FinishReason.FAILED, reason, FailureCause.EXECUTOR_DEATHS)

    def _handle_next_executor(self, message: ExecutorLoading | ExecutorReady | ExecutorFailed) -> None:
        match message:
            case ExecutorLoading(phase):
                self._peers.observer.tell(observer.Loading(phase))
            case ExecutorReady():
                self._switch.found_ready(message, self._state.requests.values())
                self._hold_new_requests()
            case ExecutorFailed(error):
                self._give_up_switch(error)

    def _give_up_switch(self, reason: str) -> None:
        self._switch.fail(reason)
        self._hold_new_requests()

    def _hold_new_requests(self) -> None:
        """From now on those that have not begun wait for another executor, or do so no longer."""
        if self._state.hold_new_requests(self._switch.holds_new_requests):
            self.serve()
