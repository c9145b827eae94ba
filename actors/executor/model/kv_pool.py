"""The paged KV pool on the device, and the host memory that its blocks are saved to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from cuelight.actors.executor.host_memory import HostMemoryMapping, in_use
from cuelight.kernel import get_logger
from cuelight.messages.request import NULL_BLOCK


class KVPool:
    """Keys and values of every layer, in blocks.

    Each layer's tensors have shape [blocks, kv_heads, block_size, head_dim]: a (block, head) pair is one contiguous
    run, so gathering a block table copies whole runs and needs no transpose. With `is_token_major` the tensors are
    views of memory laid out as [blocks, block_size, kv_heads, head_dim].
    """

    def __init__(
        self,
        *,
        layers: int,
        block_count: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        is_token_major: bool = False,
    ) -> None:
        shape = (block_count, kv_heads, block_size, head_dim)
        self.block_count = block_count
        self.block_size = block_size
        self.kv_heads = kv_heads
        # Zeros, not garbage: a NaN in a padded slot would spread through the masked softmax (rule `zeroed-pool`).
        self.keys = [_zeros(shape, dtype, device, is_token_major) for _ in range(layers)]
        self.values = [_zeros(shape, dtype, device, is_token_major) for _ in range(layers)]

        self._buffers: tuple[torch.Tensor, torch.Tensor] = (self.keys[0].new_empty(0), self.keys[0].new_empty(0))

    def buffers(self, runs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two flat buffers for at least `runs` (block, head) runs, reused by later steps to save allocations."""
        size = runs * self.keys[0][0, 0].numel()
        if len(self._buffers[0]) < size:
            self._buffers = (self.keys[0].new_empty(size), self.keys[0].new_empty(size))
        return self._buffers

    @staticmethod
    def block_bytes(*, layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Return the bytes of a block: keys and values of all layers."""
        return 2 * layers * block_size * kv_heads * head_dim * dtype.itemsize

    def check(self, blocks: Sequence[int]) -> None:
        """Assert that all these blocks exist and none is the null block."""
        exist = [NULL_BLOCK < block < self.block_count for block in blocks]
        assert all(exist), "a copied block exists, and is not the null block"

    def clear(self, layer: int, blocks: torch.Tensor) -> None:
        """Zero whole blocks of a layer."""
        self.keys[layer][blocks] = 0
        self.values[layer][blocks] = 0

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks, each `sources[i]` to `targets[i]`, in every layer; no block is both."""
        assert not set(sources) & set(targets), "no block is both a source and a target"
        self.check(sources)
        self.check(targets)
        device = self.keys[0].device
        blocks = torch.tensor((sources, targets), dtype=torch.int64, pin_memory=device.type == "cuda")
        read, written = blocks.to(device, non_blocking=True)  # pinned memory, so that the host does not block
        for tensor in (*self.keys, *self.values):
            tensor[written] = tensor[read]

    def write(self, layer: int, blocks: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store `k` and `v`, both [tokens, kv_heads, head_dim], at slot `offsets[i]` of block `blocks[i]`."""
        self.keys[layer][blocks, :, offsets] = k
        self.values[layer][blocks, :, offsets] = v


def _zeros(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, is_token_major: bool
) -> torch.Tensor:
    blocks, heads, size, dim = shape
    if is_token_major:
        return torch.zeros((blocks, size, heads, dim), dtype=dtype, device=device).transpose(1, 2)
    return torch.zeros(shape, dtype=dtype, device=device)


log = get_logger("cuelight.executor")


class HostPool:
    """Tensors in host memory like the pool's, for `block_count` blocks with ids from 0.

    Copies are queued on the device's current stream, in the order of the calls. Nothing else reads this memory, so a
    saved block can be loaded, and its host block reused, without waiting. On CUDA the memory is pinned for that; a
    `host_memory` mapping only if the driver supports it.
    """

    def __init__(self, pool: KVPool, block_count: int, host_memory: HostMemoryMapping | None = None) -> None:
        self.block_count = block_count
        self._pool = pool
        self._host_memory = host_memory
        self._free = None if host_memory is None else torch.frombuffer(host_memory.data, dtype=torch.uint8)
        if self._free is not None and pool.keys[0].device.type == "cuda":
            self._pin(self._free)
        self.keys = [self._like(keys) for keys in pool.keys]
        self.values = [self._like(values) for values in pool.values]

    def _like(self, stored: torch.Tensor) -> torch.Tensor:
        shape = (self.block_count, *stored.shape[1:])
        if self._free is None:
            return torch.zeros(shape, dtype=stored.dtype, pin_memory=stored.device.type == "cuda")
        taken, self._free = self._free.tensor_split([self.block_count * stored[0].nbytes])
        return taken.view(stored.dtype).view(shape)

    def _pin(self, memory: torch.Tensor) -> None:
        """Pin the memory, so that copies do not block the host. If it fails, copies are correct but slower."""
        driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if error := int(driver.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
            log.warning("host_memory_is_not_pinned", error=error)
            with suppress(RuntimeError):  # clear the error, which the driver returns again from the next call
                torch.zeros(1, device=self._pool.keys[0].device)
        else:
            weakref.finalize(self, _unpin, driver.cudaHostUnregister, memory).atexit = False

    def save(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the pool's blocks `sources[i]` to this memory's `targets[i]`."""
        self._pool.check(sources)
        self._check(targets)
        runs = _runs(sources, targets)
        with in_use(self._host_memory):
            for stored, kept in self._layers():
                _copy(stored, kept, runs)

    def load(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy this memory's blocks `sources[i]` to the pool's `targets[i]`."""
        self._check(sources)
        self._pool.check(targets)
        runs = _runs(sources, targets)
        with in_use(self._host_memory):
            for stored, kept in self._layers():
                _copy(kept, stored, runs)

    def _layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        stored = (*self._pool.keys, *self._pool.values)
        return list(zip(stored, (*self.keys, *self.values), strict=True))

    def _check(self, blocks: Sequence[int]) -> None:
        assert all(0 <= block < self.block_count for block in blocks), "a copied block exists"


def _unpin(unregister: Callable[[int], object], memory: torch.Tensor) -> None:
    unregister(memory.data_ptr())


def _runs(sources: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return runs (source, target, count) of blocks that are adjacent in both memories, to be copied at once."""
    runs: list[tuple[int, int, int]] = []
    for source, target in zip(sources, targets, strict=True):
        if runs:
            first_source, first_target, count = runs[-1]
            if (source, target) == (first_source + count, first_target + count):
                runs[-1] = (first_source, first_target, count + 1)
                continue
        runs.append((source, target, 1))
    return runs


def _copy(read: torch.Tensor, written: torch.Tensor, runs: list[tuple[int, int, int]]) -> None:
    for source, target, count in runs:
        written[target : target + count].copy_(read[source : source + count], non_blocking=True)
