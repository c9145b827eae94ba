"""Steps in flight at the executor, the batch changes due with the next step, and block requests in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

from cuelight.actors.scheduler.admission import PlannedRound
from cuelight.actors.scheduler.planning import Planned
from cuelight.actors.scheduler.request import Request
from cuelight.actors.scheduler.watchdog import Watchdog
from cuelight.kernel import get_logger
from cuelight.messages import cache, executor
from cuelight.messages.address import Address
from cuelight.messages.request import BlockCopies, RequestId
from cuelight.messages.scheduler import Granted, StepDone, StepFailed

log = get_logger("cuelight.scheduler")


class InFlightSteps:
    """Steps that were sent and not answered, oldest first. An epoch ends when one of its steps fails.

    `watchdog` runs while any step is in flight.
    """

    def __init__(
        self,
        to: Address[executor.ExecutorMessage],
        reply_to: Address[StepDone | StepFailed],
        steps_max: int,
        first_epoch: int,
        watchdog: Watchdog,
        now: Callable[[], float],
    ) -> None:
        self._to = to
        self._reply_to = reply_to
        self._steps_max = steps_max
        self._plans: deque[tuple[int, list[Planned], int]] = deque()
        self._epoch = first_epoch
        self._watchdog = watchdog
        self._now = now
        self._life = 0
        """The life of the executor that the steps are sent to."""
        self.step = 0
        """The number of the step that was sent last."""
        self.copies_done = -1
        """The last round whose copies have been made, as those of all earlier rounds have."""
        self._left_batch: list[RequestId] = []
        self._copies: list[BlockCopies] = []
        self._round = -1

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[list[Planned]]:
        return (plan for _, plan, _ in self._plans)

    def send_to(self, to: Address[executor.ExecutorMessage]) -> None:
        """Send later steps to another executor, which has no rows."""
        self._to = to

    def begin_life(self, life: int, load_seconds: float) -> None:
        """Address later steps to this life of the executor, which took `load_seconds` to load and has done no step."""
        self._life = life
        self._watchdog.begin_again(load_seconds)

    def end_life(self) -> None:
        """Stop the watchdog on the executor and clear its measurements: the executor's life has ended."""
        self._watchdog.begin_again()

    @property
    def has_room(self) -> bool:
        """Whether another step may be sent."""
        return len(self._plans) < self._steps_max

    def copy(self, copies: Iterable[BlockCopies], of_round: int) -> None:
        """Add the copies of round `of_round` to the next step, after those already added."""
        self._copies.extend(copies)
        self._round = of_round

    def leave(self, request: Request) -> None:
        """Remove a request's row from the batch with the next step, if it has one."""
        if request.in_batch:
            self._left_batch.append(request.request_id)

    def send(self, plan: list[tuple[Request, int]]) -> None:
        """Send a step that computes the given number of tokens of each request."""
        rows: list[executor.Row] = []
        extensions: list[executor.Extension] = []
        chunks: list[executor.RowChunk] = []
        planned: list[Planned] = []
        for request, count in plan:
            if not request.in_batch:
                rows.append(_row(request))
                request.in_batch = True
                request.block_ids.clear()
            elif request.block_ids:
                extensions.append(executor.Extension(request.request_id, tuple(request.block_ids)))
                request.block_ids.clear()
            chunks.append(executor.RowChunk(request.request_id, count))
            request.scheduled += count
            if request.scheduled == len(request.token_ids) + request.pending:
                request.pending += 1  # this chunk samples
            planned.append((request, count, request.incarnation))
        token_count = sum([count for _, count in plan])
        self._watchdog.asked(self._now(), token_count)
        self.step += 1
        self._plans.append((self.step, planned, self._round))
        self._to.tell(
            executor.ExecuteStep(
                epoch=self._epoch,
                step=self.step,
                life=self._life,
                ended=tuple(self._left_batch),
                rows=tuple(rows),
                extensions=tuple(extensions),
                chunks=tuple(chunks),
                reply_to=self._reply_to,
                copies=tuple(self._copies),
            )
        )
        self._left_batch.clear()
        self._copies.clear()
        log.debug("step", step=self.step, requests=len(plan), tokens=token_count)

    def finished(self, done: StepDone) -> list[Planned] | None:
        """Remove the oldest step, which `done` answers, and return its plan; None if `done` is of an earlier epoch."""
        if done.epoch != self._epoch:
            return None
        step, plan, self.copies_done = self._plans.popleft()
        assert step == done.step, "steps end in the order they were sent"
        self._watchdog.answered(self._now())
        return plan

    def failed(self, failed: StepFailed) -> list[Planned] | None:
        """Void every step in flight and return the failed step's plan; None if the step was void already.

        A void step that lost the contents of the blocks also voids the steps sent since, which build on them. The plan
        is then empty, as no request of theirs is at fault.
        """
        if failed.epoch == self._epoch:
            _, plan, _ = self._plans[0]
        elif failed.contents_lost:
            plan = []
        else:
            return None
        self._end_epoch()
        return plan

    def void(self) -> None:
        """Drop all steps in flight and all copies due: the blocks are lost."""
        self._end_epoch()
        self.forget_batch(contents_lost=True)

    def forget_batch(self, *, contents_lost: bool) -> None:
        """Start the next step with an empty batch. If `contents_lost`, drop the copies due, too."""
        self._left_batch.clear()
        if contents_lost:
            self._copies.clear()

    def _end_epoch(self) -> None:
        self._plans.clear()
        self._epoch += 1
        self._watchdog.give_up()


