"""The scheduler: every request's life, and what each step computes. Knows tokens; not blocks, text or tensors.

One planning round is Reserve → Granted → ExecuteStep, or ExecuteStep alone when no blocks are wanted. Up to
`steps_in_flight` steps run or wait at the executor, so planning hides behind the device's work.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, TypeAlias, assert_never

import msgspec

from cuelight.actors.scheduler.chronicle import Chronicle
from cuelight.actors.scheduler.deadlines import Deadlines
from cuelight.actors.scheduler.planning import Planned, common_prefix, plan_step, stop_reason
from cuelight.actors.scheduler.policy import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, policy_of
from cuelight.actors.scheduler.queue import Queue
from cuelight.actors.scheduler.tracked import Tracked
from cuelight.kernel import Actor, Context, get_logger
from cuelight.messages import cache, detokenizer, executor, intake, observer
from cuelight.messages.address import Address
from cuelight.messages.request import FinishReason, RequestId, Usage
from cuelight.messages.scheduler import (
    Abort,
    Admit,
    ExecutorReady,
    Explain,
    Explanation,
    Granted,
    SchedulerMessage,
    SetPolicy,
    StepDone,
    StepFailed,
    StopMatched,
)

DEFERRED_MAX: Final = 256
"""Beyond so many, nobody is tried until they are admitted: looking past them for others costs more each time."""

log = get_logger("cuelight.scheduler")


class _Expire(msgspec.Struct, frozen=True, tag=True):
    """The earliest deadline has come."""


SchedulerInbox: TypeAlias = SchedulerMessage | _Expire


@dataclass(frozen=True)
class Limits:
    """`token_budget` tokens a step, `running_max` requests with blocks, `steps_in_flight` steps at the executor.

    While others could use the budget, a prompt gets at most `long_prefill_tokens` of a step.
    """

    token_budget: int
    running_max: int
    steps_in_flight: int = 2
    long_prefill_tokens: int = 2**63
    admissions_tried_max: int = 64


@dataclass(frozen=True)
class Neighbours:
    """Whom the scheduler talks to."""

    cache: Address[cache.CacheMessage]
    executor: Address[executor.ExecutorMessage]
    detokenizer: Address[detokenizer.DetokenizerMessage]
    intake: Address[intake.IntakeMessage]
    observer: Address[observer.ObserverMessage]


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
        self._context = context
        self._limits = limits
        # A decode takes one token of the budget: more running requests than that could never all go on.
        self._running_max = min(limits.running_max, limits.token_budget)
        self._eos_token_ids = eos_token_ids
        self._to = neighbours
        self._requests: dict[RequestId, Tracked] = {}
        self._waiting = Queue(policy_of(policy))
        self._deadlines = Deadlines(lambda seconds: context.after(seconds, _Expire()))
        self._arrivals = 0
        self._chronicle = Chronicle()
        self._running: dict[RequestId, Tracked] = {}
        self._in_flight: deque[tuple[int, list[Planned]]] = deque()
        # While a Reserve is out: whom it asks for, with their incarnations, and which of them waited then.
        self._asked: dict[RequestId, int] | None = None
        self._courted: set[RequestId] = set()
        # Those set aside for a prefix that a running request computes: whose, and how many tokens of it they share.
        # With nobody known, until there is any news.
        self._deferred: dict[Tracked, tuple[Tracked | None, int]] = {}
        self._pool_exhausted = False
        # Counts what may let somebody in: blocks given back, prefixes computed. An answer from before it is stale.
        self._news = 0
        self._news_when_asked = 0
        self._ready = False
        self._epoch = 0
        self._step = 0
        # Gathered while one message is handled, then sent as one message per edge.
        self._released: list[cache.Filled] = []
        self._prefilled: dict[RequestId, Tracked] = {}
        self._left_batch: list[RequestId] = []
        self._ends: list[detokenizer.RequestEnded] = []
        self._totals = observer.RequestFigures()
        self._counts = {"preemptions": 0, "finished": 0, "prompt_tokens": 0, "cached_tokens": 0, "output_tokens": 0}

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
            case Explain(request_id, reply_to):
                reply_to.tell(self._explain(request_id))
            case _Expire():
                for late in self._deadlines.due(self._context.clock.now()):
                    self._expire(late)
            case ExecutorReady(block_count, block_size):
                self._ready = True
                self._to.cache.tell(cache.Reset(block_count, block_size))
                # The null block is nobody's: see the cache manager.
                self._to.intake.tell(intake.Serving((block_count - 1) * block_size))
            case _:
                assert_never(message)
        self._announce()
        self._plan(admit=True)
        self._see_that_something_moves()
        self._publish()

    def _admit(self, admit: Admit) -> None:
        assert admit.request_id not in self._requests, "request ids are used once"
        now = self._context.clock.now()
        request = Tracked(self._arrivals, admit)
        self._arrivals += 1
        self._requests[admit.request_id] = request
        self._waiting.join(request)
        self._deadlines.add(request, now)

    def _stop_matched(self, matched: StopMatched) -> None:
        if (stopped := self._requests.get(matched.request_id)) is not None:
            stopped.stop_at(matched.output_tokens)
            self._end(stopped, FinishReason.STOP)

    def _expire(self, request: Tracked) -> None:
        if self._requests.get(request.request_id) is not request:
            return
        now = self._context.clock.now()
        if now >= request.deadline:
            self._end(request, FinishReason.EXPIRED, "its deadline has passed")
        elif now >= request.queue_deadline and request.queued_seconds is None:
            self._end(request, FinishReason.EXPIRED, f"it has waited for {request.service.queue_seconds} s")

    def _explain(self, request_id: RequestId) -> Explanation:
        request = self._requests.get(request_id)
        if request is None:
            return self._chronicle.ended(request_id)
        return self._chronicle.explain(request, "running" if request.running else "waiting")

    def _see_that_something_moves(self) -> None:
        """Rule 11: while anything is left to do, a step runs or blocks are asked for; else one request is given up."""
        while self._ready and self._requests and self._asked is None and not self._in_flight:
            stuck = next(iter(self._running.values()), None) or self._waiting.head(1)[0]
            obstacle = self._obstacle(self._limits.token_budget)
            why = obstacle or ("all wait for a prefix" if self._deferred else "no step can be planned")
            reason = f"nothing moves, and {len(self._requests)} requests are live: {why}"
            log.error("stalled", request_id=stuck.request_id, reason=reason, running=len(self._running))
            self._end(stuck, FinishReason.FAILED, reason)
            self._reopen(None)
            self._announce()
            self._plan(admit=True)

    # What a step gave.

    def _step_done(self, done: StepDone) -> None:
        if done.epoch != self._epoch:
            return
        step, plan = self._in_flight.popleft()
        assert step == done.step, "steps end in the order they were sent"
        for request, token_count, incarnation in plan:
            if request.incarnation == incarnation and request.running:
                request.computed += token_count
                if request.computed <= request.prefill_tokens:
                    self._prefilled[request.request_id] = request
                    self._reopen(request)  # others may share what was just computed
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
            self._flush_released()
            self._to.detokenizer.tell(detokenizer.TokensReady(tuple(request_ids), tuple(token_ids)))

    def _append(self, request: Tracked, token_id: int) -> None:
        request.pending -= 1
        request.token_ids.append(token_id)
        request.suspect = False
        self._waiting.charge(request, OUTPUT_TOKEN_COST)
        if (reason := stop_reason(request, token_id, self._eos_token_ids)) is not None:
            self._end(request, reason)

    def _step_failed(self, failed: StepFailed) -> None:
        """Void every step of the epoch and recompute; a request whose step fails when it runs alone is at fault."""
        if failed.epoch != self._epoch:
            return
        _, plan = self._in_flight.popleft()
        self._in_flight.clear()
        self._epoch += 1
        log.warning("step_failed", epoch=failed.epoch, step=failed.step, requests=len(plan), error=failed.error)
        for request in self._requests.values():
            request.pending = 0
        for request, _, _ in plan:
            if request.suspect:
                self._end_if_live(request.request_id, FinishReason.FAILED, failed.error)
            request.suspect = True
        for request in reversed(list(self._running.values())):
            self._preempt(request, "a step failed")
        self._left_batch.clear()  # a new epoch starts with no rows at all

    # The next step.

    def _plan(self, *, admit: bool) -> None:
        """Send the next step, or first ask for the blocks it wants."""
        while self._ready and self._asked is None and len(self._in_flight) < self._limits.steps_in_flight:
            # A long prompt leaves room for those that wait; what they do not take it gets when blocks are granted.
            others_wait = admit and len(self._waiting) > 0 and self._closed_door() is None
            plan = self._planned(others_wait=others_wait)
            growths = [cache.Growth(r.request_id, r.scheduled + n) for r, n in plan if r.scheduled + n > r.capacity]
            budget = self._limits.token_budget - sum([count for _, count in plan])
            admissions = self._candidates(budget) if admit else []
            if others_wait and not admissions:
                plan = self._planned(others_wait=False)
            if growths or admissions:
                self._reserve(growths, admissions, budget)
            elif plan:
                self._execute(plan)
            else:
                return

    def _planned(self, *, others_wait: bool) -> list[tuple[Tracked, int]]:
        limits = self._limits
        running = self._running.values()
        return plan_step(running, limits.token_budget, limits.long_prefill_tokens, others_wait=others_wait)

    def _candidates(self, token_budget: int) -> list[cache.Admission]:
        """The head of the queue, as far as seats and budget could reach."""
        if not self._waiting:
            return []
        if (obstacle := self._obstacle(token_budget)) is not None:
            self._chronicle.obstacle(obstacle, self._context.clock.now())
            return []
        seats = min(self._running_max - len(self._running), self._limits.admissions_tried_max)
        candidates: list[cache.Admission] = []
        for request in self._waiting.head(seats + len(self._deferred)):
            # A preempted request comes back only when its tokens in flight have arrived (rule 38).
            if request.pending or len(candidates) == seats:
                break
            if request in self._deferred:
                continue  # set aside, so that it does not hold up those behind it (rule 9)
            candidates.append(request.admission())
        return candidates

    def _obstacle(self, token_budget: int) -> str | None:
        """What keeps everybody who waits from being admitted now."""
        if (closed := self._closed_door()) is not None:
            return closed
        if token_budget <= 0:
            return "the requests that run use the whole token budget"
        return None

    def _closed_door(self) -> str | None:
        """What keeps them out whatever the next step is."""
        if len(self._running) >= self._running_max:
            return f"{len(self._running)} requests are running, as many as may"
        if self._pool_exhausted:
            return "the blocks that are free do not suffice for the next in line"
        if any(request.suspect for request in self._running.values()):
            return "requests of a failed step run alone"
        if len(self._deferred) >= DEFERRED_MAX:
            return f"{len(self._deferred)} requests wait for prefixes that are being computed"
        return None

    def _reserve(self, growths: list[cache.Growth], admissions: list[cache.Admission], token_budget: int) -> None:
        asked = [g.request_id for g in growths] + [a.request_id for a in admissions]
        self._courted = {a.request_id for a in admissions}
        self._asked = {request_id: self._requests[request_id].incarnation for request_id in asked}
        self._news_when_asked = self._news
        growing = {g.request_id: self._requests[g.request_id] for g in growths}
        filled = tuple(request.filled() for request in (self._prefilled | growing).values() if request.running)
        self._prefilled.clear()
        self._to.cache.tell(
            cache.Reserve(filled, tuple(growths), tuple(admissions), token_budget, reply_to=self._context.ref)
        )

    def _granted(self, granted: Granted) -> None:
        asked, self._asked = self._asked, None
        assert asked is not None, "only what was asked for is granted"
        for grant in granted.grants:
            request = self._requests.get(grant.request_id)
            if request is None and grant.request_id in self._courted:
                # It ended while it waited, so nobody has released what it is given now.
                self._released.append(cache.Filled(grant.request_id, grant.cached_tokens, ()))
                self._reopen(None)
            if request is None or request.incarnation != asked[grant.request_id]:
                continue  # one that ended or lost its blocks while it ran was released behind our asking
            if not request.running:
                self._waiting.leave(request)
                self._running[request.request_id] = request
                self._waiting.charge(request, INPUT_TOKEN_COST * (len(request.token_ids) - grant.cached_tokens))
                now = self._context.clock.now()
                self._chronicle.note(request, "admitted", f"{grant.cached_tokens} tokens were cached", now)
                self._chronicle.obstacle("", now)
                request.admit(grant.cached_tokens, now)
            request.extend(grant.block_ids, grant.token_capacity)
        for request_id in granted.deferred:
            self._defer(request_id)
        is_stale = self._news != self._news_when_asked
        short = [r for i in granted.refused if (r := self._requests.get(i)) and r.incarnation == asked[i]]
        if any(request.running for request in short):
            self._preempt(self._waiting.victim(self._running.values()), "another one needed blocks to go on")
            self._flush_released()
            # Whoever was just evicted must not be let in again by the same round (rule 2).
            self._plan(admit=False)
        else:
            self._pool_exhausted = bool(short) and not is_stale
            # If all that were tried have been set aside, the next in line are tried before they lose their turn.
            if short or not granted.deferred or self._courted - set(granted.deferred):
                self._run_what_fits()
            if self._pool_exhausted and not self._running and not self._in_flight:
                # Nothing runs, so every block is free, and still it does not fit: it never will (rule 11).
                self._end(short[0], FinishReason.FAILED, "the request does not fit the block pool")
                self._pool_exhausted = False  # for the next one the pool may do

    def _defer(self, request_id: RequestId) -> None:
        """Set a request aside until what it shares with a running one is computed, if that is still to be done."""
        if (request := self._requests.get(request_id)) is None:
            return
        leader, shared = None, 0
        for other in self._running.values():
            ahead = other.computed
            if ahead >= min(other.prefill_tokens, len(request.token_ids)):
                continue
            # Most have nothing in common there, which one look tells.
            if request.token_ids[ahead] == other.token_ids[ahead]:
                tokens = min(common_prefix(request.token_ids, other.token_ids), other.prefill_tokens)
                if tokens > max(shared, ahead):
                    leader, shared = other, tokens
        if leader is None and self._news != self._news_when_asked:
            return  # whoever computed it has done so, or is gone
        self._deferred[request] = leader, shared
        why = "a running request is computing the prefix they share"
        self._chronicle.note(request, "deferred", why, self._context.clock.now())

    def _run_what_fits(self) -> None:
        plan = self._planned(others_wait=False)
        plan = [(request, count) for request, count in plan if request.scheduled + count <= request.capacity]
        if plan:
            self._execute(plan)

    def _execute(self, plan: list[tuple[Tracked, int]]) -> None:
        rows: list[executor.Row] = []
        extensions: list[executor.Extension] = []
        chunks: list[executor.Chunk] = []
        flight: list[Planned] = []
        for request, count in plan:
            if not request.in_batch:
                rows.append(self._row(request))
                request.in_batch = True
                request.block_ids.clear()
            elif request.block_ids:
                extensions.append(executor.Extension(request.request_id, tuple(request.block_ids)))
                request.block_ids.clear()
            chunks.append(executor.Chunk(request.request_id, count))
            request.scheduled += count
            if request.scheduled == len(request.token_ids) + request.pending:
                request.pending += 1  # this chunk samples
            flight.append((request, count, request.incarnation))
        self._step += 1
        self._in_flight.append((self._step, flight))
        self._to.executor.tell(
            executor.ExecuteStep(
                epoch=self._epoch,
                step=self._step,
                ended=tuple(self._left_batch),
                rows=tuple(rows),
                extensions=tuple(extensions),
                chunks=tuple(chunks),
                reply_to=self._context.ref,
            )
        )
        self._left_batch.clear()
        log.debug("step", step=self._step, requests=len(plan), tokens=sum([count for _, count in plan]))

    @staticmethod
    def _row(request: Tracked) -> executor.Row:
        assert request.pending == 0, "a request enters the batch with all its tokens known"
        return executor.Row(
            request_id=request.request_id,
            token_ids=tuple(request.token_ids),
            prompt_tokens=request.prompt_tokens,
            computed_tokens=request.scheduled,
            block_ids=tuple(request.block_ids),
            sampling=request.sampling,
        )

    # Losing blocks, for a while or for good.

    def _preempt(self, request: Tracked, why: str) -> None:
        """Back to the front of the queue, all tokens kept, all blocks freed (rules 34 to 37)."""
        self._chronicle.note(request, "preempted", why, self._context.clock.now())
        del self._running[request.request_id]
        self._give_back(request)
        request.evict()
        self._reopen(request)
        request.preemptions += 1
        self._counts["preemptions"] += 1
        self._waiting.join(request)

    def _give_back(self, request: Tracked) -> None:
        self._released.append(request.filled())
        self._prefilled.pop(request.request_id, None)
        if request.in_batch:
            self._left_batch.append(request.request_id)

    def _reopen(self, source: Tracked | None) -> None:
        """Try again whoever was refused, or set aside for what this one has computed or never will."""
        self._pool_exhausted = False
        self._news += 1
        if self._deferred:
            self._deferred = {
                request: (leader, shared)
                for request, (leader, shared) in self._deferred.items()
                if leader is not None and (leader is not source or (leader.running and leader.computed < shared))
            }

    def _end_if_live(self, request_id: RequestId, reason: FinishReason, error: str = "") -> None:
        if (request := self._requests.get(request_id)) is not None:
            self._end(request, reason, error)

    def _end(self, request: Tracked, reason: FinishReason, error: str = "") -> None:
        del self._requests[request.request_id]
        self._deadlines.forget(request)
        self._deferred.pop(request, None)
        if request.running:
            del self._running[request.request_id]
            self._give_back(request)
            request.running = False
            self._reopen(request)
        else:
            self._waiting.leave(request)
        usage = Usage(request.prompt_tokens, request.cached_tokens, request.output_tokens)
        now = self._context.clock.now()
        self._chronicle.end(request, str(reason), error, now)
        elapsed = now - request.arrived_at
        queued = elapsed if request.queued_seconds is None else request.queued_seconds
        self._ends.append(
            detokenizer.RequestEnded(request.request_id, reason, usage, queued, request.preemptions, error)
        )
        self._count(usage)
        log.info(
            "request_finished",
            request_id=request.request_id,
            reason=str(reason),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            preemptions=request.preemptions,
            queued_seconds=round(queued, 6),
            seconds=round(elapsed, 6),
            **({"error": error} if error else {}),
        )

    # Telling the others, once per message handled.

    def _flush_released(self) -> None:
        if self._released:
            self._to.cache.tell(cache.Release(tuple(self._released)))
            self._released.clear()

    def _announce(self) -> None:
        """Blocks first, so that whoever hears of an end finds them free."""
        self._flush_released()
        if self._ends:
            for end in self._ends:
                self._to.detokenizer.tell(end)
            self._to.intake.tell(intake.Finished(tuple(end.request_id for end in self._ends)))
            self._ends.clear()

    def _count(self, usage: Usage) -> None:
        self._counts["finished"] += 1
        self._counts["prompt_tokens"] += usage.prompt_tokens
        self._counts["cached_tokens"] += usage.cached_tokens
        self._counts["output_tokens"] += usage.output_tokens

    def _publish(self) -> None:
        figures = observer.RequestFigures(
            running=len(self._running), waiting=len(self._waiting), steps=self._step, **self._counts
        )
        if figures != self._totals:
            self._totals = figures
            self._to.observer.tell(figures)
