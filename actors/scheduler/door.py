"""Whether anybody who waits may come in, who is tried next, and what keeps the others out."""

from __future__ import annotations

from collections.abc import Collection

from cuelight.actors.scheduler.allowance import AdaptiveTokenBudget
from cuelight.actors.scheduler.deferred import DEFERRED_MAX, PrefixWaiters
from cuelight.actors.scheduler.planning import StepLimits
from cuelight.actors.scheduler.queue import Queue
from cuelight.actors.scheduler.tracked import Request


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
        saturated_tenants = (
            self._waiting.saturated_tenants(running, turns, self._limits.long_prefill_tokens)
            if turns is not None
            else ()
        )
        following: list[Request] = []
        wanted = len(self._waiting) if self.holds_new_requests else count + len(self.prefix_waiters)
        for request in self._waiting.head(wanted, without=saturated_tenants):
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
