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
    """The scheduler's counts: requests by state now, the rest since the engine started."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    preemptions: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class BlockFigures(msgspec.Struct, frozen=True, tag=True):
    """The cache manager's counts. A free block is one that no request holds; it may still be cached."""

    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    evictions: int = 0


ObserverMessage: TypeAlias = Ready | LoadFailed | RequestFigures | BlockFigures
