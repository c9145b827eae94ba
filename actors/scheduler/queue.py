"""The waiting requests in a policy's order of service. Joining and leaving stay cheap in a long queue.

Also chooses the running request to preempt: `victim` for want of blocks, `find_claim` for a tenant's share.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from itertools import count
from operator import attrgetter
from typing import Final, TypeAlias

from cuelight.actors.scheduler.policy import INPUT_TOKEN_COST, LEEWAY_TOKENS, Policy, Rank, Turns
from cuelight.actors.scheduler.request import Request

_Place: TypeAlias = tuple[bool, Rank, int, Request]
"""False if the request was preempted, so that it sorts first; its rank, which is unique; its ticket; the request."""


COUNTERS_MAX: Final = 1024
"""Number of tenants' counters beyond which the first search for counters to drop takes place."""

COUNTER_HIGH: Final = 1e6
"""Counter above which all are lowered. Here a float still resolves the smallest charge, 1e-6, to a part in 1,000."""

ABOUT_SECONDS: Final = 60.0
ABOUT_MAX: Final = 64
"""A tenant is present for `ABOUT_SECONDS` after its last arrival, unless `ABOUT_MAX` others arrived since."""

_tenant_of = attrgetter("service.tenant")


class _Lane:
    """A heap of places, some of requests that have left; `length` counts the requests that wait."""

    __slots__ = ("length", "places")

    def __init__(self) -> None:
        self.places: list[_Place] = []
        self.length = 0


