"""Fault attribution: which request brought the executor down, from those that were with it each time it died.

A request is with it if a step in flight computes it. Whoever was, twice, runs alone until it has sampled some tokens;
then its next one is its own. A kill from outside says little: operators and the system's memory killer hit anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from cuelight.actors.scheduler.planning import Planned
from cuelight.actors.scheduler.tracked import Request
from cuelight.kernel import ExitCause, Terminated

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
