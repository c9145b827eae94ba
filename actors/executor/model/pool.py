"""The paged KV pool on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cuelight.messages.request import NULL_BLOCK


class KVPool:
    """Keys and values of every layer, in blocks.

    Each layer's tensors have shape [blocks, kv_heads, block_size, head_dim]: a (block, head) pair is one contiguous
    run, so gathering a block table moves whole runs and needs no transpose. With `is_token_major` these are views of
    memory in which a token's heads lie together: [blocks, block_size, kv_heads, head_dim].
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
        """Two flat buffers with room for `runs` (block, head) runs, kept from step to step: fresh memory is slow."""
        size = runs * self.keys[0][0, 0].numel()
        if len(self._buffers[0]) < size:
            self._buffers = (self.keys[0].new_empty(size), self.keys[0].new_empty(size))
        return self._buffers

    @staticmethod
    def block_bytes(*, layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers, keys and values together."""
        return 2 * layers * block_size * kv_heads * head_dim * dtype.itemsize

    def check(self, blocks: Sequence[int]) -> None:
        """Assert that requests can hold all of these blocks."""
        exist = [NULL_BLOCK < block < self.block_count for block in blocks]
        assert all(exist), "a copied block exists, and is not the null block"

    def clear(self, layer: int, blocks: torch.Tensor) -> None:
        """Zero whole blocks of one layer."""
        self.keys[layer][blocks] = 0
        self.values[layer][blocks] = 0

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks, each `sources[i]` to `targets[i]`, in every layer; no block is both."""
        assert not set(sources) & set(targets), "no block is both a source and a target"
        self.check(sources)
        self.check(targets)
        device = self.keys[0].device
        blocks = torch.tensor((sources, targets), dtype=torch.int64, pin_memory=device.type == "cuda")
        read, written = blocks.to(device, non_blocking=True)  # from pinned memory, so that nobody waits
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
