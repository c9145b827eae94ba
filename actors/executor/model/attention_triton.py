"""Attention by one kernel over block tables, for prefill chunks and decodes alike: a step is planned once on the host.

A plan is one array of numbers that every layer reads from the device. What a CUDA graph bakes into its launches is in
the plan's key and nowhere else, so that a graph serves every step of its key once the numbers lie where they lay.
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
"""Numbers of one item: where its block table begins, its first token, how many tokens, the first one's position, its
keys' begin and end, its place among the partial results or -1, nothing. Of a merge: its first token, how many, the
first of its partial results, how many."""

NO_SLOT = NO_PLACE = -1
SPAN_MIN = 256
"""Fewer keys than this are not worth a program of their own."""
PROGRAMS_PER_PROCESSOR = 4
ALIGNED = 4
"""Each section begins at 16 bytes, which is a condition of the compiled kernels."""


class GraphKey(NamedTuple):
    """All that a step's launches depend on: grids, the sizes of scratch memory, and where the numbers' sections lie.

    `rows` query rows (tokens times the heads of a group) make a tile.
    """

    tokens: int
    items: int
    merges: int
    partials: int
    rows: int

    @property
    def sections(self) -> tuple[int, int, int]:
        """Where the items, the merges and the block tables begin; slots begin at 0, and tables end with the numbers."""
        items = _aligned(self.tokens)
        merges = items + ITEM * self.items
        return items, merges, merges + _aligned(MERGE * self.merges)

    def numbers(self, table_entries: int) -> int:
        """How many numbers a plan of this key has with so many entries of block tables."""
        return self.sections[2] + table_entries


@dataclass(frozen=True)
class TritonPlan:
    """One step's attention on the host: `numbers` are to be moved to the device as they are."""

    key: GraphKey
    numbers: Int32s


@dataclass(frozen=True)
class TritonStep:
    """A plan's numbers on the device, by section, and the memory for what several programs compute of one tile.

    `slots` [tokens], `items` [n, ITEM], `merges` [n, MERGE], `tables` [entries], all int32. `partials`:
    [n, kv_heads, rows, head_dim] in float32, not divided yet; `sums`: [n, kv_heads, 2, rows], the largest score in
    powers of two and the sum of weights.
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
    """How a layer makes its scores."""

    scaling: float
    window: int | None
    softcap: float | None


class PagedKernels(Protocol):
    """What runs on the device. Keys and values are a layer's, [blocks, kv_heads, block_size, head_dim], any strides."""

    def write(
        self, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Store `k` and `v`, [tokens, kv_heads, head_dim], at block * block_size + offset; nothing at `NO_SLOT`."""

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        step: TritonStep,
        scores: ScoreOptions,
    ) -> None:
        """Every item: into `out`, or into the partial results."""

    def merge(self, out: torch.Tensor, step: TritonStep) -> None:
        """Every merge: from the partial results into `out`."""


@dataclass(frozen=True)
class Tiling:
    """Query rows of a tile: where all tokens decode, and elsewhere. `processors` run programs at the same time."""

    decode_rows: int
    prefill_rows: int
    processors: int


class TritonPlanner:
    """Divides steps into items, for a model's heads.

    `span`: keys that one program goes through, about; None takes as many as make enough programs for the device. With a
    number, what is computed for one row that decodes does not depend on others that do, at some loss where few run.
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
        """Items that keep the device busy."""
        return -(-PROGRAMS_PER_PROCESSOR * self._tiling.processors // self._kv_heads)

    def plan(self, batch: Batch, tokens: int | None = None) -> TritonPlan:
        """The step's numbers. With `tokens`, padded to so many, and with few keys: for graphs.

        Tokens that pad have no slot and see nothing: their output is zeros.
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
        """Into how many each tile's keys are divided, as [tiles]. Without a fixed span, `_wanted` more than tiles."""
        ends = tiles[:, 5]
        span = self._span or max(SPAN_MIN, _power_of_two(-(-int(ends.sum()) // self._wanted)))
        pieces = np.maximum(1, (ends + span // 2) // span)
        # As many pieces of that length may be more than there are keys for.
        return np.maximum(1, -(-ends // np.maximum(1, -(-ends // pieces))))

    def _padded_key(self, tokens: int, items: Int64s, merges: Int64s, rows: int) -> GraphKey:
        """Nearly always the same for so many tokens. What is left over are items and merges of no tokens."""
        most = tokens + self._wanted
        if len(items) > most:
            most = _power_of_two(len(items))
        # Few rows are divided as soon as they are long enough, many only where one is much longer than the others.
        is_merged = tokens < self._wanted or len(merges) > 0
        return GraphKey(tokens, most, tokens * is_merged, most * is_merged, rows)


def _tiles(starts: Int64s, stops: Int64s, lengths: Int64s, tables: Int64s, tokens: int) -> Int64s:
    """[tiles, ITEM]: each chunk's tokens, `tokens` at a time, as items that go through all of their keys."""
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
    """The items, and a merge for each tile that has several."""
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
    """Items that go through no keys, for the tokens from `total` to `tokens`."""
    assert total <= tokens, "the step fits the graph"
    first = np.arange(total, tokens, at_once)
    items = np.zeros((len(first), ITEM), np.int64)
    items[:, 1] = first
    items[:, 2] = np.minimum(at_once, tokens - first)
    items[:, 6] = NO_PLACE
    return items


def _repeated(times: Int64s) -> tuple[Int64s, Int64s]:
    """Each index as many times as it is said, and beside it which time that is: [2, 1] gives [0, 0, 1], [0, 1, 0]."""
    owner = np.repeat(np.arange(len(times)), times)
    return owner, np.arange(len(owner)) - (np.cumsum(times) - times)[owner]


def _power_of_two(count: int) -> int:
    """The least that is no smaller."""
    return 1 << max(0, count - 1).bit_length()


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


class TritonAttention:
    """One step's attention, as `PagedAttention`, from numbers that lie on the device.

    They may change between the calls of a graph, as long as they are a plan of the same key.
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
        """As `PagedAttention.attend`, with as many tokens as the plan has; sums are in float32."""
        step, keys, values = self._step, self._pool.keys[layer], self._pool.values[layer]
        assert len(q) == len(k) == len(v) == step.key.tokens, "the plan's tokens, all of them"
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        with torch.cuda.device(q.device) if q.is_cuda else nullcontext():  # where kernels are launched
            self._kernels.write(k, v, keys, values, step.slots)
            self._kernels.attend(q, keys, values, out, step, ScoreOptions(scaling, window, softcap))
            if step.key.merges:
                self._kernels.merge(out, step)
        return out


class TritonBackend:
    """The backend. What a graph needs is apart: plans on the host, bound to numbers on the device."""

    name = "triton"
    is_token_major = False

    def __init__(self, kernels: PagedKernels, planner: TritonPlanner, device: torch.device) -> None:
        self._kernels = kernels
        self._planner = planner
        self._device = device

    def plan(self, batch: Batch, tokens: int | None = None) -> TritonPlan:
        """As `TritonPlanner.plan`. On the host alone, from any thread."""
        return self._planner.plan(batch, tokens)

    def bind(self, pool: KVPool, key: Hashable, numbers: torch.Tensor) -> TritonAttention:
        """The attention of a plan of this key whose numbers are at the beginning of `numbers`: int32, on the device."""
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
