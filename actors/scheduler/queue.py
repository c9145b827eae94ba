"""The requests that wait, in the order in which a policy serves them. A long queue costs no more to join or leave."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import count
from typing import Final, TypeAlias

from cuelight.actors.scheduler.policy import INPUT_TOKEN_COST, Policy, Rank
from cuelight.actors.scheduler.tracked import Tracked

_Place: TypeAlias = tuple[bool, Rank, int, Tracked]
"""Preempted requests (False) before the others, then by rank, which no two share; then the ticket it holds for."""


COUNTERS_MAX: Final = 1024
"""So many tenants are remembered before the first look at whom to forget."""


class _Lane:
    """The places of one lane, a heap, with those of requests that have left; `length` counts the others."""

    __slots__ = ("length", "places")

    def __init__(self) -> None:
        self.places: list[_Place] = []
        self.length = 0


class Queue:
    """Lanes of waiting requests: one lane, or one a tenant where the policy is fair.

    A request that leaves out of turn is forgotten at once, and its place is skipped when it comes up. Of a lane that
    is served by counter, the counter says what its tenant has received; a tenant that was away starts no lower than
    those who waited meanwhile.
    """

    def __init__(self, policy: Policy) -> None:
        self._waiting: dict[Tracked, int] = {}
        self._tickets = count(1)
        self._begin(policy)

    def _begin(self, policy: Policy) -> None:
        self._policy = policy
        self._lanes: dict[str, _Lane] = {}
        self._counters: dict[str, float] = {}
        self._counters_max = COUNTERS_MAX
        self._last_to_leave = ""

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, request: Tracked) -> None:
        """Wait from now on; one that was preempted before those of its lane that never ran."""
        assert request not in self._waiting, "a request waits once"
        self._waiting[request] = ticket = next(self._tickets)
        tenant = self._tenant(request)
        lane = self._lanes.get(tenant)
        if lane is None:
            # With nobody waiting, the tenant that was served last says how far the others have come.
            present = list(self._lanes) or [self._last_to_leave]
            least = min(self._counters.get(other, 0.0) for other in present)
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), least)
            self._forget_tenants(least)
            lane = self._lanes[tenant] = _Lane()
        heapq.heappush(lane.places, (request.preemptions == 0, self._policy.rank(request), ticket, request))
        lane.length += 1

    def leave(self, request: Tracked) -> None:
        """Wait no longer."""
        del self._waiting[request]
        tenant = self._tenant(request)
        lane = self._lanes[tenant]
        lane.length -= 1
        if not lane.length:
            del self._lanes[tenant]
            self._last_to_leave = tenant
        elif len(lane.places) > 2 * lane.length + 64:
            # Those who left must not pile up behind a head that waits for long.
            lane.places = [place for place in lane.places if self._holds(place)]
            heapq.heapify(lane.places)

    def head(self, wanted: int) -> list[Tracked]:
        """The next `wanted` requests in the order of service, as if each were served its prompt. They go on waiting."""
        heads: list[Tracked] = []
        order = [(self._counters[tenant], tenant) for tenant in self._lanes]
        heapq.heapify(order)
        seen: list[tuple[list[_Place], _Place]] = []
        while order and len(heads) < wanted:
            counter, tenant = order[0]
            places = self._lanes[tenant].places
            while places and not self._holds(places[0]):
                heapq.heappop(places)
            if not places:
                heapq.heappop(order)
                continue
            place = heapq.heappop(places)
            seen.append((places, place))
            heads.append(place[3])
            cost = self._policy.cost(tenant, INPUT_TOKEN_COST * len(place[3].token_ids))
            heapq.heapreplace(order, (counter + cost, tenant))
        for places, place in seen:
            heapq.heappush(places, place)
        return heads

    def charge(self, request: Tracked, tokens: float) -> None:
        """The request's tenant was served so many tokens' worth."""
        if self._policy.is_fair:
            tenant = request.service.tenant
            self._counters[tenant] = self._counters.get(tenant, 0.0) + self._policy.cost(tenant, tokens)

    def reorder(self, policy: Policy) -> None:
        """Serve by this policy from now on. Nobody is lost; whoever waited longest is still first among equals."""
        waiting, self._waiting = self._waiting, {}
        self._begin(policy)
        for request in waiting:
            self.join(request)

    def victim(self, running: Iterable[Tracked]) -> Tracked:
        """Who of these loses its blocks first: of the tenant that has received most, the last in rank."""
        return max(running, key=lambda each: (self._counters.get(self._tenant(each), 0.0), self._policy.rank(each)))

    def _forget_tenants(self, least: float) -> None:
        """Names of tenants are the clients' to choose. One that would be brought up to `least` needs no counter."""
        if len(self._counters) > self._counters_max:
            self._counters = {t: c for t, c in self._counters.items() if c >= least or t in self._lanes}
            self._counters_max = 2 * len(self._counters) + COUNTERS_MAX

    def _holds(self, place: _Place) -> bool:
        """Whether whoever took this place still waits for it."""
        return self._waiting.get(place[3]) == place[2]

    def _tenant(self, request: Tracked) -> str:
        return request.service.tenant if self._policy.is_fair else ""
