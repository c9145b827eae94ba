"""The next step of the scheduler's work: what it wants of the cache manager, and what it asks of the executor.

One round is Reserve → Granted → ExecuteStep, or ExecuteStep alone when no blocks are wanted. Up to `steps_in_flight`
steps run or wait at the executor, so planning hides behind the device's work.
"""

from __future__ import annotations

from cuelight.actors.scheduler import blame
from cuelight.actors.scheduler.tracked import Tracked
from cuelight.actors.scheduler.workload import CACHE, EXECUTOR, Workload, token_capacity
from cuelight.kernel import get_logger
from cuelight.messages import cache
from cuelight.messages.request import FinishReason, RequestId
from cuelight.messages.scheduler import Grant, Granted

log = get_logger("cuelight.scheduler")


class NextStep:
    """Decodes first, then prefill, under one token budget; whom to serve next and whom to preempt is the policy's.

    Nothing is planned while there is no pool, nor before the work is open.
    """

    def __init__(self, work: Workload) -> None:
        self._work = work
        self._now = work.now
        self._requests = work.requests
        self._waiting = work.waiting
        self._running = work.running
        self._door = work.door
        self._flights = work.flights
        self._outbox = work.outbox
        self._chronicle = work.chronicle
        self._reservation = work.reservation
        self._doubts = work.doubts
        self._rounds = work.rounds

    def plan(self, *, admit: bool) -> None:
        """Send the next step, or first ask for the blocks it wants."""
        running = self._running.values()
        while self._work.is_serving and self._reservation.asked is None and self._flights.has_room:
            usurper = self._usurp() if admit else None
            following = self._rounds.next(running, admit=admit, usurper=usurper)
            if following.growths or following.admitted:
                self._doubts[CACHE].asked(self._now())
                self._reservation.ask(following, self._running, self._door.deferred.news, self._flights.made)
            elif following.plan and blame.may_fly(following.plan, self._flights):
                self._execute(following.plan)
            else:
                return

    def _usurp(self) -> Tracked | None:
        """Who takes the place of another one for its tenant's share: the other one is preempted (one a round)."""
        pair = self._usurpation()
        if pair is None or not self._rounds.has_tokens_left(self._running.values(), without=pair[1]):
            return None
        usurper, victim = pair
        usurper.is_sheltered = True
        self._work.preempt(victim, f"tenant {usurper.service.tenant!r} has less than its share")
        self._outbox.flush_released()
        return usurper

    def _usurpation(self) -> tuple[Tracked, Tracked] | None:
        if self._work.pool is None:
            return None
        return self._door.usurpation(self._running.values(), token_capacity(self._work.pool), self._now())

    def _execute(self, plan: list[tuple[Tracked, int]]) -> None:
        token_count = sum([count for _, count in plan])
        self._outbox.counts["scheduled_tokens"] += token_count
        self._outbox.counts["budget_tokens"] += self._work.budget.most
        self._doubts[EXECUTOR].asked(self._now(), token_count)
        self._flights.send(plan)

    def granted(self, granted: Granted) -> None:
        """Blocks are there, or are not."""
        if (asked := self._reservation.answered(granted)) is None:
            return
        self._doubts[CACHE].answered(self._now())
        self._flights.copy(granted.copies, granted.round)
        for grant in granted.grants:
            self._take(grant, asked[grant.request_id])
        is_stale = self._door.deferred.news != self._reservation.news
        for request_id in granted.deferred:
            self._defer(request_id, is_stale=is_stale)
        short = [r for i in granted.refused if (r := self._requests.get(i)) and r.incarnation == asked[i]]
        if any(request.running for request in short):
            self._work.preempt(self._waiting.victim(self._running.values()), "another one needed blocks to go on")
            self._outbox.flush_released()
            # Whoever was just evicted must not be let in again by the same round (rule `running-first`).
            self.plan(admit=False)
            return
        self._door.refused(short[0] if short and not is_stale else None)
        if short and self._usurpation() is not None:
            self.plan(admit=True)
            return
        if short and short[0].is_sheltered and not is_stale:
            self._door.gave_way_in_vain(short[0])
        # If all that were tried have been set aside, the next in line are tried before they lose their turn.
        if short or not granted.deferred or self._reservation.courted - set(granted.deferred):
            self._run_what_fits()
        if short and not is_stale and not self._running and not self._flights:
            # Nothing runs, so every block is free, and still it does not fit: it never will (rule `liveness`).
            self._work.end(short[0], FinishReason.FAILED, "the request does not fit the block pool")
            self._door.refused(None)  # for the next one the pool may do

    def _take(self, grant: Grant, incarnation: int) -> None:
        """Blocks are there for a request, if it still is."""
        request = self._requests.get(grant.request_id)
        if request is None or request.incarnation != incarnation:
            if grant.request_id in self._reservation.courted:
                # It ended while it waited, so nobody has released what it is given now.
                self._outbox.release(cache.Filled(grant.request_id, grant.cached_tokens, ()))
                self._door.reopen(None)
            return  # one that ended or lost its blocks while it ran was released behind our asking
        if not request.running:
            now = self._now()
            self._waiting.leave(request)
            self._running[request.request_id] = request
            self._chronicle.note(request, "admitted", f"{grant.cached_tokens} tokens were cached", now)
            self._chronicle.obstacle("", now)
            request.admit(grant.cached_tokens, now)
        request.extend(grant.block_ids, grant.token_capacity)

    def _defer(self, request_id: RequestId, *, is_stale: bool) -> None:
        """Set a request aside until what it shares with a running one is computed, if that is still to be done."""
        if (request := self._requests.get(request_id)) is None or self._work.pool is None:
            return
        request.is_sheltered = False
        if self._door.deferred.add(request, self._running.values(), self._work.pool.block_size, is_stale=is_stale):
            why = "a running request is computing the prefix they share"
            self._chronicle.note(request, "deferred", why, self._now())

    def _run_what_fits(self) -> None:
        plan = self._rounds.planned(self._running.values(), others_wait=False)
        plan = [(request, count) for request, count in plan if request.scheduled + count <= request.capacity]
        if plan and blame.may_fly(plan, self._flights):
            self._execute(plan)

    def see_that_something_moves(self) -> None:
        """Fail one request where work is left but no step runs and no blocks are asked for (rule `liveness`)."""
        while self._work.is_serving and self._requests and self._reservation.asked is None and not self._flights:
            stuck = next(iter(self._running.values()), None) or self._waiting.head(1)[0]
            obstacle = self._door.obstacle(self._running.values(), self._work.budget.tokens, self._now())
            why = obstacle or ("all wait for a prefix" if self._door.deferred else "no step can be planned")
            reason = f"nothing moves, and {len(self._requests)} requests are live: {why}"
            log.error("stalled", request_id=stuck.request_id, reason=reason, running=len(self._running))
            self._work.end(stuck, FinishReason.FAILED, reason)
            self._door.reopen(None)
            self._outbox.announce()
            self.plan(admit=True)
