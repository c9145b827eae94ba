"""Whom to serve next, and who loses blocks first: four policies as plain functions behind one type.

A policy ranks requests: the smallest rank is served first, and the largest among those that run loses its blocks first.
A rank is fixed when a request joins the queue, so that a queue is a heap. Aging does not contradict that: what waiting
is worth grows alike for all, so the order of two requests that wait never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from cuelight.actors.scheduler.tracked import Tracked
from cuelight.messages.scheduler import SetPolicy

Rank: TypeAlias = tuple[float, int]
"""What counts, then the order of arrival."""

INPUT_TOKEN_COST: Final = 1.0
OUTPUT_TOKEN_COST: Final = 2.0
"""What a tenant's counter is charged for a token, after the paper below: an output token needs a step of its own."""


@dataclass(frozen=True)
class Policy:
    """`rank` orders requests. Where `is_fair`, each tenant has a lane of its own, and lanes are served by counter."""

    rank: Callable[[Tracked], Rank]
    is_fair: bool = False
    weights: Mapping[str, float] = field(default_factory=dict)

    def cost(self, tenant: str, tokens: float) -> float:
        """What so many tokens' worth of service adds to the tenant's counter."""
        return tokens / self.weights.get(tenant, 1.0)


def policy_of(chosen: SetPolicy) -> Policy:
    """The policy that a valid message names."""
    match chosen.name:
        case "fcfs":
            return Policy(lambda request: (0.0, request.number))
        case "priority":
            aging = chosen.aging_seconds
            return Policy(lambda request: (request.arrived_at - request.service.priority * aging, request.number))
        case "deadline":
            return Policy(lambda request: (request.deadline, request.number))
        case "fair":
            # The virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024).
            return Policy(lambda request: (0.0, request.number), is_fair=True, weights=dict(chosen.weights))
    raise AssertionError(f"no policy is called {chosen.name}")
