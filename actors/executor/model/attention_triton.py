"""Attention by a single Triton kernel over block tables, for prefill chunks and decodes, planned once on the host.

A plan is an array of numbers that every layer reads on the device. All integers that a CUDA graph fixes in its launches
are in the plan's key, so a graph is valid for every step with the same key, once its numbers are copied to the same
memory.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from cuelight.actors.executor.batch import Batch
from cuelight.actors.executor.model.attention import Attention
from cuelight.actors.executor.model.kv_pool import KVPool

Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]

ITEM, MERGE = 8, 4
"""The sizes of an item and of a merge, in numbers.

An item: start of its block table, first token, token count, position of the first token, begin and end of its keys,
index of its partial result or `NO_PLACE`, unused. A merge: first token, token count, first partial result, count of
partial results.
"""

NO_SLOT = NO_PLACE = -1
SPAN_MIN = 256
"""Minimum number of keys of a program, if the keys of a tile are divided."""
PROGRAMS_PER_PROCESSOR = 4
ALIGNED = 4
"""Sections begin at multiples of this many int32, that is 16 bytes, which the compiled kernels require."""


class GraphKey(NamedTuple):
    """All integers that a step's launches depend on: grids, sizes of scratch memory, and offsets of the sections.

    A tile has `rows` query rows (tokens times heads of a group).
    """

    tokens: int
    items: int
    merges: int
    partials: int
    rows: int

    @property
    def sections(self) -> tuple[int, int, int]:
        """Offsets of the items, the merges and the block tables; slots are at 0, and tables extend to the end."""
        items = _aligned(self.tokens)
        merges = items + ITEM * self.items
        return items, merges, merges + _aligned(MERGE * self.merges)

    def numbers(self, table_entries: int) -> int:
        """Return the count of numbers of a plan with this key and `table_entries` block table entries in total."""
        return self.sections[2] + table_entries


@dataclass(frozen=True)
class TritonPlan:
    """The attention of one step on the host; `numbers` are copied to the device unchanged."""

    key: GraphKey
    numbers: Int32s


@dataclass(frozen=True)
class TritonStep:
    """The sections of a plan on the device, and scratch memory for partial results of divided tiles.

    `slots` [tokens], `items` [n, ITEM], `merges` [n, MERGE], `tables` [entries], all int32. `partials`:
    [n, kv_heads, rows, head_dim] in float32, weighted sums of values; `sums`: [n, kv_heads, 2, rows] in float32, the
    largest score, as an exponent of 2, and the sum of weights.
    """

    key: GraphKey
    slots: torch.Tensor
    items: torch.Tensor
    merges: torch.Tensor
    tables: torch.Tensor
    partials: torch.Tensor
    sums: torch.Tensor


@dataclass(frozen=True)
class ScoreOptions:
    """How a layer computes its scores."""

    scaling: float
    window: int | None
    softcap: float | None


class PagedKernels(Protocol):
    """The kernels. Keys and values are a layer's, [blocks, kv_heads, block_size, head_dim], with any strides."""

    def write(
        self, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Store `k` and `v`, [tokens, kv_heads, head_dim], at `slots`: block * block_size + offset, or `NO_SLOT`."""

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        step: TritonStep,
        scores: ScoreOptions,
    ) -> None:
        """Compute every item, and write it to `out` or to the partial results."""

    def merge(self, out: torch.Tensor, step: TritonStep) -> None:
        """Merge partial results into `out`."""


@dataclass(frozen=True)
class Tiling:
    """Query rows of a tile in decode steps and in other steps, and the number of processors that run programs."""

    decode_rows: int
    prefill_rows: int
    processors: int


class TritonPlanner:
    """Divides the attention of steps into items, each computed by a program for every KV head.

    `span` is the approximate number of keys of a program; None chooses it so that all processors of the device are
    busy. With a fixed span, the result of a decoding row does not depend on the other rows, at some loss of speed if
    there are few.
    """

    def __init__(
        self, query_groups: int, kv_heads: int, block_size: int, tiling: Tiling, span: int | None = None
    ) -> None:
        self._groups = query_groups
        self._kv_heads = kv_heads
        self._block_size = block_size
        self._tiling = tiling
        self._span = span

    @property
    def _wanted(self) -> int:
        """Number of items that keeps all processors busy."""
        return -(-PROGRAMS_PER_PROCESSOR * self._tiling.processors // self._kv_heads)

    def plan(self, batch: Batch, tokens: int | None = None) -> TritonPlan:
        """Return the plan of a step. With `tokens`, pad it to that many tokens and to one of few keys, for graphs.

        Padding tokens have no slot and attend to nothing; their output is zero.
        """
        bounds = [(each.start, each.stop, each.context_length) for each in batch.chunks]
        starts, stops, lengths = np.array(bounds, np.int64).reshape(-1, 3).T
        decodes = bool((stops - starts == 1).all())
        rows = self._tiling.decode_rows if decodes else self._tiling.prefill_rows
        entries = np.array([len(each.block_ids) for each in batch.chunks], np.int64)
        tiles = _tiles(starts, stops, lengths, np.cumsum(entries) - entries, rows // self._groups)
        items, merges = _divided(tiles, self._pieces(tiles))
        total = len(batch.token_ids)
        key = GraphKey(total, len(items), len(merges), int(merges[:, 3].sum()), rows)
        if tokens is not None:
            items = np.concatenate([items, _padding(total, tokens, rows // self._groups)])
            key = self._padded_key(tokens, items, merges, rows)
        numbers = np.zeros(key.numbers(int(entries.sum())), np.int32)
        at_items, at_merges, at_tables = key.sections
        numbers[:total] = batch.blocks * self._block_size + batch.offsets
        numbers[total : key.tokens] = NO_SLOT
        numbers[at_items : at_items + items.size] = items.reshape(-1)
        numbers[at_merges : at_merges + merges.size] = merges.reshape(-1)
        if batch.chunks:
            numbers[at_tables:] = np.concatenate([each.block_ids for each in batch.chunks])
        return TritonPlan(key, numbers)

    def _pieces(self, tiles: Int64s) -> Int64s:
        """Return the number of pieces of each tile, [tiles]; without a fixed span, about `_wanted` more than tiles."""
        ends = tiles[:, 5]
        span = self._span or max(SPAN_MIN, _power_of_two(-(-int(ends.sum()) // self._wanted)))
        pieces = np.maximum(1, (ends + span // 2) // span)
        # Rounding the length up may leave the last pieces without keys.
        return np.maximum(1, -(-ends // np.maximum(1, -(-ends // pieces))))

    def _padded_key(self, tokens: int, items: Int64s, merges: Int64s, rows: int) -> GraphKey:
        """Return a key that is nearly always the same for `tokens`; unused items and merges have no tokens."""
        most = tokens + self._wanted
        if len(items) > most:
            most = _power_of_two(len(items))
        # Few tokens are divided once they have enough keys, many only if one has far more keys than the others.
        is_merged = tokens < self._wanted or len(merges) > 0
        return GraphKey(tokens, most, tokens * is_merged, most * is_merged, rows)


def _tiles(starts: Int64s, stops: Int64s, lengths: Int64s, tables: Int64s, tokens: int) -> Int64s:
    """Return items [tiles, ITEM] of `tokens` tokens of a chunk each, over all of their keys."""
    counts = stops - starts
    owner, number = _repeated(-(-counts // tokens))
    first = starts[owner] + number * tokens
    tiles = np.zeros((len(owner), ITEM), np.int64)
    tiles[:, 0] = tables[owner]
    tiles[:, 1] = first
    tiles[:, 2] = np.minimum(tokens, stops[owner] - first)
    tiles[:, 3] = (lengths - counts)[owner] + number * tokens
    tiles[:, 5] = tiles[:, 3] + tiles[:, 2]
    tiles[:, 6] = NO_PLACE
    return tiles


def _divided(tiles: Int64s, pieces: Int64s) -> tuple[Int64s, Int64s]:
    """Divide tiles into `pieces` items; return the items and the merges of divided tiles."""
    if (pieces == 1).all():
        return tiles, np.zeros((0, MERGE), np.int64)
    owner, number = _repeated(pieces)
    items, ends = tiles[owner], tiles[owner, 5]
    length = -(-ends // pieces[owner])
    items[:, 4] = number * length
    items[:, 5] = np.minimum(items[:, 4] + length, ends)
    is_split = pieces[owner] > 1
    items[:, 6] = np.where(is_split, np.cumsum(is_split) - 1, NO_PLACE)
    split, parts = tiles[pieces > 1], pieces[pieces > 1]
    return items, np.stack([split[:, 1], split[:, 2], np.cumsum(parts) - parts, parts], axis=1)


def _padding(total: int, tokens: int, at_once: int) -> Int64s:
    """Return items without keys for the padding tokens from `total` to `tokens`."""
    assert total <= tokens, "the step fits the graph"
    first = np.arange(total, tokens, at_once)
    items = np.zeros((len(first), ITEM), np.int64)
    items[:, 1] = first
    items[:, 2] = np.minimum(at_once, tokens - first)
    items[:, 6] = NO_PLACE
    return items


def _repeated(times: Int64s) -> tuple[Int64s, Int64s]:
    """Repeat each index `times[index]` times; return it and the repetition: [2, 1] gives [0, 0, 1] and [0, 1, 0]."""
    owner = np.repeat(np.arange(len(times)), times)
    return owner, np.arange(len(owner)) - (np.cumsum(times) - times)[owner]


def _power_of_two(count: int) -> int:
    """Return the least power of two that is not smaller than `count`."""
    return 1 << max(0, count - 1).bit_length()


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


class TritonAttention:
    """The attention of one step, as `PagedAttention`, from a plan's numbers on the device.

    Between replays of a graph, the numbers may be overwritten by those of another plan with the same key.
    """

    def __init__(self, kernels: PagedKernels, pool: KVPool, step: TritonStep) -> None:
        self._kernels = kernels
        self._pool = pool
        self._step = step

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """As `PagedAttention.attend`, with exactly the plan's number of tokens; sums are in float32."""
        step, keys, values = self._step, self._pool.keys[layer], self._pool.values[layer]
        assert len(q) == len(k) == len(v) == step.key.tokens, "the plan's tokens, all of them"
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        with torch.cuda.device(q.device) if q.is_cuda else nullcontext():  # Triton launches on the current device
            self._kernels.write(k, v, keys, values, step.slots)
            self._kernels.attend(q, keys, values, out, step, ScoreOptions(scaling, window, softcap))
            if step.key.merges:
                self._kernels.merge(out, step)
        return out


class TritonBackend:
    """The backend "triton", a `PlanningBackend`: it plans on the host and binds plans to numbers on the device."""

    name = "triton"
    is_token_major = False

    def __init__(self, kernels: PagedKernels, planner: TritonPlanner, device: torch.device) -> None:
        self._kernels = kernels
        self._planner = planner
        self._device = device

    def plan(self, batch: Batch, tokens: int | None = None) -> TritonPlan:
        """As `TritonPlanner.plan`. Thread-safe; does not use the device."""
        return self._planner.plan(batch, tokens)

    def bind(self, pool: KVPool, key: Hashable, numbers: torch.Tensor) -> TritonAttention:
        """Return the attention of a plan with this key, whose numbers begin `numbers`: int32, on the device."""
        assert isinstance(key, GraphKey), "keys come from plans"
        at_items, at_merges, at_tables = key.sections
        heads, head_dim = pool.kv_heads, pool.keys[0].shape[-1]
        scratch = partial(torch.empty, dtype=torch.float32, device=self._device)
        step = TritonStep(
            key=key,
            slots=numbers[: key.tokens],
            items=numbers[at_items:at_merges].view(key.items, ITEM),
            merges=numbers[at_merges : at_merges + key.merges * MERGE].view(key.merges, MERGE),
            tables=numbers[at_tables:],
            partials=scratch((key.partials, heads, key.rows, head_dim)),
            sums=scratch((key.partials, heads, 2, key.rows)),
        )
        return TritonAttention(self._kernels, pool, step)

    def step(self, pool: KVPool, batch: Batch) -> Attention:
        plan = self.plan(batch)
        return self.bind(pool, plan.key, torch.from_numpy(plan.numbers).to(self._device, non_blocking=True))
