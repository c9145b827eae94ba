"""The paged KV pool of the native decoder, and host memory beside it, in numpy arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from cuelight.actors.executor.host_memory import HostMemoryMapping, in_use
from cuelight.actors.executor.native.attention import BF16, FLOAT32, INT8, CueKv
from cuelight.actors.executor.native.model_folder import Architecture
from cuelight.messages.request import NULL_BLOCK, BlockCopies, CopyKind

SCALE_BYTES: Final = 4

Stored: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.uint16] | npt.NDArray[np.int8]
Floats: TypeAlias = npt.NDArray[np.float32]

TYPES: Mapping[int, np.dtype[np.float32] | np.dtype[np.uint16] | np.dtype[np.int8]] = {
    FLOAT32: np.dtype(np.float32),
    BF16: np.dtype(np.uint16),
    INT8: np.dtype(np.int8),
}


@dataclass(frozen=True)
class BlockStorage:
    """Keys and values of some blocks, [blocks, layers, 2, kv_heads, block_size, head_dim], and for int8 the scale of
    each token and head, [blocks, layers, 2, kv_heads, block_size]; else no scales. Only the kernels care how numbers
    lie within a block and head. All of a block lies together: what no block has used yet takes no memory."""

    numbers: Stored
    scales: Floats

    @property
    def block_count(self) -> int:
        """Blocks that there are."""
        return len(self.numbers)

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero these blocks."""
        self.numbers[_index(blocks)] = 0
        if self.scales.size:
            self.scales[_index(blocks)] = 0

    def take(self, targets: Sequence[int], source: BlockStorage, sources: Sequence[int]) -> None:
        """Copy blocks from there."""
        self.numbers[_index(targets)] = source.numbers[_index(sources)]
        if self.scales.size:
            self.scales[_index(targets)] = source.scales[_index(sources)]


class NativeKVPool:
    """Keys and values of `block_count` blocks for the kernels, and of `host_block_count` beside them, in memory that
    is `host_memory` or of their own. `vnni_pairs`: the layout for dot-product instructions.

    Raises MemoryError.
    """

    def __init__(
        self,
        architecture: Architecture,
        block_count: int,
        block_size: int,
        kind: int,
        host_block_count: int = 0,
        host_memory: HostMemoryMapping | None = None,
        vnni_pairs: bool = False,
    ) -> None:
        self._a, self._kind, self._vnni_pairs = architecture, kind, vnni_pairs
        self.block_count, self.block_size, self.host_block_count = block_count, block_size, host_block_count
        # Zeros that the system gives page by page, when a block is first written.
        self._device = self._zeros(block_count)
        self._host_memory = host_memory
        self._host = (
            self._zeros(host_block_count) if host_memory is None else self._within(host_memory, host_block_count)
        )

    def _shape(self, blocks: int) -> tuple[int, ...]:
        return (blocks, self._a.layers, 2, self._a.kv_heads, self.block_size)

    def _zeros(self, blocks: int) -> BlockStorage:
        a, shape = self._a, self._shape(blocks)
        try:
            scales = np.zeros(shape if self._kind == INT8 else 0, np.float32)
            return BlockStorage(cast(Stored, np.zeros((*shape, a.head_dim), TYPES[self._kind])), scales)
        except (ValueError, OverflowError) as error:  # numpy cannot even count them
            raise MemoryError(str(error)) from error

    def _within(self, host_memory: HostMemoryMapping, blocks: int) -> BlockStorage:
        a, shape = self._a, self._shape(blocks)
        runs = math.prod(shape)
        scales = np.frombuffer(host_memory.data, np.float32, runs if self._kind == INT8 else 0)
        numbers = np.frombuffer(host_memory.data, TYPES[self._kind], runs * a.head_dim, scales.nbytes)
        return BlockStorage(
            cast(Stored, numbers.reshape(*shape, a.head_dim)), scales.reshape(shape) if scales.size else scales
        )

    @staticmethod
    def block_bytes(architecture: Architecture, block_size: int, kind: int) -> int:
        """Bytes of one block over all layers, keys and values together."""
        a = architecture
        head_bytes = a.head_dim * TYPES[kind].itemsize + (SCALE_BYTES if kind == INT8 else 0)
        return 2 * a.layers * a.kv_heads * block_size * head_bytes

    def structures(self) -> list[CueKv]:
        """One a layer, for the library."""
        return [self._structure(layer) for layer in range(self._a.layers)]

    def _structure(self, layer: int) -> CueKv:
        keys, values = self._device.numbers[0, layer]
        key_scales, value_scales = self._device.scales[0, layer] if self._kind == INT8 else (None, None)
        return CueKv(
            keys=keys.ctypes.data,
            values=values.ctypes.data,
            key_scales=None if key_scales is None else key_scales.ctypes.data,
            value_scales=None if value_scales is None else value_scales.ctypes.data,
            blocks=self.block_count,
            block_stride=math.prod(self._shape(1)),
            type=self._kind,
            kv_heads=self._a.kv_heads,
            block_size=self.block_size,
            head_dim=self._a.head_dim,
            vnni_pairs=self._vnni_pairs,
        )

    def copy(self, copies: BlockCopies) -> None:
        """Copy whole blocks."""
        source = self._host if copies.copying is CopyKind.LOAD else self._device
        target = self._host if copies.copying is CopyKind.SAVE else self._device
        self._check(source, copies.sources)
        self._check(target, copies.targets)
        with nullcontext() if copies.copying is CopyKind.FORK else in_use(self._host_memory):
            target.take(copies.targets, source, copies.sources)

    def _check(self, memory: BlockStorage, blocks: Sequence[int]) -> None:
        first = 0 if memory is self._host else NULL_BLOCK + 1
        count = memory.block_count
        assert all(first <= block < count for block in blocks), "a copied block exists, and is not the null block"

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero these blocks."""
        self._device.clear(blocks)


def _index(blocks: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(blocks, np.int64)
