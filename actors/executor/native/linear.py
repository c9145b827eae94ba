"""Matrix products with packed weights, through the native kernels: numpy arrays in and out.

Owns the packed memory and checks shapes, since the kernels check nothing. Knows no layers and no model.
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
"""Kernels read whole cache lines."""

CHUNK_BYTES = 32 << 20
"""Memory is asked of the system in such pieces; untouched pages of the last one cost nothing."""


class WeightFormat(IntEnum):
    """How weights are kept. INT8 has a scale per output, INT4 a scale and a middle per output and 32 inputs (5 bits a
    weight in all); both multiply rows that are quantized to int8 in the call, with a scale per 64 inputs. BF16
    multiplies rows that are rounded to bfloat16 where the machine has instructions for that, else rows of float32."""

    F32 = 0
    BF16 = 1
    INT8 = 2
    INT4 = 3


class SourceType(IntEnum):
    """The type of weights in memory that are to be packed."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


_SOURCES = {"float32": SourceType.FLOAT32, "uint16": SourceType.BFLOAT16, "float16": SourceType.FLOAT16}


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows as int8 in the kernels' order, to be used for several products of the same number of inputs."""

    buffer: Bytes
    rows: int
    inputs: int


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Weights [outputs, inputs] as the kernels want them. `gated`: gate and up one after the other, whose product is
    silu(gate) * up, half as many outputs."""

    buffer: Bytes
    kind: WeightFormat
    outputs: int
    inputs: int
    gated: bool

    @property
    def width(self) -> int:
        """Values in a row of the result."""
        return self.outputs // 2 if self.gated else self.outputs


class LinearKernels:
    """The library's products. x and results are rows of float32; the numbers of a row lie one after the other.

    The methods raise `ValueError` on arrays that do not fit: the kernels themselves check nothing.
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
        """What weights [outputs, inputs] need when packed."""
        count: int = self._packed_bytes(kind, outputs, inputs, gated)
        if count < 0:
            raise ValueError(f"cannot pack [{outputs}, {inputs}] weights as {kind.name}{', gated' if gated else ''}")
        return count

    def pack(
        self, weights: Weights, kind: WeightFormat, gated: bool = False, into: Bytes | None = None
    ) -> PackedMatrix:
        """Weights [outputs, inputs] of float32, float16, or bfloat16 as their 16 bits.

        `gated`: the rows of gate, then as many of up. `into`: memory to use, which begins on a cache line.
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
        """As `pack`, from memory that is not numpy's; rows begin `stride` weights apart."""
        outputs, inputs = shape
        needed = self.packed_bytes(kind, outputs, inputs, gated)
        buffer = aligned(needed) if into is None else into
        if buffer.nbytes < needed or buffer.ctypes.data % ALIGNMENT or not buffer.flags.c_contiguous:
            raise ValueError(f"packing needs {needed} bytes that begin on a cache line")
        self._pack(kind, address, source, stride, outputs, inputs, gated, buffer.ctypes.data)
        return PackedMatrix(buffer, kind, outputs, inputs, gated)

    def linear(
        self, packed: PackedMatrix, x: Floats, bias: Floats | None = None, out: Floats | None = None, add: bool = False
    ) -> Floats:
        """x @ W^T + bias, or that `add`ed to what `out` holds; silu(gate) * up for gated weights."""
        address, stride = _rows(x, packed.inputs)
        out = _result(packed, len(x), bias, out, add)
        target, target_stride = _rows(out, packed.width)
        weights = packed.buffer.ctypes.data
        self._linear(weights, address, stride, len(x), _address(bias), add, target, target_stride)
        return out

    def quantize(self, x: Floats) -> QuantizedRows:
        """Rows to int8: of each 64 inputs the largest magnitude becomes 127.

        Of a row that is not finite all products are NaN.
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
        """silu(gate) * up of gated INT8 or INT4 weights, quantized for the next product."""
        _check_quantized(packed, x)
        if not packed.gated:
            raise ValueError("the weights are not gated")
        next_rows = QuantizedRows(aligned(self._quantized_bytes(x.rows, packed.width)), x.rows, packed.width)
        self._gated_quantized(packed.buffer.ctypes.data, x.buffer.ctypes.data, x.rows, next_rows.buffer.ctypes.data)
        return next_rows


class Arena:
    """Memory for many packed weights, which lie in it one after the other on huge pages where the system has them.

    Small pages cost a fifth of the memory's speed when every weight is read once in a step.
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._free = np.empty(0, np.uint8)

    def take(self, count: int) -> Bytes:
        """Bytes that begin on a cache line, not yet written. They stay as long as anything refers to them."""
        needed = -(-count // ALIGNMENT) * ALIGNMENT
        if needed > len(self._free):
            self._free = _huge_pages(max(needed, self._chunk_bytes))
        taken, self._free = self._free[:count], self._free[needed:]
        return taken


def _huge_pages(count: int) -> Bytes:
    # Private: what is shared counts as a file, and files have other rules for large pages.
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them has other pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def aligned(count: int) -> Bytes:
    """Bytes that begin on a cache line, not yet written."""
    memory = np.empty(count + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + count]


def _rows(rows: Floats, width: int) -> tuple[int, int]:
    """Address and stride in numbers."""
    apart, within = rows.strides if rows.ndim == 2 else (0, 0)
    if rows.dtype != np.float32 or rows.ndim != 2 or rows.shape[1] != width:
        raise ValueError(f"not rows of {width} float32 numbers: {rows.dtype} {rows.shape}")
    if len(rows) == 0:
        return rows.ctypes.data, width
    if (within != 4 and width > 1) or apart % 4 or (apart < 4 * width and len(rows) > 1):
        raise ValueError("the numbers of a row must lie one after the other, and rows must not overlap")
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
        raise ValueError(f"bias must be {packed.outputs} float32 numbers")
    if out is None:
        if add:
            raise ValueError("there is nothing to add to")
        return np.empty((rows, packed.width), np.float32)
    if len(out) != rows or not out.flags.writeable:
        raise ValueError(f"the result needs {rows} rows that can be written")
    return out


def _address(values: Floats | None) -> int | None:
    return None if values is None else values.ctypes.data
