"""Whether anybody who waits may come in, who is tried next, and what keeps the others out."""

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
    """Between those that wait and those that run."""

    def __init__(self, limits: StepLimits, budget: AdaptiveTokenBudget, waiting: Queue) -> None:
        self._limits = limits
        self._budget = budget
        self._waiting = waiting
        self.prefix_waiters = PrefixWaiters()
        # What is free does not suffice for this one. It shuts the door for as long as it is the next in line.
        self._refused: Request | None = None
        self._changes_then = 0
        # Another one gave way to it, and still there was no room: nobody else does until one of those that run is gone.
        self._not_helped: Request | None = None
        self.holds_new_requests = False
        """Whether only those may come in that have been in before."""

    @property
    def running_max(self) -> int:
        """The most requests that may run now. A decode takes a token: more than a step has could never all go on."""
        return min(self._limits.running_max, self._budget.tokens)

    def refused(self, request: Request | None) -> None:
        """What is free does not suffice for this one; None where it did for all that were tried."""
        self._refused = request
        self._changes_then = -1

    def make_no_more_room(self, request: Request) -> None:
        """It was refused though others gave way to it, and no other one can."""
        request.is_protected = False
        self._not_helped = request

    def reopen(self, source: Request | None) -> None:
        """Try again whoever was refused, or set aside for what this one has computed or never will."""
        self._refused = None
        if source is None or not source.running:
            self._not_helped = None
        self.prefix_waiters.reopen(source)

    def closed(self, running: Collection[Request], now: float) -> str | None:
        """What keeps everybody out, whatever the next step is."""
        if len(running) >= self.running_max:
            return f"{len(running)} requests are running, as many as may"
        if self.holds_new_requests and not self._waiting.has_returning():
            return "another model is about to take over, and serves whoever has not begun"
        if self._is_pool_exhausted(running, now):
            return "the blocks that are free do not suffice for the next in line"
        if any(request.suspect for request in running):
            return "requests of a failed step run alone"
        if self.prefix_waiters.is_full:
            return f"{DEFERRED_MAX} requests wait for prefixes that are being computed"
        return None

    def obstacle(self, running: Collection[Request], tokens_left: int, now: float) -> str | None:
        """What keeps everybody out of the next step, which has so many tokens left."""
        if (closed := self.closed(running, now)) is not None:
            return closed
        return None if tokens_left > 0 else "the requests that run use the whole token budget"

    def find_claim(
        self, running: Collection[Request], token_capacity: int, now: float
    ) -> tuple[Request, Request] | None:
        """Where all seats are taken, or the pool's slots: who may come in for its tenant's share, and who gives way."""
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
        """Those to try now: the head of the queue, as far as there are seats."""
        seats = min(self.running_max - len(running), self._limits.admissions_tried_max)
        return self._next_in_line(seats, running, now)

    def _next_in_line(self, count: int, running: Collection[Request], now: float) -> list[Request]:
        """Of a tenant whose running prompts fill what it may have of a step, there is none."""
        turns = self._waiting.turns(running, now)
        without: Collection[str] = ()
        if turns is not None:
            without = self._waiting.saturated_tenants(running, turns, self._limits.long_prefill_tokens)
        following: list[Request] = []
        wanted = len(self._waiting) if self.holds_new_requests else count + len(self.prefix_waiters)
        for request in self._waiting.head(wanted, without=without):
            if self.holds_new_requests and not request.preemptions:
                continue
            # A preempted request comes back only when its tokens in flight have arrived (rule `tokens-in-flight`).
            if request.pending or len(following) == count:
                break
            if (
                request not in self.prefix_waiters
            ):  # set aside, so that it does not hold up those behind it (rule `head-of-line`)
                following.append(request)
        return following

    def _is_pool_exhausted(self, running: Collection[Request], now: float) -> bool:
        """Whether who was refused is still the next: it may have left, and others may have come before it."""
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
"""Beyond so many, nobody is tried until they are admitted: looking past them for others costs more each time."""


