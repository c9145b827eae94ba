"""The scheduler: every request's life, and what each step computes. Knows tokens; not blocks, text or tensors.

One planning round is Reserve → Granted → ExecuteStep, or ExecuteStep alone when no blocks are wanted. Up to
`steps_in_flight` steps run or wait at the executor, so planning hides behind the device's work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias, assert_never

import msgspec

from cuelight.actors.scheduler.chronicle import Chronicle
from cuelight.actors.scheduler.deadlines import Deadlines
from cuelight.actors.scheduler.door import Door
from cuelight.actors.scheduler.flights import Flights
from cuelight.actors.scheduler.outbox import Neighbours, Outbox
from cuelight.actors.scheduler.patience import Patience
from cuelight.actors.scheduler.planning import Limits, stop_reason
from cuelight.actors.scheduler.policy import OUTPUT_TOKEN_COST, policy_of
from cuelight.actors.scheduler.queue import Queue
from cuelight.actors.scheduler.reservation import Reservation
from cuelight.actors.scheduler.rounds import Rounds
from cuelight.actors.scheduler.tracked import Tracked
from cuelight.kernel import Actor, Context, Timer, get_logger
from cuelight.messages import cache, detokenizer, intake
from cuelight.messages.request import FinishReason, RequestId
from cuelight.messages.scheduler import (
    Abort,
    Admit,
    ExecutorReady,
    Explain,
    Explanation,
    Grant,
    Granted,
    SchedulerMessage,
    SetPolicy,
    StepDone,
    StepFailed,
    StopMatched,
)

DEADLINES: Final = "deadlines"
CACHE: Final = "cache manager"
EXECUTOR: Final = "executor"

log = get_logger("cuelight.scheduler")


class _Wake(msgspec.Struct, frozen=True, tag=True):
    """Time to see to this: to the deadlines, or whether a neighbour still answers."""

    what: str


SchedulerInbox: TypeAlias = SchedulerMessage | _Wake


class Scheduler(Actor[SchedulerInbox]):
    """Decodes first, then prefill, under one token budget; whom to serve next and whom to preempt is the policy's."""

    def __init__(
        self,
        context: Context[SchedulerInbox],
        limits: Limits,
        eos_token_ids: frozenset[int],
        neighbours: Neighbours,
        policy: SetPolicy,
    ) -> None:
        self._self = context.ref
        self._clock = context.clock
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._cache = neighbours.cache
        self._detokenizer = neighbours.detokenizer
        self._intake = neighbours.intake
        self._requests: dict[RequestId, Tracked] = {}
        self._waiting = Queue(policy_of(policy))
        self._running: dict[RequestId, Tracked] = {}
        self._door = Door(limits, self._waiting)
        self._flights = Flights(neighbours.executor, context.ref, limits.steps_in_flight)
        self._outbox = Outbox(neighbours)
        self._deadlines = Deadlines(_waking(context, DEADLINES))
        self._chronicle = Chronicle()
        self._rounds = Rounds(limits, self._waiting, self._door, self._chronicle, context.clock.now)
        self._reservation = Reservation(neighbours.cache, context.ref)
        self._doubts = {who: Patience(_waking(context, who)) for who in (CACHE, EXECUTOR)}
        self._arrivals = 0
        self._pool: ExecutorReady | None = None

    def handle(self, message: SchedulerInbox) -> None:
        match message:
            case StepDone():
                self._step_done(message)
            case Granted():
                self._granted(message)
            case Admit():
                self._admit(message)
            case Abort(request_id):
                self._end_if_live(request_id, FinishReason.CANCELLED)
            case StopMatched():
                self._stop_matched(message)
            case StepFailed():
                self._step_failed(message)
            case SetPolicy():
                self._waiting.reorder(policy_of(message))
                self._door.reopen(None)
            case Explain(request_id, reply_to):
                reply_to.tell(self._explain(request_id))
            case _Wake(what):
                self._wake(what)
            case ExecutorReady():
                self._pool = message
                self._reset_cache(message)
                # The null block is nobody's: see the cache manager.
                self._intake.tell(intake.Serving((message.block_count - 1) * message.block_size))
            case _:
                assert_never(message)
        self._outbox.announce()
        self._plan(admit=True)
        self._see_that_something_moves()
        self._outbox.publish(len(self._running), len(self._waiting), self._flights.step)

    def _reset_cache(self, pool: ExecutorReady) -> None:
        self._cache.tell(cache.Reset(pool.block_count, pool.block_size, pool.host))

    # Requests come, and wait.

    def _admit(self, admit: Admit) -> None:
        assert admit.request_id not in self._requests, "request ids are used once"
        request = Tracked(self._arrivals, admit)
        self._arrivals += 1
        self._requests[admit.request_id] = request
        self._waiting.join(request)
        self._deadlines.add(request, self._clock.now())

    def _stop_matched(self, matched: StopMatched) -> None:
        if (stopped := self._requests.get(matched.request_id)) is not None:
            stopped.stop_at(matched.output_tokens)
            self._end(stopped, FinishReason.STOP)

    def _expire(self, request: Tracked) -> None:
        if self._requests.get(request.request_id) is not request:
            return
        now = self._clock.now()
        if now >= request.deadline:
            self._end(request, FinishReason.EXPIRED, "its deadline has passed")
        elif now >= request.queue_deadline and request.queued_seconds is None:
            self._end(request, FinishReason.EXPIRED, f"it has waited for {request.service.queue_seconds} s")

    def _explain(self, request_id: RequestId) -> Explanation:
        request = self._requests.get(request_id)
        if request is None:
            return self._chronicle.ended(request_id)
        return self._chronicle.explain(request, "running" if request.running else "waiting")

    # What keeps everything from going on.

    def _see_that_something_moves(self) -> None:
        """Rule 11: while anything is left to do, a step runs or blocks are asked for; else one request is given up."""
        while self._pool is not None and self._requests and self._reservation.asked is None and not self._flights:
            stuck = next(iter(self._running.values()), None) or self._waiting.head(1)[0]
            obstacle = self._door.obstacle(self._running.values(), self._limits.token_budget, self._clock.now())
            why = obstacle or ("all wait for a prefix" if self._door.deferred else "no step can be planned")
            reason = f"nothing moves, and {len(self._requests)} requests are live: {why}"
            log.error("stalled", request_id=stuck.request_id, reason=reason, running=len(self._running))
            self._end(stuck, FinishReason.FAILED, reason)
            self._door.reopen(None)
            self._outbox.announce()
            self._plan(admit=True)

    def _wake(self, what: str) -> None:
        now = self._clock.now()
        if what == DEADLINES:
            for late in self._deadlines.due(now):
                self._expire(late)
        else:
            self._look_after(what, now)

    def _look_after(self, neighbour: str, now: float) -> None:
        """A neighbour that does not answer cannot be helped from here; but whoever asks is to know why they wait."""
        if (silence := self._doubts[neighbour].silence(now)) is not None:
            reason = f"the {neighbour} has not answered for {silence:.0f} s"
            log.error("stalled", reason=reason, running=len(self._running), waiting=len(self._waiting))
            self._chronicle.obstacle(reason, now)

    # What a step gave.

    def _step_done(self, done: StepDone) -> None:
        if (plan := self._flights.landed(done)) is None:
            return
        self._doubts[EXECUTOR].answered(self._clock.now())
        for request, token_count, incarnation in plan:
            if request.incarnation == incarnation and request.running:
                request.computed += token_count
                if request.computed <= request.prefill_tokens:
                    self._reservation.tell_of(request)
                    self._waiting.charge_prompt(request)
                    self._door.reopen(request)  # others may share what was just computed
        for request_id, reason in done.failed:
            self._end_if_live(request_id, FinishReason.FAILED, reason)
        request_ids: list[RequestId] = []
        token_ids: list[int] = []
        for request_id, token_id in zip(done.request_ids, done.token_ids, strict=True):
            # A request that ended while this step ran has no use for its token (rule 45).
            if (sampled := self._requests.get(request_id)) is not None:
                request_ids.append(request_id)
                token_ids.append(token_id)
                self._append(sampled, token_id)
        if request_ids:
            self._outbox.flush_released()
            self._detokenizer.tell(detokenizer.TokensReady(tuple(request_ids), tuple(token_ids)))

    def _append(self, request: Tracked, token_id: int) -> None:
        request.pending -= 1
        request.token_ids.append(token_id)
        request.suspect = False
        self._waiting.charge(request, OUTPUT_TOKEN_COST)
        if (reason := stop_reason(request, token_id, self._eos_token_ids)) is not None:
            self._end(request, reason)

    def _step_failed(self, failed: StepFailed) -> None:
        """Void every step of the epoch and recompute; a request whose step fails when it runs alone is at fault."""
        if (plan := self._flights.failed(failed)) is None:
            return
        self._doubts[EXECUTOR].give_up()
        log.warning("step_failed", epoch=failed.epoch, step=failed.step, requests=len(plan), error=failed.error)
        for request in self._requests.values():
            request.pending = 0
        for request, _, _ in plan:
            if request.suspect:
                self._end_if_live(request.request_id, FinishReason.FAILED, failed.error)
            request.suspect = True
        for request in reversed(list(self._running.values())):
            self._preempt(request, "a step failed")
        self._flights.begin_epoch(contents_lost=failed.contents_lost)
        if failed.contents_lost:
            assert self._pool is not None
            self._outbox.flush_released()
            # What is granted now is of tables that the reset forgets.
            for request_id in self._reservation.courted if self._reservation.asked is not None else ():
                if (courted := self._requests.get(request_id)) is not None and not courted.running:
                    courted.incarnation += 1
            self._reset_cache(self._pool)

    # The next step.

    def _plan(self, *, admit: bool) -> None:
        """Send the next step, or first ask for the blocks it wants."""
        running = self._running.values()
        while self._pool is not None and self._reservation.asked is None and self._flights.has_room:
            usurper = self._usurp() if admit else None
            following = self._rounds.next(running, admit=admit, usurper=usurper)
            if following.growths or following.admitted:
                self._doubts[CACHE].asked(self._clock.now())
                self._reservation.ask(following, self._running, self._door.deferred.news)
            elif following.plan:
                self._execute(following.plan)
            else:
                return

    def _usurp(self) -> Tracked | None:
        """Who takes the place of another one for its tenant's share: the other one is preempted (one a round)."""
        pair = self._usurpation()
        if pair is None or not self._rounds.has_tokens_left(self._running.values(), without=pair[1]):
            return None
        usurper, victim = pair
        usurper.is_sheltered = True
        self._preempt(victim, f"tenant {usurper.service.tenant!r} has less than its share")
        self._outbox.flush_released()
        return usurper

    def _usurpation(self) -> tuple[Tracked, Tracked] | None:
        if self._pool is None:
            return None
        token_capacity = (self._pool.block_count - 1) * self._pool.block_size
        return self._door.usurpation(self._running.values(), token_capacity, self._clock.now())

    def _execute(self, plan: list[tuple[Tracked, int]]) -> None:
        self._outbox.counts["scheduled_tokens"] += sum([count for _, count in plan])
        self._outbox.counts["budget_tokens"] += self._limits.token_budget
        self._doubts[EXECUTOR].asked(self._clock.now())
        self._flights.send(plan)

    def _granted(self, granted: Granted) -> None:
        asked = self._reservation.answered()
        self._doubts[CACHE].answered(self._clock.now())
        self._flights.copy(granted.copies)
        for grant in granted.grants:
            self._take(grant, asked[grant.request_id])
        is_stale = self._door.deferred.news != self._reservation.news
        for request_id in granted.deferred:
            self._defer(request_id, is_stale=is_stale)
        short = [r for i in granted.refused if (r := self._requests.get(i)) and r.incarnation == asked[i]]
        if any(request.running for request in short):
            self._preempt(self._waiting.victim(self._running.values()), "another one needed blocks to go on")
            self._outbox.flush_released()
            # Whoever was just evicted must not be let in again by the same round (rule 2).
            self._plan(admit=False)
            return
        self._door.refused(short[0] if short and not is_stale else None)
        if short and self._usurpation() is not None:
            self._plan(admit=True)
            return
        if short and short[0].is_sheltered and not is_stale:
            self._door.gave_way_in_vain(short[0])
        # If all that were tried have been set aside, the next in line are tried before they lose their turn.
        if short or not granted.deferred or self._reservation.courted - set(granted.deferred):
            self._run_what_fits()
        if short and not is_stale and not self._running and not self._flights:
            # Nothing runs, so every block is free, and still it does not fit: it never will (rule 11).
            self._end(short[0], FinishReason.FAILED, "the request does not fit the block pool")
            self._door.refused(None)  # for the next one the pool may do

    def _take(self, grant: Grant, incarnation: int) -> None:
        """Blocks are there for a request, if it still is."""
        request = self._requests.get(grant.request_id)
        if request is None and grant.request_id in self._reservation.courted:
            # It ended while it waited, so nobody has released what it is given now.
            self._outbox.release(cache.Filled(grant.request_id, grant.cached_tokens, ()))
            self._door.reopen(None)
        if request is None or request.incarnation != incarnation:
            return  # one that ended or lost its blocks while it ran was released behind our asking
        if not request.running:
            now = self._clock.now()
            self._waiting.leave(request)
            self._running[request.request_id] = request
            self._chronicle.note(request, "admitted", f"{grant.cached_tokens} tokens were cached", now)
            self._chronicle.obstacle("", now)
            request.admit(grant.cached_tokens, now)
        request.extend(grant.block_ids, grant.token_capacity)

    def _defer(self, request_id: RequestId, *, is_stale: bool) -> None:
        """Set a request aside until what it shares with a running one is computed, if that is still to be done."""
        if (request := self._requests.get(request_id)) is None or self._pool is None:
            return
        request.is_sheltered = False
        if self._door.deferred.add(request, self._running.values(), self._pool.block_size, is_stale=is_stale):
            why = "a running request is computing the prefix they share"
            self._chronicle.note(request, "deferred", why, self._clock.now())

    def _run_what_fits(self) -> None:
        plan = self._rounds.planned(self._running.values(), others_wait=False)
        plan = [(request, count) for request, count in plan if request.scheduled + count <= request.capacity]
        if plan:
            self._execute(plan)

    # Losing blocks, for a while or for good.

    def _preempt(self, request: Tracked, why: str) -> None:
        """Back to the front of the queue, all tokens kept, all blocks freed (rules 34 to 37)."""
        now = self._clock.now()
        self._chronicle.note(request, "preempted", why, now)
        self._give_back(request)
        request.evict(now)
        self._door.reopen(request)
        request.preemptions += 1
        self._outbox.counts["preemptions"] += 1
        self._waiting.join(request)

    def _give_back(self, request: Tracked) -> None:
        del self._running[request.request_id]
        self._outbox.release(request.filled())
        self._reservation.leave(request)
        self._flights.leave(request)

    def _end_if_live(self, request_id: RequestId, reason: FinishReason, error: str = "") -> None:
        if (request := self._requests.get(request_id)) is not None:
            self._end(request, reason, error)

    def _end(self, request: Tracked, reason: FinishReason, error: str = "") -> None:
        now = self._clock.now()
        del self._requests[request.request_id]
        self._deadlines.forget(request)
        self._door.deferred.forget(request)
        if request.running:
            self._give_back(request)
            request.stop_running(now)
            self._door.reopen(request)
        else:
            self._waiting.leave(request)
        self._chronicle.end(request, str(reason), error, now)
        self._outbox.end(request, reason, error, now)


def _waking(context: Context[SchedulerInbox], what: str) -> Callable[[float], Timer]:
    return lambda seconds: context.after(seconds, _Wake(what))
