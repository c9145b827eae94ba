"""The requests that wait, in the order in which a policy serves them. A long queue costs no more to join or leave."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from itertools import count
from operator import attrgetter
from typing import Final, TypeAlias

from cuelight.actors.scheduler.policy import INPUT_TOKEN_COST, LEEWAY_TOKENS, Policy, Rank, Turns
from cuelight.actors.scheduler.request import Request

_Place: TypeAlias = tuple[bool, Rank, int, Request]
"""Preempted requests (False) before the others, then by rank, which no two share; then the ticket it holds for."""


COUNTERS_MAX: Final = 1024
"""So many tenants are remembered before the first look at whom to forget."""

COUNTER_HIGH: Final = 1e6
"""Here a float still holds a token of the heaviest tenant, which counts a millionth, to a part in a thousand."""

ABOUT_SECONDS: Final = 60.0
ABOUT_MAX: Final = 64
"""A tenant is about for so long after its last request came, unless so many others came since."""

_tenant_of = attrgetter("service.tenant")


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
        self._waiting: dict[Request, int] = {}
        self._tickets = count(1)
        self.changes = 0
        """How often anybody has joined or left; where tenants are charged, their order also changes in between."""
        self._begin(policy)

    def _begin(self, policy: Policy) -> None:
        self._policy = policy
        self._lanes: dict[str, _Lane] = {}
        self._counters: dict[str, float] = {}
        self._counters_max = COUNTERS_MAX
        self._last_to_leave = ""
        # When the last request of each tenant that is about came, the latest last.
        self._came_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_fair(self) -> bool:
        """Whether tenants have lanes and are charged."""
        return self._policy.is_fair

    def has_returning(self) -> bool:
        """Whether any of them has run before."""
        return any(request.preemptions for request in self._waiting)

    def join(self, request: Request) -> None:
        """Wait from now on; one that was preempted before those of its lane that never ran."""
        assert request not in self._waiting, "a request waits once"
        self._waiting[request] = ticket = next(self._tickets)
        self.changes += 1
        tenant = self._tenant(request)
        self._see(tenant, request.arrived_at)
        lane = self._lanes.get(tenant)
        if lane is None:
            # With nobody waiting, the tenant that was served last says how far the others have come.
            present = list(self._lanes) or [self._last_to_leave]
            least = self._lowered(min(self._counters.get(other, 0.0) for other in present))
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), least)
            self._forget_tenants(least)
            lane = self._lanes[tenant] = _Lane()
        heapq.heappush(lane.places, (request.preemptions == 0, self._policy.rank(request), ticket, request))
        lane.length += 1

    def leave(self, request: Request) -> None:
        """Wait no longer."""
        del self._waiting[request]
        self.changes += 1
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

    def head(self, wanted: int, without: Container[str] = ()) -> list[Request]:
        """The next `wanted` requests in the order of service, as if each were served its prompt. They go on waiting.

        Passes over those of tenants in `without`.
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
        """The request's tenant was served so many tokens' worth."""
        if self._policy.is_fair:
            tenant = request.service.tenant
            self._counters[tenant] = self._counters.get(tenant, 0.0) + self._policy.cost(tenant, tokens)

    def charge_prompt(self, request: Request) -> None:
        """More of its prompt may have been computed: each token of it is charged once, however often that happens."""
        tokens = min(request.computed, request.prompt_tokens) - request.charged_tokens
        if tokens > 0:
            request.charged_tokens += tokens
            self.charge(request, INPUT_TOKEN_COST * tokens)

    def turns(self, running: Collection[Request], now: float) -> Turns | None:
        """How tenants share a step, where more than one is about.

        Only those that want prompts computed are compared: one that has received less and wants none keeps nobody's
        turn from coming.
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
        """Tenants whose turn it is not, and whose running prompts have so many tokens yet to be computed."""
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
        """Who of those that wait may take the place of whom of those that run, for the sake of their tenants' shares.

        `size` says how much of `total` a request holds, or would hold; those set aside cannot be let in. The one's
        tenant lacks its share and has not received more, beyond the leeway. Of the tenant that holds most, the last in
        rank gives way that is not protected, if that tenant still holds no less afterwards, each by its weight: so
        nobody can take back what it gave, and with one tenant alone nobody gives way.
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
        """Whether a tenant that waits holds less than its share, or, where its queue wants more than that, than half.

        Between tenants that could fill the machine alone, the order of admission does the rest without preempting.
        """
        share = total * self._policy.share(tenant, held)
        wanted = held[tenant] + size * self._lanes[tenant].length
        return held[tenant] < (share if wanted <= share else share / 2)

    def reorder(self, policy: Policy) -> None:
        """Serve by this policy from now on. Nobody is lost; whoever waited longest is still first among equals.

        From one fair policy to another, what tenants have received is remembered; new weights count from now on.
        """
        if policy.is_fair and self._policy.is_fair:
            self._policy = policy
            return
        waiting, self._waiting = self._waiting, {}
        self._begin(policy)
        for request in waiting:
            self.join(request)

    def victim(self, running: Iterable[Request]) -> Request:
        """Who of these loses its blocks first: of the tenant that has received most, the last in rank.

        Protected requests come after all others: they would only take their place back.
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

    def _see(self, tenant: str, arrived_at: float) -> None:
        self._came_at[tenant] = max(self._came_at.pop(tenant, 0.0), arrived_at)
        if len(self._came_at) > ABOUT_MAX:
            del self._came_at[next(iter(self._came_at))]

    def _lowered(self, least: float) -> float:
        """The same `least`, after taking it off every counter where it is so high that small charges would be lost."""
        if least <= COUNTER_HIGH:
            return least
        self._counters = {tenant: counter - least for tenant, counter in self._counters.items()}
        return 0.0

    def _forget_tenants(self, least: float) -> None:
        """Names of tenants are the clients' to choose. One that would be brought up to `least` needs no counter."""
        if len(self._counters) > self._counters_max:
            self._counters = {t: c for t, c in self._counters.items() if c >= least or t in self._lanes}
            self._counters_max = 2 * len(self._counters) + COUNTERS_MAX

    def _first(self, lane: _Lane) -> Request:
        while not self._holds(lane.places[0]):
            heapq.heappop(lane.places)
        return lane.places[0][3]

    def _holds(self, place: _Place) -> bool:
        """Whether whoever took this place still waits for it."""
        return self._waiting.get(place[3]) == place[2]

    def _tenant(self, request: Request) -> str:
        return request.service.tenant if self._policy.is_fair else ""
