"""What whoever opened the engine hears: readiness, and each owner's figures as they change."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from cuelight.messages.request import ExecutorId


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Intake admits requests of up to `token_capacity` tokens from now on. Told once in each life of intake.

    A new intake knows of no request: clients send again whatever has not ended.
    """

    token_capacity: int


class Loading(msgspec.Struct, frozen=True, tag=True):
    """The executor has come to this phase of its start."""

    phase: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The executor is there. It took so long, of which these phases are a part, by name."""

    seconds: float
    phases: tuple[tuple[str, float], ...]


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The executor could not load the model; the engine cannot start."""

    error: str


class Recovering(msgspec.Struct, frozen=True, tag=True):
    """The executor, the cache manager or the scheduler was lost, and with it what is in the blocks; requests wait until
    it is computed again.
    """

    reason: str


class Recovered(msgspec.Struct, frozen=True, tag=True):
    """The first step since is done, or there is nothing to compute. Seconds from the loss to a new executor, that it
    took to load, and to that step.
    """

    start_seconds: float
    load_seconds: float
    recompute_seconds: float


class GaveUp(msgspec.Struct, frozen=True, tag=True):
    """The executor has died too often without computing anything in between: nobody is served any more."""

    reason: str


class Switched(msgspec.Struct, frozen=True, tag=True):
    """This executor has taken over; the one before has nothing more to do."""

    executor_id: ExecutorId


class SwitchFailed(msgspec.Struct, frozen=True, tag=True):
    """This executor will not take over, and is needed no longer; the one before serves on.

    `is_mismatch`: a request that lives does not fit its model.
    """

    executor_id: ExecutorId
    reason: str
    is_mismatch: bool = False


class RequestFigures(msgspec.Struct, frozen=True, tag=True):
    """The scheduler's counts: requests by state now, the rest since its life began.

    Of `budget_tokens`, the token budgets of all steps, `scheduled_tokens` were used.
    """

    running: int = 0
    waiting: int = 0
    steps: int = 0
    preemptions: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    scheduled_tokens: int = 0
    budget_tokens: int = 0


class BlockFigures(msgspec.Struct, frozen=True, tag=True):
    """The cache manager's counts, totals since its life began. A free block is held by no request; it may be cached.

    Of `tokens_looked_up`, those of all requests when they were admitted, `tokens_found` were cached. Host memory has no
    blocks in all where using it would not pay. Blocks were saved there, loaded from there, and forked for a sample.
    """

    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    evictions: int = 0
    tokens_looked_up: int = 0
    tokens_found: int = 0
    host_blocks_total: int = 0
    host_blocks_used: int = 0
    blocks_saved: int = 0
    blocks_loaded: int = 0
    blocks_forked: int = 0


ObserverMessage: TypeAlias = (
    Ready | Loading | Loaded | LoadFailed | Recovering | Recovered | GaveUp | RequestFigures | BlockFigures
)
