"""Native attention and the small kernels: speed beside this machine's limits and beside torch's own operations.

Part of `python -m benchmarks.native`. The shape is SmolLM2-135M's: 9 query heads, 3 KV heads, head_dim 64, blocks of 16
tokens, 30 layers. Each layer has a pool of its own, so that a step of many rows finds its keys and values in memory, as
in a model, and not in a cache; where all of them fit in a cache, more than the limit of memory can be seen. torch
attends to the same keys and values lying dense, which spares it the gathering from blocks that it would need.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from benchmarks.native_limits import Ceilings
from cuelight.actors.executor.native.attention import (
    BF16,
    FLOAT32,
    INT8,
    AttentionKernels,
    Floats,
    LayerPool,
    SmallKernels,
    StepLayout,
    layout,
    wants_vnni_pairs,
)

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 9, 3, 64, 16
BYTES = {FLOAT32: 4, BF16: 2, INT8: 1}
NAMES = {FLOAT32: "float32", BF16: "bf16", INT8: "int8"}
FORMS = {"portable": 0, "avx2": 1, "avx512": 2, "avx512 bf16": 3}

STEPS: dict[str, list[tuple[int, int]]] = {
    "1 row of 256": [(1, 256)],
    "1 row of 2048": [(1, 2048)],
    "32 rows of 300": [(1, 300)] * 32,
    "prefill of 256": [(256, 256)],
    "32 new of 2048": [(32, 2048)],
    "31 rows of 300, prefill of 64": [*[(1, 300)] * 31, (64, 64)],
}
"""(new tokens, context) of each sequence."""

REPETITIONS = 15


def fastest(run: Callable[[], object], repetitions: int = REPETITIONS) -> float:
    """Seconds of the fastest run; the first one only warms up."""
    times = []
    for _ in range(repetitions + 1):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


class Step:
    """One step over the pools of all layers, with random contents."""

    def __init__(self, sequences: list[tuple[int, int]], kind: int, vnni_pairs: bool) -> None:
        self.sequences, self.kind = sequences, kind
        self.counts = [-(-context // BLOCK_SIZE) for _, context in sequences]
        self.blocks = sum(self.counts)
        self.random = np.random.default_rng(1)
        self.arrays = [self._layer() for _ in range(LAYERS)]
        self.pools = [
            LayerPool(
                *(a.ctypes.data for a in data),
                kind,
                self.blocks,
                KV_HEADS,
                BLOCK_SIZE,
                HEAD_DIM,
                *(a.ctypes.data for a in scales),
                vnni_pairs=vnni_pairs,
            )
            for data, scales in self.arrays
        ]
        self.layout = self._layout()
        self.q = self.random.standard_normal((self.layout.token_count, HEADS * HEAD_DIM)).astype(np.float32)
        self.out = np.empty_like(self.q)

    def _layer(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        shape = (self.blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        scales = [np.full(shape[:3], 0.01, np.float32) for _ in range(2)]
        if self.kind == INT8:
            return [self.random.integers(-127, 128, shape, np.int8) for _ in range(2)], scales
        data = [self.random.standard_normal(shape, np.float32) for _ in range(2)]
        if self.kind == BF16:
            data = [(a.view(np.uint32) >> 16).astype(np.uint16) for a in data]
        return data, scales

    def _layout(self) -> StepLayout:
        order = self.random.permutation(self.blocks).astype(np.int64)
        tables = np.split(order, np.cumsum(self.counts)[:-1])
        ends = [0, *itertools.accumulate(count for count, _ in self.sequences)]
        positions = np.concatenate([np.arange(context - count, context) for count, context in self.sequences])
        blocks = np.concatenate(
            [
                table[np.arange(context - count, context) // BLOCK_SIZE]
                for (count, context), table in zip(self.sequences, tables, strict=True)
            ]
        )
        bounds = [(ends[i], ends[i + 1], context) for i, (_, context) in enumerate(self.sequences)]
        return layout(positions, blocks, positions % BLOCK_SIZE, bounds, tables)

    def bytes(self) -> int:
        """Bytes of the keys and values that all layers read."""
        tokens = sum(context for _, context in self.sequences)
        return 2 * tokens * KV_HEADS * HEAD_DIM * BYTES[self.kind] * len(self.pools)

    def flops(self) -> int:
        """Operations of both products over the tokens that each query sees, in all layers."""
        seen = sum(count * (2 * context - count + 1) // 2 for count, context in self.sequences)
        return 4 * seen * HEADS * HEAD_DIM * len(self.pools)

    def run(self, kernels: AttentionKernels) -> None:
        for pool in self.pools:
            kernels.attend(pool, self.layout, self.q, self.out, HEADS, HEAD_DIM**-0.5)


def torch_seconds(sequences: Sequence[tuple[int, int]]) -> float:
    """torch's attention in float32, keys and values dense; sequences of one shape in one call."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    calls = []
    for (count, context), same in itertools.groupby(sequences):
        rows = len(list(same))
        q = torch.randn(rows, HEADS, count, HEAD_DIM)
        kv = [[torch.randn(rows, KV_HEADS, context, HEAD_DIM) for _ in range(2)] for _ in range(LAYERS)]
        mask = None if count == 1 else torch.ones(count, context, dtype=torch.bool).tril(context - count)
        calls += [(q, k, v, mask) for k, v in kv]

    def run() -> None:
        for q, k, v, mask in calls:
            scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    with torch.inference_mode():
        return fastest(run, 5)


