"""Policies: which request is served next, and which is preempted first.

A policy ranks requests: the smallest rank is served first, and the largest among the running requests is preempted
first. A rank is fixed when a request joins the queue, so that the queue can be a heap. Aging keeps it fixed: waiting
counts alike for all requests, so the order of two waiting requests never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from cuelight.actors.scheduler.request import Request
from cuelight.messages.scheduler import SetPolicy

Rank: TypeAlias = tuple[float, int]
"""The policy's value, then the order of arrival."""

INPUT_TOKEN_COST: Final = 1.0
OUTPUT_TOKEN_COST: Final = 2.0
"""Charge per token to a tenant's counter, after the paper below: each output token needs a step of its own."""

LEEWAY_TOKENS: Final = 1024.0
"""Service that a tenant may have received beyond another and still precede it, within a step and for admission.

A tenant that returns starts level with the others: without the leeway, its first prompt would end its turn.
"""


@dataclass(frozen=True)
class Policy:
    """An order of requests, `rank`. If `is_fair`, each tenant has a lane, and lanes are served by counter."""

    rank: Callable[[Request], Rank]
    is_fair: bool = False
    weights: Mapping[str, float] = field(default_factory=dict)

    def cost(self, tenant: str, tokens: float) -> float:
        """Return the amount that `tokens` of service add to the tenant's counter."""
        return tokens / self.weights.get(tenant, 1.0)

    def share(self, tenant: str, tenants: Iterable[str]) -> float:
        """Return the share of `tenant`, from 0 to 1, among `tenants`, which include it."""
        return self.weights.get(tenant, 1.0) / sum([self.weights.get(each, 1.0) for each in tenants])


@dataclass(frozen=True)
class Turns:
    """How the prompts of several tenants share a step.

    A tenant has a turn if it has received little and none of its requests wait: a step or two computes all its prompts.
    A tenant with waiting requests gains nothing from long steps, and the others would wait for these steps to end.
    """

    policy: Policy
    counters: Mapping[str, float]
    least: float
    """The lowest counter among the tenants with prompts to compute."""
    queued: Collection[str]
    """Tenants with waiting requests."""

    def parts(self, prefills: Iterable[tuple[Request, int]]) -> tuple[bool, list[list[tuple[Request, int]]]]:
        """Return whether any tenant has a turn, and the prompts by tenant in order of the counters.

        The prompts are those of the tenants with a turn, or of all tenants if none has one.
        """
        parts: dict[str, list[tuple[Request, int]]] = {}
        for request, remaining in prefills:
            parts.setdefault(request.service.tenant, []).append((request, remaining))
        order = sorted(parts, key=lambda tenant: self.counters.get(tenant, 0.0))
        first = [tenant for tenant in order if self.is_turn(tenant)]
        return bool(first), [parts[tenant] for tenant in first or order]

    def is_turn(self, tenant: str) -> bool:
        """Return whether this tenant has a turn."""
        leeway = self.policy.cost(tenant, LEEWAY_TOKENS)
        return tenant not in self.queued and self.counters.get(tenant, 0.0) <= self.least + leeway


def policy_of(chosen: SetPolicy) -> Policy:
    """Return the policy that a valid message names."""
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
    raise AssertionError(f"unknown policy {chosen.name!r}")
