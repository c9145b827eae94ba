"""Which executor computes, what its death and the cache manager's mean for the work, and who takes its place."""

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
        from_outside = recovery.is_from_outside(death, self._context.ref.name)
        culprit = recovery.attribute_crash(present, from_outside=from_outside)
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


M = TypeVar("M")


class ExecutorSwitch(Generic[M]):
    """One switch at a time, from the word that an executor is loading until it has taken over or never will."""

    def __init__(self, context: Context[M], roles: ExecutorRoles | None) -> None:
        self._context = context
        self._roles = roles
        self._asked: Switch | None = None
        self._ready: ExecutorReady | None = None
        self._given_up: set[ExecutorId] = set()
        """Executors that will not take over: an order for one of them was sent before that was known."""

    def ask(self, switch: Switch, reply_to: Address[ExecutorLoading | ExecutorReady | ExecutorFailed]) -> None:
        """This one is to take over. Nothing is asked twice of a scheduler, but of its next life it may be."""
        if self._asked is not None:
            if not self.concerns(switch.executor_id):
                switch.reply_to.tell(SwitchFailed(switch.executor_id, "another executor is to take over already"))
            return
        if switch.executor_id in self._given_up:
            return
        try:
            role = self._role(switch.executor_id)
            self._context.watch(role)
        except KeyError:
            switch.reply_to.tell(SwitchFailed(switch.executor_id, "there is no such executor"))
            return
        self._asked = switch
        self._context.find(role).tell(GetExecutorState(reply_to))  # it may have been ready before this life began
        log.info("switch_asked", executor_id=switch.executor_id, recompute=switch.recompute)

    def concerns(self, executor_id: ExecutorId) -> bool:
        """Whether this is the one that is to take over."""
        return self._asked is not None and self._asked.executor_id == executor_id

    def is_death(self, death: Terminated) -> bool:
        """Whether the one that is to take over has died."""
        return self._asked is not None and death.actor == self._role(self._asked.executor_id).name

    def fail(self, reason: str, *, is_mismatch: bool = False) -> None:
        """It will not take over; the one that is there has heard nothing of it."""
        asked, self._asked, self._ready = self._asked, None, None
        assert asked is not None, "there is one that could"
        self._given_up.add(asked.executor_id)
        log.warning("switch_failed", executor_id=asked.executor_id, reason=reason)
        asked.reply_to.tell(SwitchFailed(asked.executor_id, reason, is_mismatch))

    def found_ready(self, ready: ExecutorReady, requests: Iterable[Request]) -> None:
        """It is there. If one of the requests that it would be given does not fit, it will not take over."""
        if self._ready is None or self._ready.life != ready.life:
            self._ready = ready
            self.check(requests)

    def check(self, requests: Iterable[Request]) -> None:
        """Whether it could serve those of these requests that it would be given: else it will not take over at all."""
        if (limit := self.token_limit) is None:
            return
        for request in requests:
            if (self.recomputes or not has_begun(request)) and request.token_limit > limit:
                reason = f"request {request.request_id} may come to {request.token_limit} tokens, and it holds {limit}"
                self.fail(reason, is_mismatch=True)
                return

    @property
    def token_limit(self) -> int | None:
        """What a request may hold at the one that is ready to take over; None where there is none."""
        if self._asked is None or self._ready is None:
            return None
        return min(self._asked.context_length, (self._ready.block_count - 1) * self._ready.block_size)

    @property
    def recomputes(self) -> bool:
        """Whether it takes over at once, and computes again what runs."""
        return self._asked is not None and self._asked.recompute

    @property
    def holds_new_requests(self) -> bool:
        """Whether those that have not begun wait for the one that is ready, until all others are done."""
        return self._ready is not None and not self.recomputes

    def is_due(self, requests: Iterable[Request]) -> bool:
        """Whether it may take over now."""
        return self._ready is not None and (self.recomputes or not any(map(has_begun, requests)))

    def take(self) -> tuple[Switch, ExecutorReady]:
        """It takes over."""
        asked, ready = self._asked, self._ready
        assert asked is not None and ready is not None, "it is due"
        self._asked = self._ready = None
        return asked, ready

    def peers(self, switch: Switch, before: Peers) -> Peers:
        """The same, with another executor."""
        role = self._role(switch.executor_id)
        kill = None if before.kill_executor is None else partial(self._context.kill, role)
        executor = self._context.find(role)
        return replace(before, executor=executor, executor_id=switch.executor_id, kill_executor=kill)

    def _role(self, executor_id: ExecutorId) -> Role[ExecutorMessage]:
        if self._roles is None:
            raise KeyError(executor_id)
        return self._roles[executor_id]


def has_begun(request: Request) -> bool:
    """Whether it runs, or did: what it computes belongs to the executor that is there."""
    return request.running or request.preemptions > 0


def confirm(switch: Switch) -> None:
    """It has taken over."""
    log.info("switched", executor_id=switch.executor_id)
    switch.reply_to.tell(Switched(switch.executor_id))
