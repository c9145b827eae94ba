"""Whom to serve next, and who loses blocks first: four policies as plain functions behind one type.

A policy ranks requests: the smallest rank is served first, and the largest among those that run loses its blocks first.
A rank is fixed when a request joins the queue, so that a queue is a heap. Aging does not contradict that: what waiting
is worth grows alike for all, so the order of two requests that wait never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from cuelight.actors.scheduler.request import Request
from cuelight.messages.scheduler import SetPolicy

Rank: TypeAlias = tuple[float, int]
"""What counts, then the order of arrival."""

INPUT_TOKEN_COST: Final = 1.0
OUTPUT_TOKEN_COST: Final = 2.0
"""What a tenant's counter is charged for a token, after the paper below: an output token needs a step of its own."""

LEEWAY_TOKENS: Final = 1024.0
"""What a tenant may have received more than another and still come before it, within a step and for seats and blocks.

Whoever comes back starts level with the others: without this, its first prompt would cost it its turn.
"""


@dataclass(frozen=True)
class Policy:
    """`rank` orders requests. Where `is_fair`, each tenant has a lane of its own, and lanes are served by counter."""

    rank: Callable[[Request], Rank]
    is_fair: bool = False
    weights: Mapping[str, float] = field(default_factory=dict)

    def cost(self, tenant: str, tokens: float) -> float:
        """What so many tokens' worth of service adds to the tenant's counter."""
        return tokens / self.weights.get(tenant, 1.0)

    def share(self, tenant: str, tenants: Iterable[str]) -> float:
        """Its part of what these tenants have between them, itself among them: from 0 to 1."""
        return self.weights.get(tenant, 1.0) / sum([self.weights.get(each, 1.0) for each in tenants])


@dataclass(frozen=True)
class Turns:
    """How the prompts of several tenants share a step.

    It is the turn of each tenant that has received little and has nobody waiting: all that it wants, it can have in a
    step or two. One with a queue of its own gains nothing by long steps, and makes the others wait for their end.
    """

    policy: Policy
    counters: Mapping[str, float]
    least: float
    """The counter of the one that has received least, of the tenants that want prompts computed."""
    queued: Collection[str]
    """Those with requests that wait."""

    def parts(self, prefills: Iterable[tuple[Request, int]]) -> tuple[bool, list[list[tuple[Request, int]]]]:
        """Whether it is anybody's turn, and the requests of each such tenant, else of all, in order of the counters."""
        parts: dict[str, list[tuple[Request, int]]] = {}
        for request, remaining in prefills:
            parts.setdefault(request.service.tenant, []).append((request, remaining))
        order = sorted(parts, key=lambda tenant: self.counters.get(tenant, 0.0))
        first = [tenant for tenant in order if self.is_turn(tenant)]
        return bool(first), [parts[tenant] for tenant in first or order]

    def is_turn(self, tenant: str) -> bool:
        """Whether it is this tenant's turn."""
        leeway = self.policy.cost(tenant, LEEWAY_TOKENS)
        return tenant not in self.queued and self.counters.get(tenant, 0.0) <= self.least + leeway


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
