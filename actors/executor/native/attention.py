"""The native kernels of attention: the paged pool, what fills it, and what attends to it.

Arrays are numpy's or anything with an address; whoever makes a view keeps the memory alive and unmoved. Every call
runs on the library's threads and lets go of the GIL. Knows nothing of models or requests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]

FLOAT32, BF16, INT8 = 0, 1, 2
"""How keys and values are stored."""


class CueKv(ctypes.Structure):
    """One layer's pool, as `kv_pool.h` has it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
        *((name, ctypes.c_int64) for name in ("blocks", "block_stride")),
        *((name, ctypes.c_int32) for name in ("type", "kv_heads", "block_size", "head_dim", "vnni_pairs")),
    )


class CueSlots(ctypes.Structure):
    """Where a step's tokens stand, as `kv_pool.h` has it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("positions", "blocks", "offsets")),
        ("count", ctypes.c_int32),
    )


class CueSequences(ctypes.Structure):
    """A step's chunks, as `attention.h` has it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("starts", "stops", "context_lengths", "table_offsets", "blocks")),
        ("block_entries", ctypes.c_int64),
        ("count", ctypes.c_int32),
    )


@dataclass(frozen=True)
class LayerPool:
    """Addresses of one layer's keys and values, [blocks, kv_heads, block_size, head_dim] of `type`.

    For `INT8` the scales are float32 [blocks, kv_heads, block_size]. With `vnni_pairs` keys are
    [blocks, kv_heads, head_dim / 2, block_size, 2] and values [blocks, kv_heads, block_size / 2, head_dim, 2].
    """

    keys: int
    values: int
    type: int
    blocks: int
    kv_heads: int
    block_size: int
    head_dim: int
    key_scales: int = 0
    value_scales: int = 0
    vnni_pairs: bool = False
    block_stride: int = 0
    """From block to block, in tokens of one head; 0: one block lies right behind the other."""

    def structure(self) -> CueKv:
        """For the library."""
        return CueKv(
            self.keys,
            self.values,
            self.key_scales,
            self.value_scales,
            self.blocks,
            self.block_stride or self.kv_heads * self.block_size,
            self.type,
            self.kv_heads,
            self.block_size,
            self.head_dim,
            self.vnni_pairs,
        )


@dataclass(frozen=True)
class StepLayout:
    """One step's tokens and chunks as the library reads them; keeps its arrays."""

    token_count: int
    slots: CueSlots
    chunks: CueSequences
    arrays: tuple[Ints, ...]


def layout(
    positions: Ints, blocks: Ints, offsets: Ints, chunks: Sequence[tuple[int, int, int]], tables: Sequence[Ints]
) -> StepLayout:
    """Lay a step out: per token a position, block and offset; per chunk (start, stop, context length), a table."""
    token_count = len(positions)
    if not token_count == len(blocks) == len(offsets) or len(chunks) != len(tables):
        raise ValueError("per token one position, block and offset; per chunk one table")
    if any(not 0 <= start < stop <= token_count for start, stop, _ in chunks):
        raise ValueError(f"a chunk is a part of the {token_count} tokens")
    bounds = np.array(chunks, np.int64).reshape(-1, 3)
    starts, stops, lengths = (np.ascontiguousarray(column) for column in bounds.T)
    entries = np.concatenate([np.zeros(0, np.int64), *tables]).astype(np.int64)
    ends = np.cumsum([0, *map(len, tables)], dtype=np.int64)
    slots = [np.ascontiguousarray(array, np.int64) for array in (positions, blocks, offsets)]
    arrays = (*slots, starts, stops, lengths, ends, entries)
    return StepLayout(
        token_count,
        CueSlots(*(array.ctypes.data for array in slots), token_count),
        CueSequences(*(a.ctypes.data for a in (starts, stops, lengths, ends, entries)), len(entries), len(chunks)),
        arrays,
    )


def wants_vnni_pairs(library: ctypes.CDLL, kind: int, block_size: int, head_dim: int) -> bool:
    """Whether pools of this kind should hold VNNI pairs: the machine has the instructions and the sizes fit."""
    return bool(library.cue_kv_vnni_pairs(kind, block_size, head_dim))


class AttentionKernels:
    """The library's functions on numpy arrays; C-contiguous float32 throughout. Raise `ValueError` on bad slots."""

    def __init__(self, library: ctypes.CDLL) -> None:
        p, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self._write, self._rope, self._attend = library.cue_write_kv, library.cue_rope_write, library.cue_attend
        self._write.argtypes = (p, p, p, p, i64)
        self._rope.argtypes = (p, p, p, i32, p, p, i64, i32)
        self._attend.argtypes = (p, p, p, i64, p, i64, i32, ctypes.c_float)

    def write(self, pool: LayerPool, step: StepLayout, keys: Floats, values: Floats) -> None:
        """Store keys and values, [tokens, kv_heads, head_dim] each."""
        shape = (step.token_count, pool.kv_heads, pool.head_dim)
        stride = pool.kv_heads * pool.head_dim
        kv = pool.structure()
        _check(
            self._write(
                ctypes.byref(kv), ctypes.byref(step.slots), address_of(keys, shape), address_of(values, shape), stride
            )
        )

    def rope_write(
        self, pool: LayerPool, step: StepLayout, qkv: Floats, heads: int, cosines: Floats, sines: Floats
    ) -> None:
        """Turn queries (in place) and keys, then store keys and values.

        `qkv` is [tokens, (heads + 2 * kv_heads) * head_dim]: queries, keys, values. Tables are [positions, rotary / 2].
        """
        shape = (step.token_count, (heads + 2 * pool.kv_heads) * pool.head_dim)
        rows, half = cosines.shape
        kv = pool.structure()
        _check(
            self._rope(
                ctypes.byref(kv),
                ctypes.byref(step.slots),
                address_of(qkv, shape),
                heads,
                address_of(cosines, (rows, half)),
                address_of(sines, (rows, half)),
                rows,
                2 * half,
            )
        )

    def attend(self, pool: LayerPool, step: StepLayout, q: Floats, out: Floats, heads: int, scale: float) -> None:
        """Attend with the first heads * head_dim numbers of each row of `q` into those of `out`."""
        size = heads * pool.head_dim
        if q.shape[1] < size or out.shape[1] < size:
            raise ValueError(f"rows of q and out hold {size} numbers at least")
        kv = pool.structure()
        _check(
            self._attend(
                ctypes.byref(kv),
                ctypes.byref(step.chunks),
                address_of(q, (step.token_count, q.shape[1])),
                q.shape[1],
                address_of(out, (step.token_count, out.shape[1])),
                out.shape[1],
                heads,
                scale,
            )
        )


def address_of(array: Floats, shape: tuple[int, ...]) -> int:
    """The address of a C-contiguous float32 array. Raises `ValueError` for any other array or shape."""
    if array.dtype != np.float32 or not array.flags.c_contiguous or array.shape != shape:
        raise ValueError(f"needed contiguous float32 {shape}, not {array.dtype} {array.shape}")
    return array.ctypes.data


def _check(status: int) -> None:
    if status != 0:
        raise ValueError("a block, slot, position or table entry that does not exist")


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
