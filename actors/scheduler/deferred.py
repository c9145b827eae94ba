"""Who is set aside until a running request has computed the prefix that both share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cuelight.actors.scheduler.planning import common_prefix
from cuelight.actors.scheduler.tracked import Request

DEFERRED_MAX: Final = 256
"""Beyond so many, nobody is tried until they are admitted: looking past them for others costs more each time."""


class PrefixWaiters:
    """Requests that are set aside, each with the running request whose prefix it waits for and the tokens they share.

    Without a running request, one waits until the next change. `generation` counts changes: blocks that were given back
    and prefixes that were computed.
    """

    def __init__(self) -> None:
        self._leaders: dict[Request, tuple[Request | None, int]] = {}
        self.generation = 0

    def __len__(self) -> int:
        return len(self._leaders)

    def __contains__(self, request: Request) -> bool:
        return request in self._leaders

    @property
    def is_full(self) -> bool:
        """Whether so many wait that nobody else is to be tried."""
        return len(self._leaders) >= DEFERRED_MAX

    def add(self, request: Request, running: Iterable[Request], block_size: int, *, is_stale: bool) -> bool:
        """Set it aside, unless what it was to wait for has been computed or given up since (`is_stale`)."""
        leader, shared = _leader(request, running, block_size)
        if leader is None and is_stale:
            return False
        self._leaders[request] = leader, shared
        return True

    def forget(self, request: Request) -> None:
        """Remove `request` from the prefix waiters."""
        self._leaders.pop(request, None)

    def reopen(self, source: Request | None) -> None:
        """Count a change, and let go the requests that wait for what `source` has computed, or never will."""
        self.generation += 1
        if self._leaders:
            self._leaders = {
                request: (leader, shared)
                for request, (leader, shared) in self._leaders.items()
                if leader is not None and (leader is not source or (leader.running and leader.computed < shared))
            }


def _leader(request: Request, running: Iterable[Request], block_size: int) -> tuple[Request | None, int]:
    """Who is computing most of what this request shares with anyone, and how many tokens that are."""
    leader, shared = None, 0
    for other in running:
        # Its last token it computes itself, whoever else has (rule `recompute-last`).
        ahead, end = other.computed, min(other.prefill_tokens, len(request.token_ids) - 1)
        if ahead >= end or other.salt != request.salt:
            continue
        # Most have nothing in common there, which one look tells.
        if request.token_ids[ahead] == other.token_ids[ahead]:
            tokens = min(common_prefix(request.token_ids, other.token_ids), end)
            if other.request_id != request.sample_of:  # of which only whole blocks can be found
                tokens -= tokens % block_size
            if tokens > max(shared, ahead):
                leader, shared = other, tokens
    return leader, shared
