"""What was lost with the executor or the cache manager, how long it takes to come back, and when it is hopeless."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from cuelight.actors.scheduler.outbox import Peers
from cuelight.actors.scheduler.planning import Planned
from cuelight.actors.scheduler.request import Request
from cuelight.kernel import ExitCause, Terminated
from cuelight.messages import observer


class RecoveryTracker:
    """From a loss to the first step after it. Deaths of the executor with no step in between are counted."""

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
        """Another executor has taken over, which answers for its own deaths alone."""
        self._kill_executor = peers.kill_executor
        self._deaths = 0

    def lost(self, reason: str, now: float) -> None:
        """Every block is gone."""
        if self._lost_at is None:
            self._lost_at = self._ready_at = now
            self._load_seconds = 0.0
        self._observer.tell(observer.Recovering(reason))

    def died(self, reason: str, *, is_explained: bool) -> None:
        """The executor's life is over; where that is explained, what brought it down will do so no more."""
        self._deaths = 0 if is_explained else self._deaths + 1
        if self._deaths > self._restarts_max:
            self.give_up(f"the executor has died {self._deaths} times and computed nothing in between; {reason}")

    def give_up(self, reason: str) -> None:
        """There is no hope."""
        if not self._has_given_up:
            self._has_given_up = True
            self._observer.tell(observer.GaveUp(reason))

    def ready(self, load_seconds: float, now: float) -> None:
        """There is an executor; one that outlived the loss has loaded before."""
        self._ready_at = now
        self._load_seconds = min(load_seconds, now - self._lost_at) if self._lost_at is not None else 0.0

    def advanced(self, now: float) -> None:
        """A step is done."""
        self._deaths = 0
        self.settle(now)

    def settle(self, now: float) -> None:
        """All is as before the loss, as far as anybody needs it."""
        if self._lost_at is not None:
            start_seconds = max(0.0, self._ready_at - self._lost_at - self._load_seconds)
            self._observer.tell(observer.Recovered(start_seconds, self._load_seconds, now - self._ready_at))
            self._lost_at = None

    def kill(self, reason: str) -> bool:
        """End the executor's life, if that can be done."""
        if self._kill_executor is None:
            return False
        self._kill_executor(reason)
        return True


CRASHES_BEFORE_ALONE: Final = 2
"""Present in so many deaths, a request runs alone."""

KILLS_ALONE_MAX: Final = 3
"""So many deaths by a kill from outside, each while it ran alone, are laid at its door."""

TOKENS_UNTIL_CLEARED: Final = 2
"""After so many more tokens a request has nothing to do with what happened before."""

SIGNALS_FROM_OUTSIDE: Final = frozenset({"SIGKILL", "SIGTERM"})
"""Sent by an operator or by the system when memory is short; other signals mostly come of what the process does."""


def is_from_outside(death: Terminated, scheduler: str) -> bool:
    """Whether the executor was killed from outside, and not by its own computation or by the scheduler of this name."""
    match death.cause:
        case ExitCause.KILLED:
            return death.killed_by != scheduler
        case ExitCause.SIGNALED:
            return death.killed_by in SIGNALS_FROM_OUTSIDE
    return False


def attribute_crash(present: Iterable[Request], *, from_outside: bool) -> Request | None:
    """Attribute the executor's death to one of the requests whose steps were in flight; None where that is open."""
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
    """Whether this step may go to the executor beside those that are there: who runs alone is alone in all of them."""
    firsts = [plan[0][0], *[step[0][0] for step in steps]]  # a request that runs alone is the only one of its step
    if any(each.suspect and each.crashes >= CRASHES_BEFORE_ALONE for each in firsts):
        return len(set(firsts)) == 1
    return True


def count_sampled(request: Request) -> None:
    """Count a sampled token: after enough of them, `request` is not suspected of earlier crashes any more."""
    request.has_failed = False
    if not request.crashes:
        request.suspect = False
        return
    request.sampled_since_crash += 1
    if request.sampled_since_crash >= TOKENS_UNTIL_CLEARED:
        request.crashes = request.kills_alone = 0
        request.suspect = False
