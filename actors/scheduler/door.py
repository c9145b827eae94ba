"""Whether anybody who waits may come in, who is tried next, and what keeps the others out."""

from __future__ import annotations

from collections.abc import Collection

from cuelight.actors.scheduler.deferred import DEFERRED_MAX, Deferred
from cuelight.actors.scheduler.planning import Limits
from cuelight.actors.scheduler.queue import Queue
from cuelight.actors.scheduler.tracked import Tracked


class Door:
    """Between those that wait and those that run."""

    def __init__(self, limits: Limits, waiting: Queue) -> None:
        self._limits = limits
        # A decode takes one token of the budget: more running requests than that could never all go on.
        self.running_max = min(limits.running_max, limits.token_budget)
        self._waiting = waiting
        self.deferred = Deferred()
        self._is_pool_exhausted = False

    def joined(self, request: Tracked) -> None:
        """It waits. If it is served before the one that did not fit, it may fit."""
        if self._is_pool_exhausted and self._waiting.head(1)[0] is request:
            self._is_pool_exhausted = False

    def refused(self, request: Tracked | None) -> None:
        """What is free does not suffice for this one, the next in line; None where it did for all that were tried."""
        self._is_pool_exhausted = request is not None

    def reopen(self, source: Tracked | None) -> None:
        """Try again whoever was refused, or set aside for what this one has computed or never will."""
        self._is_pool_exhausted = False
        self.deferred.reopen(source)

    def closed(self, running: Collection[Tracked]) -> str | None:
        """What keeps everybody out, whatever the next step is."""
        if len(running) >= self.running_max:
            return f"{len(running)} requests are running, as many as may"
        if self._is_pool_exhausted:
            return "the blocks that are free do not suffice for the next in line"
        if any(request.suspect for request in running):
            return "requests of a failed step run alone"
        if self.deferred.is_full:
            return f"{DEFERRED_MAX} requests wait for prefixes that are being computed"
        return None

    def obstacle(self, running: Collection[Tracked], token_budget: int) -> str | None:
        """What keeps everybody out of the next step, which has so many tokens left."""
        if (closed := self.closed(running)) is not None:
            return closed
        return None if token_budget > 0 else "the requests that run use the whole token budget"

    def usurpation(self, running: Collection[Tracked], token_capacity: int) -> tuple[Tracked, Tracked] | None:
        """Where all seats are taken, or the pool's slots: who may come in for its tenant's share, and who gives way."""
        seats_are_taken = len(running) >= self.running_max
        if not seats_are_taken and not self._is_pool_exhausted:
            return None
        if self.deferred.is_full or any(request.suspect for request in running):
            return None
        if seats_are_taken:
            return self._waiting.usurpation(running, self.running_max, lambda _: 1, self.deferred.__contains__)
        return self._waiting.usurpation(running, token_capacity, Tracked.slots, self.deferred.__contains__)

    def candidates(self, running: Collection[Tracked], now: float) -> list[Tracked]:
        """Those to try now: the head of the queue, as far as there are seats.

        Of a tenant whose running prompts fill what it may have of a step, there is none.
        """
        turns = self._waiting.turns(running, now)
        sated = self._waiting.sated(running, turns, self._limits.long_prefill_tokens) if turns is not None else ()
        seats = min(self.running_max - len(running), self._limits.admissions_tried_max)
        candidates: list[Tracked] = []
        for request in self._waiting.head(seats + len(self.deferred), without=sated):
            # A preempted request comes back only when its tokens in flight have arrived (rule 38).
            if request.pending or len(candidates) == seats:
                break
            if request not in self.deferred:  # set aside, so that it does not hold up those behind it (rule 9)
                candidates.append(request)
        return candidates
