"""Products of bfloat16 weights with rows rounded to bfloat16 (AVX512-BF16), against numpy in float64."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cuelight.actors.executor.native.linear import LinearKernels, PackedMatrix, WeightFormat

Array = npt.NDArray[Any]

# Relative to the sum of the magnitudes that were added.
TOLERANCE = 2e-6


@pytest.fixture
def kernels(avx512_bf16: ctypes.CDLL) -> LinearKernels:
    return LinearKernels(avx512_bf16)


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def rounded(x: Array) -> Array:
    """Round to bfloat16 and back."""
    return torch.from_numpy(x).bfloat16().float().numpy()


def packed(kernels: LinearKernels, weights: Array, gated: bool = False) -> PackedMatrix:
    return kernels.pack(weights, WeightFormat.BF16, gated)


def check(kernels: LinearKernels, rows: int, outputs: int, inputs: int) -> None:
    x, weights = normal(rows, rows, inputs), normal(outputs, outputs, inputs)
    y = kernels.linear(packed(kernels, weights), x)
    left, right = rounded(x).astype(np.float64), rounded(weights).astype(np.float64).T
    assert (np.abs(y - left @ right) <= TOLERANCE * (np.abs(left) @ np.abs(right))).all()


@pytest.mark.parametrize("inputs", [1, 2, 7, 40, 41, 95])
def test_any_number_of_rows(kernels: LinearKernels, inputs: int) -> None:
    for rows in range(1, 41):
        check(kernels, rows, 70, inputs)


@pytest.mark.parametrize("threads", [1, 3])
def test_model_shapes_and_odd_shapes(kernels: LinearKernels, native: ctypes.CDLL, threads: int) -> None:
    before = native.cue_threads()
    native.cue_set_threads(threads)
    for shape in [(1, 1, 1), (3, 33, 1), (50, 65, 130), (1, 129, 2047), (33, 320, 577)]:
        check(kernels, *shape)
    native.cue_set_threads(before)


def test_rows_are_rounded_to_the_nearest(kernels: LinearKernels) -> None:
    """Ties to even; non-finite numbers stay so. Below 2^-126 the instructions flush to 0."""
    halves = (np.arange(0x3F80, 0x3FC0, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    odd = np.array([0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 2e-38, 1e-30], np.float32)
    x = np.concatenate([halves, -halves, halves * np.float32(1 + 2**-20), odd, normal(1, 50) * 1e20])[:, None]
    one = packed(kernels, np.ones((1, 1), np.float32))
    np.testing.assert_array_equal(kernels.linear(one, x), rounded(x))


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 64, 96), (5, 37, 51), (30, 64, 96), (14, 100, 33)])
def test_bias_and_addition(kernels: LinearKernels, rows: int, outputs: int, inputs: int) -> None:
    x, weights = normal(1, rows, inputs), packed(kernels, normal(2, outputs, inputs))
    bias, before = normal(5, outputs), normal(6, rows, outputs)
    plain = kernels.linear(weights, x)
    np.testing.assert_array_equal(kernels.linear(weights, x, bias), plain + bias)
    added = kernels.linear(weights, x, bias, before.copy(), add=True)
    np.testing.assert_array_equal(added, plain + bias + before)


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 64, 96), (5, 34, 41), (30, 2, 96), (40, 192, 33)])
def test_gated_products(kernels: LinearKernels, rows: int, outputs: int, inputs: int) -> None:
    x, weights = normal(1, rows, inputs), normal(2, outputs, inputs)
    gate, up = np.split(kernels.linear(packed(kernels, weights), x).astype(np.float64), 2, axis=1)
    y = kernels.linear(packed(kernels, weights, gated=True), x)
    np.testing.assert_allclose(y, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 7, 25])
def test_strided_rows_write_nothing_else(kernels: LinearKernels, rows: int) -> None:
    x, weights = normal(1, rows, 45), packed(kernels, normal(2, 33, 45))
    wide = np.full((rows, 60), np.nan, np.float32)
    wide[:, 7:52] = x
    out = np.full((rows + 2, 42), 77, np.float32)
    kernels.linear(weights, wide[:, 7:52], out=out[1:-1, 4:-5])
    np.testing.assert_array_equal(out[1:-1, 4:-5], kernels.linear(weights, x))
    out[1:-1, 4:-5] = 77
    assert (out == 77).all()


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_non_finite_row_changes_no_other(kernels: LinearKernels, odd: float) -> None:
    x, weights = normal(1, 14, 71), normal(2, 40, 71)
    expected = kernels.linear(packed(kernels, weights), x)
    x[3, 70] = odd
    y = kernels.linear(packed(kernels, weights), x)
    assert not np.isfinite(y[3]).any()
    np.testing.assert_array_equal(np.delete(y, 3, axis=0), np.delete(expected, 3, axis=0))
    x, weights[7, 33] = normal(1, 14, 71), odd
    y = kernels.linear(packed(kernels, weights), x)
    assert not np.isfinite(y[:, 7]).any()
    np.testing.assert_array_equal(np.delete(y, 7, axis=1), np.delete(expected, 7, axis=1))


def test_every_form_reads_the_same_packed_weights(kernels: LinearKernels, native: ctypes.CDLL) -> None:
    x, weights = rounded(normal(1, 17, 95)), packed(kernels, normal(2, 70, 95))
    expected = kernels.linear(weights, x)
    for form in range(3):
        assert native.cue_force_isa(form) == form
        np.testing.assert_allclose(kernels.linear(weights, x), expected, rtol=1e-5, atol=1e-4)
        np.testing.assert_array_equal(packed(kernels, normal(2, 70, 95)).buffer, weights.buffer)
