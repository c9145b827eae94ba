"""Native matrix products against numpy: integer sums bit for bit, the rest within a tolerance, in every form."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cuelight.actors.executor.native.linear import Arena, LinearKernels, PackedMatrix, SourceType, WeightFormat, aligned

Array = npt.NDArray[Any]

GROUP = 32
SPAN = 64
# (rows, outputs, inputs): each size of a block of rows, then odd ones, then those of a small model and wide ones.
ROWS = [(rows, 70, 40) for rows in (*range(1, 14), 24, 25, 26)]
ODD = [(1, 1, 1), (3, 33, 1), (2, 1, 33), (5, 31, 7), (13, 47, 95), (50, 65, 130), (1, 129, 2047)]
REAL = [(1, 960, 576), (4, 576, 576), (9, 576, 1536), (33, 960, 576), (1, 64, 11008), (26, 32, 11008), (130, 96, 4096)]
SHAPES = [*ROWS, *ODD, *REAL]

# Relative to the sum of the magnitudes that were added.
TOLERANCE = 2e-6


@pytest.fixture
def kernels(form: ctypes.CDLL) -> LinearKernels:
    return LinearKernels(form)


@pytest.fixture(params=[1, 3], ids=["alone", "threads"])
def threads(request: pytest.FixtureRequest, form: ctypes.CDLL) -> Iterator[LinearKernels]:
    before = form.cue_threads()
    form.cue_set_threads(request.param)
    yield LinearKernels(form)
    form.cue_set_threads(before)


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@cache  # for all forms and counts of threads, as are the products
def drawn(seed: int, *shape: int) -> Array:
    return normal(seed, *shape)


def operands(rows: int, outputs: int, inputs: int) -> tuple[Array, Array]:
    return drawn(rows, rows, inputs).copy(), drawn(outputs, outputs, inputs).copy()


def parts(x: Array, size: int) -> Array:
    """[rows, parts, size], padded with zeros."""
    rows, inputs = x.shape
    padded = np.zeros((rows, -(-inputs // size) * size), x.dtype)
    padded[:, :inputs] = x
    return padded.reshape(rows, -1, size)


def to_int8(x: Array) -> tuple[Array, Array]:
    """Quantize spans of activations and rows of weights, in the float32 steps of the kernels."""
    largest = np.abs(x).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest != 0)
    return np.rint(x * inverse).astype(np.int32), largest / np.float32(127)


def to_bf16(x: Array) -> Array:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def int4_codes(packed: PackedMatrix) -> tuple[Array, Array, Array]:
    """Codes from 0 to 15 as [outputs, groups, 32], scales and middles as [outputs, groups, 1]."""
    groups = -(-packed.inputs // SPAN) * SPAN // GROUP
    memory = packed.buffer[64:].reshape(-1, groups, 640)
    pairs = memory[:, :, :512].reshape(-1, groups, 4, 2, 16, 4)
    quads = np.stack([pairs & 15, pairs >> 4], axis=3)  # panel, group, pair, low or high nibble, half, lane, input
    codes = quads.transpose(0, 4, 5, 1, 2, 3, 6).reshape(-1, groups, GROUP)
    lines = from_bf16(memory[:, :, 512:].copy().view(np.uint16)).reshape(-1, groups, 2, 16, 2)
    scales, middles = lines.transpose(2, 0, 4, 3, 1).reshape(2, -1, groups, 1)[:, : packed.outputs]
    return codes[: packed.outputs], scales, middles


def int4_weights(packed: PackedMatrix) -> Array:
    codes, scales, middles = int4_codes(packed)
    values: Array = (codes.astype(np.float64) - 8) * scales + middles
    return values.reshape(packed.outputs, -1)[:, : packed.inputs]


@cache
def int8_product(rows: int, outputs: int, inputs: int) -> tuple[Array, Array]:
    """The product of these operands in float64, and the magnitudes added."""
    x, weights = operands(rows, outputs, inputs)
    (values, scales), (codes, steps) = to_int8(parts(x, SPAN)), to_int8(weights)
    sums = np.einsum("rsi,osi->ros", values, parts(codes, SPAN)) * scales.astype(np.float64)[:, None, :, 0]
    wide = steps[:, 0].astype(np.float64)
    return sums.sum(axis=2) * wide, np.abs(sums).sum(axis=2) * wide


def int4_product(x: Array, packed: PackedMatrix) -> tuple[Array, Array]:
    values, scales = to_int8(parts(x, SPAN))
    used = (values * scales.astype(np.float64)).reshape(len(x), -1)[:, : x.shape[1]]
    codes, steps, middles = int4_codes(packed)
    largest = (codes * np.abs(steps) + np.abs(middles - 8 * steps)).reshape(packed.outputs, -1)[:, : packed.inputs]
    product: Array = used @ int4_weights(packed).T
    return product, np.abs(used) @ largest.T


def silu_gate(sums: Array) -> Array:
    gate, up = np.split(sums.astype(np.float64), 2, axis=1)
    product: Array = gate / (1 + np.exp(-gate)) * up
    return product


@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_int8_products_match_the_quantized_operands(
    threads: LinearKernels, rows: int, outputs: int, inputs: int
) -> None:
    x, weights = operands(rows, outputs, inputs)
    expected, magnitudes = int8_product(rows, outputs, inputs)
    difference = np.abs(threads.linear(threads.pack(weights, WeightFormat.INT8), x) - expected)
    assert (difference <= TOLERANCE * magnitudes + 1e-30).all()


@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_int4_products_match_the_quantized_operands(
    threads: LinearKernels, rows: int, outputs: int, inputs: int
) -> None:
    x, weights = operands(rows, outputs, inputs)
    packed = threads.pack(weights, WeightFormat.INT4)
    expected, magnitudes = int4_product(x, packed)
    assert (np.abs(threads.linear(packed, x) - expected) <= TOLERANCE * magnitudes + 1e-30).all()


@pytest.mark.parametrize("rows", [*range(1, 14), 30])
@pytest.mark.parametrize("inputs", [64, 100, 200])
def test_int8_products_of_one_span_match_integer_sums_bit_for_bit(
    kernels: LinearKernels, rows: int, inputs: int
) -> None:
    """At any position of the span: the other spans add zeros."""
    x, weights = operands(rows, 70, inputs)
    packed, (codes, steps) = kernels.pack(weights, WeightFormat.INT8), to_int8(weights)
    for first in range(0, inputs, SPAN):
        only = np.zeros_like(x)
        only[:, first : first + SPAN] = x[:, first : first + SPAN]
        values, scales = to_int8(only)
        expected = (values @ codes.T).astype(np.float32) * scales * steps[:, 0]
        np.testing.assert_array_equal(kernels.linear(packed, only), expected)


@pytest.mark.parametrize("kind", [WeightFormat.INT8, WeightFormat.INT4])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [*ROWS, (3, 33, 1), (13, 47, 95), (26, 96, 576)])
def test_products_of_integers_are_exact(
    threads: LinearKernels, rows: int, outputs: int, inputs: int, kind: WeightFormat
) -> None:
    """With every scale 1, all intermediate sums are integers that float32 holds, in any order."""
    random, limit = np.random.default_rng(rows), 127 if kind is WeightFormat.INT8 else 7
    x = random.integers(-127, 128, (rows, inputs)).astype(np.float32)
    weights = random.integers(-limit - (kind is WeightFormat.INT4), limit + 1, (outputs, inputs)).astype(np.float32)
    x[:, ::SPAN] = 127
    weights[:, ::GROUP], weights[:, 1::GROUP] = limit, -limit - (kind is WeightFormat.INT4)
    if inputs % GROUP != 1:  # else a group has one weight, whose scale is 0
        np.testing.assert_array_equal(threads.linear(threads.pack(weights, kind), x), x @ weights.T)


@cache
def float_product(rows: int, outputs: int, inputs: int, kind: WeightFormat) -> tuple[Array, Array]:
    """The product of these operands in float64, and the magnitudes added."""
    x, weights = operands(rows, outputs, inputs)
    used = (from_bf16(to_bf16(weights)) if kind is WeightFormat.BF16 else weights).astype(np.float64)
    return x @ used.T, np.abs(x) @ np.abs(used.T)


@pytest.mark.parametrize("kind", [WeightFormat.F32, WeightFormat.BF16])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_float_products(threads: LinearKernels, rows: int, outputs: int, inputs: int, kind: WeightFormat) -> None:
    x, weights = operands(rows, outputs, inputs)
    y = threads.linear(threads.pack(weights, kind), x)
    expected, magnitudes = float_product(rows, outputs, inputs, kind)
    assert (np.abs(y - expected) <= TOLERANCE * magnitudes).all()


def test_sums_of_the_largest_magnitudes_do_not_saturate(kernels: LinearKernels) -> None:
    """127 * 127 everywhere, with equal and opposite signs: 16-bit sums of pairs would overflow."""
    signs = np.where(np.arange(4096) % 3 == 0, np.float32(-1), np.float32(1))
    x = np.stack([signs, -signs, np.ones_like(signs)])
    weights = np.stack([signs, -signs, np.ones_like(signs), -np.ones_like(signs)])
    y = kernels.linear(kernels.pack(weights, WeightFormat.INT8), x)
    np.testing.assert_allclose(y, x @ weights.T, rtol=1e-5)


@pytest.mark.parametrize("kind", WeightFormat)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 64, 96), (5, 37, 50), (30, 64, 96), (14, 100, 33)])
def test_bias_and_addition(kernels: LinearKernels, rows: int, outputs: int, inputs: int, kind: WeightFormat) -> None:
    x, weights = operands(rows, outputs, inputs)
    bias, before = normal(5, outputs), normal(6, rows, outputs)
    packed = kernels.pack(weights, kind)
    plain = kernels.linear(packed, x)
    np.testing.assert_array_equal(kernels.linear(packed, x, bias), plain + bias)
    np.testing.assert_array_equal(kernels.linear(packed, x, None, before.copy(), add=True), plain + before)
    added = kernels.linear(packed, x, bias, before.copy(), add=True)
    np.testing.assert_array_equal(added, plain + bias + before)


@pytest.mark.parametrize("kind", WeightFormat)
@pytest.mark.parametrize("outputs", [32, 33, 64, 95])
@pytest.mark.parametrize("rows", [1, 7, 25])
def test_strided_rows_write_nothing_else(kernels: LinearKernels, rows: int, outputs: int, kind: WeightFormat) -> None:
    x, weights = operands(rows, outputs, 45)
    packed = kernels.pack(weights, kind)
    wide = np.full((rows, 60), np.nan, np.float32)
    wide[:, 7:52] = x
    out = np.full((rows + 2, outputs + 9), 77, np.float32)
    kernels.linear(packed, wide[:, 7:52], out=out[1:-1, 4:-5])
    np.testing.assert_array_equal(out[1:-1, 4:-5], kernels.linear(packed, x))
    out[1:-1, 4:-5] = 77
    assert (out == 77).all()


@pytest.mark.parametrize("kind", WeightFormat)
def test_packed_weights_stay_within_their_bytes(kernels: LinearKernels, kind: WeightFormat) -> None:
    weights = normal(1, 70, 50)
    needed = kernels.packed_bytes(kind, 70, 50)
    memory = aligned(needed + 64)
    memory[:] = 0xA5
    kernels.pack(weights, kind, into=memory)
    assert (memory[needed:] == 0xA5).all()
    np.testing.assert_array_equal(memory[:needed], kernels.pack(weights, kind).buffer)


@pytest.mark.parametrize("kind", WeightFormat)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 64, 96), (5, 34, 40), (30, 2, 96), (40, 192, 33)])
def test_gated_products(kernels: LinearKernels, rows: int, outputs: int, inputs: int, kind: WeightFormat) -> None:
    x, weights = operands(rows, outputs, inputs)
    expected = silu_gate(kernels.linear(kernels.pack(weights, kind), x))
    y = kernels.linear(kernels.pack(weights, kind, gated=True), x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


def test_gates_far_from_zero(kernels: LinearKernels) -> None:
    gates = np.array([-1e4, -200, -87.5, -20, -1e-20, 0, 1e-20, 20, 88, 200, 1e30], np.float32)
    weights = np.concatenate([gates[:, None], np.ones((len(gates), 1), np.float32)])
    y = kernels.linear(kernels.pack(weights, WeightFormat.F32, gated=True), np.ones((1, 1), np.float32))
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(y, silu_gate(weights.T), rtol=1e-6, atol=1e-33)


@pytest.mark.parametrize("kind", [WeightFormat.INT8, WeightFormat.INT4])
@pytest.mark.parametrize("rows", [1, 3, 13, 40])
def test_rows_quantized_once_serve_several_products(threads: LinearKernels, rows: int, kind: WeightFormat) -> None:
    x, weights = operands(rows, 160, 70)
    up, down = threads.pack(weights, kind, gated=True), threads.pack(normal(9, 50, 80), kind)
    quantized = threads.quantize(x)
    for packed in (up, threads.pack(weights, kind)):
        np.testing.assert_array_equal(threads.linear_quantized(packed, quantized), threads.linear(packed, x))
    bias, before = normal(3, 50), normal(4, rows, 50)
    expected = threads.linear(down, threads.linear(up, x), bias, before.copy(), add=True)
    following = threads.gated_quantized(up, quantized)
    np.testing.assert_array_equal(threads.linear_quantized(down, following, bias, before, add=True), expected)


@pytest.mark.parametrize("kind", WeightFormat)
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_non_finite_row_changes_no_other(kernels: LinearKernels, kind: WeightFormat, odd: float) -> None:
    x, weights = operands(14, 40, 70)
    packed = kernels.pack(weights, kind)
    expected = kernels.linear(packed, x)
    x[3, 69] = odd
    y = kernels.linear(packed, x)
    assert not np.isfinite(y[3]).any()
    np.testing.assert_array_equal(np.delete(y, 3, axis=0), np.delete(expected, 3, axis=0))


@pytest.mark.parametrize("kind", [WeightFormat.INT8, WeightFormat.INT4])
def test_zero_and_denormal_rows_and_weights_give_zeros(kernels: LinearKernels, kind: WeightFormat) -> None:
    x, weights = operands(13, 40, 70)
    x[2], x[5], weights[7] = 0, 1e-44, 0
    y = kernels.linear(kernels.pack(weights, kind), x)
    assert (y[[2, 5]] == 0).all()
    assert (y[:, 7] == 0).all()
    assert np.isfinite(y).all()


@pytest.mark.parametrize("kind", WeightFormat)
@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_non_finite_weights_reach_their_outputs_only(kernels: LinearKernels, kind: WeightFormat, odd: float) -> None:
    x, weights = operands(3, 40, 70)
    weights[7, 33] = odd
    y = kernels.linear(kernels.pack(weights, kind), x)
    assert not np.isfinite(y[:, 7]).any()
    assert np.isfinite(np.delete(y, 7, axis=1)).all()


@pytest.mark.parametrize("kind", WeightFormat)
def test_half_precision_weights_pack_as_their_values(kernels: LinearKernels, kind: WeightFormat) -> None:
    half = normal(1, 70, 50).astype(np.float16)
    half[0, :6] = [0, -0.0, 6e-8, -6e-5, 65504, -65504]
    expected = kernels.pack(half.astype(np.float32), kind).buffer
    np.testing.assert_array_equal(kernels.pack(half, kind).buffer, expected)
    bits = to_bf16(normal(2, 70, 50))
    expected = kernels.pack(from_bf16(bits), kind).buffer
    np.testing.assert_array_equal(kernels.pack(bits, kind).buffer, expected)
    address, stride = bits[:, :40].ctypes.data, bits.strides[0] // 2
    sliced = kernels.pack_from(address, SourceType.BFLOAT16, stride, (70, 40), kind).buffer
    np.testing.assert_array_equal(sliced, kernels.pack(from_bf16(bits[:, :40]), kind).buffer)


def test_quantized_weights_are_close_to_the_weights(kernels: LinearKernels) -> None:
    """int8 errs by at most half a step of a row; int4 by less than a step of a group, and on average by less than codes
    spaced evenly from the least to the greatest weight."""
    weights, x = normal(1, 40, 64), np.eye(64, dtype=np.float32)
    int8 = kernels.linear(kernels.pack(weights, WeightFormat.INT8), x).T
    assert (np.abs(int8 - weights) <= np.abs(weights).max(axis=1, keepdims=True) / 127 * 0.51).all()
    groups = weights.reshape(40, 2, GROUP)
    least, steps = groups.min(axis=2, keepdims=True), np.ptp(groups, axis=2, keepdims=True) / 15
    int4 = kernels.linear(kernels.pack(weights, WeightFormat.INT4), x).T.reshape(groups.shape)
    evenly = np.rint((groups - least) / steps) * steps + least
    assert (np.abs(int4 - groups) < steps).all()
    assert np.square(int4 - groups).mean() < np.square(evenly - groups).mean()


@pytest.mark.parametrize("offset", [0, 3, -40])
def test_weights_quantized_to_4_bits_before_get_their_codes_back(kernels: LinearKernels, offset: float) -> None:
    """Groups of 32 with a scale and a minimum of 16 bits each, rounded to bfloat16 afterwards."""
    random = np.random.default_rng(5)
    codes = random.integers(0, 16, (40, 3, GROUP))
    codes[:, :, 7], codes[:, :, 20] = 0, 15
    scales = random.uniform(0.001, 0.1, (40, 3, 1)).astype(np.float16).astype(np.float32)
    least = (scales * (offset - random.uniform(4, 12, (40, 3, 1)))).astype(np.float16).astype(np.float32)
    weights = to_bf16((codes * scales + least).reshape(40, -1))
    packed = kernels.pack(weights, WeightFormat.INT4)
    np.testing.assert_array_equal(int4_codes(packed)[0][:, :3], codes)
    given = from_bf16(weights).reshape(codes.shape)
    difference = np.abs(int4_weights(packed).reshape(codes.shape) - given)
    assert (difference <= 0.04 * scales + 2**-7 * np.abs(given).max(axis=2, keepdims=True)).all()


@pytest.mark.parametrize("value", [0.0, 1.5, -3e-5, 1e-42, 3e38])
def test_group_of_equal_weights(kernels: LinearKernels, value: float) -> None:
    weights = np.full((3, 70), value, np.float32)
    np.testing.assert_allclose(int4_weights(kernels.pack(weights, WeightFormat.INT4)), weights, rtol=2**-8, atol=1e-38)


def test_arena_memory_does_not_overlap(native: ctypes.CDLL) -> None:
    kernels, arena = LinearKernels(native), Arena(chunk_bytes=100_000)
    x, weights = operands(3, 40, 70)
    packed = [kernels.pack(weights * n, kind, into=arena.take(kernels.packed_bytes(kind, 40, 70)))
              for n in range(1, 9) for kind in WeightFormat]  # fmt: skip
    larger_than_a_chunk = arena.take(250_001)
    larger_than_a_chunk[:] = 0xA5
    del arena
    for index, each in enumerate(packed):
        assert each.buffer.ctypes.data % 64 == 0
        expected = kernels.linear(kernels.pack(weights * (index // 4 + 1), each.kind), x)
        np.testing.assert_array_equal(kernels.linear(each, x), expected)


def test_concurrent_callers(native: ctypes.CDLL) -> None:
    kernels = LinearKernels(native)
    x, weights = operands(20, 300, 200)
    packed = [kernels.pack(weights, kind) for kind in WeightFormat]
    expected = [kernels.linear(each, x) for each in packed]
    with ThreadPoolExecutor(4) as callers:
        for index, y in enumerate(callers.map(lambda number: kernels.linear(packed[number % 4], x), range(200))):
            np.testing.assert_array_equal(y, expected[index % 4])


def test_invalid_shapes_are_refused(native: ctypes.CDLL) -> None:
    kernels = LinearKernels(native)
    x, weights = operands(3, 40, 70)
    packed, gated = kernels.pack(weights, WeightFormat.INT8), kernels.pack(weights, WeightFormat.INT8, gated=True)
    out, bias = np.zeros((3, 40), np.float32), np.zeros(40, np.float32)
    read_only = np.zeros((3, 40), np.float32)
    read_only.flags.writeable = False
    for refused in (
        lambda: kernels.packed_bytes(WeightFormat.F32, 0, 5),
        lambda: kernels.packed_bytes(WeightFormat.INT8, 5, 70_000),
        lambda: kernels.pack(weights[:39], WeightFormat.F32, gated=True),
        lambda: kernels.pack(weights, WeightFormat.F32, into=aligned(100)),
        lambda: kernels.linear(packed, x[:, :69]),
        lambda: kernels.linear(packed, x.astype(np.float64)),
        lambda: kernels.linear(packed, np.asfortranarray(x)),
        lambda: kernels.linear(packed, x[0]),
        lambda: kernels.linear(packed, x, bias[:39]),
        lambda: kernels.linear(packed, x, out=out[:2]),
        lambda: kernels.linear(packed, x, out=out[:, :39]),
        lambda: kernels.linear(packed, x, out=read_only),
        lambda: kernels.linear(packed, x, add=True),
        lambda: kernels.linear(gated, x, bias),
        lambda: kernels.linear_quantized(packed, kernels.quantize(x[:, :69])),
        lambda: kernels.linear_quantized(kernels.pack(weights, WeightFormat.F32), kernels.quantize(x)),
        lambda: kernels.gated_quantized(packed, kernels.quantize(x)),
    ):
        with pytest.raises(ValueError):
            refused()


def test_no_rows_give_an_empty_result(native: ctypes.CDLL) -> None:
    kernels = LinearKernels(native)
    packed = kernels.pack(normal(1, 40, 70), WeightFormat.INT4)
    assert kernels.linear(packed, np.zeros((0, 70), np.float32)).shape == (0, 40)
