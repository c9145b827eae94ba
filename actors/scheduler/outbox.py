"""What the others are to hear: gathered while one message is handled, then sent as one message per edge."""

from __future__ import annotations

from dataclasses import dataclass

from cuelight.actors.scheduler.tracked import Tracked
from cuelight.kernel import get_logger
from cuelight.messages import cache, detokenizer, executor, intake, observer
from cuelight.messages.address import Address
from cuelight.messages.request import FinishReason, Usage

log = get_logger("cuelight.scheduler")


@dataclass(frozen=True)
class Neighbours:
    """Whom the scheduler talks to."""

    cache: Address[cache.CacheMessage]
    executor: Address[executor.ExecutorMessage]
    detokenizer: Address[detokenizer.DetokenizerMessage]
    intake: Address[intake.IntakeMessage]
    observer: Address[observer.ObserverMessage]


class Outbox:
    """Blocks to free, ends to announce, figures to publish."""

    def __init__(self, to: Neighbours) -> None:
        self._to = to
        self._released: list[cache.Filled] = []
        self._ends: list[detokenizer.RequestEnded] = []
        self._told = observer.RequestFigures()
        self.counts = {
            "preemptions": 0,
            "finished": 0,
            "prompt_tokens": 0,
            "cached_tokens": 0,
            "output_tokens": 0,
            "scheduled_tokens": 0,
            "budget_tokens": 0,
        }

    def release(self, filled: cache.Filled) -> None:
        """These blocks are held no longer."""
        self._released.append(filled)

    def flush_released(self) -> None:
        """Say it now."""
        if self._released:
            self._to.cache.tell(cache.Release(tuple(self._released)))
            self._released.clear()

    def end(self, request: Tracked, reason: FinishReason, error: str, now: float) -> None:
        """The request is over."""
        usage = Usage(request.prompt_tokens, request.cached_tokens, request.output_tokens)
        elapsed = now - request.arrived_at
        queued = elapsed if request.queued_seconds is None else request.queued_seconds
        self._ends.append(
            detokenizer.RequestEnded(
                request.request_id, reason, usage, queued, request.preemptions, error, request.running_seconds
            )
        )
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

    def announce(self) -> None:
        """Blocks first, so that whoever hears of an end finds them free."""
        self.flush_released()
        if self._ends:
            for end in self._ends:
                self._to.detokenizer.tell(end)
            self._to.intake.tell(intake.Finished(tuple(end.request_id for end in self._ends)))
            self._ends.clear()

    def publish(self, running: int, waiting: int, steps: int) -> None:
        """The figures, if they have changed."""
        figures = observer.RequestFigures(running=running, waiting=waiting, steps=steps, **self.counts)
        if figures != self._told:
            self._told = figures
            self._to.observer.tell(figures)