class Queue:
    """Lanes of waiting requests: one lane, or one a tenant where the policy is fair.

    A request that leaves out of order is forgotten at once; its place is skipped when it comes to the head. Lanes of a
    fair policy are served by the tenants' counters of received service. A tenant that returns starts at the lowest
    counter of the waiting tenants or above.
    """

    def __init__(self, policy: Policy) -> None:
        self._waiting: dict[Request, int] = {}
        self._tickets = count(1)
        self.changes = 0
        """How often a request has joined or left. Under a fair policy, charges also change the order."""
        self._begin(policy)

    def _begin(self, policy: Policy) -> None:
        self._policy = policy
        self._lanes: dict[str, _Lane] = {}
        self._counters: dict[str, float] = {}
        self._counters_max = COUNTERS_MAX
        self._last_to_leave = ""
        # When the last request of each present tenant arrived, the latest last.
        self._came_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_fair(self) -> bool:
        """Whether each tenant has a lane and is charged for service."""
        return self._policy.is_fair

    def has_returning(self) -> bool:
        """Return whether a waiting request has run before."""
        return any(request.preemptions for request in self._waiting)

    def join(self, request: Request) -> None:
        """Add a request. A preempted request goes before those of its lane that have never run."""
        assert request not in self._waiting, "a request waits once"
        self._waiting[request] = ticket = next(self._tickets)
        self.changes += 1
        tenant = self._tenant(request)
        self._note_arrival(tenant, request.arrived_at)
        lane = self._lanes.get(tenant)
        if lane is None:
            # If no tenant waits, the counter of the tenant that left last stands for those of the others.
            present = list(self._lanes) or [self._last_to_leave]
            least = self._lowered(min(self._counters.get(other, 0.0) for other in present))
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), least)
            self._forget_tenants(least)
            lane = self._lanes[tenant] = _Lane()
        heapq.heappush(lane.places, (request.preemptions == 0, self._policy.rank(request), ticket, request))
        lane.length += 1

    def leave(self, request: Request) -> None:
        """Remove a waiting request."""
        del self._waiting[request]
        self.changes += 1
        tenant = self._tenant(request)
        lane = self._lanes[tenant]
        lane.length -= 1
        if not lane.length:
            del self._lanes[tenant]
            self._last_to_leave = tenant
        elif len(lane.places) > 2 * lane.length + 64:
            # Places of requests that left must not accumulate behind a head that waits for long.
            lane.places = [place for place in lane.places if self._holds(place)]
            heapq.heapify(lane.places)

    def head(self, wanted: int, without: Container[str] = ()) -> list[Request]:
        """Return the next `wanted` requests in the order of service, as if each prompt were charged. They stay queued.

        Requests of the tenants in `without` are passed over.
        """
        heads: list[Request] = []
        order = [(self._counters[tenant], tenant) for tenant in self._lanes if tenant not in without]
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

    def charge(self, request: Request, tokens: float) -> None:
        """Charge the request's tenant for `tokens` of service, if the policy is fair."""
        if self._policy.is_fair:
            tenant = request.service.tenant
            self._counters[tenant] = self._counters.get(tenant, 0.0) + self._policy.cost(tenant, tokens)

    def charge_prompt(self, request: Request) -> None:
        """Charge the tenant for newly computed prompt tokens. Recomputed tokens are not charged again."""
        tokens = min(request.computed, request.prompt_tokens) - request.charged_tokens
        if tokens > 0:
            request.charged_tokens += tokens
            self.charge(request, INPUT_TOKEN_COST * tokens)

    def turns(self, running: Collection[Request], now: float) -> Turns | None:
        """Return how tenants share a step; None if the policy is not fair or fewer than two tenants are present.

        Only the counters of tenants with prompts to compute are compared: the counter of a tenant without any must not
        end the turn of another.
        """
        if not self._policy.is_fair:
            return None
        while self._came_at and (oldest := next(iter(self._came_at.items())))[1] < now - ABOUT_SECONDS:
            del self._came_at[oldest[0]]
        about = {*self._came_at, *self._lanes, *map(_tenant_of, running)}
        if len(about) <= 1:
            return None
        prefilling = [_tenant_of(request) for request in running if request.scheduled < request.prefill_tokens]
        least = min([self._counters.get(tenant, 0.0) for tenant in [*self._lanes, *prefilling]], default=0.0)
        return Turns(self._policy, self._counters, least, self._lanes.keys())

    def saturated_tenants(self, running: Iterable[Request], turns: Turns, prefill_tokens: int) -> set[str]:
        """Return tenants without a turn whose running prompts have at least `prefill_tokens` left to compute."""
        left: dict[str, int] = {}
        for request in running:
            if request.scheduled < request.prefill_tokens:
                tenant = request.service.tenant
                left[tenant] = left.get(tenant, 0) + request.prefill_tokens - request.scheduled
        return {tenant for tenant, tokens in left.items() if tokens >= prefill_tokens and not turns.is_turn(tenant)}

    def find_claim(
        self,
        running: Collection[Request],
        total: float,
        size: Callable[[Request], float],
        is_aside: Callable[[Request], bool] = lambda _: False,
    ) -> tuple[Request, Request] | None:
        """Return a waiting claimant and the running victim whose place it may take for its tenant's share, or None.

        `size` is the part of `total` that a request holds or would hold. A claimant that `is_aside` cannot be admitted.
        The claimant's tenant lacks its share and has received no more than the victim's, leeway included. The victim is
        the last in rank of the tenant that holds most, without protected requests. By weight, the victim's tenant must
        still hold no less afterwards, so that it cannot claim the place back. A single tenant has no victims.
        """
        if not self._policy.is_fair or not self._lanes:
            return None
        held: dict[str, float] = dict.fromkeys([*self._lanes, *map(_tenant_of, running)], 0.0)
        if len(held) == 1:
            return None
        for request in running:
            held[request.service.tenant] += size(request)
        cost = self._policy.cost
        least = min(self._lanes, key=lambda tenant: (cost(tenant, held[tenant]), self._counters[tenant]))
        most = max(held, key=lambda tenant: cost(tenant, held[tenant]))
        claimant = self._first(self._lanes[least])
        if claimant.pending or is_aside(claimant) or not self._lacks(least, held, total, size(claimant)):
            return None
        if self._counters[least] > self._counters.get(most, 0.0) + cost(least, LEEWAY_TOKENS):
            return None
        theirs = [each for each in running if each.service.tenant == most and not each.is_protected]
        victim = max(theirs, key=self._policy.rank, default=None)
        if victim is None or cost(most, held[most] - size(victim)) < cost(least, held[least] + size(claimant)):
            return None
        return claimant, victim

    def _lacks(self, tenant: str, held: Mapping[str, float], total: float, size: float) -> bool:
        """Return whether a waiting tenant holds less than its share, or than half of it if its queue wants more.

        Between tenants that could each use `total` alone, the order of admission balances the rest without preemption.
        """
        share = total * self._policy.share(tenant, held)
        wanted = held[tenant] + size * self._lanes[tenant].length
        return held[tenant] < (share if wanted <= share else share / 2)

    def reorder(self, policy: Policy) -> None:
        """Replace the policy. Every request stays; requests of equal rank keep their order.

        From one fair policy to another, the counters are kept; new weights apply to later charges.
        """
        if policy.is_fair and self._policy.is_fair:
            self._policy = policy
            return
        waiting, self._waiting = self._waiting, {}
        self._begin(policy)
        for request in waiting:
            self.join(request)

    def victim(self, running: Iterable[Request]) -> Request:
        """Return the running request to preempt first: the last in rank of the tenant that has received most.

        Under a fair policy, protected requests come after all others: they would only claim their place back.
        """
        is_fair, counters = self._policy.is_fair, self._counters
        return max(
            running,
            key=lambda each: (
                not (is_fair and each.is_protected),
                counters.get(self._tenant(each), 0.0),
                self._policy.rank(each),
            ),
        )

    def _note_arrival(self, tenant: str, arrived_at: float) -> None:
        self._came_at[tenant] = max(self._came_at.pop(tenant, 0.0), arrived_at)
        if len(self._came_at) > ABOUT_MAX:
            del self._came_at[next(iter(self._came_at))]

    def _lowered(self, least: float) -> float:
        """Return `least`, or 0 after subtracting it from every counter if it is above `COUNTER_HIGH`."""
        if least <= COUNTER_HIGH:
            return least
        self._counters = {tenant: counter - least for tenant, counter in self._counters.items()}
        return 0.0

    def _forget_tenants(self, least: float) -> None:
        """Drop counters below `least`, which `join` would raise to it. Clients may name any number of tenants."""
        if len(self._counters) > self._counters_max:
            self._counters = {t: c for t, c in self._counters.items() if c >= least or t in self._lanes}
            self._counters_max = 2 * len(self._counters) + COUNTERS_MAX

    def _first(self, lane: _Lane) -> Request:
        while not self._holds(lane.places[0]):
            heapq.heappop(lane.places)
        return lane.places[0][3]

    def _holds(self, place: _Place) -> bool:
        """Return whether the request that took this place still waits."""
        return self._waiting.get(place[3]) == place[2]

    def _tenant(self, request: Request) -> str:
        return request.service.tenant if self._policy.is_fair else ""
