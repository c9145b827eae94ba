"""Memory of a device, and the number of blocks in the KV pool.

On the CPU the pool has a budget of bytes. On CUDA it takes the memory that weights and steps leave free: the largest
step is run and its peak is measured. The module also measures the cost of moving blocks to host memory.
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
"""The null block, and a block for a request."""


GRAPH_BYTES = 4 << 20
"""Bytes that the driver takes for each graph, beside the memory that all graphs share."""


class DeviceMemory(Protocol):
    """A device's memory, in bytes. With `is_measured` it reports the peak of a step, by which the pool is sized."""

    is_measured: bool

    def total(self) -> int:
        """Return the memory of the device in total."""

    def free(self) -> int:
        """Return the memory that no process uses."""

    def allocated(self) -> int:
        """Return the memory that this process's tensors use now."""

    def peak(self) -> int:
        """Return the most memory that this process's tensors have used since `begin`."""

    def begin(self) -> None:
        """Release the allocator's cached memory, and reset the peak."""


class CudaMemory:
    """Memory of a CUDA device, as reported by the driver and torch's allocator."""

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
    """Memory of the machine. The memory of tensors is not measured."""

    is_measured = False

    def total(self) -> int:
        """As `DeviceMemory.total`."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def free(self) -> int:
        """Return the available memory, including caches that the system would reclaim."""
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
        """Do nothing: no peak is measured."""


def memory_of(device: torch.device) -> DeviceMemory:
    """Return the memory of a device."""
    return CudaMemory(device) if device.type == "cuda" else SystemMemory()


@dataclass(frozen=True)
class MemoryBudget:
    """The use of a device's memory, in bytes.

    `used` is all memory in use before the pool is allocated, including that of other processes and the weights.
    `fraction` is the fraction of `total` that may be in use in total. `step` and `graphs` are reserved.
    """

    total: int
    fraction: float
    used: int
    weights: int
    step: int
    graphs: int

    @property
    def pool(self) -> int:
        """Bytes left for the pool; negative if the rest exceeds the budget."""
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
    """Run the largest step and measure its memory. All memory that tensors use before it counts as weights.

    `sampling` is the number of bytes used after the forward pass has released its memory. Graphs share the memory of
    the largest `decode` step; None means no graphs. Raises CannotLoad.
    """
    weights = memory.allocated()
    peak = max(_peak(memory, step), sampling)
    graphs = 0 if decode is None else _peak(memory, decode) + graph_count * GRAPH_BYTES
    memory.begin()
    total = memory.total()
    return MemoryBudget(total, fraction, total - memory.free(), weights, peak, graphs)


def _peak(memory: DeviceMemory, work: Callable[[], None]) -> int:
    """Return the peak memory of `work`, beyond the memory in use before it. Raises CannotLoad."""
    memory.begin()
    before = memory.allocated()
    try:
        work()
    except torch.OutOfMemoryError as error:
        total = memory.total()
        raise CannotLoad(
            f"the model does not fit: of {gib(total)} its weights take {gib(before)}, {gib(total - memory.free())} are "
            f"in use in total, and the largest step that token_budget allows needs more: {error}"
        ) from error
    return memory.peak() - before


def count_blocks(options: LoadOptions, block_bytes: int, budget: MemoryBudget | None) -> int:
    """Return the number of blocks of the pool: as the options say, or as many as fit. Raises CannotLoad.

    With a measured `budget`, the blocks fill it; with None, the options and the host's free memory decide.
    """
    if budget is None:
        return options.blocks(block_bytes, cpu_budget())
    if budget.pool // block_bytes < BLOCKS_MIN:
        left = f"{gib(max(budget.pool, 0))} are left for the KV cache, of which a block takes {block_bytes} bytes"
        raise CannotLoad(f"the model does not fit: {budget}; {left}")
    return budget.pool // block_bytes


def gib(count: int) -> str:
    """Format bytes as MiB or GiB."""
    return f"{count / (1 << 30):.2f} GiB" if count >= 10 << 20 else f"{count / (1 << 20):.2f} MiB"


TOKENS_MAX = 64
"""Tokens computed to measure the cost of recomputing, if the pool and the model's context hold as many."""

BLOCKS_MAX = 8
"""Blocks copied to measure the cost of moving; most preempted requests have at least as many."""

MOVES = 5


def measure_costs(
    pool: KVPool, host: HostPool, token_limit: int, prefill: Callable[[int], None], now: Callable[[], float]
) -> HostTier:
    """Measure the seconds to move a block to host memory and back, and to recompute a token.

    `prefill(n)` computes a row of n tokens, at most `token_limit`, in the pool's first blocks; `now` returns seconds.
    Blocks of the pool that were used are zeroed afterwards.
    """
    device = pool.keys[0].device
    token_count = min(TOKENS_MAX, token_limit, (pool.block_count - 1) * pool.block_size)
    count = min(BLOCKS_MAX, host.block_count, pool.block_count - 1)
    # In opposite orders, since adjacent blocks are copied in a single run, which is rare in use.
    kept, stored = range(count)[::-1], range(1, 1 + count)

    def move() -> None:
        host.save(stored, kept)
        host.load(kept, stored)

    move_seconds = _seconds(move, MOVES, device, now) / count
    # Once, since it takes long. On a busy machine moving blocks then merely looks better than it is.
    recompute_seconds = _seconds(lambda: prefill(token_count), 1, device, now) / token_count
    used = torch.arange(1, 1 + -(-token_count // pool.block_size), device=device)
    for layer in range(len(pool.keys)):
        pool.clear(layer, used)
    return HostTier(host.block_count, move_seconds, recompute_seconds)


def _seconds(work: Callable[[], None], times: int, device: torch.device, now: Callable[[], float]) -> float:
    """Return the median seconds of `work`, after a warm-up call."""
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
    """Block until all work queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
