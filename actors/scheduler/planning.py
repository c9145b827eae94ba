"""The tokens that the next step computes, when a request ends, and the token budget (halved after out of memory)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from cuelight.actors.scheduler.policy import Turns
from cuelight.actors.scheduler.request import Request
from cuelight.kernel import get_logger
from cuelight.messages.request import FinishReason

Planned: TypeAlias = tuple[Request, int, int]
"""A request, its token count in one step, and its incarnation when the step was planned.

A plain tuple, as one is built for each request in each step and a named tuple costs several times as much.
"""


@dataclass(frozen=True)
class StepLimits:
    """Limits: `token_budget` tokens a step, `running_max` requests with blocks, `steps_in_flight` steps in flight.

    While others could use the budget, a prompt gets at most `long_prefill_tokens` of a step. The executor may die
    `restarts_max` times in a row without a finished step. A step may take `step_timeout_seconds`, or, if that is None,
    a time derived from the steps before it.
    """

    token_budget: int
    running_max: int
    steps_in_flight: int = 2
    long_prefill_tokens: int = 2**63
    admissions_tried_max: int = 64
    restarts_max: int = 8
    step_timeout_seconds: float | None = None


def plan_step(
    running: Iterable[Request],
    token_budget: int,
    long_prefill_tokens: int,
    *,
    others_wait: bool,
    turns: Callable[[], Turns | None] = lambda: None,
) -> list[tuple[Request, int]]:
    """Plan every decode first, then prefill chunks in order of service, `token_budget` tokens in all.

    While other requests, running or waiting (`others_wait`), could use the budget, a chunk has at most
    `long_prefill_tokens`, or an even share if that is more (rule `long-prefill-cap`). If none waits, tokens left over
    are then distributed in order.

    If tenants take `turns`, only the prompts of the tenants with a turn are planned. If no tenant has one, each gets at
    most `long_prefill_tokens` for all its prompts, as the next request to arrive waits for the steps in flight.

    A request that was part of a failed step runs alone until it has sampled a token, so that a second failure can be
    attributed to it. A request that gets no tokens is passed over; those behind it still get theirs (rule
    `skip-blocked`).
    """
    decodes: list[tuple[Request, int]] = []
    prefills: list[tuple[Request, int]] = []
    for request in running:
        remaining = request.remaining
        if request.suspect and remaining > 0:
            return [(request, min(remaining, token_budget))]
        if remaining == 1:
            decodes.append((request, 1))
        elif remaining > 1:
            prefills.append((request, remaining))
    plan = decodes[:token_budget]
    budget = token_budget - len(plan)
    if prefills and (tenants := turns()) is not None:
        plan += _chunks_in_turns(prefills, budget, long_prefill_tokens, others_wait, tenants)
    else:
        plan += _chunks(prefills, budget, long_prefill_tokens, others_wait)
    assert sum([count for _, count in plan]) <= token_budget, "a step stays within its budget"
    return plan


def _chunks(
    prefills: list[tuple[Request, int]], budget: int, long_tokens: int, others_wait: bool
) -> list[tuple[Request, int]]:
    if budget <= 0 or not prefills:
        return []
    eligible = len(prefills) + others_wait
    cap = max(long_tokens, budget // eligible) if eligible > 1 else budget
    counts: list[int] = []
    for _, remaining in prefills:
        counts.append(min(remaining, cap, budget))
        budget -= counts[-1]
    if not others_wait:
        for i, (_, remaining) in enumerate(prefills):
            more = min(remaining - counts[i], budget)
            counts[i] += more
            budget -= more
    return [(request, count) for (request, _), count in zip(prefills, counts, strict=True) if count]


def _chunks_in_turns(
    prefills: list[tuple[Request, int]], budget: int, long_tokens: int, others_wait: bool, turns: Turns
) -> list[tuple[Request, int]]:
    chunks: list[tuple[Request, int]] = []
    is_their_turn, parts = turns.parts(prefills)
    for part in parts:
        allowed = budget if is_their_turn else min(budget, long_tokens)
        theirs = _chunks(part, allowed, long_tokens, others_wait)
        budget -= sum([count for _, count in theirs])
        chunks += theirs
    return chunks


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of two token sequences."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def stop_reason(request: Request, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
    """Return why the token just appended ends the request, or None: end token, stop token, length (`stop-order`)."""
    sampling = request.sampling
    is_stop = (token_id in eos_token_ids and not sampling.ignore_eos) or token_id in sampling.stop_token_ids
    if is_stop and request.output_tokens >= sampling.min_tokens:
        return FinishReason.STOP
    if len(request.token_ids) >= request.token_limit:
        return FinishReason.LENGTH
    return None


STEPS_BEFORE_GROWTH: Final = 256
"""Steps that must fit before the budget is doubled: memory that another program used may be free again."""

log = get_logger("cuelight.scheduler")


class AdaptiveTokenBudget:
    """The owner of the token budget: `tokens` is the budget of the next step, `most` the configured one."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tokens = most
        self._fitted = 0

    def shrink(self, token_count: int) -> bool:
        """Halve the budget after a step of `token_count` tokens ran out of memory. Return False if it had one token."""
        if token_count <= 1:
            return False
        self.tokens = token_count // 2
        self._fitted = 0
        log.warning("out_of_memory", token_count=token_count, token_budget=self.tokens)
        return True

    def step_fitted(self) -> bool:
        """Count a finished step. Return whether the budget has grown."""
        if self.tokens == self.most:
            return False
        self._fitted += 1
        if self._fitted < STEPS_BEFORE_GROWTH:
            return False
        self.tokens, self._fitted = min(self.most, 2 * self.tokens), 0
        return True