def attention_rows(native: ctypes.CDLL, ceilings: Ceilings) -> list[dict[str, object]]:
    """One row for each step and type; float32 in every form of the kernels."""
    rows: list[dict[str, object]] = []
    for name, sequences in STEPS.items():
        theirs = torch_seconds(sequences)
        forms = [(FLOAT32, "portable"), (FLOAT32, "avx2"), *((kind, "avx512") for kind in NAMES), (BF16, "avx512 bf16")]
        for kind, form in forms:
            if native.cue_force_isa(FORMS[form]) != FORMS[form]:
                continue
            step = Step(sequences, kind, wants_vnni_pairs(native, kind, BLOCK_SIZE, HEAD_DIM))
            kernels = AttentionKernels(native)
            ours = fastest(partial(step.run, kernels), 3 if form == "portable" else REPETITIONS)
            limits = ceilings.measure(20)
            share = limits.seconds(step.flops(), step.bytes(), integer=False) / ours
            rows.append(
                {
                    "step": name,
                    "stored": NAMES[kind],
                    "form": form,
                    "ms": f"{1e3 * ours:.2f}",
                    "GFLOP/s": f"{step.flops() / ours / 1e9:.0f} of {limits.float32:.0f}",
                    "GB/s": f"{step.bytes() / ours / 1e9:.1f} of {limits.memory:.1f}",
                    "of the limit": f"{share:.0%}",
                    "torch float32 ms": f"{1e3 * theirs:.2f}",
                }
            )
    native.cue_force_isa(-1)
    return rows


def small_rows(native: ctypes.CDLL) -> list[dict[str, object]]:
    """Microseconds of the small kernels at 1 and 32 rows, beside torch."""
    import torch
    from torch.nn.functional import rms_norm, silu

    kernels, random = SmallKernels(native), np.random.default_rng(0)

    def draw(*shape: int) -> Floats:
        return random.standard_normal(shape, np.float32)

    rows: list[dict[str, object]] = []
    for count in (1, 32):
        x, delta, weight, pair, logits = (
            draw(count, 576),
            draw(count, 576),
            draw(576),
            draw(count, 3072),
            draw(count, 49152),
        )
        t_x, t_delta, t_weight, t_pair, t_logits = map(torch.from_numpy, (x, delta, weight, pair, logits))
        delta *= 1e-6
        pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "residual and norm, 576": (
                lambda: kernels.add_rmsnorm(x, delta, weight, 1e-5),  # noqa: B023 - called at once
                lambda: rms_norm(t_x.add_(t_delta), (576,), t_weight, 1e-5),  # noqa: B023
            ),
            "silu(gate) * up, 1536": (
                lambda: kernels.silu_mul(pair),  # noqa: B023
                lambda: silu(t_pair[:, :1536]) * t_pair[:, 1536:],  # noqa: B023
            ),
            "argmax, 49152": (lambda: kernels.argmax(logits), lambda: t_logits.argmax(dim=1)),  # noqa: B023
        }
        for name, (ours, theirs) in pairs.items():
            with torch.inference_mode():
                mine, other = (1e6 * fastest(run, 200) for run in (ours, theirs))
            rows.append({"kernel": name, "rows": count, "us": f"{mine:.1f}", "torch us": f"{other:.1f}"})
    return rows


def measure(native: ctypes.CDLL, ceilings: Ceilings) -> dict[str, list[dict[str, object]]]:
    """The tables of this part."""
    return {"Attention, 30 layers": attention_rows(native, ceilings), "Between the products": small_rows(native)}
