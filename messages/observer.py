"""Messages to the engine's observer: readiness, recovery, and each actor's figures when they change."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from cuelight.messages.request import ExecutorId


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Intake admits requests of up to `token_capacity` tokens from now on. Sent once in each life of intake.

    A new intake has no requests: clients send again those that have not ended.
    """

    token_capacity: int


class Loading(msgspec.Struct, frozen=True, tag=True):
    """The executor has come to this phase of its start."""

    phase: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The executor is ready. `seconds` is its load time, `phases` the named parts of it."""

    seconds: float
    phases: tuple[tuple[str, float], ...]


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The executor could not load the model; the engine cannot start."""

    error: str


class Recovering(msgspec.Struct, frozen=True, tag=True):
    """The executor, the cache manager or the scheduler was lost, and with it the contents of the blocks. Requests wait
    until these are recomputed.
    """

    reason: str


class Recovered(msgspec.Struct, frozen=True, tag=True):
    """The first step after a loss has finished, or no requests are left. The seconds are from the loss to the start of
    a new executor, its load time, and from then to the end of that step.
    """

    start_seconds: float
    load_seconds: float
    recompute_seconds: float


class GaveUp(msgspec.Struct, frozen=True, tag=True):
    """The executor died too often in a row without a finished step: no more requests are served."""

    reason: str


class Switched(msgspec.Struct, frozen=True, tag=True):
    """This executor has taken over; the executor before is no longer needed."""

    executor_id: ExecutorId


class SwitchFailed(msgspec.Struct, frozen=True, tag=True):
    """This executor will not take over and is no longer needed; the active executor continues.

    `is_mismatch` if a live request does not fit its model.
    """

    executor_id: ExecutorId
    reason: str
    is_mismatch: bool = False


class RequestFigures(msgspec.Struct, frozen=True, tag=True):
    """The scheduler's counts: requests by state now, the rest since its life began.

    `budget_tokens` is the sum of the token budgets of all steps, `scheduled_tokens` the part that was used.
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

    `tokens_looked_up` counts the tokens of all requests at their admission, `tokens_found` those that were cached.
    `host_blocks_total` is 0 if using host memory would cost more than recomputing. `blocks_saved` and `blocks_loaded`
    count copies to and from host memory, `blocks_forked` copies for another sample of a prompt.
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
