"""What `torch.nn.attention.varlen.varlen_attn` does, in plain torch, strict about what it is given."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Varlen:
    """The function of one version of FlashAttention. Like the strictest of them it spreads what pads a last page."""

    is_version_2: bool
    calls: int = 0

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:
        self.calls += 1
        assert scale is not None and seqused_k is not None and block_table is not None
        heads, kv_heads = query.shape[1], key.shape[2]
        assert enable_gqa == (heads != kv_heads) and heads % kv_heads == 0
        assert query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
        assert query.dtype == key.dtype == value.dtype and query.dtype in (torch.float16, torch.bfloat16)
        assert key.shape == value.shape and key.shape[3] == query.shape[2] <= 256
        assert window_size[1] == 0, "no token sees those after it"
        self._check_bounds(query, cu_seq_q, cu_seq_k, seqused_k, max_q, max_k)
        self._check_pages(key, block_table, seqused_k, num_splits)
        out = torch.full_like(query, torch.nan)
        for row, (start, stop) in enumerate(zip(cu_seq_q.tolist(), cu_seq_q[1:].tolist(), strict=False)):
            used = int(seqused_k[row])
            pages = block_table[row, : -(-used // key.shape[1])].long()
            keys, values = (each[pages].flatten(0, 1).float() for each in (key, value))
            q = query[start:stop].float().unflatten(1, (kv_heads, -1))
            scores = torch.einsum("nhgd,khd->hngk", q, keys).nan_to_num() * scale
            last = used - (stop - start) + torch.arange(stop - start)[:, None]
            sees = torch.arange(len(keys)) <= last
            if window_size[0] >= 0:
                sees &= torch.arange(len(keys)) >= last - window_size[0]
            weights = scores.masked_fill(~sees[None, :, None], -torch.inf).softmax(-1)
            out[start:stop] = torch.einsum("hngk,khd->nhgd", weights, values).flatten(1, 2).to(out.dtype)
        return out

    def _check_bounds(
        self,
        query: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor | None,
        seqused_k: torch.Tensor,
        max_q: int,
        max_k: int,
    ) -> None:
        counts = cu_seq_q.diff()
        assert cu_seq_q.dtype == seqused_k.dtype == torch.int32
        assert cu_seq_q[0] == 0 and cu_seq_q[-1] == len(query) and (counts > 0).all()
        assert len(seqused_k) == len(counts) and (seqused_k >= counts).all()
        assert (max_q, max_k) == (counts.max(), seqused_k.max())
        if self.is_version_2:
            assert cu_seq_k is not None and cu_seq_k.dtype == torch.int32 and cu_seq_k[0] == 0
            assert (cu_seq_k.diff() == seqused_k).all()
        else:
            assert cu_seq_k is None, "later versions take it for something else"

    def _check_pages(
        self, key: torch.Tensor, block_table: torch.Tensor, seqused_k: torch.Tensor, num_splits: int | None
    ) -> None:
        if self.is_version_2:
            assert key.shape[1] % 256 == 0 and num_splits == 1
        assert block_table.dtype == torch.int32 and block_table.is_contiguous()
        assert block_table.shape[0] == len(seqused_k)
        assert block_table.shape[1] * key.shape[1] >= seqused_k.max()
        assert ((block_table >= 0) & (block_table < key.shape[0])).all()
