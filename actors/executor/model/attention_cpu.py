"""Attention over the paged pool through the native kernels: for any transformers model on the CPU."""

from __future__ import annotations

from pathlib import Path

import torch

from cuelight.actors.executor.batch import Batch
from cuelight.actors.executor.model.kv_pool import KVPool
from cuelight.actors.executor.native.attention import BF16, FLOAT32, AttentionKernels, LayerPool, layout
from cuelight.actors.executor.native.build import load_native

TYPES = {torch.float32: FLOAT32, torch.bfloat16: BF16}


class CpuBackend:
    """The backend. Raises NoNativeCode where there is no compiler for the kernels."""

    name = "cpu"
    is_token_major = False

    def __init__(self, code_folder: Path | None) -> None:
        self._kernels = AttentionKernels(load_native(code_folder))

    def step(self, pool: KVPool, batch: Batch) -> CpuAttention:
        return CpuAttention(self._kernels, pool, batch)


class CpuAttention:
    """One step's attention, as `PagedAttention`: laid out once, then used by every layer."""

    def __init__(self, kernels: AttentionKernels, pool: KVPool, batch: Batch) -> None:
        self._kernels = kernels
        self._pool = pool
        self._layout = layout(
            batch.positions,
            batch.blocks,
            batch.offsets,
            [(each.start, each.stop, each.context_length) for each in batch.chunks],
            [each.block_ids for each in batch.chunks],
        )
        self._longest = max((each.context_length for each in batch.chunks), default=0)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Store this layer's K/V, then attend. As `PagedAttention.attend`, without `softcap`; sums are in float32.

        Only a window that is longer than every context is one that these kernels know.
        """
        assert softcap is None and (window is None or window >= self._longest), "who chose this backend looked"
        pool = _pool(self._pool, layer)
        keys, values, queries = (each.float().contiguous() for each in (k, v, q))
        self._kernels.write(pool, self._layout, keys.numpy(), values.numpy())
        tokens, heads, head_dim = q.shape
        out = torch.empty(tokens, heads * head_dim)
        flat = queries.view(tokens, -1).numpy()
        self._kernels.attend(pool, self._layout, flat, out.numpy(), heads, scaling)
        return out.view(tokens, heads, head_dim).to(q.dtype)


def _pool(pool: KVPool, layer: int) -> LayerPool:
    keys, values = pool.keys[layer], pool.values[layer]
    blocks, kv_heads, block_size, head_dim = keys.shape
    return LayerPool(keys.data_ptr(), values.data_ptr(), TYPES[keys.dtype], blocks, kv_heads, block_size, head_dim)
