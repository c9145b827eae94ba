"""The executor's rows, and one step laid out as flat arrays. Pure bookkeeping on the host: no tensors."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cuelight.messages.executor import Chunk, ExecuteStep, Row
from cuelight.messages.request import RequestId, Sampling

Ints = npt.NDArray[np.int64]

NULL_BLOCK = 0
"""Padding in block tables points here; nobody's tokens live in it."""


@dataclass
class _DeviceRow:
    """`length` counts the row's tokens, known or being sampled; `computed` those whose K/V is, or will be, written."""

    slot: int
    known: Ints
    prompt_tokens: int
    length: int
    computed: int
    block_ids: Ints
    block_count: int
    sampling: Sampling

    def extend(self, block_ids: tuple[int, ...]) -> None:
        needed = self.block_count + len(block_ids)
        if needed > len(self.block_ids):
            grown = np.full(max(needed, 2 * len(self.block_ids)), NULL_BLOCK, np.int64)
            grown[: self.block_count] = self.block_ids[: self.block_count]
            self.block_ids = grown
        self.block_ids[self.block_count : needed] = block_ids
        self.block_count = needed


@dataclass(frozen=True)
class Sequence:
    """One chunk in the batch: tokens `start:stop` of the flat batch end at `context_length` tokens of its row."""

    start: int
    stop: int
    context_length: int
    block_ids: Ints


@dataclass(frozen=True)
class Draw:
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
    the rows in `fed_slots`.
    """

    epoch: int
    step: int
    token_ids: Ints
    positions: Ints
    blocks: Ints
    offsets: Ints
    fed: list[int] = field(default_factory=list)
    fed_slots: list[int] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)


class Rows:
    """The requests in the device's batch, each in a slot of its own."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows: dict[RequestId, _DeviceRow] = {}
        self._free_slots: list[int] = []
        self._slot_count = 0
        self._epoch = 0

    def prepare(self, step: ExecuteStep) -> Batch:
        """Apply what changed and lay out the step's chunks, in the order given."""
        self._apply(step)
        total = sum(chunk.token_count for chunk in step.chunks)
        shape = (4, total)
        token_ids, positions, blocks, offsets = np.zeros(shape, np.int64)
        batch = Batch(step.epoch, step.step, token_ids, positions, blocks, offsets)
        start = 0
        for chunk in step.chunks:
            self._lay_out(batch, chunk, self._rows[chunk.request_id], start)
            start += chunk.token_count
        return batch

    def _apply(self, step: ExecuteStep) -> None:
        if step.epoch != self._epoch:
            self._epoch = step.epoch
            self._rows.clear()
            self._free_slots.clear()
            self._slot_count = 0
        for request_id in step.ended:
            # Steps run in order, so a slot may be taken over by the very step that frees it.
            heapq.heappush(self._free_slots, self._rows.pop(request_id).slot)
        for row in step.rows:
            assert row.request_id not in self._rows, "a row enters once"
            self._rows[row.request_id] = self._enter(row)
        for extension in step.extensions:
            self._rows[extension.request_id].extend(extension.block_ids)

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
            block_ids=np.array(row.block_ids, np.int64),
            block_count=len(row.block_ids),
            sampling=row.sampling,
        )

    def _lay_out(self, batch: Batch, chunk: Chunk, row: _DeviceRow, start: int) -> None:
        begin, end = row.computed, row.computed + chunk.token_count
        stop = start + chunk.token_count
        assert end <= row.length, "a chunk computes tokens that exist"
        assert end <= row.block_count * self._block_size, "the block table covers the chunk"
        known_end = min(end, len(row.known))
        if begin < known_end:
            batch.token_ids[start : start + known_end - begin] = row.known[begin:known_end]
        if end > len(row.known):
            # Sampled tokens are known to the device alone, which keeps the newest.
            assert end == row.length and end - max(begin, len(row.known)) == 1, "one sampled token at a time"
            batch.fed.append(stop - 1)
            batch.fed_slots.append(row.slot)
        positions = np.arange(begin, end)
        batch.positions[start:stop] = positions
        batch.blocks[start:stop] = row.block_ids[positions // self._block_size]
        batch.offsets[start:stop] = positions % self._block_size
        used = -(-end // self._block_size)
        batch.sequences.append(Sequence(start, stop, end, row.block_ids[:used].copy()))
        row.computed = end
        if end == row.length:
            output_index = row.length - row.prompt_tokens
            batch.draws.append(Draw(chunk.request_id, row.slot, stop - 1, row.length, output_index, row.sampling))
            row.length += 1

    @property
    def slot_count(self) -> int:
        """How many slots have been in use at once in this epoch."""
        return self._slot_count
