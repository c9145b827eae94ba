"""Outgoing messages: collected while one message is handled, then sent as one message per receiver."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Never, TypeAlias

from cuelight.actors.scheduler.request import Request
from cuelight.kernel import Role, get_logger
from cuelight.messages import cache, detokenizer, intake, observer
from cuelight.messages.address import Address
from cuelight.messages.detokenizer import RequestEnded
from cuelight.messages.executor import ExecutorMessage
from cuelight.messages.request import FIRST_EXECUTOR, ExecutorId, FailureCause, FinishReason, RequestId, Usage
from cuelight.messages.scheduler import Admit

log = get_logger("cuelight.scheduler")


@dataclass(frozen=True)
class ExecutorRoles:
    """The roles of an engine's executors by id; `first` is the role of the executor that the engine starts with."""

    first: Role[ExecutorMessage]

    def __getitem__(self, executor_id: ExecutorId) -> Role[ExecutorMessage]:
        """Return the role of this executor. Roles of later executors differ from `first` in their name only."""
        if executor_id == FIRST_EXECUTOR:
            return self.first
        return replace(self.first, name=f"{self.first.name} {executor_id}")


@dataclass(frozen=True)
class Peers:
    """The addresses that the scheduler sends to, and the roles that it watches.

    `kill_executor` ends the executor's life, with a reason; None if it runs on threads, which cannot be killed.
    """

    cache: Address[cache.CacheMessage]
    executor: Address[ExecutorMessage]
    detokenizer: Address[detokenizer.DetokenizerMessage]
    intake: Address[intake.IntakeMessage]
    observer: Address[observer.ObserverMessage]
    cache_role: Role[Never] | None = None
    executor_id: ExecutorId = FIRST_EXECUTOR
    executor_roles: ExecutorRoles | None = None
    kill_executor: Callable[[str], None] | None = None

    @property
    def executor_role(self) -> Role[ExecutorMessage] | None:
        """The role of the active executor; None if there are no executor roles."""
        return None if self.executor_roles is None else self.executor_roles[self.executor_id]


