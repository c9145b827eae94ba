"""The scheduler's state and its transitions: waiting and running requests, admission, and the token budget.

`SchedulerState` is the only owner. The step loop, the executor manager and the actor read it and call its methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cuelight.actors.scheduler import recovery
from cuelight.actors.scheduler.admission import AdmissionGate, AdmissionPlanner, PlannedRound
from cuelight.actors.scheduler.in_flight import BlockRequests, InFlightSteps
from cuelight.actors.scheduler.outbox import Outbox
from cuelight.actors.scheduler.planning import AdaptiveTokenBudget, Planned, StepLimits, stop_reason
from cuelight.actors.scheduler.policy import OUTPUT_TOKEN_COST, policy_of
from cuelight.actors.scheduler.queue import Queue
from cuelight.actors.scheduler.request import Request, RequestDeadlines
from cuelight.actors.scheduler.timeline import Timeline
from cuelight.kernel import Timer, get_logger
from cuelight.messages import cache
from cuelight.messages.request import FailureCause, FinishReason, RequestId
from cuelight.messages.scheduler import (
    Admit,
    ExecutorReady,
    Explanation,
    Grant,
    SetPolicy,
    StepDone,
    StepFailed,
    StopMatched,
)

log = get_logger("cuelight.scheduler")


class SchedulerState:
    """All requests that have not ended, the queue and the admission gate, the token budget, and the executor's pool.

    A request that gives its blocks back leaves `steps` and `block_requests`. `wake_after` makes the timer of the
    deadlines.
    """

    def __init__(
        self,
        limits: StepLimits,
        eos_token_ids: frozenset[int],
        policy: SetPolicy,
        outbox: Outbox,
        steps: InFlightSteps,
        block_requests: BlockRequests,
        wake_after: Callable[[float], Timer],
        now: Callable[[], float],
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._pool: ExecutorReady | None = None
        self._is_open = False
        self._requests: dict[RequestId, Request] = {}
        self._running: dict[RequestId, Request] = {}
        self._queue = Queue(policy_of(policy))
        self._budget = AdaptiveTokenBudget(limits.token_budget)
        self._gate = AdmissionGate(limits, self._budget, self._queue)
        self._now = now
        self._steps = steps
        self._block_requests = block_requests
        self._outbox = outbox
        self._deadlines = RequestDeadlines(wake_after)
        self._timeline = Timeline()
        self._planner = AdmissionPlanner(limits, self._budget, self._queue, self._gate, self._timeline, self._now)
        self._arrivals = 0

    @property
    def requests(self) -> Mapping[RequestId, Request]:
        """All requests that have not ended, by id."""
        return self._requests

    @property
    def running(self) -> Mapping[RequestId, Request]:
        """Requests that hold blocks, by id."""
        return self._running

    @property
    def pool(self) -> ExecutorReady | None:
        """The executor's blocks; None while there is no executor."""
        return self._pool

    @property
    def is_open(self) -> bool:
        """Whether `RestoreState` has arrived."""
        return self._is_open

    @property
    def is_serving(self) -> bool:
        """Whether steps may be planned: there is a pool, and the state is open."""
        return self._pool is not None and self._is_open

    def explain(self, request_id: RequestId) -> Explanation:
        """Return a request's state and timeline."""
        request = self._requests.get(request_id)
        if request is None:
            return self._timeline.ended(request_id)
        return self._timeline.explain(request, "running" if request.running else "waiting")

    def open(self) -> None:
        """Allow planning: the state of the scheduler before has arrived."""
        self._is_open = True

    def set_policy(self, policy: SetPolicy) -> None:
        """Serve by this policy from now on."""
        self._queue.reorder(policy_of(policy))
        self._gate.reopen(None)

    def join(self, admit: Admit) -> Request | None:
        """Queue a request and return it. For a known request, send its output or its end again and return None."""
        if (known := self._requests.get(admit.request_id)) is not None:
            self._outbox.repeat(known)
            return None
        if self._outbox.repeat_end(admit.request_id):
            return None
        request = Request(self._arrivals, admit)
        self._arrivals += 1
        self._requests[admit.request_id] = request
        self._queue.join(request)
        self._deadlines.add(request, self._now())
        return request

    def limit(self, request: Request, token_limit: int) -> None:
        """Let a request hold `token_limit` tokens at most; end one whose prompt is too long for that."""
        request.limit_to(token_limit)
        if request.token_limit > token_limit:
            reason = f"the new model holds {token_limit} tokens; the prompt has {request.prompt_tokens}"
            self.end(request, FinishReason.FAILED, reason, FailureCause.NO_ROOM)

    def end_if_complete(self, request: Request) -> None:
        """End a resumed request whose last output token already ended it."""
        output = request.output
        if output and (reason := stop_reason(request, output[-1], self._eos_token_ids)) is not None:
            self.end(request, reason)

    def stop_matched(self, matched: StopMatched) -> None:
        """End a request whose text a stop string ended, and drop its output beyond."""
        stopped = self._requests.get(matched.request_id)
        # An earlier scheduler may have sent more output than this one has: the match is sent again once it has as much.
        if stopped is not None and matched.output_tokens <= stopped.output_tokens:
            stopped.stop_at(matched.output_tokens)
            self.end(stopped, FinishReason.STOP)

    def expire(self, now: float) -> None:
        """End the requests whose deadlines have come."""
        for request in self._deadlines.due(now):
            if request.is_over:
                continue
            if now >= request.deadline:
                self.end(request, FinishReason.EXPIRED, "its deadline has passed")
            elif now >= request.queue_deadline and request.queued_seconds is None:
                self.end(request, FinishReason.EXPIRED, f"it has waited for {request.service.queue_seconds} s")

    def end_if_live(
        self, request_id: RequestId, reason: FinishReason, error: str = "", failure: FailureCause | None = None
    ) -> None:
        """End this request, if it is live."""
        if (request := self._requests.get(request_id)) is not None:
            self.end(request, reason, error, failure)

    def end(self, request: Request, reason: FinishReason, error: str = "", failure: FailureCause | None = None) -> None:
        """End a live request: release its blocks or its place in the queue, and queue its end for sending."""
        now = self._now()
        del self._requests[request.request_id]
        request.is_over = True
        self._deadlines.forget(request)
        self._gate.prefix_waiters.forget(request)
        if request.running:
            self._give_back(request, is_poisoned=reason is FinishReason.FAILED)
            request.stop_running(now)
            self._gate.reopen(request)
        else:
            self._queue.leave(request)
        self._timeline.end(request, str(reason), error, now)
        self._outbox.end(request, reason, error, now, failure)

    def publish(self) -> None:
        """Send the figures, if they have changed."""
        self._outbox.publish(len(self._running), len(self._queue), self._steps.step)

    def note_silence(self, reason: str) -> None:
        """Store that no request is admitted because a peer does not answer."""
        log.error("stalled", reason=reason, running=len(self._running), waiting=len(self._queue))
        self._timeline.obstacle(reason, self._now())

    @property
    def generation(self) -> int:
        """Number of times that blocks were given back or prefixes computed, which may allow admissions."""
        return self._gate.prefix_waiters.generation

    def plan_round(self, *, admit: bool, claimant: Request | None) -> PlannedRound:
        """Decide the next step, and the requests to admit for it if blocks are free."""
        return self._planner.next(self._running.values(), admit=admit, claimant=claimant)

    def plan_within_blocks(self) -> list[tuple[Request, int]]:
        """Plan a step within the blocks that the running requests hold."""
        plan = self._planner.planned(self._running.values(), others_wait=False)
        return [(request, count) for request, count in plan if request.scheduled + count <= request.capacity]

    def find_claim(self) -> tuple[Request, Request] | None:
        """Return a waiting claimant for its tenant's share and the running victim whose place it may take, or None."""
        if self._pool is None:
            return None
        return self._gate.find_claim(self._running.values(), token_capacity(self._pool), self._now())

    def has_tokens_left(self, without: Request) -> bool:
        """Return whether a step of all running requests but `without` leaves budget tokens."""
        return self._planner.has_tokens_left(self._running.values(), without)

    def make_room(self, claimant: Request, victim: Request) -> None:
        """Preempt `victim` for the share of the claimant's tenant."""
        claimant.is_protected = True
        self.preempt(victim, f"tenant {claimant.service.tenant!r} has less than its share")

    def preempt_last(self) -> None:
        """Preempt the request that the policy serves last: another running request needs blocks."""
        self.preempt(self._queue.victim(self._running.values()), "another running request needed blocks")

    def close_gate(self, refused: Request | None) -> None:
        """Admit no request while `refused`, which does not fit the free blocks, is next in line; None opens it."""
        self._gate.refused(refused)

    def make_no_more_room(self, request: Request) -> None:
        """Preempt no other request for this one: it did not fit although one was preempted for it."""
        self._gate.make_no_more_room(request)

    def end_stuck(self) -> None:
        """Fail the first running request, or else the next in line: no step can be planned (rule `liveness`)."""
        stuck = next(iter(self._running.values()), None) or self._queue.head(1)[0]
        obstacle = self._gate.obstacle(self._running.values(), self._budget.tokens, self._now())
        why = obstacle or ("all wait for a prefix" if self._gate.prefix_waiters else "no step can be planned")
        reason = f"no progress is possible with {len(self._requests)} live requests: {why}"
        log.error("stalled", request_id=stuck.request_id, reason=reason, running=len(self._running))
        self.end(stuck, FinishReason.FAILED, reason, FailureCause.STALLED)
        self._gate.reopen(None)

    def take_blocks(self, grant: Grant) -> None:
        """Append granted blocks to a live request, and start it if it was waiting."""
        request = self._requests[grant.request_id]
        if not request.running:
            now = self._now()
            self._queue.leave(request)
            self._running[request.request_id] = request
            self._timeline.note(request, "admitted", f"{grant.cached_tokens} tokens were cached", now)
            self._timeline.obstacle("", now)
            request.admit(grant.cached_tokens, now)
        request.extend(grant.block_ids, grant.token_capacity)

    def return_blocks(self, grant: Grant) -> None:
        """Release blocks granted to a request that ended while it waited for them."""
        self._outbox.release(cache.Filled(grant.request_id, grant.cached_tokens, ()))
        self._gate.reopen(None)

    def defer(self, request: Request, *, is_stale: bool) -> None:
        """Defer a request until the prefix that it shares with a running one is computed, if it is not yet."""
        assert self._pool is not None, "the cache manager answers for a pool"
        request.is_protected = False
        if self._gate.prefix_waiters.add(request, self._running.values(), self._pool.block_size, is_stale=is_stale):
            why = "a running request is computing the prefix they share"
            self._timeline.note(request, "deferred", why, self._now())

    def count_step(self, token_count: int) -> None:
        """Add a step of `token_count` tokens to the figures."""
        self._outbox.count_step(token_count, self._budget.most)

    def step_done(self, plan: Sequence[Planned], done: StepDone) -> None:
        """Apply the computed and sampled tokens of a step."""
        if self._budget.step_fitted():
            self._gate.reopen(None)
        planned: dict[RequestId, Request] = {}
        for request, token_count, incarnation in plan:
            planned[request.request_id] = request
            if request.incarnation == incarnation and request.running:
                request.computed += token_count
                if request.computed <= request.prefill_tokens:
                    self._block_requests.note_computed(request)
                    self._queue.charge_prompt(request)
                    self._gate.reopen(request)  # others may share what was just computed
        for request_id, reason in done.failed:
            self._fail(planned[request_id], reason)
        sampled: list[tuple[Request, int]] = []
        for request_id, token_id in zip(done.request_ids, done.token_ids, strict=True):
            # Drop the token of a request that ended while this step was in flight (rule `late-stop`).
            if not (given := planned[request_id]).is_over:
                sampled.append((given, token_id))
                self._append(given, token_id)
        if sampled:
            self._outbox.tokens(sampled)

    def step_failed(self, plan: Sequence[Planned], failed: StepFailed) -> None:
        """Preempt every running request to recompute it, and fail a request whose step has failed before.

        A step that ran out of memory is retried with a smaller token budget, if the budget can shrink.
        """
        self._expect_no_tokens()
        is_smaller = failed.out_of_memory and self._budget.shrink(sum([count for _, count, _ in plan]))
        for request, _, _ in () if is_smaller else plan:
            if request.has_failed:
                self._fail(request, failed.error)
            request.has_failed = request.suspect = True
        self._preempt_all("a step failed")
        self._gate.reopen(None)

    def lose_blocks(self, why: str) -> None:
        """Preempt every running request, which keeps its tokens: all blocks are lost."""
        self._expect_no_tokens()
        self._preempt_all(why)
        self._outbox.forget_released()
        self._gate.refused(None)
        self._gate.reopen(None)

    def _append(self, request: Request, token_id: int) -> None:
        request.pending -= 1
        request.token_ids.append(token_id)
        recovery.count_sampled(request)
        self._queue.charge(request, OUTPUT_TOKEN_COST)
        if (reason := stop_reason(request, token_id, self._eos_token_ids)) is not None:
            self.end(request, reason)

    def _fail(self, request: Request, error: str) -> None:
        if not request.is_over:
            self.end(request, FinishReason.FAILED, error, FailureCause.STEP_FAILED)

    def _expect_no_tokens(self) -> None:
        for request in self._requests.values():
            request.pending = 0

    def _preempt_all(self, why: str) -> None:
        for request in reversed(list(self._running.values())):
            self.preempt(request, why)

    def preempt(self, request: Request, why: str) -> None:
        """Preempt a request: to the front of the queue, tokens kept, blocks freed (rule `preemption-keeps-tokens`)."""
        now = self._now()
        self._timeline.note(request, "preempted", why, now)
        self._give_back(request)
        request.evict(now)
        self._gate.reopen(request)
        request.preemptions += 1
        self._outbox.count_preemption()
        self._queue.join(request)

    def _give_back(self, request: Request, *, is_poisoned: bool = False) -> None:
        del self._running[request.request_id]
        self._outbox.release(request.filled(), is_poisoned=is_poisoned)
        self._block_requests.leave(request)
        self._steps.leave(request)

    def set_pool(self, pool: ExecutorReady | None) -> None:
        """Set the pool to plan for; None while there is no executor."""
        self._pool = pool

    def set_end_tokens(self, eos_token_ids: frozenset[int]) -> None:
        """Set the tokens that end an output."""
        self._eos_token_ids = eos_token_ids

    def hold_new_requests(self, is_held: bool) -> bool:
        """Admit only requests that have run before, if `is_held`. Return whether this changed."""
        if self._gate.holds_new_requests == is_held:
            return False
        self._gate.holds_new_requests = is_held
        self._gate.reopen(None)
        return True


def token_capacity(pool: ExecutorReady) -> int:
    """Return the tokens that the pool holds without the null block, which is never granted."""
    return (pool.block_count - 1) * pool.block_size
