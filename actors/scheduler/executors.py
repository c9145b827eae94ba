"""The active executor: its start, its death and the cache manager's, and the switch to another executor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar, assert_never

from cuelight.actors.scheduler import recovery
from cuelight.actors.scheduler.outbox import ExecutorRoles, Peers
from cuelight.actors.scheduler.recovery import RecoveryTracker
from cuelight.actors.scheduler.request import Request
from cuelight.actors.scheduler.state import SchedulerState, token_capacity
from cuelight.actors.scheduler.steps import StepLoop
from cuelight.actors.scheduler.watchdog import Watchdogs
from cuelight.kernel import Context, ExitCause, Role, Terminated, get_logger
from cuelight.messages import executor, intake, observer
from cuelight.messages.address import Address
from cuelight.messages.executor import ExecutorMessage, GetExecutorState
from cuelight.messages.observer import Switched, SwitchFailed
from cuelight.messages.request import ExecutorId, FailureCause, FinishReason
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
    """The active executor, and the switch to the next one if a reload is in progress."""

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
        """Watch the cache manager and the executor, and request the executor's state."""
        for role in (self._peers.cache_role, self._peers.executor_role):
            if role is not None:
                self._context.watch(role)
        self._peers.executor.tell(executor.GetExecutorState(self._self))
        self._watchdogs.report.asked(self._now())

    def handle(
        self, message: ExecutorLoading | ExecutorReady | ExecutorFailed | Terminated | Switch | CancelSwitch
    ) -> None:
        """Handle an executor's report, a peer's death, or the start or cancellation of a switch."""
        match message:
            case ExecutorLoading() | ExecutorReady() | ExecutorFailed():
                self._handle_executor(message)
            case Terminated():
                self._peer_died(message)
            case Switch():
                if message.executor_id == self._peers.executor_id:
                    confirm(message)  # sent again just after this executor had taken over
                else:
                    self._switch.ask(message, self._self)
            case CancelSwitch():
                if self._switch.concerns(message.executor_id):
                    self._give_up_switch("the switch was cancelled")
            case _:
                assert_never(message)

    def take_over_if_due(self) -> None:
        """Make the next executor the active one, if it is ready and the scheduler is between two steps.

        Without `recompute`, requests that have begun end on the executor before.
        """
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
        """Send `CapacityChanged` to intake, if the executor is ready."""
        if self._state.pool is None:
            return
        capacity, context_length = token_capacity(self._state.pool), self._context_length
        if self._switch.holds_new_requests and (limit := self._switch.token_limit) is not None:
            # The next executor serves new requests; the active one does if the switch fails.
            capacity = min(capacity, limit)
        self._intake.tell(intake.CapacityChanged(capacity, context_length))

    def limit(self, request: Request) -> None:
        """Apply the active model's token limit to a new request, and check the request against the next executor.

        Intake may have sent it before it received the new limits.
        """
        if self._switch.holds_new_requests:
            self._switch.check([request])
            self._hold_new_requests()
        if self._context_length is not None and self._state.pool is not None:
            self._state.limit(request, min(self._context_length, token_capacity(self._state.pool)))

    def _handle_executor(self, message: ExecutorLoading | ExecutorReady | ExecutorFailed) -> None:
        """Handle a report from the active executor or the next one; ignore any other executor."""
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
        """Recover from a peer's death. If it was stopped, report no loss and suspect no request."""
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
        if not self._had_executor:  # since this scheduler's life began
            self._peers.observer.tell(observer.LoadFailed(error))
        if not self._recovery.kill(f"the executor cannot load the model: {error}"):
            self._recovery.give_up(f"the executor cannot load the model again: {error}")

    def _attribute_crash(self, death: Terminated, present: list[Request]) -> None:
        """Count the executor's death. Fail the request among `present` that it is attributed to, if any."""
        from_outside = recovery.is_from_outside(death, self._context.ref.name)
        culprit = recovery.attribute_crash(present, from_outside=from_outside)
        self._recovery.died(death.error, is_explained=culprit is not None)
        if culprit is not None:
            reason = f"the executor died {culprit.crashes} times with this request, the last time alone: {death.error}"
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
        """Hold new requests for the next executor, or release them, as the switch requires."""
        if self._state.hold_new_requests(self._switch.holds_new_requests):
            self.serve()


M = TypeVar("M")


