"""Matrix products with packed weights by the native kernels, on numpy arrays.

This module allocates the packed memory and checks shapes, which the kernels do not check.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
Weights: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.float16] | npt.NDArray[np.uint16]
Bytes: TypeAlias = npt.NDArray[np.uint8]

ALIGNMENT = 64
"""Alignment of packed weights in bytes, since the kernels read whole cache lines."""

CHUNK_BYTES = 32 << 20
"""Bytes that an arena maps at once; untouched pages of the last mapping take no memory."""


class WeightFormat(IntEnum):
    """The format of packed weights.

    INT8 has a scale per output. INT4 has a scale and a midpoint per output and 32 inputs, 5 bits per weight in total.
    Both multiply rows that the call quantizes to int8, with a scale per 64 inputs. BF16 multiplies rows rounded to
    bfloat16 if the CPU has instructions for that, else rows of float32.
    """

    F32 = 0
    BF16 = 1
    INT8 = 2
    INT4 = 3


class SourceType(IntEnum):
    """The type of weights before packing."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


_SOURCES = {"float32": SourceType.FLOAT32, "uint16": SourceType.BFLOAT16, "float16": SourceType.FLOAT16}


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows quantized to int8 in the kernels' layout, for one or more products with `inputs` inputs."""

    buffer: Bytes
    rows: int
    inputs: int


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Packed weights [outputs, inputs]. With `gated`, they are gate and up, and the product is silu(gate) * up."""

    buffer: Bytes
    kind: WeightFormat
    outputs: int
    inputs: int
    gated: bool

    @property
    def width(self) -> int:
        """Number of columns of the product: `outputs`, or half as many if gated."""
        return self.outputs // 2 if self.gated else self.outputs


class LinearKernels:
    """The kernels for linear layers. Inputs and results are float32 with contiguous rows.

    The methods raise `ValueError` for arrays of wrong shapes, types or strides.
    """

    def __init__(self, native: ctypes.CDLL) -> None:
        p, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self._packed_bytes, self._pack = native.cue_packed_bytes, native.cue_pack
        self._packed_bytes.argtypes, self._packed_bytes.restype = (i32, i64, i64, i32), i64
        self._pack.argtypes = (i32, p, i32, i64, i64, i64, i32, p)
        self._linear, self._linear_quantized = native.cue_linear, native.cue_linear_quantized
        self._linear.argtypes = (p, p, i64, i64, p, i32, p, i64)
        self._linear_quantized.argtypes = (p, p, i64, p, i32, p, i64)
        self._quantized_bytes, self._quantize = native.cue_quantized_bytes, native.cue_quantize
        self._quantized_bytes.argtypes, self._quantized_bytes.restype = (i64, i64), i64
        self._quantize.argtypes, self._quantize.restype = (p, i64, i64, i64, p), None
        self._gated_quantized = native.cue_gated_quantized
        self._gated_quantized.argtypes = (p, p, i64, p)

    def packed_bytes(self, kind: WeightFormat, outputs: int, inputs: int, gated: bool = False) -> int:
        """Return the bytes of packed weights [outputs, inputs]. Raises `ValueError` if they cannot be packed."""
        count: int = self._packed_bytes(kind, outputs, inputs, gated)
        if count < 0:
            raise ValueError(f"cannot pack [{outputs}, {inputs}] weights as {kind.name}{', gated' if gated else ''}")
        return count

    def pack(
        self, weights: Weights, kind: WeightFormat, gated: bool = False, into: Bytes | None = None
    ) -> PackedMatrix:
        """Pack weights [outputs, inputs] of float32, float16, or bfloat16 stored as uint16.

        With `gated`, the weights are the rows of gate, then those of up. `into` is memory to use, aligned to a cache
        line; by default it is allocated.
        """
        outputs, inputs = weights.shape
        apart, within = weights.strides
        source = _SOURCES[weights.dtype.name]
        if within != weights.itemsize or apart % weights.itemsize:
            return self.pack(weights.copy(), kind, gated, into)
        return self.pack_from(
            weights.ctypes.data, source, apart // weights.itemsize, (outputs, inputs), kind, gated, into
        )

    def pack_from(
        self,
        address: int,
        source: SourceType,
        stride: int,
        shape: tuple[int, int],
        kind: WeightFormat,
        gated: bool = False,
        into: Bytes | None = None,
    ) -> PackedMatrix:
        """As `pack`, from weights of `shape` at an address, with a distance of `stride` weights between rows."""
        outputs, inputs = shape
        needed = self.packed_bytes(kind, outputs, inputs, gated)
        buffer = aligned(needed) if into is None else into
        if buffer.nbytes < needed or buffer.ctypes.data % ALIGNMENT or not buffer.flags.c_contiguous:
            raise ValueError(f"packing needs {needed} contiguous bytes aligned to {ALIGNMENT}, not {buffer.nbytes}")
        self._pack(kind, address, source, stride, outputs, inputs, gated, buffer.ctypes.data)
        return PackedMatrix(buffer, kind, outputs, inputs, gated)

    def linear(
        self, packed: PackedMatrix, x: Floats, bias: Floats | None = None, out: Floats | None = None, add: bool = False
    ) -> Floats:
        """Return x @ W^T + bias; silu(gate) * up for gated weights. With `add`, add the product to `out`."""
        address, stride = _rows(x, packed.inputs)
        out = _result(packed, len(x), bias, out, add)
        target, target_stride = _rows(out, packed.width)
        weights = packed.buffer.ctypes.data
        self._linear(weights, address, stride, len(x), _address(bias), add, target, target_stride)
        return out

    def quantize(self, x: Floats) -> QuantizedRows:
        """Quantize rows to int8, with a scale per 64 inputs that maps the largest magnitude to 127.

        All products of a row that is not finite are NaN.
        """
        rows, inputs = x.shape
        address, stride = _rows(x, inputs)
        quantized = QuantizedRows(aligned(self._quantized_bytes(rows, inputs)), rows, inputs)
        self._quantize(address, stride, rows, inputs, quantized.buffer.ctypes.data)
        return quantized

    def linear_quantized(
        self,
        packed: PackedMatrix,
        x: QuantizedRows,
        bias: Floats | None = None,
        out: Floats | None = None,
        add: bool = False,
    ) -> Floats:
        """As `linear`, for INT8 and INT4 weights."""
        _check_quantized(packed, x)
        out = _result(packed, x.rows, bias, out, add)
        target, stride = _rows(out, packed.width)
        weights = packed.buffer.ctypes.data
        self._linear_quantized(weights, x.buffer.ctypes.data, x.rows, _address(bias), add, target, stride)
        return out

    def gated_quantized(self, packed: PackedMatrix, x: QuantizedRows) -> QuantizedRows:
        """Return silu(gate) * up for gated INT8 or INT4 weights, quantized for the next product."""
        _check_quantized(packed, x)
        if not packed.gated:
            raise ValueError("the weights are not gated: pack them with gated=True")
        next_rows = QuantizedRows(aligned(self._quantized_bytes(x.rows, packed.width)), x.rows, packed.width)
        self._gated_quantized(packed.buffer.ctypes.data, x.buffer.ctypes.data, x.rows, next_rows.buffer.ctypes.data)
        return next_rows


class Arena:
    """An allocator for packed weights, which are contiguous and on huge pages if the system supports them.

    With small pages, reading every weight once per step is a fifth slower.
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._free = np.empty(0, np.uint8)

    def take(self, count: int) -> Bytes:
        """Return `count` uninitialized bytes aligned to a cache line, which are freed when no array refers to them."""
        needed = -(-count // ALIGNMENT) * ALIGNMENT
        if needed > len(self._free):
            self._free = _huge_pages(max(needed, self._chunk_bytes))
        taken, self._free = self._free[:count], self._free[needed:]
        return taken


def _huge_pages(count: int) -> Bytes:
    # Private, since a shared mapping counts as a file, for which other rules for huge pages apply.
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # not every kernel supports huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def aligned(count: int) -> Bytes:
    """Return `count` uninitialized bytes aligned to a cache line."""
    memory = np.empty(count + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + count]


def _rows(rows: Floats, width: int) -> tuple[int, int]:
    """Return the address of rows [n, width] and their stride in numbers. Raises `ValueError` for any other array."""
    apart, within = rows.strides if rows.ndim == 2 else (0, 0)
    if rows.dtype != np.float32 or rows.ndim != 2 or rows.shape[1] != width:
        raise ValueError(f"expected rows of {width} float32 numbers, not {rows.dtype} {rows.shape}")
    if len(rows) == 0:
        return rows.ctypes.data, width
    if (within != 4 and width > 1) or apart % 4 or (apart < 4 * width and len(rows) > 1):
        raise ValueError(f"each row must be contiguous, and rows must not overlap: strides are {rows.strides}")
    return rows.ctypes.data, apart // 4


def _check_quantized(packed: PackedMatrix, x: QuantizedRows) -> None:
    if packed.kind not in {WeightFormat.INT8, WeightFormat.INT4}:
        raise ValueError(f"{packed.kind.name} weights take rows of float32")
    if x.inputs != packed.inputs:
        raise ValueError(f"the weights take {packed.inputs} inputs, the rows have {x.inputs}")


def _result(packed: PackedMatrix, rows: int, bias: Floats | None, out: Floats | None, add: bool) -> Floats:
    if packed.gated and (bias is not None or add):
        raise ValueError("gated products have no bias and are not added")
    if bias is not None and (
        bias.dtype != np.float32 or bias.shape != (packed.outputs,) or not bias.flags.c_contiguous
    ):
        raise ValueError(f"bias must be {packed.outputs} contiguous float32 numbers, not {bias.dtype} {bias.shape}")
    if out is None:
        if add:
            raise ValueError("add=True needs out")
        return np.empty((rows, packed.width), np.float32)
    if len(out) != rows or not out.flags.writeable:
        raise ValueError(f"out needs {rows} writable rows, not {len(out)}")
    return out


def _address(values: Floats | None) -> int | None:
    return None if values is None else values.ctypes.data
