"""Attention over the paged pool in plain torch: the reference that every faster backend is judged by.

Registered with transformers as one attention function. The step's layout reaches it through a context variable that
the runner sets, because no cache object passes through the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from cuelight.actors.executor.batch import Batch, BatchChunk, Ints
from cuelight.actors.executor.model.kv_pool import KVPool
from cuelight.messages.request import NULL_BLOCK

ATTENTION_NAME = "cuelight_paged"

IGNORED_OPTIONS = ("dropout", "position_ids", "logits_to_keep")
"""Of what transformers gives an attention function, what changes nothing here. Neither do flags."""

PADDING_RATIO_MAX = 1.3
"""Decodes attend together as long as the longest context is at most this much longer than the shortest."""

GATHERED_TOKENS_MAX = 8192
"""Decodes attend together up to this much context in all, so that what was gathered is still in the CPU's cache."""


@dataclass(frozen=True)
class _AttentionGroup:
    """R rows with n query tokens each, attending together.

    `queries`: flat indices [R * n]. `runs`: [R * kv_heads * blocks] (block, head) runs of the pool to gather.
    `last`: [R, n, 1], the position of each query, which is the last that it sees.
    """

    rows: int
    query_count: int
    context: int
    queries: torch.Tensor
    runs: torch.Tensor
    last: Ints


class PagedAttention:
    """One step's attention: laid out once, then used by every layer."""

    def __init__(self, pool: KVPool, batch: Batch, query_groups: int, dtype: torch.dtype, device: torch.device) -> None:
        self._pool = pool
        self._query_groups = query_groups
        self._dtype = dtype
        self._device = device
        self._blocks = torch.from_numpy(batch.blocks).to(device)
        self._offsets = torch.from_numpy(batch.offsets).to(device)
        # Partly filled blocks: an earlier owner may have left NaN there, which no mask keeps out (rule `zeroed-pool`).
        begun = np.setdiff1d(batch.blocks[batch.offsets == 0], batch.blocks[batch.offsets == pool.block_size - 1])
        self._begun = torch.from_numpy(begun).to(device) if len(begun) else None
        self._groups = [self._group(chunks) for chunks in _alike(batch.chunks, pool.block_size)]
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
        runs = max((len(group.runs) for group in self._groups), default=0)
        self._key_buffer, self._value_buffer = pool.buffers(runs)

    def _group(self, chunks: list[BatchChunk]) -> _AttentionGroup:
        pool, count = self._pool, chunks[0].stop - chunks[0].start
        blocks = max(len(chunk.block_ids) for chunk in chunks)
        table = np.full((len(chunks), blocks), NULL_BLOCK, np.int64)
        for row, chunk in enumerate(chunks):
            table[row, : len(chunk.block_ids)] = chunk.block_ids
        runs = table[:, None, :] * pool.kv_heads + np.arange(pool.kv_heads)[None, :, None]
        lengths = np.array([chunk.context_length for chunk in chunks])
        queries = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])
        return _AttentionGroup(
            rows=len(chunks),
            query_count=count,
            context=blocks * pool.block_size,
            queries=torch.from_numpy(queries).to(self._device),
            runs=torch.from_numpy(runs.reshape(-1)).to(self._device),
            last=lengths[:, None, None] - count + np.arange(count)[None, :, None],
        )

    def _mask(self, number: int, window: int | None) -> torch.Tensor:
        """[R, 1, groups * n, context] to add to the scores; the query heads of a KV head lie along the query axis."""
        if (known := self._masks.get((number, window))) is not None:
            return known
        group = self._groups[number]
        keys = np.arange(group.context)[None, None, :]
        sees = keys <= group.last  # its own position and all before it
        if window is not None:
            sees &= keys > group.last - window
        mask = torch.zeros(sees.shape, dtype=self._dtype).masked_fill_(torch.from_numpy(~sees), -torch.inf)
        mask = self._masks[number, window] = mask.repeat(1, self._query_groups, 1)[:, None].to(self._device)
        return mask

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
        """Store this layer's K/V, then attend.

        `q` is [T, heads, head_dim], `k` and `v` [T, kv_heads, head_dim]; gives the shape of `q`. A token sees so many
        as `window`, itself included. `softcap` keeps each score s within bounds: softcap * tanh(s / softcap).
        """
        pool = self._pool
        if self._begun is not None:
            pool.clear(layer, self._begun)
        pool.write(layer, self._blocks, self._offsets, k, v)
        out = torch.empty_like(q)
        for number, group in enumerate(self._groups):
            mask = self._mask(number, window)
            keys = self._gather(pool.keys[layer], group, self._key_buffer)
            values = self._gather(pool.values[layer], group, self._value_buffer)
            queries = self._fold(q.index_select(0, group.queries), group)
            if softcap is None:
                mine = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)
            else:
                mine = _capped_attention(queries, keys, values, mask, scaling, softcap)
            out.index_copy_(0, group.queries, self._unfold(mine, group))
        return out

    def _gather(self, stored: torch.Tensor, group: _AttentionGroup, buffer: torch.Tensor) -> torch.Tensor:
        heads, head_dim = self._pool.kv_heads, stored.shape[-1]
        runs = stored.view(-1, self._pool.block_size * head_dim)
        gathered = buffer[: len(group.runs) * runs.shape[1]].view(-1, runs.shape[1])
        torch.index_select(runs, 0, group.runs, out=gathered)
        return gathered.view(group.rows, heads, group.context, head_dim)

    def _fold(self, q: torch.Tensor, group: _AttentionGroup) -> torch.Tensor:
        """[R * n, heads, d] → [R, kv_heads, groups * n, d]: grouped heads become more queries of one KV head."""
        heads, head_dim = self._pool.kv_heads, q.shape[-1]
        q = q.view(group.rows, group.query_count, heads, self._query_groups, head_dim)
        return q.permute(0, 2, 3, 1, 4).reshape(group.rows, heads, -1, head_dim)

    def _unfold(self, out: torch.Tensor, group: _AttentionGroup) -> torch.Tensor:
        heads, head_dim = self._pool.kv_heads, out.shape[-1]
        out = out.view(group.rows, heads, self._query_groups, group.query_count, head_dim)
        return out.permute(0, 3, 1, 2, 4).reshape(group.rows * group.query_count, -1, head_dim)