class ExecutorSwitch(Generic[M]):
    """The switch to the next executor, at most one at a time, until that executor takes over or the switch fails."""

    def __init__(self, context: Context[M], roles: ExecutorRoles | None) -> None:
        self._context = context
        self._roles = roles
        self._asked: Switch | None = None
        self._ready: ExecutorReady | None = None
        self._given_up: set[ExecutorId] = set()
        """Executors whose switch failed. A `Switch` to one of them may still arrive, and is ignored."""

    def ask(self, switch: Switch, reply_to: Address[ExecutorLoading | ExecutorReady | ExecutorFailed]) -> None:
        """Start a switch, or fail it if another is in progress or there is no such executor.

        A repeated `Switch` is ignored: it is sent again to a new life of the scheduler.
        """
        if self._asked is not None:
            if not self.concerns(switch.executor_id):
                switch.reply_to.tell(
                    SwitchFailed(switch.executor_id, f"a switch to executor {self._asked.executor_id} is in progress")
                )
            return
        if switch.executor_id in self._given_up:
            return
        try:
            role = self._role(switch.executor_id)
            self._context.watch(role)
        except KeyError:
            switch.reply_to.tell(SwitchFailed(switch.executor_id, f"there is no executor {switch.executor_id}"))
            return
        self._asked = switch
        # The executor may have been ready before this life of the scheduler.
        self._context.find(role).tell(GetExecutorState(reply_to))
        log.info("switch_asked", executor_id=switch.executor_id, recompute=switch.recompute)

    def concerns(self, executor_id: ExecutorId) -> bool:
        """Return whether this is the next executor."""
        return self._asked is not None and self._asked.executor_id == executor_id

    def is_death(self, death: Terminated) -> bool:
        """Return whether `death` is the next executor's."""
        return self._asked is not None and death.actor == self._role(self._asked.executor_id).name

    def fail(self, reason: str, *, is_mismatch: bool = False) -> None:
        """End the switch with `SwitchFailed`. The active executor is not affected."""
        asked, self._asked, self._ready = self._asked, None, None
        assert asked is not None, "a switch is in progress"
        self._given_up.add(asked.executor_id)
        log.warning("switch_failed", executor_id=asked.executor_id, reason=reason)
        asked.reply_to.tell(SwitchFailed(asked.executor_id, reason, is_mismatch))

    def found_ready(self, ready: ExecutorReady, requests: Iterable[Request]) -> None:
        """Store that the next executor is ready, and check `requests` against it."""
        if self._ready is None or self._ready.life != ready.life:
            self._ready = ready
            self.check(requests)

    def check(self, requests: Iterable[Request]) -> None:
        """Fail the switch if the next executor cannot hold one of the requests that it would serve.

        Without `recompute`, requests that have begun are not among them. Does nothing until it is ready.
        """
        if (limit := self.token_limit) is None:
            return
        for request in requests:
            if (self.recomputes or not has_begun(request)) and request.token_limit > limit:
                reason = (
                    f"request {request.request_id} may need {request.token_limit} tokens; the new model holds {limit}"
                )
                self.fail(reason, is_mismatch=True)
                return

    @property
    def token_limit(self) -> int | None:
        """Tokens that a request may hold at the next executor; None until it is ready."""
        if self._asked is None or self._ready is None:
            return None
        return min(self._asked.context_length, (self._ready.block_count - 1) * self._ready.block_size)

    @property
    def recomputes(self) -> bool:
        """Whether the next executor takes over as soon as it is ready and recomputes the running requests."""
        return self._asked is not None and self._asked.recompute

    @property
    def holds_new_requests(self) -> bool:
        """Whether requests that have not begun wait for the next executor until all others have ended."""
        return self._ready is not None and not self.recomputes

    def is_due(self, requests: Iterable[Request]) -> bool:
        """Return whether the next executor may take over now, as far as `requests` are concerned."""
        return self._ready is not None and (self.recomputes or not any(map(has_begun, requests)))

    def take(self) -> tuple[Switch, ExecutorReady]:
        """End the switch and return its `Switch` and `ExecutorReady`."""
        asked, ready = self._asked, self._ready
        assert asked is not None and ready is not None, "a switch is due"
        self._asked = self._ready = None
        return asked, ready

    def peers(self, switch: Switch, before: Peers) -> Peers:
        """Return `before` with the executor of `switch` in place of the active one."""
        role = self._role(switch.executor_id)
        kill = None if before.kill_executor is None else partial(self._context.kill, role)
        executor = self._context.find(role)
        return replace(before, executor=executor, executor_id=switch.executor_id, kill_executor=kill)

    def _role(self, executor_id: ExecutorId) -> Role[ExecutorMessage]:
        if self._roles is None:
            raise KeyError(executor_id)
        return self._roles[executor_id]


def has_begun(request: Request) -> bool:
    """Return whether a request runs or has run; without `recompute`, the active executor finishes it."""
    return request.running or request.preemptions > 0


def confirm(switch: Switch) -> None:
    """Answer `Switched`: the executor has taken over."""
    log.info("switched", executor_id=switch.executor_id)
    switch.reply_to.tell(Switched(switch.executor_id))
