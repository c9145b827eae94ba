"""What it costs to keep blocks in host memory, and what to compute them again: measured once, on the idle device."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from cuelight.actors.executor.model.host import HostPool
from cuelight.actors.executor.model.pool import KVPool
from cuelight.messages.request import HostTier

TOKENS_MAX = 64
"""So many tokens are computed at once, where the pool and the model's context have room for them."""

BLOCKS_MAX = 8
"""So many blocks are copied at once: few requests lose fewer."""

MOVES = 5


def measure_costs(
    pool: KVPool, host: HostPool, token_limit: int, prefill: Callable[[int], None], now: Callable[[], float]
) -> HostTier:
    """Move blocks, and compute some; all of them are zeros again afterwards.

    `prefill(n)` computes a row of n tokens, at most `token_limit`, in the pool's first blocks; `now` gives seconds.
    """
    device = pool.keys[0].device
    token_count = min(TOKENS_MAX, token_limit, (pool.block_count - 1) * pool.block_size)
    count = min(BLOCKS_MAX, host.block_count, pool.block_count - 1)
    # In opposite orders: blocks that are neighbours in both memories are copied at once, which is rare in use.
    kept, stored = range(count)[::-1], range(1, 1 + count)

    def move() -> None:
        host.save(stored, kept)
        host.load(kept, stored)

    move_seconds = _seconds(move, MOVES, device, now) / count
    # Once, since it takes long: a machine that is busy elsewhere makes moving look better than it is, no more.
    recompute_seconds = _seconds(lambda: prefill(token_count), 1, device, now) / token_count
    used = torch.arange(1, 1 + -(-token_count // pool.block_size), device=device)
    for layer in range(len(pool.keys)):
        pool.clear(layer, used)
    return HostTier(host.block_count, move_seconds, recompute_seconds)


def _seconds(work: Callable[[], None], times: int, device: torch.device, now: Callable[[], float]) -> float:
    """The median time it takes, once it is warm."""
    work()
    measured: list[float] = []
    for _ in range(times):
        _wait(device)
        began = now()
        work()
        _wait(device)
        measured.append(now() - began)
    return median(measured)


def _wait(device: torch.device) -> None:
    """Until all that is queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
