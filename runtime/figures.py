"""An engine's figures: requests and blocks at this moment, and totals that survive whoever counts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import msgspec

from cuelight.messages.observer import BlockFigures, RequestFigures

F = TypeVar("F", bound=msgspec.Struct)


@dataclass(frozen=True)
class EngineStats:
    """Requests and blocks now, totals since the start. A block that is only cached counts as free.

    Of `budget_tokens`, the token budgets of all steps, `scheduled_tokens` were used. Of `tokens_looked_up`, those of
    all admissions, those after a preemption too, `tokens_found` were cached.
    """

    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    evictions: int
    steps: int
    preemptions: int
    finished: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    scheduled_tokens: int
    budget_tokens: int
    tokens_looked_up: int
    tokens_found: int
    host_blocks_total: int
    host_blocks_used: int
    blocks_saved: int
    blocks_loaded: int
    blocks_forked: int


REQUEST_TOTALS: Final = (
    "steps",
    "preemptions",
    "finished",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "scheduled_tokens",
    "budget_tokens",
)
BLOCK_TOTALS: Final = (
    "evictions",
    "tokens_looked_up",
    "tokens_found",
    "blocks_saved",
    "blocks_loaded",
    "blocks_forked",
)


class _Counted(Generic[F]):
    """What one actor says, with the `totals` of its earlier lives on top."""

    def __init__(self, nothing: F, totals: tuple[str, ...]) -> None:
        self.latest = self._before = nothing
        self._totals = totals

    def hear(self, told: F) -> None:
        before = self._before
        sums: dict[str, int] = {name: getattr(before, name) + getattr(told, name) for name in self._totals}
        self.latest = msgspec.structs.replace(told, **sums)

    def life_over(self) -> None:
        self._before = self.latest


class Figures:
    """The latest figures of whoever counts requests and blocks."""

    def __init__(self) -> None:
        self._requests = _Counted(RequestFigures(), REQUEST_TOTALS)
        self._blocks = _Counted(BlockFigures(), BLOCK_TOTALS)

    def hear(self, told: RequestFigures | BlockFigures) -> None:
        """From an actor, about its present life."""
        if isinstance(told, RequestFigures):
            self._requests.hear(told)
        else:
            self._blocks.hear(told)

    def life_over(self, actor: str) -> None:
        """The next life of this actor counts from nothing. What this one had not said yet is not in the totals."""
        if actor == "scheduler":
            self._requests.life_over()
        elif actor == "cache":
            self._blocks.life_over()

    def clear(self) -> None:
        """Nothing runs, waits or holds blocks any more; the totals stay."""
        self._requests.latest = msgspec.structs.replace(self._requests.latest, running=0, waiting=0)
        blocks = self._blocks.latest
        self._blocks.latest = msgspec.structs.replace(blocks, blocks_free=blocks.blocks_total)

    def stats(self) -> EngineStats:
        """Of requests and blocks."""
        return _stats(self._requests.latest, self._blocks.latest)


def _stats(requests: RequestFigures, blocks: BlockFigures) -> EngineStats:
    return EngineStats(
        running=requests.running,
        waiting=requests.waiting,
        blocks_total=blocks.blocks_total,
        blocks_free=blocks.blocks_free,
        blocks_cached=blocks.blocks_cached,
        evictions=blocks.evictions,
        steps=requests.steps,
        preemptions=requests.preemptions,
        finished=requests.finished,
        prompt_tokens=requests.prompt_tokens,
        cached_tokens=requests.cached_tokens,
        output_tokens=requests.output_tokens,
        scheduled_tokens=requests.scheduled_tokens,
        budget_tokens=requests.budget_tokens,
        tokens_looked_up=blocks.tokens_looked_up,
        tokens_found=blocks.tokens_found,
        host_blocks_total=blocks.host_blocks_total,
        host_blocks_used=blocks.host_blocks_used,
        blocks_saved=blocks.blocks_saved,
        blocks_loaded=blocks.blocks_loaded,
        blocks_forked=blocks.blocks_forked,
    )


NO_STATS: Final = _stats(RequestFigures(), BlockFigures())
"""Before the start."""
