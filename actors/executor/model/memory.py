"""How much memory there is, and how many blocks of keys and values the rest of it holds once a model is loaded.

On the CPU the pool has a budget of bytes. On a device with memory of its own it takes what a step leaves over: a step
as large as any is run, and its peak is measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

import torch

from cuelight.actors.executor.model.kv_pool import HostPool, KVPool
from cuelight.actors.executor.options import CannotLoad, LoadOptions, cpu_budget
from cuelight.messages.request import HostTier

MEMINFO = Path("/proc/meminfo")

BLOCKS_MIN = 2
"""The null block, and one for a request."""


GRAPH_BYTES = 4 << 20
"""What the driver takes for a graph of its own, beside the memory that all share."""


class DeviceMemory(Protocol):
    """A device's memory, in bytes. With `is_measured` it tells what steps take, and the pool's size goes by that."""

    is_measured: bool

    def total(self) -> int:
        """All that the device has."""

    def free(self) -> int:
        """What nobody has taken, in this process or another."""

    def allocated(self) -> int:
        """What this process's tensors take now."""

    def peak(self) -> int:
        """The most that they took since `begin`."""

    def begin(self) -> None:
        """Give back what is kept in reserve, and forget the peak so far."""


class CudaMemory:
    """As the driver and torch's allocator tell."""

    is_measured = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        """As `DeviceMemory.total`."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        """As `DeviceMemory.free`."""
        return torch.cuda.mem_get_info(self._device)[0]

    def allocated(self) -> int:
        """As `DeviceMemory.allocated`."""
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """As `DeviceMemory.peak`."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def begin(self) -> None:
        """As `DeviceMemory.begin`."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


class SystemMemory:
    """The machine's. What tensors take is not known there."""

    is_measured = False

    def total(self) -> int:
        """As `DeviceMemory.total`."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def free(self) -> int:
        """With what the system would give up for it."""
        try:
            lines = MEMINFO.read_text().splitlines()
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
        except (OSError, ValueError, IndexError, StopIteration):  # not Linux
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def allocated(self) -> int:
        """As `DeviceMemory.allocated`."""
        return 0

    def peak(self) -> int:
        """As `DeviceMemory.peak`."""
        return 0

    def begin(self) -> None:
        """Nothing to forget."""


def memory_of(device: torch.device) -> DeviceMemory:
    """The device's."""
    return CudaMemory(device) if device.type == "cuda" else SystemMemory()


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of a device's memory, and what takes them. `used` is all that is there before the pool, whoever's it is."""

    total: int
    fraction: float
    used: int
    weights: int
    step: int
    graphs: int

    @property
    def pool(self) -> int:
        """What is left for the pool; negative where the rest takes more than it may."""
        return int(self.total * self.fraction) - self.used - self.step - self.graphs

    def __str__(self) -> str:
        allowed = f"of {gib(self.total)} it may take {gib(int(self.total * self.fraction))} (memory_fraction)"
        taken = f"{gib(self.used)} are in use ({gib(self.weights)} by the weights)"
        return f"{allowed}; {taken}, a step takes up to {gib(self.step)} and graphs {gib(self.graphs)}"


def measure_memory(
    memory: DeviceMemory,
    fraction: float,
    step: Callable[[], None],
    sampling: int,
    decode: Callable[[], None] | None,
    graph_count: int,
) -> MemoryBudget:
    """Run the largest step and see what it takes; the weights are all that this process has on the device so far.

    `sampling` bytes follow a forward pass, after it has given its own back. Graphs share what the largest `decode` step
    takes; without one there are none. Raises CannotLoad.
    """
    weights = memory.allocated()
    peak = max(_peak(memory, step), sampling)
    graphs = 0 if decode is None else _peak(memory, decode) + graph_count * GRAPH_BYTES
    memory.begin()
    total = memory.total()
    return MemoryBudget(total, fraction, total - memory.free(), weights, peak, graphs)


def _peak(memory: DeviceMemory, work: Callable[[], None]) -> int:
    """What it takes beside what is there before."""
    memory.begin()
    before = memory.allocated()
    try:
        work()
    except torch.OutOfMemoryError as error:
        total = memory.total()
        raise CannotLoad(
            f"the model does not fit: of {gib(total)} its weights take {gib(before)}, {gib(total - memory.free())} are "
            f"in use in all, and a step as large as token_budget allows finds no room: {error}"
        ) from error
    return memory.peak() - before


def count_blocks(options: LoadOptions, block_bytes: int, budget: MemoryBudget | None) -> int:
    """Blocks of the pool: as many as are asked for, or as many as the budget has room for. Raises CannotLoad.

    Without a budget that was measured, the host's free memory decides.
    """
    if budget is None:
        return options.blocks(block_bytes, cpu_budget())
    if budget.pool // block_bytes < BLOCKS_MIN:
        left = f"{gib(max(budget.pool, 0))} are left for the KV cache, of which a block takes {block_bytes} bytes"
        raise CannotLoad(f"the model does not fit: {budget}; {left}")
    return budget.pool // block_bytes


def gib(count: int) -> str:
    """Bytes for people."""
    return f"{count / (1 << 30):.2f} GiB" if count >= 10 << 20 else f"{count / (1 << 20):.2f} MiB"


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
