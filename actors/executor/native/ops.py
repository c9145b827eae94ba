"""The native kernels between the matrix products: norm, activation, embedding, argmax. On numpy arrays."""

from __future__ import annotations

import ctypes
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cuelight.actors.executor.native.attention import BF16, FLOAT32, INT8, Floats, Ints, address_of

EmbeddingTable: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.uint16] | npt.NDArray[np.int8]

_TYPES = {"float32": FLOAT32, "uint16": BF16, "int8": INT8}


class SmallKernels:
    """The library's functions; every array is C-contiguous. They raise `ValueError` on arrays that do not fit."""

    def __init__(self, library: ctypes.CDLL) -> None:
        p, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self._norm, self._silu = library.cue_add_rmsnorm, library.cue_silu_mul
        self._embed, self._argmax = library.cue_embed, library.cue_argmax
        self._norm.argtypes, self._norm.restype = (p, p, p, p, i64, i64, ctypes.c_float), None
        self._silu.argtypes, self._silu.restype = (p, p, i64, p, i64, i64), None
        self._embed.argtypes = (p, i64, p, p, i32, i64, i64, p)
        self._argmax.argtypes, self._argmax.restype = (p, i64, i64, i64, p), None

    def add_rmsnorm(self, x: Floats, delta: Floats | None, weight: Floats, epsilon: float) -> Floats:
        """`x += delta`, if there is one; returns the norm of x times the weight. x is [rows, n]."""
        rows, n = x.shape
        y = np.empty_like(x)
        added = None if delta is None else address_of(delta, x.shape)
        self._norm(address_of(x, x.shape), added, address_of(weight, (n,)), y.ctypes.data, rows, n, epsilon)
        return y

    def silu_mul(self, gate_up: Floats) -> Floats:
        """silu(gate) * up of rows that hold the gate's n numbers, then as many of up."""
        rows, width = gate_up.shape
        if width % 2:
            raise ValueError(f"{width} numbers are not gate and up")
        out = np.empty((rows, width // 2), np.float32)
        gate = address_of(gate_up, gate_up.shape)
        self._silu(gate, gate + 2 * width, width, out.ctypes.data, rows, width // 2)
        return out

    def embed(self, ids: Ints, table: EmbeddingTable, scales: Floats | None = None) -> Floats:
        """Rows of a table: float32, bf16 as uint16, or int8 with a scale for each row."""
        rows, n = table.shape
        kind = _TYPES[table.dtype.name]
        if not table.flags.c_contiguous or (kind == INT8) != (scales is not None):
            raise ValueError("a contiguous table, with scales if it is int8")
        out = np.empty((len(ids), n), np.float32)
        scale = None if scales is None else address_of(scales, (rows,))
        wanted = np.ascontiguousarray(ids, np.int64)
        if self._embed(wanted.ctypes.data, len(ids), table.ctypes.data, scale, kind, rows, n, out.ctypes.data) != 0:
            raise ValueError(f"an id is not below {rows}")
        return out

    def argmax(self, logits: Floats) -> Ints:
        """Where each row is largest, the first such place; -1 for a row with a number that is not finite."""
        rows, n = logits.shape
        if n == 0:
            raise ValueError("the largest of no numbers")
        out = np.empty(rows, np.int64)
        self._argmax(address_of(logits, logits.shape), n, rows, n, out.ctypes.data)
        return out
