"""Admission: whether waiting requests may be admitted, which are tried next, and the obstacle if none may."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from cuelight.actors.scheduler.planning import AdaptiveTokenBudget, StepLimits, common_prefix, plan_step
from cuelight.actors.scheduler.queue import Queue
from cuelight.actors.scheduler.request import Request
from cuelight.actors.scheduler.timeline import Timeline
from cuelight.messages import cache


class AdmissionGate:
    """Decides whether waiting requests may be tried, and which ones."""

    def __init__(self, limits: StepLimits, budget: AdaptiveTokenBudget, waiting: Queue) -> None:
        self._limits = limits
        self._budget = budget
        self._waiting = waiting
        self.prefix_waiters = PrefixWaiters()
        # The free blocks do not suffice for this request. No other is admitted while it is the next in line.
        self._refused: Request | None = None
        self._changes_then = 0
        # Refused although another request was preempted for it. No other is preempted until blocks are given back.
        self._not_helped: Request | None = None
        self.holds_new_requests = False
        """Whether only requests that have run before may be admitted."""

    @property
    def running_max(self) -> int:
        """Largest number of requests that may run now; at most the token budget, as each decode takes a token."""
        return min(self._limits.running_max, self._budget.tokens)

    def refused(self, request: Request | None) -> None:
        """Store the request that the free blocks cannot hold; None if they hold every request that was tried."""
        self._refused = request
        self._changes_then = -1

    def make_no_more_room(self, request: Request) -> None:
        """Preempt no other request for this one: it was refused although one was preempted for it."""
        request.is_protected = False
        self._not_helped = request

    def reopen(self, source: Request | None) -> None:
        """Allow the refused request and deferred requests to be tried again, after a change in `source` or any other.

        A request stays deferred while its leader, `source` or another, has yet to compute the prefix they share.
        """
        self._refused = None
        if source is None or not source.running:
            self._not_helped = None
        self.prefix_waiters.reopen(source)

    def closed(self, running: Collection[Request], now: float) -> str | None:
        """Return the obstacle to admission that holds for any next step; None if there is no obstacle."""
        if len(running) >= self.running_max:
            return f"{len(running)} requests are running, the maximum"
        if self.holds_new_requests and not self._waiting.has_returning():
            return "another model is about to take over and will serve the requests that have not begun"
        if self._is_pool_exhausted(running, now):
            return "too few blocks are free for the next request in line"
        if any(request.suspect for request in running):
            return "requests of a failed step run alone"
        if self.prefix_waiters.is_full:
            return f"{DEFERRED_MAX} requests wait for prefixes that are being computed"
        return None

    def obstacle(self, running: Collection[Request], tokens_left: int, now: float) -> str | None:
        """Return the obstacle to admission for the next step, which has `tokens_left`; None without one."""
        if (closed := self.closed(running, now)) is not None:
            return closed
        return None if tokens_left > 0 else "the running requests use the whole token budget"

    def find_claim(
        self, running: Collection[Request], token_capacity: int, now: float
    ) -> tuple[Request, Request] | None:
        """Return a claimant for its tenant's share and its victim, if all places or all slots of the pool are taken."""
        if self.holds_new_requests:
            return None
        seats_are_taken = len(running) >= self.running_max
        if not seats_are_taken and not self._is_pool_exhausted(running, now):
            return None
        if self.prefix_waiters.is_full or any(request.suspect for request in running):
            return None
        if seats_are_taken:
            return self._waiting.find_claim(running, self.running_max, lambda _: 1, self._cannot_come)
        return self._waiting.find_claim(running, token_capacity, Request.slots, self._cannot_come)

    def candidates(self, running: Collection[Request], now: float) -> list[Request]:
        """Return the requests to try now: the head of the queue, up to the number that may still run."""
        seats = min(self.running_max - len(running), self._limits.admissions_tried_max)
        return self._next_in_line(seats, running, now)

    def _next_in_line(self, count: int, running: Collection[Request], now: float) -> list[Request]:
        """Return up to `count` requests in line, without tenants whose running prompts fill their part of a step."""
        turns = self._waiting.turns(running, now)
        without: Collection[str] = ()
        if turns is not None:
            without = self._waiting.saturated_tenants(running, turns, self._limits.long_prefill_tokens)
        following: list[Request] = []
        wanted = len(self._waiting) if self.holds_new_requests else count + len(self.prefix_waiters)
        for request in self._waiting.head(wanted, without=without):
            if self.holds_new_requests and not request.preemptions:
                continue
            # A preempted request is admitted only when its tokens in flight have arrived (rule `tokens-in-flight`).
            if request.pending or len(following) == count:
                break
            # A prefix waiter does not block the requests behind it (rule `head-of-line`).
            if request not in self.prefix_waiters:
                following.append(request)
        return following

    def _is_pool_exhausted(self, running: Collection[Request], now: float) -> bool:
        """Return whether the refused request is still the next in line: it may have left or been overtaken."""
        if self._refused is None:
            return False
        if self._waiting.is_fair or self._waiting.changes != self._changes_then:
            if self._next_in_line(1, running, now) != [self._refused]:
                return False
            self._changes_then = self._waiting.changes
        return True

    def _cannot_come(self, request: Request) -> bool:
        return request is self._not_helped or request in self.prefix_waiters


DEFERRED_MAX: Final = 256
"""Number of prefix waiters at which no request is tried: skipping them in the queue costs more with each."""


