"""Attention by torch's own `varlen_attn`, FlashAttention over block tables: on CUDA, in half precision."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from cuelight.actors.executor.batch import Batch
from cuelight.actors.executor.model.kv_pool import KVPool
from cuelight.messages.request import NULL_BLOCK

VarlenAttention: TypeAlias = Callable[..., torch.Tensor]
"""`torch.nn.attention.varlen.varlen_attn`."""

PAGE_TOKENS = 256
"""FlashAttention 2 wants blocks of so many tokens, or of a multiple of that."""
HEAD_DIM_MAX = 256
HEAD_DIM_STEP = 8


def varlen_attention() -> VarlenAttention | None:
    """The function, where the installed torch has one that reads block tables."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    wanted = {"block_table", "seqused_k", "num_splits", "enable_gqa", "scale", "window_size"}
    if not wanted <= set(inspect.signature(varlen_attn).parameters):
        return None
    return cast(VarlenAttention, varlen_attn)  # which gives more than a tensor only if asked


def is_version_2() -> bool:
    """Whether torch uses FlashAttention 2: that it has by itself, later ones are activated by the host program."""
    from torch.nn import attention

    current = getattr(attention, "current_flash_attention_impl", None)
    return current is None or current() in (None, "FA2")


class FlashBackend:
    """The backend."""

    name = "flash"
    is_token_major = True

    def __init__(self, function: VarlenAttention, device: torch.device, *, is_version_2: bool) -> None:
        self._function = function
        self._device = device
        self._is_version_2 = is_version_2

    def step(self, pool: KVPool, batch: Batch) -> FlashAttention:
        return FlashAttention(self._function, pool, batch, self._device, is_version_2=self._is_version_2)


class FlashAttention:
    """One step's attention, as `PagedAttention`; the pool's memory must be token-major."""

    def __init__(
        self, function: VarlenAttention, pool: KVPool, batch: Batch, device: torch.device, *, is_version_2: bool
    ) -> None:
        self._function = function
        self._pool = pool
        counts = np.array([each.stop - each.start for each in batch.chunks], np.int32)
        lengths = np.array([each.context_length for each in batch.chunks], np.int32)
        widest = max((len(each.block_ids) for each in batch.chunks), default=0)
        table = np.full((len(lengths), widest), NULL_BLOCK, np.int32)
        for row, each in enumerate(batch.chunks):
            table[row, : len(each.block_ids)] = each.block_ids
        slots = batch.blocks * pool.block_size + batch.offsets
        # Blocks begun but not filled: what an earlier owner left in them may be NaN, which some versions spread
        # (rule `zeroed-pool`).
        begun = np.setdiff1d(batch.blocks[batch.offsets == 0], batch.blocks[batch.offsets == pool.block_size - 1])
        self._begun = torch.from_numpy(begun).to(device) if len(begun) else None
        self._slots = torch.from_numpy(slots).to(device)
        self._query_bounds = torch.from_numpy(_bounds(counts)).to(device)
        # Later versions than the second take none.
        self._key_bounds = torch.from_numpy(_bounds(lengths)).to(device) if is_version_2 else None
        self._lengths = torch.from_numpy(lengths).to(device)
        self._table = torch.from_numpy(table).to(device)
        self._query_count, self._length = int(counts.max(initial=0)), int(lengths.max(initial=0))
        # One split: with more, version 2 leaves rows unwritten where it reads block tables.
        self._splits = 1 if is_version_2 else None

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
        """As `PagedAttention.attend`, without `softcap`."""
        assert softcap is None, "who chose this backend looked"
        if self._begun is not None:
            self._pool.clear(layer, self._begun)
        keys, values = (stored[layer].transpose(1, 2) for stored in (self._pool.keys, self._pool.values))
        for stored, new in ((keys, k), (values, v)):
            stored.view(-1, *stored.shape[2:]).index_copy_(0, self._slots, new)
        return self._function(
            q.contiguous(),
            keys,
            values,
            self._query_bounds,
            self._key_bounds,
            self._query_count,
            self._length,
            scale=scaling,
            # A query sees so many to its left beside itself, and none to its right.
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=q.shape[1] != k.shape[1],
            seqused_k=self._lengths,
            block_table=self._table,
            num_splits=self._splits,
        )


def _bounds(sizes: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return np.cumsum([0, *sizes], dtype=np.int32)
