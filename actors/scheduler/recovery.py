"""Recovery after the executor or the cache manager is lost, and attribution of the executor's deaths.

`is_from_outside` tells a kill by an operator from a crash; `attribute_crash` finds the request at fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from cuelight.actors.scheduler.outbox import Peers
from cuelight.actors.scheduler.planning import Planned
from cuelight.actors.scheduler.request import Request
from cuelight.kernel import ExitCause, Terminated
from cuelight.messages import observer


class RecoveryTracker:
    """The time from a loss to the first step after it, and the executor's deaths in a row without a step."""

    def __init__(self, peers: Peers, restarts_max: int) -> None:
        self._observer = peers.observer
        self._kill_executor = peers.kill_executor
        self._restarts_max = restarts_max
        self._lost_at: float | None = None
        self._ready_at = 0.0
        self._load_seconds = 0.0
        self._deaths = 0
        self._has_given_up = False

    def replaced(self, peers: Peers) -> None:
        """Count the deaths of the executor that has taken over, from 0."""
        self._kill_executor = peers.kill_executor
        self._deaths = 0

    def lost(self, reason: str, now: float) -> None:
        """Report that the contents of all blocks were lost."""
        if self._lost_at is None:
            self._lost_at = self._ready_at = now
            self._load_seconds = 0.0
        self._observer.tell(observer.Recovering(reason))

    def died(self, reason: str, *, is_explained: bool) -> None:
        """Count a death of the executor, or restart the count if the death `is_explained`; give up above the limit."""
        self._deaths = 0 if is_explained else self._deaths + 1
        if self._deaths > self._restarts_max:
            self.give_up(f"the executor died {self._deaths} times in a row without a finished step; last: {reason}")

    def give_up(self, reason: str) -> None:
        """Report once that no more requests are served."""
        if not self._has_given_up:
            self._has_given_up = True
            self._observer.tell(observer.GaveUp(reason))

    def ready(self, load_seconds: float, now: float) -> None:
        """Note that an executor is ready. If it survived the loss, only the time since then counts as its load time."""
        self._ready_at = now
        self._load_seconds = min(load_seconds, now - self._lost_at) if self._lost_at is not None else 0.0

    def advanced(self, now: float) -> None:
        """Note that a step has finished: restart the count of deaths and settle."""
        self._deaths = 0
        self.settle(now)

    def settle(self, now: float) -> None:
        """End the recovery and report its duration, if one is in progress."""
        if self._lost_at is not None:
            start_seconds = max(0.0, self._ready_at - self._lost_at - self._load_seconds)
            self._observer.tell(observer.Recovered(start_seconds, self._load_seconds, now - self._ready_at))
            self._lost_at = None

    def kill(self, reason: str) -> bool:
        """Kill the executor. Return False if it cannot be killed."""
        if self._kill_executor is None:
            return False
        self._kill_executor(reason)
        return True


CRASHES_BEFORE_ALONE: Final = 2
"""Deaths of the executor with a request in flight after which the request runs alone."""

KILLS_ALONE_MAX: Final = 3
"""Kills from outside, each while a request ran alone, after which the deaths are attributed to the request."""

TOKENS_UNTIL_CLEARED: Final = 2
"""Tokens that a request samples after a death before it is no longer suspected."""

SIGNALS_FROM_OUTSIDE: Final = frozenset({"SIGKILL", "SIGTERM"})
"""Sent by an operator, or by the system when memory is short. Other signals mostly come from the process itself."""


def is_from_outside(death: Terminated, scheduler: str) -> bool:
    """Return whether the executor was killed from outside: not by its own computation, nor by the named scheduler."""
    match death.cause:
        case ExitCause.KILLED:
            return death.killed_by != scheduler
        case ExitCause.SIGNALED:
            return death.killed_by in SIGNALS_FROM_OUTSIDE
    return False


def attribute_crash(present: Iterable[Request], *, from_outside: bool) -> Request | None:
    """Return the request in flight that the executor's death is attributed to, or None, and update the suspicions."""
    suspects = list(dict.fromkeys(present))
    for request in suspects:
        request.crashes += 1
        request.sampled_since_crash = 0
        request.suspect = request.suspect or request.crashes >= CRASHES_BEFORE_ALONE
    if len(suspects) != 1 or suspects[0].crashes <= CRASHES_BEFORE_ALONE:
        return None
    (alone,) = suspects
    if not from_outside:
        return alone
    alone.kills_alone += 1
    return alone if alone.kills_alone >= KILLS_ALONE_MAX else None


def may_be_in_flight(plan: Sequence[tuple[Request, int]], steps: Iterable[Sequence[Planned]]) -> bool:
    """Return whether a step may be in flight beside `steps`: a request that runs alone is alone in all of them."""
    firsts = [plan[0][0], *[step[0][0] for step in steps]]  # a request that runs alone is the only one of its step
    if any(each.suspect and each.crashes >= CRASHES_BEFORE_ALONE for each in firsts):
        return len(set(firsts)) == 1
    return True


def count_sampled(request: Request) -> None:
    """Count a sampled token. After `TOKENS_UNTIL_CLEARED`, `request` is no longer suspected of earlier crashes."""
    request.has_failed = False
    if not request.crashes:
        request.suspect = False
        return
    request.sampled_since_crash += 1
    if request.sampled_since_crash >= TOKENS_UNTIL_CLEARED:
        request.crashes = request.kills_alone = 0
        request.suspect = False
