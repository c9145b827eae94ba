"""The executor's rows, and one step laid out as flat arrays. Pure bookkeeping on the host: no tensors."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from cuelight.messages.executor import ExecuteStep, Row, RowChunk
from cuelight.messages.request import NULL_BLOCK, RequestId, Sampling
from cuelight.messages.scheduler import StepDone

Ints = npt.NDArray[np.int64]

NOT_FINITE: Final = "the model's logits are not finite numbers"
"""Why a row fails whose logits have no largest number."""


@dataclass(slots=True)
class _DeviceRow:
    """`length` counts the row's tokens, known or being sampled; `computed` those whose K/V is, or will be, written.

    The block table is there twice: `blocks` to look one up, and `block_ids`, perhaps with padding behind, for many.
    """

    slot: int
    known: Ints
    prompt_tokens: int
    length: int
    computed: int
    blocks: list[int]
    block_ids: Ints
    sampling: Sampling

    def extend(self, block_ids: tuple[int, ...]) -> None:
        """What is in the table stays as it is, so batches may go on looking at it."""
        count = len(self.blocks)
        self.blocks.extend(block_ids)
        if len(self.blocks) > len(self.block_ids):
            grown = np.full(max(len(self.blocks), 2 * len(self.block_ids)), NULL_BLOCK, np.int64)
            grown[:count] = self.block_ids[:count]
            self.block_ids = grown
        self.block_ids[count : len(self.blocks)] = block_ids


# The next two might be frozen, but there is one for each row of each step, and that takes three times as long.
@dataclass(slots=True)
class BatchChunk:
    """One chunk in the batch: tokens `start:stop` of the flat batch end at `context_length` tokens of its row."""

    start: int
    stop: int
    context_length: int
    block_ids: Ints


@dataclass(slots=True)
class SamplingRow:
    """One row that samples: from the logits of flat token `index`, the token at `position` of its text."""

    request_id: RequestId
    slot: int
    index: int
    position: int
    output_index: int
    sampling: Sampling


@dataclass
class Batch:
    """One step as a flat "super sequence" of T tokens.

    `token_ids`, `positions`, `blocks` and `offsets` have shape [T]: what to compute, where in its row it stands, and
    which slot of which block takes its K/V. Tokens listed in `fed` (flat indices) come from the device instead, from
    the rows in `fed_slots`. The rows in `freed_slots` belong to nobody once the steps before are done, or to a row that
    enters with this step.
    """

    epoch: int
    step: int
    token_ids: Ints
    positions: Ints
    blocks: Ints
    offsets: Ints
    fed: list[int] = field(default_factory=list)
    fed_slots: list[int] = field(default_factory=list)
    chunks: list[BatchChunk] = field(default_factory=list)
    sampling_rows: list[SamplingRow] = field(default_factory=list)
    freed_slots: list[int] = field(default_factory=list)

    def done(self, token_ids: Sequence[int]) -> StepDone:
        """The answer to the step, from a token for each of `sampling_rows`; a negative one is that of a failed row."""
        sampled = [(row.request_id, token_id) for row, token_id in zip(self.sampling_rows, token_ids, strict=True)]
        return StepDone(
            self.epoch,
            self.step,
            tuple([request_id for request_id, token_id in sampled if token_id >= 0]),
            tuple([token_id for _, token_id in sampled if token_id >= 0]),
            tuple([(request_id, NOT_FINITE) for request_id, token_id in sampled if token_id < 0]),
        )


class DeviceRows:
    """The requests in the device's batch, each in a slot of its own."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows: dict[RequestId, _DeviceRow] = {}
        self._free_slots: list[int] = []
        self._slot_count = 0
        self._epoch = 0

    def prepare(self, step: ExecuteStep) -> Batch:
        """Apply what changed and lay out the step's chunks, in the order given."""
        freed_slots = self._apply(step)
        total = sum(chunk.token_count for chunk in step.chunks)
        shape = (4, total)
        token_ids, positions, blocks, offsets = np.zeros(shape, np.int64)
        batch = Batch(step.epoch, step.step, token_ids, positions, blocks, offsets, freed_slots=freed_slots)
        start = self._lay_out_tokens(batch, step.chunks)
        for chunk in step.chunks[start:]:
            self._lay_out(batch, chunk, start)
            start += chunk.token_count
        return batch

    def _apply(self, step: ExecuteStep) -> list[int]:
        """The slots that are freed."""
        freed: list[int] = []
        if step.epoch != self._epoch:
            self._epoch = step.epoch
            freed.extend(range(self._slot_count))
            self._rows.clear()
            self._free_slots.clear()
            self._slot_count = 0
        for request_id in step.ended:
            # Steps run in order, so a slot may be taken over by the very step that frees it.
            freed.append(self._rows.pop(request_id).slot)
            heapq.heappush(self._free_slots, freed[-1])
        for row in step.rows:
            assert row.request_id not in self._rows, "a row enters once"
            self._rows[row.request_id] = self._enter(row)
        for extension in step.extensions:
            self._rows[extension.request_id].extend(extension.block_ids)
        return freed

    def _enter(self, row: Row) -> _DeviceRow:
        if self._free_slots:
            slot = heapq.heappop(self._free_slots)
        else:
            slot = self._slot_count
            self._slot_count += 1
        return _DeviceRow(
            slot=slot,
            known=np.array(row.token_ids, np.int64),
            prompt_tokens=row.prompt_tokens,
            length=len(row.token_ids),
            computed=row.computed_tokens,
            blocks=list(row.block_ids),
            block_ids=np.array(row.block_ids, np.int64),
            sampling=row.sampling,
        )

    def _lay_out_tokens(self, batch: Batch, chunks: tuple[RowChunk, ...]) -> int:
        """The first chunks, as long as they are of one token; how many they are.

        In most steps these are all, and they are many: so numbers are put into lists, and those into arrays at once.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        for start, chunk in enumerate(chunks):
            if chunk.token_count != 1:
                break
            row = self._rows[chunk.request_id]
            position = row.computed
            token_ids.append(int(row.known[position]) if position < len(row.known) else 0)
            positions.append(position)
            self._take(batch, chunk, row, start)  # which looks whether there is such a block
            blocks.append(row.blocks[position // self._block_size])
        count = len(positions)
        batch.token_ids[:count], batch.positions[:count], batch.blocks[:count] = token_ids, positions, blocks
        batch.offsets[:count] = batch.positions[:count] % self._block_size
        return count

    def _lay_out(self, batch: Batch, chunk: RowChunk, start: int) -> None:
        row = self._rows[chunk.request_id]
        begin, stop = row.computed, start + chunk.token_count
        known = row.known[begin : begin + chunk.token_count]
        batch.token_ids[start : start + len(known)] = known
        positions = np.arange(begin, begin + chunk.token_count)
        self._take(batch, chunk, row, start)
        batch.positions[start:stop] = positions
        batch.blocks[start:stop] = row.block_ids[positions // self._block_size]
        batch.offsets[start:stop] = positions % self._block_size

    def _take(self, batch: Batch, chunk: RowChunk, row: _DeviceRow, start: int) -> None:
        """The row's next tokens are the batch's, from `start` on."""
        begin, stop = row.computed, start + chunk.token_count
        end = begin + chunk.token_count
        assert end <= row.length, "a chunk computes tokens that exist"
        assert end <= len(row.blocks) * self._block_size, "the block table covers the chunk"
        if end > len(row.known):
            # Sampled tokens are known to the device alone, which keeps the newest.
            assert end == row.length and end - max(begin, len(row.known)) == 1, "one sampled token at a time"
            batch.fed.append(stop - 1)
            batch.fed_slots.append(row.slot)
        batch.chunks.append(BatchChunk(start, stop, end, row.block_ids[: -(-end // self._block_size)]))
        row.computed = end
        if end == row.length:
            output_index = end - row.prompt_tokens
            batch.sampling_rows.append(
                SamplingRow(chunk.request_id, row.slot, stop - 1, end, output_index, row.sampling)
            )
            row.length += 1

    @property
    def slot_count(self) -> int:
        """How many slots have been in use at once in this epoch."""
        return self._slot_count