def _capped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scaling: float, softcap: float
) -> torch.Tensor:
    """As `scaled_dot_product_attention`, which caps no scores."""
    scores = (q @ k.transpose(-1, -2)).float() * (scaling / softcap)
    weights = (scores.tanh_() * softcap + mask).softmax(dim=-1)
    return weights.to(v.dtype) @ v


def _alike(chunks: list[BatchChunk], block_size: int) -> Iterator[list[BatchChunk]]:
    """Sequences to attend together: each prefill chunk alone, decodes with others of about their length."""
    decodes: list[BatchChunk] = []
    for single, some in groupby(chunks, key=lambda chunk: chunk.stop - chunk.start == 1):
        if single:
            decodes.extend(some)
        else:
            yield from ([chunk] for chunk in some)
    decodes.sort(key=lambda chunk: len(chunk.block_ids))
    group: list[BatchChunk] = []
    for chunk in decodes:
        blocks = len(chunk.block_ids)
        padded = blocks > PADDING_RATIO_MAX * len(group[0].block_ids) + 1 if group else False
        if padded or (group and (len(group) + 1) * blocks * block_size > GATHERED_TOKENS_MAX):
            yield group
            group = []
        group.append(chunk)
    if group:
        yield group


class Attention(Protocol):
    """One step's attention, whoever computes it."""

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
        """As `PagedAttention.attend`."""


_step: ContextVar[Attention] = ContextVar("cuelight_step")


@contextmanager
def attending(attention: Attention) -> Iterator[None]:
    """Within, the registered attention function uses this step's layout."""
    token = _step.set(attention)
    try:
        yield
    finally:
        _step.reset(token)


def attend(
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """As `Attention.attend` of the step that runs now."""
    return _step.get().attend(layer, q, k, v, scaling, window, softcap)


class UnsupportedAttention(Exception):
    """The model asks of attention what no backend does."""


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls in each layer; `query`, `key` and `value` are [1, heads, T, head_dim].

    Raises UnsupportedAttention for whatever else a model gives it, since that would make other numbers.
    """
    if attention_mask is not None:  # transformers makes none for an attention function that it does not know
        raise UnsupportedAttention("this model has masks of its own, which are not supported yet")
    for name, option in options.items():
        if option is not None and not isinstance(option, bool) and name not in IGNORED_OPTIONS:
            what = "sinks" if name in ("s_aux", "sinks") else name
            raise UnsupportedAttention(f"this model's attention has {what}, which is not supported yet")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedAttention("this model's tokens attend to those after them, so it cannot be served")
    layer: int = module.layer_idx  # type: ignore[assignment]  # every transformers attention module has one
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend(layer, q, k, v, scaling, sliding_window, softcap)[None], None


def register() -> None:
    """Make the function known to transformers under `ATTENTION_NAME`; harmless when done again."""
    function: Callable[..., tuple[torch.Tensor, None]] = _paged_attention
    AttentionInterface.register(ATTENTION_NAME, function)
