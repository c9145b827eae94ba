"""Messages to the executor: one a step, with the changes to the batch since the step before."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from cuelight.messages.address import Address
from cuelight.messages.request import BlockCopies, RequestId, Sampling
from cuelight.messages.scheduler import ExecutorFailed, ExecutorLoading, ExecutorReady, StepDone, StepFailed


class Row(msgspec.Struct, frozen=True):
    """A row that enters the batch with all its tokens so far; the K/V of the first `computed_tokens` is in `block_ids`.

    `prompt_tokens` counts the prompt alone: after a preemption, `token_ids` also has the output so far.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    prompt_tokens: int
    computed_tokens: int
    block_ids: tuple[int, ...]
    sampling: Sampling


class Extension(msgspec.Struct, frozen=True):
    """Blocks appended to the block table of a row that the executor already has."""

    request_id: RequestId
    block_ids: tuple[int, ...]


class RowChunk(msgspec.Struct, frozen=True):
    """Compute the next `token_count` tokens of a row. The chunk that reaches the row's last token also samples one."""

    request_id: RequestId
    token_count: int


class ExecuteStep(msgspec.Struct, frozen=True, tag=True):
    """Run one step. Answered once: `StepDone` or `StepFailed`.

    Applied in this order: make `copies`, one after the other; remove `ended` rows; add `rows`; append `extensions`; run
    `chunks`, decodes first. A row whose last token was sampled by the step before reads it from the device. A new
    `epoch` starts without rows. A step for another `life` of the executor is neither run nor answered.
    """

    epoch: int
    step: int
    life: int
    ended: tuple[RequestId, ...]
    rows: tuple[Row, ...]
    extensions: tuple[Extension, ...]
    chunks: tuple[RowChunk, ...]
    reply_to: Address[StepDone | StepFailed]
    copies: tuple[BlockCopies, ...] = ()


class GetExecutorState(msgspec.Struct, frozen=True, tag=True):
    """Return the executor's state. Answered once: `ExecutorLoading`, `ExecutorReady` or `ExecutorFailed`."""

    reply_to: Address[ExecutorLoading | ExecutorReady | ExecutorFailed]


ExecutorMessage: TypeAlias = ExecuteStep | GetExecutorState