class PrefixWaiters:
    """Deferred requests, each with the running request whose prefix it waits for and the number of tokens they share.

    A request without such a leader waits until the next change. `generation` counts changes: blocks given back and
    prefixes computed.
    """

    def __init__(self) -> None:
        self._leaders: dict[Request, tuple[Request | None, int]] = {}
        self.generation = 0

    def __len__(self) -> int:
        return len(self._leaders)

    def __contains__(self, request: Request) -> bool:
        return request in self._leaders

    @property
    def is_full(self) -> bool:
        """Whether `DEFERRED_MAX` requests wait, so that no other is tried."""
        return len(self._leaders) >= DEFERRED_MAX

    def add(self, request: Request, running: Iterable[Request], block_size: int, *, is_stale: bool) -> bool:
        """Add a request, unless it has no leader and a change has happened since the answer (`is_stale`).

        Return whether it was added.
        """
        leader, shared = _leader(request, running, block_size)
        if leader is None and is_stale:
            return False
        self._leaders[request] = leader, shared
        return True

    def forget(self, request: Request) -> None:
        """Remove `request` from the prefix waiters."""
        self._leaders.pop(request, None)

    def reopen(self, source: Request | None) -> None:
        """Count a change. Remove requests without a leader, and those whose prefix `source` has or will not compute."""
        self.generation += 1
        if self._leaders:
            self._leaders = {
                request: (leader, shared)
                for request, (leader, shared) in self._leaders.items()
                if leader is not None and (leader is not source or (leader.running and leader.computed < shared))
            }


def _leader(request: Request, running: Iterable[Request], block_size: int) -> tuple[Request | None, int]:
    """Return the running request that is computing the longest prefix shared with `request`, and its length."""
    leader, shared = None, 0
    for other in running:
        # A request always computes its last token itself (rule `recompute-last`).
        ahead, end = other.computed, min(other.prefill_tokens, len(request.token_ids) - 1)
        if ahead >= end or other.salt != request.salt:
            continue
        # One comparison excludes most requests.
        if request.token_ids[ahead] == other.token_ids[ahead]:
            tokens = min(common_prefix(request.token_ids, other.token_ids), end)
            if other.request_id != request.sample_of:  # only whole blocks of another prompt can be reused
                tokens -= tokens % block_size
            if tokens > max(shared, ahead):
                leader, shared = other, tokens
    return leader, shared


NEXT_IN_LINE_WAIT: Final = "the next requests in line wait for prompts that are being computed, or for tokens in flight"


@dataclass(frozen=True)
class PlannedRound:
    """The tokens to compute of each request, the growths these need, and the requests to admit if blocks are free."""

    plan: list[tuple[Request, int]]
    growths: list[cache.Growth]
    admitted: list[Request]
    tokens_left: int
    """Budget tokens that the plan does not use."""


class AdmissionPlanner:
    """Decides rounds. Changes only the obstacles in the timeline."""

    def __init__(
        self,
        limits: StepLimits,
        budget: AdaptiveTokenBudget,
        waiting: Queue,
        gate: AdmissionGate,
        timeline: Timeline,
        now: Callable[[], float],
    ) -> None:
        self._limits = limits
        self._budget = budget
        self._waiting = waiting
        self._gate = gate
        self._timeline = timeline
        self._now = now

    def planned(self, running: Collection[Request], *, others_wait: bool) -> list[tuple[Request, int]]:
        """Plan a step of the running requests; `others_wait` if waiting requests could use part of the budget."""
        return plan_step(
            running,
            self._budget.tokens,
            self._limits.long_prefill_tokens,
            others_wait=others_wait,
            turns=lambda: self._waiting.turns(running, self._now()),
        )

    def has_tokens_left(self, running: Iterable[Request], without: Request) -> bool:
        """Return whether a step of all running requests but `without` leaves budget tokens."""
        others = [request for request in running if request is not without]
        return sum([count for _, count in self.planned(others, others_wait=True)]) < self._budget.tokens

    def next(self, running: Collection[Request], *, admit: bool, claimant: Request | None) -> PlannedRound:
        """Decide the next round. Waiting requests count only if they may be admitted.

        With a `claimant`, no other request is admitted: the victim might return in its place.
        """
        others_wait = admit and len(self._waiting) > 0 and self._gate.closed(running, self._now()) is None
        # A long prompt leaves tokens to waiting requests. It gets those that are left when blocks are granted.
        plan = self.planned(running, others_wait=others_wait)
        growths = [cache.Growth(r.request_id, r.scheduled + n) for r, n in plan if r.scheduled + n > r.capacity]
        tokens_left = self._budget.tokens - sum([count for _, count in plan])
        if claimant is not None:
            # The claimant is admitted even if the other tenants' new turns leave it no tokens in this step.
            return PlannedRound(plan, growths, [claimant], max(1, tokens_left))
        admitted = self._candidates(running, tokens_left) if admit else []
        if others_wait and not admitted:
            plan = self.planned(running, others_wait=False)
        return PlannedRound(plan, growths, admitted, tokens_left)

    def _candidates(self, running: Collection[Request], tokens_left: int) -> list[Request]:
        """Return the requests to try now. If there are none, store the obstacle in the timeline."""
        if not self._waiting:
            return []
        now = self._now()
        obstacle = self._gate.obstacle(running, tokens_left, now)
        candidates = [] if obstacle is not None else self._gate.candidates(running, now)
        if not candidates:
            self._timeline.obstacle(obstacle or NEXT_IN_LINE_WAIT, now)
        return candidates