class PrefixWaiters:
    """Requests that are set aside, each with the running request whose prefix it waits for and the tokens they share.

    Without a running request, one waits until the next change. `generation` counts changes: blocks that were given back
    and prefixes that were computed.
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
        """Whether so many wait that nobody else is to be tried."""
        return len(self._leaders) >= DEFERRED_MAX

    def add(self, request: Request, running: Iterable[Request], block_size: int, *, is_stale: bool) -> bool:
        """Set it aside, unless what it was to wait for has been computed or given up since (`is_stale`)."""
        leader, shared = _leader(request, running, block_size)
        if leader is None and is_stale:
            return False
        self._leaders[request] = leader, shared
        return True

    def forget(self, request: Request) -> None:
        """Remove `request` from the prefix waiters."""
        self._leaders.pop(request, None)

    def reopen(self, source: Request | None) -> None:
        """Count a change, and let go the requests that wait for what `source` has computed, or never will."""
        self.generation += 1
        if self._leaders:
            self._leaders = {
                request: (leader, shared)
                for request, (leader, shared) in self._leaders.items()
                if leader is not None and (leader is not source or (leader.running and leader.computed < shared))
            }


def _leader(request: Request, running: Iterable[Request], block_size: int) -> tuple[Request | None, int]:
    """Who is computing most of what this request shares with anyone, and how many tokens that are."""
    leader, shared = None, 0
    for other in running:
        # Its last token it computes itself, whoever else has (rule `recompute-last`).
        ahead, end = other.computed, min(other.prefill_tokens, len(request.token_ids) - 1)
        if ahead >= end or other.salt != request.salt:
            continue
        # Most have nothing in common there, which one look tells.
        if request.token_ids[ahead] == other.token_ids[ahead]:
            tokens = min(common_prefix(request.token_ids, other.token_ids), end)
            if other.request_id != request.sample_of:  # of which only whole blocks can be found
                tokens -= tokens % block_size
            if tokens > max(shared, ahead):
                leader, shared = other, tokens
    return leader, shared


NEXT_IN_LINE_WAIT: Final = "the next in line wait for prompts that are being computed, or for tokens in flight"


@dataclass(frozen=True)
class PlannedRound:
    """So many tokens of each request, which want these growths first; who is let in if there are blocks for it."""

    plan: list[tuple[Request, int]]
    growths: list[cache.Growth]
    admitted: list[Request]
    tokens_left: int
    """Tokens of the budget that the plan does not use."""


class AdmissionPlanner:
    """Decides rounds. Changes nothing but the obstacles in the timeline."""

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
        """What a step of these computes; `others_wait` for a part of it."""
        return plan_step(
            running,
            self._budget.tokens,
            self._limits.long_prefill_tokens,
            others_wait=others_wait,
            turns=lambda: self._waiting.turns(running, self._now()),
        )

    def has_tokens_left(self, running: Iterable[Request], without: Request) -> bool:
        """Whether a step of these, but for one, leaves a token to others."""
        others = [request for request in running if request is not without]
        return sum([count for _, count in self.planned(others, others_wait=True)]) < self._budget.tokens

    def next(self, running: Collection[Request], *, admit: bool, claimant: Request | None) -> PlannedRound:
        """Decide the next round. Waiting requests count only if they may be admitted.

        With a `claimant`, no other request is admitted: its victim might come back in its place.
        """
        others_wait = admit and len(self._waiting) > 0 and self._gate.closed(running, self._now()) is None
        # A long prompt leaves room for those that wait; what they do not take it gets when blocks are granted.
        plan = self.planned(running, others_wait=others_wait)
        growths = [cache.Growth(r.request_id, r.scheduled + n) for r, n in plan if r.scheduled + n > r.capacity]
        tokens_left = self._budget.tokens - sum([count for _, count in plan])
        if claimant is not None:
            # It is let in even if the others' new turns leave this step nothing for it.
            return PlannedRound(plan, growths, [claimant], max(1, tokens_left))
        admitted = self._candidates(running, tokens_left) if admit else []
        if others_wait and not admitted:
            plan = self.planned(running, others_wait=False)
        return PlannedRound(plan, growths, admitted, tokens_left)

    def _candidates(self, running: Collection[Request], tokens_left: int) -> list[Request]:
        """Who is tried now, if anybody may come in."""
        if not self._waiting:
            return []
        now = self._now()
        obstacle = self._gate.obstacle(running, tokens_left, now)
        candidates = [] if obstacle is not None else self._gate.candidates(running, now)
        if not candidates:
            self._timeline.obstacle(obstacle or NEXT_IN_LINE_WAIT, now)
        return candidates
