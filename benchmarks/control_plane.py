"""Stand-ins for an engine's executor that compute nothing: control planes for benchmarks without a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from cuelight.kernel import Actor, Context
from cuelight.messages import executor, scheduler
from cuelight.messages.address import Address
from cuelight.messages.request import RequestId

SAMPLED_TOKEN = 5
"""The only token that these executors sample."""


class Rows:
    """The rows of an executor without a model: how many tokens each request has yet to compute."""

    def __init__(self) -> None:
        self._left: dict[RequestId, int] = {}

    def compute(self, step: executor.ExecuteStep) -> tuple[RequestId, ...]:
        """Return the requests for which this step samples a token, because it reaches their last one."""
        left = self._left
        for request_id in step.ended:
            del left[request_id]
        for row in step.rows:
            left[row.request_id] = len(row.token_ids) - row.computed_tokens
        for chunk in step.chunks:
            left[chunk.request_id] -= chunk.token_count
        return tuple(chunk.request_id for chunk in step.chunks if left[chunk.request_id] <= 0)

    def answer(self, step: executor.ExecuteStep) -> scheduler.StepDone:
        """Compute the step and return what the executor answers."""
        sampling = self.compute(step)
        return scheduler.StepDone(step.epoch, step.step, sampling, (SAMPLED_TOKEN,) * len(sampling))


class _StepOver(msgspec.Struct, frozen=True, tag=True):
    """The step has taken its time."""

    answer: scheduler.StepDone
    reply_to: Address[scheduler.StepDone]


_TimedInbox: TypeAlias = executor.ExecutorMessage | _StepOver


class TimedExecutor(Actor[_TimedInbox]):
    """An executor whose steps run one after another, each for `seconds(step)` of the engine's clock.

    Does not announce itself: the benchmark sends `ExecutorReady` to the scheduler.
    """

    def __init__(self, context: Context[_TimedInbox], seconds: Callable[[executor.ExecuteStep], float]) -> None:
        self._context = context
        self._seconds = seconds
        self._rows = Rows()
        self._free_at = 0.0

    def handle(self, message: _TimedInbox) -> None:
        """Answer a step when its time has passed."""
        if isinstance(message, _StepOver):
            message.reply_to.tell(message.answer)
        elif isinstance(message, executor.ExecuteStep):
            now = self._context.clock.now()
            self._free_at = max(self._free_at, now) + self._seconds(message)
            self._context.after(self._free_at - now, _StepOver(self._rows.answer(message), message.reply_to))
