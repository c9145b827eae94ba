"""One planning round: what the next step computes, who may come in for it, and the blocks that both want."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from cuelight.actors.scheduler.allowance import AdaptiveTokenBudget
from cuelight.actors.scheduler.chronicle import Timeline
from cuelight.actors.scheduler.door import AdmissionGate
from cuelight.actors.scheduler.planning import StepLimits, plan_step
from cuelight.actors.scheduler.queue import Queue
from cuelight.actors.scheduler.tracked import Request
from cuelight.messages import cache

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
