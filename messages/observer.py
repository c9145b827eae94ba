"""What whoever opened the engine hears: readiness, and each owner's figures as they change."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Intake admits requests of up to `token_capacity` tokens from now on."""

    token_capacity: int


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The executor could not load the model; the engine cannot start."""

    error: str


class RequestFigures(msgspec.Struct, frozen=True, tag=True):
    """The scheduler's counts: requests by state now, the rest since the engine started.

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
    """The cache manager's counts. A free block is one that no request holds; it may still be cached.

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


ObserverMessage: TypeAlias = Ready | LoadFailed | RequestFigures | BlockFigures
