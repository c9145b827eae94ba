"""Native attention and the small kernels against float64 in numpy, in every form that this machine can run."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cuelight.actors.executor.native.attention import (
    BF16,
    FLOAT32,
    INT8,
    AttentionKernels,
    LayerPool,
    SmallKernels,
    StepLayout,
    layout,
    wants_vnni_pairs,
)

Array = npt.NDArray[Any]

STORED = {FLOAT32: np.float32, BF16: np.uint16, INT8: np.int8}

# Relative to the largest expected magnitude.
TOLERANCE = 2e-5
WORDS_TOLERANCE = 5e-4
"""For int8 keys and values, with 15-bit queries and weights; the int8 keys and values alone are off by 4e-3."""
BF16_TOLERANCE = 2e-3
"""For weights that are rounded to bfloat16."""


@pytest.fixture(params=[1, 3], ids=["alone", "threads"])
def threads(request: pytest.FixtureRequest, form: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    before = form.cue_threads()
    form.cue_set_threads(request.param)
    yield form
    form.cue_set_threads(before)


def close(got: Array, expected: Array, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * max(1e-30, float(np.abs(expected).max())))


def to_bf16(x: Array) -> Array:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x: Array) -> Array:
    return (x.astype(np.uint32) << 16).view(np.float32)


@dataclass
class Shape:
    kv_heads: int
    group: int
    head_dim: int
    block_size: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def __str__(self) -> str:
        return f"{self.kv_heads}x{self.group}x{self.head_dim}-{self.block_size}"


SHAPES = [
    Shape(kv_heads=3, group=3, head_dim=64, block_size=16),
    Shape(kv_heads=2, group=1, head_dim=128, block_size=32),
    Shape(kv_heads=1, group=7, head_dim=80, block_size=8),
    Shape(kv_heads=2, group=4, head_dim=18, block_size=5),
    Shape(kv_heads=1, group=6, head_dim=7, block_size=1),
    Shape(kv_heads=1, group=2, head_dim=256, block_size=64),
    Shape(kv_heads=1, group=5, head_dim=32, block_size=3),
    Shape(kv_heads=2, group=2, head_dim=96, block_size=16),
    Shape(kv_heads=1, group=1, head_dim=288, block_size=16),
]

VNNI_SHAPES = [
    Shape(kv_heads=3, group=3, head_dim=64, block_size=16),
    Shape(kv_heads=2, group=1, head_dim=128, block_size=32),
    Shape(kv_heads=1, group=7, head_dim=96, block_size=48),
    Shape(kv_heads=1, group=2, head_dim=256, block_size=64),
    Shape(kv_heads=2, group=4, head_dim=32, block_size=16),
]

# (new tokens, context length) of each row.
STEPS = {
    "decode": [(1, 1), (1, 2), (1, 17), (1, 64), (1, 65), (1, 301)],
    "long": [(1, 1500)],
    "prefill": [(70, 70), (33, 200)],
    "mixed": [(1, 40), (5, 5), (1, 2100), (2, 90), (130, 131)],
}


class Paged:
    """A pool whose unused slots are NaN (or the largest int8 with scale NaN), with its contents in float64."""

    def __init__(
        self, shape: Shape, kind: int, chunks: list[tuple[int, int]], seed: int, vnni_pairs: bool = False
    ) -> None:
        self.shape, self.kind, self.chunks, self.vnni_pairs = shape, kind, chunks, vnni_pairs
        self.random = np.random.default_rng(seed)
        counts = [-(-context // shape.block_size) for _, context in chunks]
        blocks = sum(counts) + 2
        order = self.random.permutation(blocks)
        cuts = np.cumsum([0, *counts])
        self.tables = [order[cuts[i] : cuts[i + 1]].astype(np.int64) for i in range(len(chunks))]
        dims = (blocks, shape.kv_heads, shape.block_size, shape.head_dim)
        fill = {FLOAT32: np.nan, BF16: 0x7FC0, INT8: 127}[kind]
        # The middle one of three layers: all parts of a block are adjacent.
        self.everything = np.full((blocks, 3, 2, *dims[1:]), fill, STORED[kind])
        self.stored = [self.everything[:, 1, which] for which in range(2)]
        self.all_scales = np.full((blocks, 3, 2, *dims[1:3]), np.nan, np.float32)
        self.scales = [self.all_scales[:, 1, which] for which in range(2)]
        self.pool = LayerPool(
            self.stored[0].ctypes.data,
            self.stored[1].ctypes.data,
            kind,
            *dims,
            self.scales[0].ctypes.data if kind == INT8 else 0,
            self.scales[1].ctypes.data if kind == INT8 else 0,
            vnni_pairs,
            block_stride=6 * shape.kv_heads * shape.block_size,
        )

    def tokens(self, ranges: list[tuple[int, int]]) -> StepLayout:
        """A step of the tokens `begin..end` of each sequence."""
        size = self.shape.block_size
        positions = np.concatenate([np.arange(begin, end) for begin, end in ranges])
        blocks = np.concatenate(
            [table[np.arange(b, e) // size] for (b, e), table in zip(ranges, self.tables, strict=True)]
        )
        ends = np.cumsum([0, *(end - begin for begin, end in ranges)])
        sequences = [
            (int(ends[i]), int(ends[i + 1]), ranges[i][1]) for i in range(len(ranges)) if ends[i] < ends[i + 1]
        ]
        tables = [self.tables[i] for i in range(len(ranges)) if ends[i] < ends[i + 1]]
        return layout(positions, blocks, positions % size, sequences, tables)

    def read(self, which: int, sequence: int) -> Array:
        """Keys (0) or values (1) of a sequence in float64: [kv_heads, context, head_dim]."""
        shape, context = self.shape, self.chunks[sequence][1]
        data = self.stored[which][self.tables[sequence]]
        if self.vnni_pairs:
            data = unpaired(data, which)
        if self.kind == BF16:
            data = from_bf16(data)
        values = data.astype(np.float64)
        if self.kind == INT8:
            values *= self.scales[which][self.tables[sequence]][..., None].astype(np.float64)
        return values.transpose(1, 0, 2, 3).reshape(shape.kv_heads, -1, shape.head_dim)[:, :context]

    def draw(self, *dims: int) -> Array:
        return self.random.standard_normal(dims, np.float32)


def unpaired(blocks: Array, which: int) -> Array:
    """The keys (0) or values (1) of blocks of VNNI pairs, token by token."""
    count, heads, size, dim = blocks.shape
    if which == 0:
        return blocks.reshape(count, heads, dim // 2, size, 2).transpose(0, 1, 3, 2, 4).reshape(blocks.shape)
    return blocks.reshape(count, heads, size // 2, dim, 2).swapaxes(3, 4).reshape(blocks.shape)


def reference(paged: Paged, q: Array, scale: float) -> Array:
    """Softmax attention in float64; q is [T, heads, head_dim]."""
    out, start = np.zeros(q.shape), 0
    for i, (count, context) in enumerate(paged.chunks):
        keys = np.repeat(paged.read(0, i), paged.shape.group, axis=0)
        values = np.repeat(paged.read(1, i), paged.shape.group, axis=0)
        scores = q[start : start + count].astype(np.float64).transpose(1, 0, 2) @ keys.transpose(0, 2, 1) * scale
        sees = np.arange(context)[None, :] <= context - count + np.arange(count)[:, None]
        scores = np.where(sees, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[start : start + count] = (weights @ values).transpose(1, 0, 2)
        start += count
    return out


@pytest.mark.parametrize("kind", [FLOAT32, BF16, INT8], ids=["float32", "bf16", "int8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_attention_matches_float64(threads: ctypes.CDLL, step: str, shape: Shape, kind: int) -> None:
    check(threads, Paged(shape, kind, STEPS[step], seed=7), lambda q: q, TOLERANCE)


@pytest.mark.parametrize("kind", [BF16, INT8], ids=["bf16", "int8"])
@pytest.mark.parametrize("shape", VNNI_SHAPES, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("count", [1, 3], ids=["alone", "threads"])
def test_attention_on_vnni_pairs_matches_float64(
    native: ctypes.CDLL, count: int, step: str, shape: Shape, kind: int
) -> None:
    skip_without_pairs(native, kind, shape)
    before = native.cue_threads()
    native.cue_set_threads(count)
    try:
        paged = Paged(shape, kind, STEPS[step], seed=7, vnni_pairs=True)
        if kind == BF16:
            check(native, paged, rounded, BF16_TOLERANCE)
        else:
            check(native, paged, lambda q: q, WORDS_TOLERANCE)
    finally:
        native.cue_set_threads(before)


def skip_without_pairs(native: ctypes.CDLL, kind: int, shape: Shape) -> None:
    if not wants_vnni_pairs(native, kind, shape.block_size, shape.head_dim):
        pytest.skip("no pairs here")


def rounded(q: Array) -> Array:
    """Queries as rounded for bfloat16 keys."""
    factor = np.float32(0.3) * np.float32(np.log2(np.e))
    return from_bf16(to_bf16(q * factor)) / factor


def check(native: ctypes.CDLL, paged: Paged, used: Callable[[Array], Array], tolerance: float) -> None:
    """Compare with the reference on `used(q)`, the queries as the kernel rounds them."""
    kernels, shape = AttentionKernels(native), paged.shape
    everything = paged.tokens([(0, context) for _, context in paged.chunks])
    wide = (everything.token_count, shape.kv_heads, shape.head_dim)
    kernels.write(paged.pool, everything, 2 * paged.draw(*wide), paged.draw(*wide))
    now = paged.tokens([(context - count, context) for count, context in paged.chunks])
    # Rows as they come out of one product for q, k and v; only the queries may be read.
    qkv = np.ascontiguousarray(paged.draw(now.token_count, (shape.heads + 2 * shape.kv_heads) * shape.head_dim))
    out = np.full((now.token_count, shape.heads * shape.head_dim + 3), 42, np.float32)
    kernels.attend(paged.pool, now, qkv, out, shape.heads, 0.3)
    q = qkv[:, : shape.heads * shape.head_dim].reshape(-1, shape.heads, shape.head_dim)
    close(out[:, :-3].reshape(q.shape), reference(paged, used(q), 0.3), tolerance)
    assert (out[:, -3:] == 42).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bf16_chunks_use_queries_and_weights_in_bf16(avx512_bf16: ctypes.CDLL, shape: Shape) -> None:
    uses_bf16 = shape.head_dim % 32 == 0
    paged = Paged(shape, BF16, STEPS["prefill"], seed=7)
    check(avx512_bf16, paged, rounded if uses_bf16 else lambda q: q, BF16_TOLERANCE if uses_bf16 else TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 4])
def test_non_finite_bf16_value_reaches_the_output(avx512_bf16: ctypes.CDLL, chunk: int) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        check_that_it_shows(avx512_bf16, BF16, bad, 5, chunk)
        check_that_it_shows(avx512_bf16, BF16, bad, 5, chunk, vnni_pairs=True)


@pytest.mark.parametrize("kind", [FLOAT32, BF16, INT8], ids=["float32", "bf16", "int8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_keys_and_values_are_stored_in_the_pool_type(form: ctypes.CDLL, shape: Shape, kind: int) -> None:
    check_what_is_stored(form, Paged(shape, kind, [(37, 37)], seed=3), kind)


@pytest.mark.parametrize("kind", [BF16, INT8], ids=["bf16", "int8"])
@pytest.mark.parametrize("shape", VNNI_SHAPES, ids=str)
def test_keys_and_values_are_stored_in_vnni_pairs(form: ctypes.CDLL, shape: Shape, kind: int) -> None:
    check_what_is_stored(form, Paged(shape, kind, [(37, 37)], seed=3, vnni_pairs=True), kind)


def check_what_is_stored(form: ctypes.CDLL, paged: Paged, kind: int) -> None:
    shape = paged.shape
    step = paged.tokens([(0, 37)])
    keys, values = (paged.draw(37, shape.kv_heads, shape.head_dim) for _ in range(2))
    values[0] = 0
    before = [stored.copy() for stored in paged.stored]
    AttentionKernels(form).write(paged.pool, step, keys, values)
    for which, given in ((0, keys), (1, values)):
        got = paged.read(which, 0).transpose(1, 0, 2)
        if kind == FLOAT32:
            assert (got == given).all()
        elif kind == BF16:
            assert (got == from_bf16(to_bf16(given))).all()
        else:
            most = np.abs(given).max(axis=-1, keepdims=True)
            assert (np.abs(got - given) <= most / 254 * 1.001).all()
        elsewhere = np.setdiff1d(np.arange(paged.pool.blocks), paged.tables[0])
        np.testing.assert_array_equal(paged.stored[which][elsewhere], before[which][elsewhere])


def test_heads_too_small_for_a_scale_are_stored_as_zeros(form: ctypes.CDLL) -> None:
    paged = Paged(Shape(1, 1, 64, 16), INT8, [(16, 16)], seed=0)
    keys = np.where(np.arange(64) < 40, np.float32(1e-39), 0).astype(np.float32) * np.ones((16, 1, 1), np.float32)
    AttentionKernels(form).write(paged.pool, paged.tokens([(0, 16)]), keys, -keys)
    assert not paged.read(0, 0).any()
    assert not paged.read(1, 0).any()


def test_bf16_rounds_like_torch(form: ctypes.CDLL) -> None:
    torch = pytest.importorskip("torch")
    paged = Paged(Shape(1, 1, 64, 16), BF16, [(16, 16)], seed=0)
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 3.4e38, 1e-40, 1.00390625, 1.01171875], np.float32)
    keys = np.resize(special, (16, 1, 64))
    AttentionKernels(form).write(paged.pool, paged.tokens([(0, 16)]), keys, keys)
    expected = torch.from_numpy(keys).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(from_bf16(paged.stored[0][paged.tables[0][0]][0]), expected[:, 0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 5, 63])
@pytest.mark.parametrize("chunk", [1, 4])
def test_non_finite_value_reaches_the_output_in_every_type(
    form: ctypes.CDLL, bad: float, place: int, chunk: int
) -> None:
    for kind in (FLOAT32, BF16, INT8):
        check_that_it_shows(form, kind, bad, place, chunk)
        if wants_vnni_pairs(form, kind, 16, 64):
            check_that_it_shows(form, kind, bad, place, chunk, vnni_pairs=True)


def check_that_it_shows(
    native: ctypes.CDLL, kind: int, bad: float, place: int, chunk: int, vnni_pairs: bool = False
) -> None:
    paged = Paged(Shape(1, 2, 64, 16), kind, [(chunk, 20)], seed=1, vnni_pairs=vnni_pairs)
    values = paged.draw(20, 1, 64)
    values[3, 0, place] = bad
    kernels = AttentionKernels(native)
    kernels.write(paged.pool, paged.tokens([(0, 20)]), paged.draw(20, 1, 64), values)
    out = np.zeros((chunk, 128), np.float32)
    kernels.attend(paged.pool, paged.tokens([(20 - chunk, 20)]), paged.draw(chunk, 128), out, 2, 0.1)
    assert not np.isfinite(out[:, place]).any()


def test_rows_before_a_non_finite_value_are_unchanged(form: ctypes.CDLL) -> None:
    """Other requests may share these rows as a prefix."""
    check_what_is_before(form)


def test_bf16_rows_before_a_non_finite_value_are_unchanged(avx512_bf16: ctypes.CDLL) -> None:
    check_what_is_before(avx512_bf16)


def check_what_is_before(native: ctypes.CDLL) -> None:
    pairs = [kind for kind in (BF16, INT8) if wants_vnni_pairs(native, kind, 16, 64)]
    for kind, vnni_pairs in (*((kind, False) for kind in (FLOAT32, BF16, INT8)), *((kind, True) for kind in pairs)):
        outs = []
        for bad in (0.5, np.inf):
            paged = Paged(Shape(1, 2, 64, 16), kind, [(75, 80)], seed=1, vnni_pairs=vnni_pairs)
            keys, values, q = (paged.draw(*dims) for dims in ((80, 1, 64), (80, 1, 64), (75, 128)))
            values[78, 0, 5] = bad
            kernels = AttentionKernels(native)
            kernels.write(paged.pool, paged.tokens([(0, 80)]), keys, values)
            outs.append(np.zeros((75, 128), np.float32))
            kernels.attend(paged.pool, paged.tokens([(5, 80)]), q, outs[-1], 2, 0.1)
        close(outs[1][:73], outs[0][:73])
        assert not np.isfinite(outs[1][73:, 5]).any()


@pytest.mark.parametrize("chunk", [1, 40])
def test_small_attention_weights_count_beside_a_large_one(native: ctypes.CDLL, chunk: int) -> None:
    """The first token takes nearly all of the attention, with a value of zero, as in many models."""
    shape = Shape(1, 1, 64, 16)
    skip_without_pairs(native, INT8, shape)
    paged = Paged(shape, INT8, [(chunk, 600)], seed=1, vnni_pairs=True)
    keys, values = 0.1 * paged.draw(600, 1, 64), 1 + paged.draw(600, 1, 64)
    keys[0], values[0] = 1, 0
    kernels = AttentionKernels(native)
    kernels.write(paged.pool, paged.tokens([(0, 600)]), keys, values)
    q, out = np.ones((chunk, 64), np.float32), np.zeros((chunk, 64), np.float32)
    kernels.attend(paged.pool, paged.tokens([(600 - chunk, 600)]), q, out, 1, 0.2)
    close(out[:, None], reference(paged, q[:, None], 0.2), WORDS_TOLERANCE)


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_rotary_embedding_rotates_halves(form: ctypes.CDLL, shape: Shape, share: float) -> None:
    paged = Paged(shape, FLOAT32, [(3, 40), (20, 20)], seed=5)
    step = paged.tokens([(37, 40), (0, 20)])
    dim, half = shape.head_dim, int(shape.head_dim * share) // 2
    frequencies = 10000.0 ** -(np.arange(half) / half)
    angles = np.arange(50)[:, None] * frequencies
    cosines, sines = (np.ascontiguousarray(table, np.float32) for table in (np.cos(angles), np.sin(angles)))
    qkv = paged.draw(23, (shape.heads + 2 * shape.kv_heads) * dim)
    given = qkv.reshape(23, -1, dim).astype(np.float64)
    AttentionKernels(form).rope_write(paged.pool, step, qkv, shape.heads, cosines, sines)
    positions = np.array([37, 38, 39, *range(20)])
    cos, sin = (np.tile(t[positions].astype(np.float64), 2)[:, None] for t in (cosines, sines))
    turned = given.copy()
    a, b = given[..., :half], given[..., half : 2 * half]
    turned[..., : 2 * half] = given[..., : 2 * half] * cos + np.concatenate([-b, a], axis=-1) * sin
    got = qkv.reshape(23, -1, dim)
    close(got[:, : shape.heads], turned[:, : shape.heads], 1e-6)
    end = shape.heads + shape.kv_heads
    for i, (part, begin) in enumerate(((slice(0, 3), 37), (slice(3, 23), 0))):
        close(paged.read(0, i)[:, begin:].transpose(1, 0, 2), turned[part, shape.heads : end], 1e-6)
        assert (paged.read(1, i)[:, begin:].transpose(1, 0, 2) == given[part, end:]).all()


def test_invalid_arguments_are_refused(native: ctypes.CDLL) -> None:
    paged = Paged(SHAPES[0], FLOAT32, [(2, 20)], seed=2)
    kernels, blocks = AttentionKernels(native), paged.pool.blocks
    k = np.zeros((2, 3, 64), np.float32)
    one, table = np.array([0, 1]), paged.tables[0]
    for block, offset in ((blocks, 0), (-1, 0), (0, 16), (0, -1)):
        step = layout(one, np.array([0, block]), np.array([0, offset]), [(0, 2, 20)], [table])
        with pytest.raises(ValueError, match="does not exist"):
            kernels.write(paged.pool, step, k, k)
    q = np.zeros((2, 9 * 64), np.float32)
    for context, bad in (
        (33, table),
        (1, table),
        (20, np.array([0, blocks])),
        (20, np.array([0, -1])),
        (20, table[:1]),
    ):
        step = layout(one, one, one, [(0, 2, context)], [bad])
        with pytest.raises(ValueError, match="does not exist"):
            kernels.attend(paged.pool, step, q, np.zeros_like(q), 9, 1.0)
    fine = layout(one, table[[0, 0]], one, [(0, 2, 20)], [table])
    for change in (
        {"type": 3},
        {"type": INT8},
        {"head_dim": 0},
        {"block_size": 0},
        {"kv_heads": 0},
        {"block_stride": 47},
        {"vnni_pairs": True},
        {"vnni_pairs": True, "type": BF16, "block_size": 8},
        {"vnni_pairs": True, "type": BF16, "head_dim": 48},
    ):
        with pytest.raises(ValueError, match=r"does not exist|contiguous"):
            kernels.write(replace(paged.pool, **change), fine, k, k)
        with pytest.raises(ValueError, match="does not exist"):
            kernels.attend(replace(paged.pool, **change), fine, q, np.zeros_like(q), 9, 1.0)
    native.cue_force_isa(0)
    try:
        with pytest.raises(ValueError, match="does not exist"):  # the portable code has no VNNI pairs
            kernels.attend(replace(paged.pool, type=BF16, vnni_pairs=True), fine, q, np.zeros_like(q), 9, 1.0)
    finally:
        native.cue_force_isa(-1)
    with pytest.raises(ValueError, match="does not exist"):
        kernels.attend(paged.pool, fine, q, np.zeros_like(q), 8, 1.0)
    tables = np.zeros((1, 32), np.float32)
    with pytest.raises(ValueError, match="does not exist"):
        kernels.rope_write(
            paged.pool, layout(one, one, one, [], []), np.zeros((2, 15 * 64), np.float32), 9, tables, tables
        )
    with pytest.raises(ValueError, match="a part of the 2 tokens"):
        layout(one, one, one, [(0, 3, 3)], [table])
    with pytest.raises(ValueError, match="contiguous float32"):
        kernels.write(paged.pool, layout(one, one, one, [], []), k.astype(np.float64), k)


@pytest.mark.parametrize(("rows", "n"), [(1, 576), (3, 5), (40, 1027), (2, 16)])
@pytest.mark.parametrize("residual", [True, False])
def test_norm(form: ctypes.CDLL, rows: int, n: int, residual: bool) -> None:
    random = np.random.default_rng(rows)
    x, delta = (random.standard_normal((rows, n)).astype(np.float32) for _ in range(2))
    weight = random.standard_normal(n).astype(np.float32)
    expected = x + delta if residual else x.copy()
    y = SmallKernels(form).add_rmsnorm(x, delta if residual else None, weight, 1e-5)
    assert (x == expected).all()
    wide = expected.astype(np.float64)
    close(y, wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight, 1e-6)


@pytest.mark.parametrize(("rows", "n"), [(1, 1536), (3, 5), (40, 1027)])
def test_silu(form: ctypes.CDLL, rows: int, n: int) -> None:
    x = (6 * np.random.default_rng(n).standard_normal((rows, 2 * n))).astype(np.float32)
    x[0, :4] = [-200, -87.5, 88, 300]
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    expected = gate / (1 + np.exp(-gate)) * up
    got = SmallKernels(form).silu_mul(x)
    np.testing.assert_allclose(got, expected, rtol=5e-5, atol=1e-30)


def test_embedding(form: ctypes.CDLL) -> None:
    random, kernels = np.random.default_rng(1), SmallKernels(form)
    table = random.standard_normal((100, 37)).astype(np.float32)
    ids = np.array([99, 0, 5, 5] * 300)
    assert (kernels.embed(ids, table) == table[ids]).all()
    assert (kernels.embed(ids, to_bf16(table)) == from_bf16(to_bf16(table))[ids]).all()
    small = random.integers(-128, 128, (100, 37)).astype(np.int8)
    scales = random.random(100).astype(np.float32)
    assert (kernels.embed(ids, small, scales) == (small.astype(np.float32) * scales[:, None])[ids]).all()
    for bad in (100, -1):
        with pytest.raises(ValueError, match="not below 100"):
            kernels.embed(np.array([0, bad]), table)


@pytest.mark.parametrize("n", [1, 3, 16, 255, 256, 257, 1000, 49152])
def test_argmax(form: ctypes.CDLL, n: int) -> None:
    random, kernels = np.random.default_rng(n), SmallKernels(form)
    logits = random.standard_normal((12, n)).astype(np.float32)
    logits[0] = 1.5  # the first of equals
    logits[1] = -3e38
    logits[2, n // 2 :] = 9
    expected = logits.argmax(axis=1)
    np.testing.assert_array_equal(kernels.argmax(logits), expected)
    for row, bad in ((3, np.nan), (4, np.inf), (5, -np.inf)):
        for place in {0, n // 2, n - 1}:
            spoiled = logits.copy()
            spoiled[row, place] = bad
            np.testing.assert_array_equal(kernels.argmax(spoiled), np.where(np.arange(12) == row, -1, expected))