class Outbox:
    """Blocks to free, request ends to announce and figures to publish."""

    def __init__(self, to: Peers, endings: UnconfirmedEnds) -> None:
        self._to = to
        self._endings = endings
        self._released: list[cache.Filled] = []
        self._poisoned: list[RequestId] = []
        self._ends: list[detokenizer.RequestEnded] = []
        self._published: observer.RequestFigures | None = None
        self.counts = {
            "preemptions": 0,
            "finished": 0,
            "prompt_tokens": 0,
            "cached_tokens": 0,
            "output_tokens": 0,
            "scheduled_tokens": 0,
            "budget_tokens": 0,
        }

    def count_step(self, token_count: int, token_budget: int) -> None:
        """Add a step of `token_count` tokens under a budget of `token_budget` tokens to the figures."""
        self.counts["scheduled_tokens"] += token_count
        self.counts["budget_tokens"] += token_budget

    def count_preemption(self) -> None:
        """Add a preemption to the figures."""
        self.counts["preemptions"] += 1

    def release(self, filled: cache.Filled, *, is_poisoned: bool = False) -> None:
        """Queue the release of a request's blocks. If `is_poisoned`, they are not kept as a prefix."""
        self._released.append(filled)
        if is_poisoned:
            self._poisoned.append(filled.request_id)

    def flush_released(self) -> None:
        """Send the queued releases to the cache manager."""
        if self._released:
            self._to.cache.tell(cache.Release(tuple(self._released), tuple(self._poisoned)))
            self.forget_released()

    def forget_released(self) -> None:
        """Drop the queued releases: the cache manager has lost every block table."""
        self._released.clear()
        self._poisoned.clear()

    def tokens(self, sampled: list[tuple[Request, int]]) -> None:
        """Send each request's newly appended token to the detokenizer, after the queued releases."""
        self.flush_released()
        self._to.detokenizer.tell(
            detokenizer.TokensReady(
                tuple([request.request_id for request, _ in sampled]),
                tuple([token_id for _, token_id in sampled]),
                tuple([request.output_tokens - 1 for request, _ in sampled]),
            )
        )

    def repeat(self, request: Request) -> None:
        """Send a request's output again: when intake admits it again, its stream may be newly opened and empty."""
        self._to.detokenizer.tell(detokenizer.Histories(((request.request_id, request.output),), ()))

    def repeat_end(self, request_id: RequestId) -> bool:
        """Send the output and the end of a request again. Return False if it has no unconfirmed end."""
        if request_id not in self._endings:
            return False
        self._to.detokenizer.tell(detokenizer.Histories((), (self._endings.of(request_id),)))
        return True

    def end(self, request: Request, reason: FinishReason, error: str, now: float, failure: FailureCause | None) -> None:
        """Queue the end of a request and count it in the figures."""
        usage = Usage(request.prompt_tokens, request.cached_tokens, request.output_tokens)
        elapsed = now - request.arrived_at
        queued = elapsed if request.queued_seconds is None else request.queued_seconds
        ended = detokenizer.RequestEnded(
            request.request_id, reason, usage, queued, request.preemptions, error, request.running_seconds, failure
        )
        self._ends.append(ended)
        self._endings.add(ended, request.output)
        self.counts["finished"] += 1
        self.counts["prompt_tokens"] += usage.prompt_tokens
        self.counts["cached_tokens"] += usage.cached_tokens
        self.counts["output_tokens"] += usage.output_tokens
        log.info(
            "request_finished",
            request_id=request.request_id,
            reason=str(reason),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            preemptions=request.preemptions,
            queued_seconds=round(queued, 6),
            running_seconds=round(request.running_seconds, 6),
            seconds=round(elapsed, 6),
            **({"error": error} if error else {}),
        )

    def fail(self, admit: Admit, error: str) -> None:
        """Queue the end of a request that could not be admitted."""
        usage = Usage(prompt_tokens=len(admit.token_ids))
        ended = detokenizer.RequestEnded(
            admit.request_id, FinishReason.FAILED, usage, 0.0, 0, error, 0.0, FailureCause.NOT_ADMITTED
        )
        self._ends.append(ended)
        self._endings.add(ended, ())

    def announce(self) -> None:
        """Send the queued releases, then the ends: when a client receives its end, the blocks are free."""
        self.flush_released()
        if self._ends:
            for end in self._ends:
                self._to.detokenizer.tell(end)
            self._ends.clear()

    def publish(self, running: int, waiting: int, steps: int) -> None:
        """Send the figures, if they have changed."""
        figures = observer.RequestFigures(running=running, waiting=waiting, steps=steps, **self.counts)
        if figures != self._published:
            self._published = figures
            self._to.observer.tell(figures)


Ending: TypeAlias = tuple[RequestEnded, tuple[int, ...]]


class UnconfirmedEnds:
    """Ends that the detokenizer has not confirmed, by request id, each with the request's output."""

    def __init__(self) -> None:
        self._endings: dict[RequestId, Ending] = {}

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._endings

    def __len__(self) -> int:
        return len(self._endings)

    def add(self, ended: RequestEnded, output: tuple[int, ...]) -> None:
        """Store an end, with the output tokens."""
        self._endings[ended.request_id] = ended, output

    def of(self, request_id: RequestId) -> Ending:
        """Return the end of this request, with its output tokens."""
        return self._endings[request_id]

    def all(self) -> tuple[Ending, ...]:
        """Return every unconfirmed end, oldest first."""
        return tuple(self._endings.values())

    def close(self, request_ids: Iterable[RequestId]) -> None:
        """Forget ends that the detokenizer has confirmed; other ids are ignored."""
        for request_id in request_ids:
            self._endings.pop(request_id, None)
