"""What an engine's actors tell their opener: the latest figures, whether it is ready, and how it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, assert_never

import msgspec

from cuelight import errors
from cuelight.health import HealthRecord
from cuelight.kernel import get_logger
from cuelight.messages import observer

log = get_logger("cuelight.engine")


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


@dataclass(frozen=True)
class Alarms:
    """Whom the board calls, within an actor's handler."""

    again_ready: Callable[[], object]
    """Intake is new, and knows of no request."""
    gave_up: Callable[[str], object]
    """The scheduler will serve nobody any more."""
    note: Callable[[str], object] = lambda _: None
    """What the executor's start has come to, for people."""


class Board:
    """The engine's own address: keeps the latest figures and wakes whoever waits for the start."""

    def __init__(self, health: HealthRecord, alarms: Alarms) -> None:
        self.requests = observer.RequestFigures()
        self.blocks = observer.BlockFigures()
        self.ready: asyncio.Future[observer.Ready] = asyncio.get_running_loop().create_future()
        self._health = health
        self._alarms = alarms
        self._cleared = False

    def tell(self, message: observer.ObserverMessage, /) -> None:
        """Hear from the actors."""
        if self._cleared:
            return
        match message:
            case observer.RequestFigures():
                self.requests = message
            case observer.BlockFigures():
                self.blocks = message
            case observer.Ready():
                self._hear_ready(message)
            case observer.Loading(phase):
                self._health.loading(phase)
                self._alarms.note(phase)
            case observer.LoadFailed(error):
                self.fail(errors.ModelUnavailable(error))
            case observer.Recovering(reason):
                log.warning("recovering", reason=reason)
                self._health.recovering(reason)
            case observer.Recovered():
                log.warning(
                    "recovered",
                    start_seconds=round(message.start_seconds, 3),
                    load_seconds=round(message.load_seconds, 3),
                    recompute_seconds=round(message.recompute_seconds, 3),
                )
                self._health.recovered(message)
            case observer.GaveUp(reason):
                self.fail(errors.ModelUnavailable(f"the executor does not come up: {reason}"))
                if self.ready.exception() is None:
                    self._alarms.gave_up(reason)
            case _:
                assert_never(message)

    def _hear_ready(self, ready: observer.Ready) -> None:
        if not self.ready.done():
            self.ready.set_result(ready)
        elif self.ready.exception() is None:
            self._alarms.again_ready()

    def fail(self, error: errors.EngineError) -> None:
        """The engine will not become ready."""
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # whoever waited may be gone, which is no reason to complain

    def clear(self) -> None:
        """Nothing runs, waits or holds blocks any more; the totals stay."""
        self._cleared = True
        self.requests = msgspec.structs.replace(self.requests, running=0, waiting=0)
        self.blocks = msgspec.structs.replace(self.blocks, blocks_free=self.blocks.blocks_total)

    def stats(self) -> EngineStats:
        """The figures, of requests and blocks."""
        return _stats(self.requests, self.blocks)


def _stats(requests: observer.RequestFigures, blocks: observer.BlockFigures) -> EngineStats:
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


NO_STATS: Final = _stats(observer.RequestFigures(), observer.BlockFigures())
"""Before the start."""
