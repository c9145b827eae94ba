"""Which tokens the next step computes: a pure function of the running requests and the budget."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cuelight.actors.scheduler.tracked import Tracked
from cuelight.messages.request import FinishReason


class Planned(NamedTuple):
    """`token_count` tokens of one request in one step; `incarnation` is the request's when it was planned."""

    request: Tracked
    token_count: int
    incarnation: int


def plan_step(running: Iterable[Tracked], token_budget: int) -> list[tuple[Tracked, int]]:
    """Every decode first, then prefill chunks in arrival order, `token_budget` tokens in all.

    A request that was part of a failed step runs alone until it has sampled a token, so that a second failure can be
    laid at its door. A request that gets no tokens is passed over; those behind it still get theirs (rule 3).
    """
    decodes: list[tuple[Tracked, int]] = []
    prefills: list[tuple[Tracked, int]] = []
    for request in running:
        need = request.need
        if request.suspect and need > 0:
            return [(request, min(need, token_budget))]
        if need == 1:
            decodes.append((request, 1))
        elif need > 1:
            prefills.append((request, need))
    plan = decodes[:token_budget]
    budget = token_budget - len(plan)
    for request, need in prefills:
        if budget == 0:
            break
        plan.append((request, min(need, budget)))
        budget -= plan[-1][1]
    assert sum(count for _, count in plan) <= token_budget, "a step stays within its budget"
    return plan


def stop_reason(request: Tracked, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
    """Whether the token just appended ends the request: end token, stop token, length, in this order (rule 46)."""
    sampling = request.sampling
    if request.output_tokens >= sampling.min_tokens and (
        (token_id in eos_token_ids and not sampling.ignore_eos) or token_id in sampling.stop_token_ids
    ):
        return FinishReason.STOP
    if request.output_tokens >= request.output_limit:
        return FinishReason.LENGTH
    return None
