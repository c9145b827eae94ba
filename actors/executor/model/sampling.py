"""Choosing tokens from logits, all rows of a step at once."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from cuelight.actors.executor.batch import Draw
from cuelight.actors.executor.chance import uniform


def sample(logits: torch.Tensor, draws: Many[Draw], eos_token_ids: Many[int]) -> torch.Tensor:
    """One token id per row of `logits` ([rows, vocabulary]); -1 for a row whose logits are not finite numbers.

    Each row is treated by its own options alone. `top_k` is applied before `top_p`, which keeps the smallest set of
    most probable tokens whose probabilities reach it.
    """
    logits = logits.float()
    _forbid_early_stops(logits, draws, eos_token_ids)
    best, token_ids = logits.max(dim=-1)
    plain = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0 and not _filters(draw)]
    filtered = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0 and _filters(draw)]
    for rows, choose in ((plain, _draw_plain), (filtered, _draw_filtered)):
        if rows:
            index = torch.tensor(rows, device=logits.device)
            token_ids[index] = choose(logits[index], best[index], [draws[row] for row in rows])
    return torch.where(best.isfinite(), token_ids, -1)


def _filters(draw: Draw) -> bool:
    return draw.sampling.top_k > 0 or draw.sampling.top_p < 1


def _forbid_early_stops(logits: torch.Tensor, draws: Many[Draw], eos_token_ids: Many[int]) -> None:
    """Before `min_tokens` no token that would end the request can be chosen (rule 46)."""
    for row, draw in enumerate(draws):
        if draw.output_index < draw.sampling.min_tokens:
            ends = [*draw.sampling.stop_token_ids, *(() if draw.sampling.ignore_eos else eos_token_ids)]
            if ends:
                logits[row, ends] = -torch.inf


def _probabilities(logits: torch.Tensor, best: torch.Tensor, draws: Many[Draw]) -> torch.Tensor:
    """Unnormalised, in double: the sums below must not depend on how a device adds floats up."""
    heat = _column(logits, [draw.sampling.temperature for draw in draws])
    return ((logits - best[:, None]).double() / heat).exp_()


def _pick(weights: torch.Tensor, draws: Many[Draw]) -> torch.Tensor:
    """Inverse transform sampling: the first index where the running sum of weights passes u times the total."""
    sums = weights.cumsum(dim=-1)
    u = _column(weights, [uniform(draw.sampling.seed or 0, draw.position) for draw in draws])
    picked = torch.searchsorted(sums, u * sums[:, -1:], right=True)[:, 0]
    # Rounding may reach past the last token of any weight.
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).to(torch.int8).argmax(dim=-1)
    return torch.minimum(picked, last)


def _draw_plain(logits: torch.Tensor, best: torch.Tensor, draws: Many[Draw]) -> torch.Tensor:
    return _pick(_probabilities(logits, best, draws), draws)


def _draw_filtered(logits: torch.Tensor, best: torch.Tensor, draws: Many[Draw]) -> torch.Tensor:
    order = logits.sort(dim=-1, descending=True, stable=True)
    weights = _probabilities(order.values, best, draws)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    top_k = _column(weights, [draw.sampling.top_k or weights.shape[-1] for draw in draws])
    weights = weights.masked_fill(rank >= top_k, 0)
    before = weights.cumsum(dim=-1) - weights
    top_p = _column(weights, [draw.sampling.top_p for draw in draws])
    weights = weights.masked_fill((before >= top_p * weights.sum(dim=-1, keepdim=True)) & (rank > 0), 0)
    return order.indices.gather(-1, _pick(weights, draws)[:, None])[:, 0]


def _column(like: torch.Tensor, values: Many[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
