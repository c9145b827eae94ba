"""The scheduler's work: requests that wait and those that run, what steps give them, and the loss of their blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cuelight.actors.scheduler import blame
from cuelight.actors.scheduler.allowance import AdaptiveTokenBudget
from cuelight.actors.scheduler.chronicle import Chronicle
from cuelight.actors.scheduler.deadlines import Deadlines
from cuelight.actors.scheduler.door import Door
from cuelight.actors.scheduler.endings import Endings
from cuelight.actors.scheduler.flights import Flights
from cuelight.actors.scheduler.outbox import Neighbours, Outbox
from cuelight.actors.scheduler.patience import (
    FIRST_STEP_SECONDS,
    PATIENCE_SECONDS,
    REPORT_SECONDS,
    START_SECONDS,
    STEP_SECONDS,
    Patience,
)
from cuelight.actors.scheduler.planning import Limits, stop_reason
from cuelight.actors.scheduler.policy import OUTPUT_TOKEN_COST, policy_of
from cuelight.actors.scheduler.queue import Queue
from cuelight.actors.scheduler.reservation import Reservation
from cuelight.actors.scheduler.rounds import Rounds
from cuelight.actors.scheduler.tracked import Tracked
from cuelight.kernel import Context, Timer, get_logger
from cuelight.messages import cache
from cuelight.messages.request import FinishReason, RequestId
from cuelight.messages.scheduler import (
    Admit,
    ExecutorReady,
    Explanation,
    SchedulerMessage,
    SetPolicy,
    StepDone,
    StepFailed,
    StopMatched,
)

DEADLINES: Final = "deadlines"
CACHE: Final = "cache manager"
EXECUTOR: Final = "executor"
REPORT: Final = "executor that was asked for a report"
START: Final = "executor that is to take the place of a lost one"

log = get_logger("cuelight.scheduler")


class Workload:
    """All requests that have not ended, and who else has a part in them.

    `on_step` is called with the time of each step that is done, `wake_after` makes a timer that wakes the scheduler to
    see to something.
    """

    def __init__(
        self,
        context: Context[SchedulerMessage],
        limits: Limits,
        eos_token_ids: frozenset[int],
        neighbours: Neighbours,
        policy: SetPolicy,
        wake_after: Callable[[str], Callable[[float], Timer]],
        on_step: Callable[[float], None],
    ) -> None:
        self.limits = limits
        self.eos_token_ids = eos_token_ids
        self.pool: ExecutorReady | None = None
        self.is_open = False
        self.requests: dict[RequestId, Tracked] = {}
        self.waiting = Queue(policy_of(policy))
        self.running: dict[RequestId, Tracked] = {}
        self.budget = AdaptiveTokenBudget(limits.token_budget)
        self.door = Door(limits, self.budget, self.waiting)
        # No answer to an earlier life's steps and questions is taken for one to this life's.
        first_epoch, first_round = context.chance.getrandbits(48), context.chance.getrandbits(48)
        self.flights = Flights(neighbours.executor, context.ref, limits.steps_in_flight, first_epoch)
        self.endings = Endings()
        self.outbox = Outbox(neighbours, self.endings)
        self.deadlines = Deadlines(wake_after(DEADLINES))
        self.chronicle = Chronicle()
        self.reservation = Reservation(neighbours.cache, context.ref, first_round)
        self.doubts = _doubts(wake_after, limits, can_kill=neighbours.kill_executor is not None)
        self.now = context.clock.now
        self.rounds = Rounds(limits, self.budget, self.waiting, self.door, self.chronicle, self.now)
        self._cache = neighbours.cache
        self._on_step = on_step
        self._arrivals = 0

    @property
    def is_serving(self) -> bool:
        """Whether anything may be planned."""
        return self.pool is not None and self.is_open

    def publish(self) -> None:
        """The figures, if they have changed."""
        self.outbox.publish(len(self.running), len(self.waiting), self.flights.step)

    def join(self, admit: Admit) -> Tracked | None:
        """A request has come; None for one that is known, of which the detokenizer is told again what it may lack."""
        if (known := self.requests.get(admit.request_id)) is not None:
            self.outbox.repeat(known)
            return None
        if admit.request_id in self.endings:
            self.outbox.repeat_end(admit.request_id)
            return None
        request = Tracked(self._arrivals, admit)
        self._arrivals += 1
        self.requests[admit.request_id] = request
        self.waiting.join(request)
        self.deadlines.add(request, self.now())
        return request

    def end_if_complete(self, request: Tracked) -> None:
        """Of one that goes on from an earlier time, all that is missing may be the word that it has ended."""
        output = request.output
        if output and (reason := stop_reason(request, output[-1], self.eos_token_ids)) is not None:
            self.end(request, reason)

    def stop_matched(self, matched: StopMatched) -> None:
        """A stop string has ended a text."""
        stopped = self.requests.get(matched.request_id)
        # A scheduler before may have said more than this one knows: then it will be told again once it has come so far.
        if stopped is not None and matched.output_tokens <= stopped.output_tokens:
            stopped.stop_at(matched.output_tokens)
            self.end(stopped, FinishReason.STOP)

    def expire(self, request: Tracked) -> None:
        """One of its deadlines has come; it may be over, or running by now."""
        if request.is_over:
            return
        now = self.now()
        if now >= request.deadline:
            self.end(request, FinishReason.EXPIRED, "its deadline has passed")
        elif now >= request.queue_deadline and request.queued_seconds is None:
            self.end(request, FinishReason.EXPIRED, f"it has waited for {request.service.queue_seconds} s")

    def explain(self, request_id: RequestId) -> Explanation:
        """What has become of a request."""
        request = self.requests.get(request_id)
        if request is None:
            return self.chronicle.ended(request_id)
        return self.chronicle.explain(request, "running" if request.running else "waiting")

    def end_if_live(self, request_id: RequestId, reason: FinishReason, error: str = "") -> None:
        """This request is over, unless it was before."""
        if (request := self.requests.get(request_id)) is not None:
            self.end(request, reason, error)

    def end(self, request: Tracked, reason: FinishReason, error: str = "") -> None:
        """This request is over."""
        now = self.now()
        del self.requests[request.request_id]
        request.is_over = True
        self.deadlines.forget(request)
        self.door.deferred.forget(request)
        if request.running:
            self._give_back(request, is_spoilt=reason is FinishReason.FAILED)
            request.stop_running(now)
            self.door.reopen(request)
        else:
            self.waiting.leave(request)
        self.chronicle.end(request, str(reason), error, now)
        self.outbox.end(request, reason, error, now)

    def step_done(self, done: StepDone) -> None:
        """The oldest step in flight has been computed."""
        if (plan := self.flights.landed(done)) is None:
            return
        now = self.now()
        if self.budget.step_fitted():
            self.door.reopen(None)
        self.doubts[EXECUTOR].answered(now)
        self._on_step(now)
        planned: dict[RequestId, Tracked] = {}
        for request, token_count, incarnation in plan:
            planned[request.request_id] = request
            if request.incarnation == incarnation and request.running:
                request.computed += token_count
                if request.computed <= request.prefill_tokens:
                    self.reservation.tell_of(request)
                    self.waiting.charge_prompt(request)
                    self.door.reopen(request)  # others may share what was just computed
        for request_id, reason in done.failed:
            self._fail(planned[request_id], reason)
        sampled: list[tuple[Tracked, int]] = []
        for request_id, token_id in zip(done.request_ids, done.token_ids, strict=True):
            # Drop the token of a request that ended while this step ran (rule `late-stop`), or that came since.
            if not (given := planned[request_id]).is_over:
                sampled.append((given, token_id))
                self._append(given, token_id)
        if sampled:
            self.outbox.tokens(sampled)

    def _append(self, request: Tracked, token_id: int) -> None:
        request.pending -= 1
        request.token_ids.append(token_id)
        blame.sampled(request)
        self.waiting.charge(request, OUTPUT_TOKEN_COST)
        if (reason := stop_reason(request, token_id, self.eos_token_ids)) is not None:
            self.end(request, reason)

    def _fail(self, request: Tracked, error: str) -> None:
        if not request.is_over:
            self.end(request, FinishReason.FAILED, error)

    def step_failed(self, failed: StepFailed) -> None:
        """Void every step of the epoch and recompute; a request whose step fails when it runs alone is at fault."""
        if (plan := self.flights.failed(failed)) is None:
            return
        self.doubts[EXECUTOR].give_up()
        log.warning("step_failed", epoch=failed.epoch, step=failed.step, requests=len(plan), error=failed.error)
        for request in self.requests.values():
            request.pending = 0
        if failed.out_of_memory and self.budget.shrink(sum([count for _, count, _ in plan])):
            plan = []  # it was nobody's fault
        for request, _, _ in plan:
            if request.has_failed:
                self._fail(request, failed.error)
            request.has_failed = request.suspect = True
        for request in reversed(list(self.running.values())):
            self.preempt(request, "a step failed")
        self.door.reopen(None)
        self.flights.begin_epoch(contents_lost=failed.contents_lost)
        if failed.contents_lost:
            self.lose_blocks("a step failed")
            self.reset_cache()

    def preempt(self, request: Tracked, why: str) -> None:
        """Preempt a request: to the front of the queue, tokens kept, blocks freed (rule `preemption-keeps-tokens`)."""
        now = self.now()
        self.chronicle.note(request, "preempted", why, now)
        self._give_back(request)
        request.evict(now)
        self.door.reopen(request)
        request.preemptions += 1
        self.outbox.counts["preemptions"] += 1
        self.waiting.join(request)

    def _give_back(self, request: Tracked, *, is_spoilt: bool = False) -> None:
        del self.running[request.request_id]
        self.outbox.release(request.filled(), is_spoilt=is_spoilt)
        self.reservation.leave(request)
        self.flights.leave(request)

    def lose_blocks(self, why: str) -> None:
        """Nobody has blocks any more: all that run wait at the front, with their tokens."""
        for request in self.requests.values():
            request.pending = 0
        for request in reversed(list(self.running.values())):
            self.preempt(request, why)
        self.flights.void()
        self.reservation.void()
        self.outbox.forget_released()
        self.door.refused(None)
        self.door.reopen(None)
        for neighbour in (CACHE, EXECUTOR):
            self.doubts[neighbour].give_up()

    def reset_cache(self) -> None:
        """The pool is new, or is to be taken for new."""
        if self.pool is not None:
            pool = self.pool
            self._cache.tell(cache.Reset(pool.block_count, pool.block_size, pool.host, self.flights.made))


def token_capacity(pool: ExecutorReady) -> int:
    """The null block is nobody's: see the cache manager."""
    return (pool.block_count - 1) * pool.block_size


def _doubts(
    wake_after: Callable[[str], Callable[[float], Timer]], limits: Limits, *, can_kill: bool
) -> dict[str, Patience]:
    """An executor that nobody can replace is given more time: all that comes of it is a line in the log."""
    least, first = (STEP_SECONDS, FIRST_STEP_SECONDS) if can_kill else (PATIENCE_SECONDS, PATIENCE_SECONDS)
    return {
        CACHE: Patience(wake_after(CACHE), PATIENCE_SECONDS, PATIENCE_SECONDS),
        EXECUTOR: Patience(wake_after(EXECUTOR), least, first, limits.step_timeout_seconds),
        REPORT: Patience(wake_after(REPORT), REPORT_SECONDS, REPORT_SECONDS),
        START: Patience(wake_after(START), START_SECONDS, REPORT_SECONDS),
    }
