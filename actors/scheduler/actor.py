"""The scheduler: every request's life, and what each step computes. Knows tokens; not blocks, text or tensors.

One planning round is Reserve → Granted → ExecuteStep, or ExecuteStep alone when no blocks are wanted. Up to
`steps_in_flight` steps run or wait at the executor, so planning hides behind the device's work.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import assert_never

from cuelight.actors.scheduler.planning import Planned, plan_step, stop_reason
from cuelight.actors.scheduler.tracked import Tracked
from cuelight.kernel import Actor, Context, get_logger
from cuelight.messages import cache, detokenizer, executor, intake, observer
from cuelight.messages.address import Address
from cuelight.messages.request import FinishReason, RequestId, Usage
from cuelight.messages.scheduler import (
    Abort,
    Admit,
    ExecutorReady,
    Granted,
    SchedulerMessage,
    StepDone,
    StepFailed,
    StopMatched,
)

log = get_logger("cuelight.scheduler")


@dataclass(frozen=True)
class Limits:
    """`token_budget` tokens a step, `running_max` requests with blocks, `steps_in_flight` steps at the executor."""

    token_budget: int
    running_max: int
    steps_in_flight: int = 2
    admissions_tried_max: int = 64


@dataclass(frozen=True)
class Neighbours:
    """Whom the scheduler talks to."""

    cache: Address[cache.CacheMessage]
    executor: Address[executor.ExecutorMessage]
    detokenizer: Address[detokenizer.DetokenizerMessage]
    intake: Address[intake.IntakeMessage]
    observer: Address[observer.ObserverMessage]


class Scheduler(Actor[SchedulerMessage]):
    """Decodes first, then prefill in arrival order under one token budget; newest preempted first, by recompute."""

    def __init__(
        self,
        context: Context[SchedulerMessage],
        limits: Limits,
        eos_token_ids: frozenset[int],
        neighbours: Neighbours,
    ) -> None:
        self._context = context
        self._limits = limits
        # A decode takes one token of the budget: more running requests than that could never all go on.
        self._running_max = min(limits.running_max, limits.token_budget)
        self._eos_token_ids = eos_token_ids
        self._to = neighbours
        self._requests: dict[RequestId, Tracked] = {}
        self._waiting: deque[Tracked] = deque()
        self._running: dict[RequestId, Tracked] = {}
        self._in_flight: deque[tuple[int, list[Planned]]] = deque()
        # While a Reserve is out: whom it asks for, with their incarnations, and which of them waited then.
        self._asked: dict[RequestId, int] | None = None
        self._courted: set[RequestId] = set()
        self._pool_exhausted = False
        self._releases = 0
        self._releases_when_asked = 0
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

    def handle(self, message: SchedulerMessage) -> None:
        match message:
            case StepDone():
                self._step_done(message)
            case Granted():
                self._granted(message)
            case Admit(request_id, token_ids, sampling, token_limit):
                request = Tracked(request_id, token_ids, sampling, token_limit, self._context.clock.now())
                assert request_id not in self._requests, "request ids are used once"
                self._requests[request_id] = request
                self._waiting.append(request)
            case Abort(request_id):
                self._end_if_live(request_id, FinishReason.CANCELLED)
            case StopMatched(request_id, output_tokens):
                if (stopped := self._requests.get(request_id)) is not None:
                    stopped.stop_at(output_tokens)
                    self._end(stopped, FinishReason.STOP)
            case StepFailed():
                self._step_failed(message)
            case ExecutorReady(block_count, block_size):
                self._ready = True
                self._to.cache.tell(cache.Reset(block_count, block_size))
                # The null block is nobody's: see the cache manager.
                self._to.intake.tell(intake.Serving((block_count - 1) * block_size))
            case _:
                assert_never(message)
        self._announce()
        self._plan(admit=True)
        self._publish()

    # What a step gave.

    def _step_done(self, done: StepDone) -> None:
        if done.epoch != self._epoch:
            return
        step, plan = self._in_flight.popleft()
        assert step == done.step, "steps end in the order they were sent"
        for planned in plan:
            request = planned.request
            if request.incarnation == planned.incarnation and request.running:
                request.computed += planned.token_count
                if planned.token_count > 1:
                    self._prefilled[request.request_id] = request
                    self._pool_exhausted = False  # the head may share what was just computed
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
        for planned in plan:
            if planned.request.suspect:
                self._end_if_live(planned.request.request_id, FinishReason.FAILED, failed.error)
            planned.request.suspect = True
        for request in reversed(list(self._running.values())):
            self._preempt(request)
        self._left_batch.clear()  # a new epoch starts with no rows at all

    # The next step.

    def _plan(self, *, admit: bool) -> None:
        """Send the next step, or first ask for the blocks it wants."""
        while self._ready and self._asked is None and len(self._in_flight) < self._limits.steps_in_flight:
            plan = plan_step(self._running.values(), self._limits.token_budget)
            growths = [cache.Growth(r.request_id, r.scheduled + n) for r, n in plan if r.scheduled + n > r.capacity]
            budget = self._limits.token_budget - sum(count for _, count in plan)
            admissions = self._candidates(budget) if admit else []
            if growths or admissions:
                self._reserve(growths, admissions, budget)
            elif plan:
                self._execute(plan)
            else:
                return

    def _candidates(self, token_budget: int) -> list[cache.Admission]:
        """The head of the queue, as far as seats and budget could reach."""
        seats = min(self._running_max - len(self._running), self._limits.admissions_tried_max)
        if token_budget <= 0 or self._pool_exhausted or any(r.suspect for r in self._running.values()):
            return []
        candidates: list[cache.Admission] = []
        for request in self._waiting:
            # A preempted request comes back only when its tokens in flight have arrived (rule 38).
            if len(candidates) >= seats or request.pending:
                break
            candidates.append(request.admission())
        return candidates

    def _reserve(self, growths: list[cache.Growth], admissions: list[cache.Admission], token_budget: int) -> None:
        asked = [g.request_id for g in growths] + [a.request_id for a in admissions]
        self._courted = {a.request_id for a in admissions}
        self._asked = {request_id: self._requests[request_id].incarnation for request_id in asked}
        self._releases_when_asked = self._releases
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
                self._releases += 1  # so whoever was refused for it is tried again
            if request is None or request.incarnation != asked[grant.request_id]:
                continue  # one that ended or lost its blocks while it ran was released behind our asking
            if not request.running:
                self._waiting.remove(request)
                self._running[request.request_id] = request
                request.admit(grant.cached_tokens, self._context.clock.now())
            request.extend(grant.block_ids, grant.token_capacity)
        short = [r for i in granted.refused if (r := self._requests.get(i)) and r.incarnation == asked[i]]
        if any(request.running for request in short):
            self._preempt(next(reversed(self._running.values())))
            self._flush_released()
            # Whoever was just evicted must not be let in again by the same round (rule 2).
            self._plan(admit=False)
        else:
            self._pool_exhausted = bool(short) and self._releases == self._releases_when_asked
            self._run_what_fits()

    def _run_what_fits(self) -> None:
        plan = plan_step(self._running.values(), self._limits.token_budget)
        plan = [(request, count) for request, count in plan if request.scheduled + count <= request.capacity]
        if plan:
            self._execute(plan)
        elif self._pool_exhausted and not self._running and not self._in_flight:
            # Nothing runs, so every block is free, and still the head does not fit: it never will (rule 11).
            self._end(self._waiting[0], FinishReason.FAILED, "the request does not fit the block pool")
            self._pool_exhausted = False  # for the next one the pool may do

    def _execute(self, plan: list[tuple[Tracked, int]]) -> None:
        rows: list[executor.Row] = []
        extensions: list[executor.Extension] = []
        chunks: list[executor.Chunk] = []
        flight: list[Planned] = []
        for request, count in plan:
            if not request.in_batch:
                rows.append(self._row(request))
            elif request.block_ids:
                extensions.append(executor.Extension(request.request_id, tuple(request.block_ids)))
            request.in_batch = True
            request.block_ids.clear()
            chunks.append(executor.Chunk(request.request_id, count))
            request.scheduled += count
            if request.scheduled == len(request.token_ids) + request.pending:
                request.pending += 1  # this chunk samples
            flight.append(Planned(request, count, request.incarnation))
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
        log.debug("step", step=self._step, requests=len(plan), tokens=sum(count for _, count in plan))

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

    def _preempt(self, request: Tracked) -> None:
        """Back to the front of the queue, all tokens kept, all blocks freed (rules 34 to 37)."""
        del self._running[request.request_id]
        self._give_back(request)
        request.evict()
        request.preemptions += 1
        self._counts["preemptions"] += 1
        self._waiting.appendleft(request)

    def _give_back(self, request: Tracked) -> None:
        self._released.append(request.filled())
        self._prefilled.pop(request.request_id, None)
        self._pool_exhausted = False
        self._releases += 1
        if request.in_batch:
            self._left_batch.append(request.request_id)

    def _end_if_live(self, request_id: RequestId, reason: FinishReason, error: str = "") -> None:
        if (request := self._requests.get(request_id)) is not None:
            self._end(request, reason, error)

    def _end(self, request: Tracked, reason: FinishReason, error: str = "") -> None:
        del self._requests[request.request_id]
        if request.running:
            del self._running[request.request_id]
            self._give_back(request)
            request.running = False
        else:
            self._waiting.remove(request)
        usage = Usage(request.prompt_tokens, request.cached_tokens, request.output_tokens)
        elapsed = self._context.clock.now() - request.arrived_at
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
