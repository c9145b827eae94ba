"""The paged KV pool of the native decoder, and host memory beside it, in numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from cuelight.actors.executor.native.architecture import Architecture
from cuelight.actors.executor.native.attention import BF16, FLOAT32, CueKv
from cuelight.messages.request import BlockCopies, Copying

Stored: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.uint16]

TYPES: Mapping[int, np.dtype[np.float32] | np.dtype[np.uint16]] = {
    FLOAT32: np.dtype(np.float32),
    BF16: np.dtype(np.uint16),
}


class Pools:
    """Keys and values, [layers, 2, blocks, kv_heads, block_size, head_dim], and the same for `host_block_count` blocks.

    Raises MemoryError.
    """

    def __init__(
        self, architecture: Architecture, block_count: int, block_size: int, kind: int, host_block_count: int = 0
    ) -> None:
        self._a, self._kind = architecture, kind
        self.block_count, self.block_size, self.host_block_count = block_count, block_size, host_block_count
        # Zeros that the system gives page by page, when a block is first written.
        self._device = self._zeros(block_count)
        self._host = self._zeros(host_block_count)

    def _zeros(self, blocks: int) -> Stored:
        a = self._a
        shape = (a.layers, 2, blocks, a.kv_heads, self.block_size, a.head_dim)
        try:
            return cast(Stored, np.zeros(shape, TYPES[self._kind]))
        except (ValueError, OverflowError) as error:  # numpy cannot even count them
            raise MemoryError(str(error)) from error

    @staticmethod
    def block_bytes(architecture: Architecture, block_size: int, kind: int) -> int:
        """Bytes of one block over all layers, keys and values together."""
        a = architecture
        return 2 * a.layers * a.kv_heads * block_size * a.head_dim * TYPES[kind].itemsize

    def structures(self) -> list[CueKv]:
        """One a layer, for the library."""
        a = self._a
        return [
            CueKv(
                keys=keys.ctypes.data,
                values=values.ctypes.data,
                blocks=self.block_count,
                type=self._kind,
                kv_heads=a.kv_heads,
                block_size=self.block_size,
                head_dim=a.head_dim,
            )
            for keys, values in self._device
        ]

    def copy(self, copies: BlockCopies) -> None:
        """Copy whole blocks."""
        source = self._host if copies.copying is Copying.LOAD else self._device
        target = self._host if copies.copying is Copying.SAVE else self._device
        self._check(source, copies.sources)
        self._check(target, copies.targets)
        target[:, :, _index(copies.targets)] = source[:, :, _index(copies.sources)]

    def _check(self, memory: Stored, blocks: Sequence[int]) -> None:
        first = 0 if memory is self._host else 1
        count = memory.shape[2]
        assert all(first <= block < count for block in blocks), "a copied block exists, and is not the null block"

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero these blocks."""
        self._device[:, :, _index(blocks)] = 0


def _index(blocks: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(blocks, np.int64)
