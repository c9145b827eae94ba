"""The kernels of planned attention in plain torch, an item at a time: what a plan says, without Triton."""

from __future__ import annotations

import math

import torch

from cuelight.actors.executor.model.attention_triton import ScoreOptions, TritonStep

LOG2E = math.log2(math.e)


class PlainKernels:
    """As `Kernels`, for any device. Reads the numbers when it is called, as a graph does."""

    def write(
        self, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        size, places = keys.shape[2], slots.long()[slots >= 0]
        for stored, new in ((keys, k), (values, v)):
            stored[places // size, :, places % size] = new[slots >= 0]

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        step: TritonStep,
        scores: ScoreOptions,
    ) -> None:
        kv_heads, size = keys.shape[1], keys.shape[2]
        for table, first, count, position, begin, end, place, _ in step.items.tolist():
            if count == 0:
                continue
            key = torch.arange(begin, end)
            blocks = step.tables[table:][key // size].long()
            queries = q[first : first + count].float().view(count, kv_heads, -1, q.shape[-1])
            seen_keys, seen_values = (stored[blocks, :, key % size].float() for stored in (keys, values))
            score = torch.einsum("nhgd,khd->hngk", queries, seen_keys) * scores.scaling
            if scores.softcap is not None:
                score = (score / scores.softcap).tanh() * scores.softcap
            last = position + torch.arange(count)[:, None]
            sees = key <= last
            if scores.window is not None:
                sees &= key > last - scores.window
            score = score.masked_fill(~sees[None, :, None], -torch.inf) * LOG2E
            most = score.amax(-1) if len(key) else score.new_full(score.shape[:-1], -torch.inf)
            weight = (score - most.where(most > -torch.inf, 0)[..., None]).exp2()
            gathered, total = torch.einsum("hngk,khd->hngd", weight, seen_values), weight.sum(-1)
            if place < 0:
                result = gathered / total.where(total > 0, 1)[..., None]
                out[first : first + count] = result.transpose(0, 1).reshape(count, *out.shape[1:]).to(out.dtype)
            else:
                rows = count * queries.shape[2]
                step.partials[place, :, :rows] = gathered.flatten(1, 2)
                step.sums[place, :, 0, :rows] = most.flatten(1)
                step.sums[place, :, 1, :rows] = total.flatten(1)

    def merge(self, out: torch.Tensor, step: TritonStep) -> None:
        for first, count, place, parts in step.merges.tolist():
            if count == 0:
                continue
            mine = slice(place, place + parts)
            rows = count * out.shape[1] // step.partials.shape[1]
            most, total = step.sums[mine, :, 0, :rows], step.sums[mine, :, 1, :rows]
            share = (most - most.amax(0)).exp2()
            result = (step.partials[mine, :, :rows] * share[..., None]).sum(0) / (total * share).sum(0)[..., None]
            result = result.view(result.shape[0], count, -1, result.shape[-1])
            out[first : first + count] = result.transpose(0, 1).reshape(count, *out.shape[1:]).to(out.dtype)
