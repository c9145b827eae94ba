"""The scheduler actor: admits and ends requests and plans steps. Handles tokens, not blocks, text or tensors.

This module dispatches messages. The state is in `state.py`, the step loop in `steps.py`, and the active executor and
recovery from a peer's death in `executors.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias, assert_never

import msgspec

from cuelight.actors.scheduler.executors import ExecutorManager
from cuelight.actors.scheduler.in_flight import BlockRequests, InFlightSteps
from cuelight.actors.scheduler.outbox import Outbox, Peers, UnconfirmedEnds
from cuelight.actors.scheduler.planning import StepLimits
from cuelight.actors.scheduler.recovery import RecoveryTracker
from cuelight.actors.scheduler.state import SchedulerState
from cuelight.actors.scheduler.steps import StepLoop
from cuelight.actors.scheduler.watchdog import EXECUTOR, REPORT, START, build_watchdogs
from cuelight.kernel import Actor, Context, Terminated, Timer, get_logger
from cuelight.messages import detokenizer, intake
from cuelight.messages.request import FailureCause, FinishReason
from cuelight.messages.scheduler import (
    Abort,
    Admit,
    CancelSwitch,
    Closed,
    ExecutorFailed,
    ExecutorLoading,
    ExecutorReady,
    Explain,
    FailRequest,
    GetHistories,
    Granted,
    IntakeStarted,
    RestoreState,
    SchedulerMessage,
    SetPolicy,
    StepDone,
    StepFailed,
    StopMatched,
    Switch,
)

DEADLINES: Final = "deadlines"

log = get_logger("cuelight.scheduler")


class _Wake(msgspec.Struct, frozen=True, tag=True):
    """A timer has fired: `what` is `DEADLINES` or the name of the watchdog."""

    what: str


Early: TypeAlias = Admit | Abort | FailRequest | SetPolicy | Closed | GetHistories
"""Messages that are stored until `RestoreState` has arrived."""

SchedulerInbox: TypeAlias = SchedulerMessage | Terminated | _Wake


class Scheduler(Actor[SchedulerInbox]):
    """Handles messages about requests, steps and executors, and plans the next step after each message.

    A new scheduler requests its state from its peers, and plans nothing until `RestoreState` has arrived.
    """

    def __init__(
        self,
        context: Context[SchedulerInbox],
        limits: StepLimits,
        eos_token_ids: frozenset[int],
        peers: Peers,
        policy: SetPolicy,
        context_length: int | None = None,
    ) -> None:
        """`context_length` is that of the model that took over in a reload; None before the first reload."""
        self._life = context.chance.getrandbits(32)
        self._now = context.clock.now
        self._detokenizer = peers.detokenizer
        self._intake = peers.intake
        self._recovery = RecoveryTracker(peers, limits.restarts_max)
        self._ends = UnconfirmedEnds()
        self._outbox = Outbox(peers, self._ends)
        wake_after = partial(_waking, context)
        can_kill = peers.kill_executor is not None
        self._watchdogs = build_watchdogs(wake_after, limits.step_timeout_seconds, can_kill=can_kill)
        # Drawn, so that no answer to an earlier life's step or round matches one of this life.
        first_epoch, first_round = context.chance.getrandbits(48), context.chance.getrandbits(48)
        in_flight = InFlightSteps(
            peers.executor, context.ref, limits.steps_in_flight, first_epoch, self._watchdogs.executor, self._now
        )
        block_requests = BlockRequests(peers.cache, context.ref, first_round, self._watchdogs.cache, self._now)
        self._state = SchedulerState(
            limits, eos_token_ids, policy, self._outbox, in_flight, block_requests, wake_after(DEADLINES), self._now
        )
        self._steps = StepLoop(
            self._state, in_flight, block_requests, self._outbox, peers.cache, self._recovery.advanced, self._now
        )
        self._executors = ExecutorManager(
            context, self._state, self._steps, self._watchdogs, self._recovery, peers, context_length
        )
        self._early: list[Early] = []
        """Messages that arrived before `RestoreState`, to be handled after it."""

    @property
    def request_count(self) -> int:
        """Number of live requests and unconfirmed ends."""
        return len(self._state.requests) + len(self._ends)

    def started(self) -> None:
        self._intake.tell(intake.SchedulerStarted(self._life))
        self._executors.start()

    def handle(self, message: SchedulerInbox) -> None:
        if not self._state.is_open and isinstance(message, Early):
            self._early.append(message)
            return
        match message:
            case StepDone():
                self._steps.step_done(message)
            case Granted():
                self._steps.granted(message)
            case StepFailed():
                self._steps.step_failed(message)
            case _Wake(what):
                self._wake(what)
            case Admit() | Abort() | FailRequest() | StopMatched() | Explain() | SetPolicy():
                self._handle_request(message)
            case ExecutorLoading() | ExecutorReady() | ExecutorFailed() | Terminated() | Switch() | CancelSwitch():
                self._executors.handle(message)
            case IntakeStarted() | GetHistories() | Closed() | RestoreState():
                self._handle_recovery(message)
            case _:
                assert_never(message)
        if self._early and self._state.is_open:
            self._handle_early()
        self._advance()

    def _handle_early(self) -> None:
        """Handle the messages that arrived before `RestoreState`, in order."""
        early, self._early = self._early, []
        for message in early:
            if isinstance(message, GetHistories | Closed):
                self._handle_recovery(message)
            else:
                self._handle_request(message)
            self._advance()

    def _advance(self) -> None:
        """Announce ends, switch executors if that is due, plan the next step and publish the figures."""
        self._outbox.announce()
        self._executors.take_over_if_due()
        self._steps.plan(admit=True)
        self._steps.end_what_is_stuck()
        self._state.publish()
        if self._state.is_serving and not self._state.requests:
            self._recovery.settle(self._now())

    def _handle_request(self, message: Admit | Abort | FailRequest | StopMatched | Explain | SetPolicy) -> None:
        match message:
            case Admit():
                self._admit(message)
            case Abort(request_id):
                self._state.end_if_live(request_id, FinishReason.CANCELLED)
            case FailRequest(request_id, error):
                self._state.end_if_live(request_id, FinishReason.FAILED, error, FailureCause.ACTOR_CRASHES)
            case StopMatched():
                self._state.stop_matched(message)
            case Explain(request_id, reply_to):
                reply_to.tell(self._state.explain(request_id))
            case SetPolicy():
                self._state.set_policy(message)
            case _:
                assert_never(message)

    def _handle_recovery(self, message: IntakeStarted | GetHistories | Closed | RestoreState) -> None:
        """Handle a new intake or detokenizer, confirmed ends, or the state to begin from."""
        match message:
            case IntakeStarted():
                self._executors.serve()
                if not self._state.is_open:
                    self._intake.tell(intake.SchedulerStarted(self._life))
            case GetHistories():
                live = [(each.request_id, each.output) for each in self._state.requests.values() if each.output_tokens]
                self._detokenizer.tell(detokenizer.Histories(tuple(live), self._ends.all()))
            case Closed():
                self._close(message)
            case RestoreState():
                self._restore(message)
            case _:
                assert_never(message)

    def _restore(self, message: RestoreState) -> None:
        """Begin with the state of the scheduler before. Ignored when open, or if meant for an earlier life."""
        if self._state.is_open or message.life != self._life:
            return
        self._state.open()
        if message.has_served:
            self._recovery.lost("the scheduler was lost", self._now())
        if message.policy is not None:
            self._handle_request(message.policy)
        histories = dict(message.histories)
        for admit in message.admitted:
            history = histories.get(admit.request_id, ())
            output = history if len(history) > len(admit.output) else admit.output
            try:
                self._admit(msgspec.structs.replace(admit, output=output))
            except Exception as error:  # a request that cannot be admitted must not crash every new scheduler
                log.error("request_not_restored", request_id=admit.request_id, exc_info=error)
                self._outbox.fail(admit, f"the scheduler cannot go on with this request: {error!r}")
        for request_id in message.aborted:
            self._state.end_if_live(request_id, FinishReason.CANCELLED)

    def _close(self, closed: Closed) -> None:
        """Forget confirmed ends. If `is_ended`, cancel live ones: an earlier scheduler had sent their ends."""
        if closed.is_ended:
            for request_id in closed.request_ids:
                self._state.end_if_live(request_id, FinishReason.CANCELLED)
            self._outbox.announce()
        self._ends.close(closed.request_ids)

    def _admit(self, admit: Admit) -> None:
        if (request := self._state.join(admit)) is None:
            return
        self._executors.limit(request)
        if not request.is_over:
            self._state.end_if_complete(request)

    def _wake(self, what: str) -> None:
        now = self._now()
        if what == DEADLINES:
            self._state.expire(now)
        else:
            self._check_peer(what, now)

    def _check_peer(self, peer: str, now: float) -> None:
        """If a peer's answer is late, store that requests wait for it. Kill an executor, if possible."""
        if (silence := self._watchdogs.named(peer).silence(now)) is not None:
            reason = f"the {peer} has not answered for {round(silence, 1):g} s"
            self._state.note_silence(reason)
            if peer in (EXECUTOR, REPORT, START):
                self._recovery.kill(reason)


def _waking(context: Context[SchedulerInbox], what: str) -> Callable[[float], Timer]:
    return lambda seconds: context.after(seconds, _Wake(what))
