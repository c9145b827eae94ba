"""The executor's rows, and the batch of one step as flat arrays. Host-side bookkeeping without tensors."""

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
"""The reason with which a row fails whose logits contain NaN or infinity."""


@dataclass(slots=True)
class _DeviceRow:
    """A request in the batch.

    `length` counts the row's tokens, known or being sampled; `computed` counts the tokens whose K/V is, or will be,
    written. The block table is stored twice: as `blocks`, a list for single lookups, and as `block_ids`, an array that
    may have padding at its end, for vectorized ones.
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
        """Append to the block table. Existing entries are not changed, so batches may keep views of `block_ids`."""
        count = len(self.blocks)
        self.blocks.extend(block_ids)
        if len(self.blocks) > len(self.block_ids):
            grown = np.full(max(len(self.blocks), 2 * len(self.block_ids)), NULL_BLOCK, np.int64)
            grown[:count] = self.block_ids[:count]
            self.block_ids = grown
        self.block_ids[count : len(self.blocks)] = block_ids


# The next two are not frozen: one of each is created per row and step, and creating a frozen one takes three times as
# long.
@dataclass(slots=True)
class BatchChunk:
    """A chunk in the batch: tokens `start:stop` of the flat batch, up to token `context_length` of its row."""

    start: int
    stop: int
    context_length: int
    block_ids: Ints


@dataclass(slots=True)
class SamplingRow:
    """A row that samples: the token at `position` of its text, from the logits of flat token `index`."""

    request_id: RequestId
    slot: int
    index: int
    position: int
    output_index: int
    sampling: Sampling


@dataclass
class Batch:
    """One step as a flat sequence of the T tokens of all its chunks.

    `token_ids`, `positions`, `blocks` and `offsets` have shape [T]: the tokens to compute, their positions in their
    rows, and the block and the slot within it that take their K/V. The tokens at the flat indices `fed` are read on the
    device instead, from the slots `fed_slots`. The slots `freed_slots` are free once the steps before are done, or are
    taken by rows that enter with this step.
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
        """Return the answer to the step. `token_ids` has a token for each of `sampling_rows`, negative if it failed."""
        sampled = [(row.request_id, token_id) for row, token_id in zip(self.sampling_rows, token_ids, strict=True)]
        return StepDone(
            self.epoch,
            self.step,
            tuple([request_id for request_id, token_id in sampled if token_id >= 0]),
            tuple([token_id for _, token_id in sampled if token_id >= 0]),
            tuple([(request_id, NOT_FINITE) for request_id, token_id in sampled if token_id < 0]),
        )


class DeviceRows:
    """The rows of the executor, each in a slot of its own."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows: dict[RequestId, _DeviceRow] = {}
        self._free_slots: list[int] = []
        self._slot_count = 0
        self._epoch = 0

    def prepare(self, step: ExecuteStep) -> Batch:
        """Apply the step's changes to the rows and lay out its chunks, in their order."""
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
        """Apply the step's changes to the rows and return the slots that they free."""
        freed: list[int] = []
        if step.epoch != self._epoch:
            self._epoch = step.epoch
            freed.extend(range(self._slot_count))
            self._rows.clear()
            self._free_slots.clear()
            self._slot_count = 0
        for request_id in step.ended:
            # Steps run in order, so a row that enters with this step may take the slot.
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
        """Lay out the leading chunks of a single token and return how many they are.

        In most steps these are all chunks, so values are collected in lists and written to the arrays at once.
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
            self._take(batch, chunk, row, start)  # checks that the block exists
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
        """Add the row's next tokens to the batch from flat index `start`, and the row to those that sample if due."""
        begin, stop = row.computed, start + chunk.token_count
        end = begin + chunk.token_count
        assert end <= row.length, "a chunk computes tokens that exist"
        assert end <= len(row.blocks) * self._block_size, "the block table covers the chunk"
        if end > len(row.known):
            # Only the device has sampled tokens, and only the newest of each row.
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
        """The largest number of slots in use at once in this epoch."""
        return self._slot_count