def _row(request: Request) -> executor.Row:
    assert request.pending == 0, "a request enters the batch with all its tokens known"
    return executor.Row(
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        prompt_tokens=request.prompt_tokens,
        computed_tokens=request.scheduled,
        block_ids=tuple(request.block_ids),
        sampling=request.sampling,
    )


class BlockRequests:
    """The `Reserve` in flight, and the requests whose computed tokens the next one reports.

    `watchdog` runs while a `Reserve` is in flight.
    """

    def __init__(
        self,
        to: Address[cache.CacheMessage],
        reply_to: Address[Granted],
        first_round: int,
        watchdog: Watchdog,
        now: Callable[[], float],
    ) -> None:
        self._to = to
        self._reply_to = reply_to
        self.asked: dict[RequestId, int] | None = None
        """Incarnations of the requests that the `Reserve` in flight asks blocks for; None while none is in flight."""
        self.candidates: set[RequestId] = set()
        """Requests of the last `Reserve` that were waiting when it was sent."""
        self.generation = 0
        """The prefix waiters' generation when the last `Reserve` was sent."""
        self._watchdog = watchdog
        self._now = now
        self._round = first_round
        self._prefilled: dict[RequestId, Request] = {}

    def note_computed(self, request: Request) -> None:
        """Report the tokens that `request` has computed with the next `Reserve`."""
        self._prefilled[request.request_id] = request

    def leave(self, request: Request) -> None:
        """Drop the report due for `request`, which gives its blocks back: its `Release` has the same content."""
        self._prefilled.pop(request.request_id, None)

    def ask(
        self, wanted: PlannedRound, running: Mapping[RequestId, Request], generation: int, copies_done: int
    ) -> None:
        """Send a `Reserve` for the blocks of a round, with the last round whose copies have been made."""
        self._watchdog.asked(self._now())
        growing = {growth.request_id: running[growth.request_id] for growth in wanted.growths}
        candidates = {request.request_id: request for request in wanted.admitted}
        self.asked = {request_id: request.incarnation for request_id, request in (growing | candidates).items()}
        self.candidates = set(candidates)
        self.generation = generation
        filled = tuple([request.filled() for request in (self._prefilled | growing).values()])
        self._prefilled.clear()
        admissions = tuple([request.admission() for request in wanted.admitted])
        self._to.tell(
            cache.Reserve(
                self._round, filled, tuple(wanted.growths), admissions, wanted.tokens_left, self._reply_to, copies_done
            )
        )

    def answered(self, answer: Granted) -> dict[RequestId, int] | None:
        """End the round that `answer` belongs to and return its `asked`; None for an answer to an earlier round."""
        if answer.round != self._round:
            return None
        asked = self.asked
        assert asked is not None, "a Reserve is answered once"
        self._watchdog.answered(self._now())
        self._end_round()
        return asked

    def void(self) -> None:
        """Drop the `Reserve` in flight and the reports due: all blocks are lost."""
        self._end_round()
        self._watchdog.give_up()
        self.candidates.clear()
        self._prefilled.clear()

    def end_life(self) -> None:
        """Stop the watchdog on the cache manager and clear its measurements: the cache manager's life has ended."""
        self._watchdog.begin_again()

    def _end_round(self) -> None:
        self.asked = None
        self._round += 1
