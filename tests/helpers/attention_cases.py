"""Steps of attention over a pool full of what is no number, judged in float64; for every backend of any device."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cuelight.actors.executor.batch import Batch
from cuelight.actors.executor.batch import BatchChunk as BatchSequence
from cuelight.actors.executor.model.backends import AttentionBackend, AttentionSpec
from cuelight.actors.executor.model.kv_pool import KVPool

SCALING = 0.3
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of the largest number expected."""

Rows = tuple[tuple[int, int], ...]
"""Of each row: tokens in all, and how many of them are computed in the step."""


@dataclass(frozen=True)
class Case:
    """One step of one layer. `is_spoilt`: nothing but the rows' own tokens is a number, not even in their blocks."""

    rows: Rows
    kv_heads: int = 2
    groups: int = 3
    head_dim: int = 16
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    is_spoilt: bool = True
    seed: int = 0

    def spec(self, device: torch.device) -> AttentionSpec:
        return AttentionSpec(
            device=device,
            dtype=self.dtype,
            heads=self.kv_heads * self.groups,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            window=self.window,
            softcap=self.softcap,
        )


class Paged:
    """The case's numbers, in blocks scattered over a pool of two layers."""

    def __init__(self, case: Case, device: torch.device, *, is_token_major: bool) -> None:
        self.case, self.device = case, device
        self.chance = torch.Generator().manual_seed(case.seed)
        blocks = [-(-context // case.block_size) for context, _ in case.rows]
        self.pool = KVPool(
            layers=2,
            block_count=1 + sum(blocks) + 3,
            block_size=case.block_size,
            kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            dtype=case.dtype,
            device=device,
            is_token_major=is_token_major,
        )
        order = list(range(1, self.pool.block_count))
        random.Random(case.seed).shuffle(order)
        self.tables = [np.array([order.pop() for _ in range(count)], np.int64) for count in blocks]
        self.batch = self._batch()
        self.q, self.keys, self.values = self._draw(case.groups * case.kv_heads, now_only=True), [], []
        for layer in range(2):
            self._fill(layer)

    def _draw(self, heads: int, *, now_only: bool = False) -> torch.Tensor:
        total = sum(count if now_only else context for context, count in self.case.rows)
        drawn = torch.randn(total, heads, self.case.head_dim, generator=self.chance)
        return drawn.to(self.case.dtype).to(self.device)

    def _batch(self) -> Batch:
        chunks, blocks, offsets, start = [], [], [], 0
        for (context, count), table in zip(self.case.rows, self.tables, strict=True):
            positions = np.arange(context - count, context)
            chunks.append(BatchSequence(start, start + count, context, table))
            blocks.append(table[positions // self.case.block_size])
            offsets.append(positions % self.case.block_size)
            start += count
        zeros = np.zeros(start, np.int64)
        return Batch(0, 0, zeros, zeros, np.concatenate(blocks), np.concatenate(offsets), chunks=chunks)

    def _fill(self, layer: int) -> None:
        size = self.case.block_size
        contexts = [context for context, _ in self.case.rows]
        for kept, stored in ((self.keys, self.pool.keys), (self.values, self.pool.values)):
            kept.append(self._draw(self.case.kv_heads).split(contexts))
            begun = [table[(context - count) // size] for (context, count), table in self._begun()]
            stored[layer][:] = torch.nan
            if not self.case.is_spoilt:
                # Whoever began a block has cleared it, and the null block never held anything.
                stored[layer][[0, *begun]] = 0
            for new, (context, count), table in zip(kept[layer], self.case.rows, self.tables, strict=True):
                before = np.arange(context - count)
                where = torch.from_numpy(table[before // size]), torch.from_numpy(before % size)
                stored[layer][where[0], :, where[1]] = new[: context - count]

    def _begun(self) -> list[tuple[tuple[int, int], np.ndarray]]:
        rows = zip(self.case.rows, self.tables, strict=True)
        return [(row, table) for row, table in rows if (row[0] - row[1]) % self.case.block_size]

    def new(self, all_of_them: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the step brings of keys or values."""
        pairs = zip(all_of_them, self.case.rows, strict=True)
        return torch.cat([each[context - count :] for each, (context, count) in pairs])

    def expected(self, layer: int) -> torch.Tensor:
        """In float64, one row and one head at a time."""
        case, out, start = self.case, torch.empty(self.q.shape, dtype=torch.float64), 0
        for (context, count), keys, values in zip(case.rows, self.keys[layer], self.values[layer], strict=True):
            for head in range(case.kv_heads * case.groups):
                q = self.q[start : start + count, head].double().cpu()
                scores = q @ keys[:, head // case.groups].double().cpu().T * SCALING
                if case.softcap is not None:
                    scores = case.softcap * (scores / case.softcap).tanh()
                distance = torch.arange(context - count, context)[:, None] - torch.arange(context)
                sees = (distance >= 0) & (distance < (case.window or context))
                weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
                out[start : start + count, head] = weights @ values[:, head // case.groups].double().cpu()
            start += count
        return out


def check(case: Case, backend: AttentionBackend, device: torch.device) -> None:
    """Both layers, with queries, keys and values that lie as transformers leaves them: heads before tokens."""
    paged = Paged(case, device, is_token_major=backend.is_token_major)
    step = backend.step(paged.pool, paged.batch)
    for layer in range(2):
        k, v = paged.new(paged.keys[layer]), paged.new(paged.values[layer])
        q, k, v = (each.transpose(0, 1).contiguous().transpose(0, 1) for each in (paged.q, k, v))
        got = step.attend(layer, q, k, v, SCALING, case.window, case.softcap)
        expected = paged.expected(layer)
        assert got.shape == expected.shape
        assert got.dtype == case.dtype
        worst = (got.double().cpu() - expected).abs().max().item()
        allowed = TOLERANCE[case.dtype] * expected.abs().max().item()
        assert worst <= allowed, f"{worst} of {allowed} in layer {layer} of {case}"


MIXES: dict[str, Rows] = {
    "one token": ((1, 1),),
    "decodes": ((1, 1), (2, 1), (15, 1), (16, 1), (17, 1), (40, 1), (63, 1), (64, 1), (65, 1), (130, 1)),
    "prompts": ((5, 5), (1, 1), (16, 16), (33, 33)),
    "all kinds": ((9, 1), (33, 1), (50, 7), (31, 2), (12, 12), (18, 1), (70, 45)),
}
SHAPES: dict[str, Case] = {
    "grouped": Case(()),
    "alone": Case((), kv_heads=3, groups=1, head_dim=8, block_size=1),
    "one for all": Case((), kv_heads=1, groups=7, head_dim=80, block_size=3),
    "many for one": Case((), kv_heads=1, groups=20, head_dim=32, block_size=16),
    "wide": Case((), kv_heads=2, groups=2, head_dim=256, block_size=16),
    "bfloat16": Case((), head_dim=64, block_size=16, dtype=torch.bfloat16),
    "float16": Case((), head_dim=128, groups=2, block_size=16, dtype=torch.float16),
    "window": Case((), window=9),
    "window of one": Case((), window=1),
    "capped": Case((), softcap=2.0),
    "window, capped, bfloat16": Case((), window=20, softcap=5.0, dtype=torch.bfloat16),
}


def cases(shapes: dict[str, Case] = SHAPES) -> dict[str, Case]:
    """Each shape with each mix."""
    return {
        f"{shape}: {mix}": dataclasses.replace(case, rows=rows)
        for shape, case in shapes.items()
        for mix, rows in MIXES.items()
    }
