"""The Triton kernels of attention over the paged pool, and how they are launched.

Whether they are compiled or interpreted is decided when this module is imported, by `TRITON_INTERPRET`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cuelight.actors.executor.model.attention_triton import ITEM, MERGE, ScoreOptions, TritonStep

LOG2E = 1.4426950408889634
LAUNCH = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
IS_INTERPRETED: bool = triton.knobs.runtime.interpret
"""Triton's interpreter multiplies no matrices of bfloat16, so there they are float32."""


@triton.jit
def _write(
    k, v, keys, values, slots,
    k_token, k_head, v_token, v_head, block_stride, head_stride, slot_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, HEADS_PADDED: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return  # pads the grid
    head = tl.arange(0, HEADS_PADDED)[:, None]
    dim = tl.arange(0, DIM_PADDED)[None, :]
    live = (head < HEADS) & (dim < DIM)
    place = (slot // BLOCK_SIZE).to(tl.int64) * block_stride + (slot % BLOCK_SIZE) * slot_stride
    place += head * head_stride + dim
    tl.store(keys + place, tl.load(k + token * k_token + head * k_head + dim, mask=live), mask=live)
    tl.store(values + place, tl.load(v + token * v_token + head * v_head + dim, mask=live), mask=live)


@triton.jit
def _operand(tensor, IS_WIDENED: tl.constexpr):
    """Of a product."""
    return tensor.to(tl.float32) if IS_WIDENED else tensor


@triton.jit
def _capped(score, cap):
    """cap * tanh(score / cap). Both are in powers of two, and the factor makes them natural again."""
    return cap * (1.0 - 2.0 / (tl.exp2(score * (2.0 * 1.4426950408889634 / cap)) + 1.0))


@triton.jit
def _divided(gathered, total):
    """Zeros for rows that have seen nothing."""
    return gathered / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _attend(  # noqa: PLR0915  # a kernel is one function
    q, keys, values, out, items, tables, partials, sums,
    scale, cap, window, q_token, q_head, block_stride, head_stride, slot_stride,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, IS_WIDENED: tl.constexpr, ITEM: tl.constexpr,
):  # fmt: skip
    """One item for one KV head; its query rows are (token, head of the group) pairs. `scale` is in powers of two."""
    item = items + tl.program_id(0) * ITEM
    count = tl.load(item + 2)
    if count == 0:
        return  # pads the grid
    head = tl.program_id(1)
    table = tables + tl.load(item)
    position = tl.load(item + 3)
    begin = tl.load(item + 4)
    end = tl.load(item + 5)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PADDED)
    token = (tl.load(item + 1) + row // GROUPS).to(tl.int64)
    query_head = head * GROUPS + row % GROUPS
    is_row = row // GROUPS < count
    is_dim = dim < DIM
    live = is_row[:, None] & is_dim[None, :]
    queries = tl.load(q + (token * q_token + query_head * q_head)[:, None] + dim[None, :], mask=live, other=0.0)
    queries = _operand(queries, IS_WIDENED)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    gathered = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    last = position + row // GROUPS
    if HAS_WINDOW:
        begin = tl.maximum(begin, position - window + 1)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        is_key = key < end
        block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0)
        place = block.to(tl.int64) * block_stride + head * head_stride + (key % BLOCK_SIZE) * slot_stride
        # What lies behind the end is not read: it may be no number.
        stored = tl.load(keys + place[None, :] + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0)
        score = tl.dot(queries, _operand(stored, IS_WIDENED), input_precision="ieee") * scale
        if HAS_CAP:
            score = _capped(score, cap)
        sees = is_key[None, :] & (key[None, :] <= last[:, None])
        if HAS_WINDOW:
            sees &= key[None, :] > last[:, None] - window
        score = tl.where(sees, score, float("-inf"))
        above = tl.maximum(most, tl.max(score, 1))
        # Rows that have seen nothing yet have no largest score.
        level = tl.where(above == float("-inf"), 0.0, above)
        weight = tl.exp2(score - level[:, None])
        fade = tl.exp2(most - level)
        total = total * fade + tl.sum(weight, 1)
        seen = tl.load(values + place[:, None] + dim[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0)
        weight, seen = _operand(weight.to(seen.dtype), IS_WIDENED), _operand(seen, IS_WIDENED)
        gathered = gathered * fade[:, None] + tl.dot(weight, seen, input_precision="ieee")
        most = above
    partial = tl.load(item + 6)
    if partial < 0:
        result = _divided(gathered, total)
        cell = token * HEADS + query_head
        tl.store(out + cell[:, None] * DIM + dim[None, :], result.to(out.dtype.element_ty), mask=live)
    else:
        first = (partial.to(tl.int64) * (HEADS // GROUPS) + head) * ROWS
        tl.store(partials + (first + row)[:, None] * DIM + dim[None, :], gathered, mask=live)
        tl.store(sums + 2 * first + row, most, mask=is_row)
        tl.store(sums + 2 * first + ROWS + row, total, mask=is_row)


@triton.jit
def _merge(
    out, merges, partials, sums,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """One tile for one KV head, from what its items have left."""
    merge = merges + tl.program_id(0) * MERGE
    count = tl.load(merge + 1)
    if count == 0:
        return  # pads the grid
    head = tl.program_id(1)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PADDED)
    is_row = row // GROUPS < count
    live = is_row[:, None] & (dim < DIM)[None, :]
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    gathered = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    place = tl.load(merge + 2).to(tl.int64)
    for index in range(tl.load(merge + 3)):
        cell = ((place + index) * (HEADS // GROUPS) + head) * ROWS
        here = tl.load(sums + 2 * cell + row, mask=is_row, other=float("-inf"))
        above = tl.maximum(most, here)
        level = tl.where(above == float("-inf"), 0.0, above)
        fade = tl.exp2(most - level)
        share = tl.exp2(here - level)
        total = total * fade + tl.load(sums + 2 * cell + ROWS + row, mask=is_row, other=0.0) * share
        part = tl.load(partials + (cell + row)[:, None] * DIM + dim[None, :], mask=live, other=0.0)
        gathered = gathered * fade[:, None] + part * share[:, None]
        most = above
    token = (tl.load(merge) + row // GROUPS).to(tl.int64)
    query_head = head * GROUPS + row % GROUPS
    result = _divided(gathered, total)
    where = out + (token * HEADS + query_head)[:, None] * DIM + dim[None, :]
    tl.store(where, result.to(out.dtype.element_ty), mask=live)


class TritonKernels:
    """Launches them, on the stream that is current."""

    def write(
        self, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """As `Kernels.write`."""
        k, v = _rows(k), _rows(v)
        tokens, heads, dim = k.shape
        assert keys.stride() == values.stride(), "keys and values lie alike"
        _write[(tokens,)](
            k, v, keys, values, slots,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1), *keys.stride()[:3],
            HEADS=heads, DIM=dim, HEADS_PADDED=_padded(heads, 1), DIM_PADDED=_padded(dim), BLOCK_SIZE=keys.shape[2],
            **LAUNCH,
        )  # fmt: skip

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        step: TritonStep,
        scores: ScoreOptions,
    ) -> None:
        """As `PagedKernels.attend`."""
        q = _rows(q)
        _, heads, dim = q.shape
        _, kv_heads, block_size, _ = keys.shape
        assert q.dtype == keys.dtype, "queries are of the pool's type"
        cap = scores.softcap
        _attend[(step.key.items, kv_heads)](
            q, keys, values, out, step.items, step.tables, step.partials, step.sums,
            scores.scaling * LOG2E, 0.0 if cap is None else cap * LOG2E, scores.window or 0,
            q.stride(0), q.stride(1), *keys.stride()[:3],
            GROUPS=heads // kv_heads, HEADS=heads, DIM=dim, DIM_PADDED=_padded(dim), BLOCK_SIZE=block_size,
            ROWS=step.key.rows, KEYS=_keys_at_once(dim, q.dtype),
            HAS_WINDOW=scores.window is not None, HAS_CAP=cap is not None, ITEM=ITEM,
            IS_WIDENED=IS_INTERPRETED and q.dtype is torch.bfloat16,
            **LAUNCH,
        )  # fmt: skip

    def merge(self, out: torch.Tensor, step: TritonStep) -> None:
        """As `Kernels.merge`."""
        _, heads, dim = out.shape
        kv_heads = step.partials.shape[1]
        _merge[(step.key.merges, kv_heads)](
            out, step.merges, step.partials, step.sums,
            GROUPS=heads // kv_heads, HEADS=heads, DIM=dim, DIM_PADDED=_padded(dim), ROWS=step.key.rows, MERGE=MERGE,
            **LAUNCH,
        )  # fmt: skip


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same, with the numbers of a head in a row."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _padded(count: int, least: int = 16) -> int:
    """A power of two; products of matrices want 16 at least."""
    return max(least, 1 << (count - 1).bit_length())


def _keys_at_once(dim: int, dtype: torch.dtype) -> int:
    """So many keys and values fit the fast memory, twice."""
    width = _padded(dim) * dtype.itemsize
    return 64 if width <= 256 else 32 if width <= 512 else 16
