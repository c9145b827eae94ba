"""Load options, the limits derived from them, and the timing of load phases; shared by both decoders."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cuelight.actors.executor.host_memory import HostMemoryClaim, HostMemoryMapping

KV_BYTES_MAX_DEFAULT = 2 << 30
MEMORY_SHARE_DEFAULT = 0.25

GPU_FILES = tuple(map(Path, ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")))
"""Device files, at least one of which exists on a Linux machine with a GPU that torch exposes as CUDA.

Checking for them is immediate; importing torch to check takes seconds.
"""


class CannotLoad(Exception):
    """The model cannot be served with the options given; the message says why."""


@dataclass(frozen=True)
class LoadOptions:
    """The model folder, its precision, its device, and the size of the KV pool.

    `block_count` takes precedence over `kv_cache_bytes`. With neither, the pool on the CPU takes a quarter of the free
    memory, at most 2 GiB and, with the native decoder, at most the bytes of `pool_tokens` tokens; on CUDA it takes the
    part of `memory_fraction` that weights and steps leave free. `host_kv_cache_bytes` takes precedence over
    `host_block_count`. A step has at most `token_budget` tokens of at most `running_max` requests. `now` is the clock
    that times the load phases, in seconds. Compiled code is cached in `code_folder`, if given. `eager` disables
    compiling and graphs of the model; None decides by the device. `host_memory`, if given, is the claim on the memory
    that holds the blocks of the host tier.
    """

    folder: Path
    decoder: str
    dtype: str
    quantization: str | None
    device: str
    block_size: int
    block_count: int | None
    kv_cache_bytes: int | None
    eos_token_ids: tuple[int, ...]
    attention: str
    token_budget: int
    code_folder: Path | None
    now: Callable[[], float]
    host_block_count: int = 0
    host_kv_cache_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    pool_tokens: int | None = None
    running_max: int = 64
    memory_fraction: float = 0.9
    eager: bool | None = None
    host_memory: HostMemoryClaim | None = None

    def blocks(self, block_bytes: int, budget: int) -> int:
        """Return the number of blocks of the pool; by default as many as `budget` bytes hold. Raises CannotLoad."""
        if self.block_count is not None:
            return self.block_count
        budget = self.kv_cache_bytes or budget
        if budget // block_bytes < 2:
            raise CannotLoad(
                f"a KV cache of {budget} bytes is too small: it needs at least two blocks of {block_bytes} bytes each"
            )
        return budget // block_bytes

    def useful_budget(self, block_bytes: int) -> int:
        """Return the default bytes of a pool on the CPU: `cpu_budget()`, or less if `pool_tokens` need less."""
        if self.pool_tokens is None:
            return cpu_budget()
        return min(cpu_budget(), (1 + -(-self.pool_tokens // self.block_size)) * block_bytes)

    def host_blocks(self, block_bytes: int) -> int:
        """Return the number of blocks in host memory. Raises CannotLoad."""
        if self.host_kv_cache_bytes is None:
            return self.host_block_count
        if self.host_kv_cache_bytes < block_bytes:
            given = f"host_kv_cache_bytes={self.host_kv_cache_bytes} holds no block"
            raise CannotLoad(f"{given}: a block takes {block_bytes} bytes")
        return self.host_kv_cache_bytes // block_bytes

    def map_host_memory(self, byte_count: int, *how: object) -> HostMemoryMapping | None:
        """Map `byte_count` bytes of the claimed host memory; None without a claim or if the memory is unavailable.

        Contents of an earlier executor survive only if the model's files, the quantization, the block size and `how`,
        the layout of the keys and values, are the same.
        """
        if self.host_memory is None or not byte_count:
            return None
        files = [(file.name, file.stat()) for file in self.folder.iterdir() if file.is_file()]
        model = sorted([(name, status.st_size, status.st_mtime_ns) for name, status in files])
        return self.host_memory.open(byte_count, repr((self.folder, model, self.quantization, self.block_size, how)))


def may_have_gpu() -> bool:
    """Return whether this machine may have a GPU, without importing torch."""
    return sys.platform == "win32" or any(file.exists() for file in GPU_FILES)


def cpu_budget() -> int:
    """Return the default bytes of the pool on a CPU: a share of the free memory, up to a limit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(free * MEMORY_SHARE_DEFAULT), KV_BYTES_MAX_DEFAULT)


class LoadPhases:
    """Seconds spent in each named phase of loading, measured with the clock that `timed_by` sets.

    `begun` is called with the name of each phase as the phase begins.
    """

    def __init__(self, begun: Callable[[str], object] = lambda _: None) -> None:
        self._begun = begun
        self._now: Callable[[], float] = lambda: 0.0
        self.seconds: dict[str, float] = {}

    def timed_by(self, now: Callable[[], float]) -> Self:
        """Set the clock, in seconds, and return self."""
        self._now = now
        return self

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block as a phase; the times of phases with the same name add up."""
        self._begun(name)
        began = self._now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - began

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Make these the `current_phases` within the block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def facts(self) -> dict[str, float]:
        """Return the seconds of each phase, as fields of a log event."""
        return phase_facts(self.seconds.items())


_current: ContextVar[LoadPhases] = ContextVar("phases")


def current_phases(now: Callable[[], float]) -> LoadPhases:
    """Return the phases of the load in progress in this context, timed by `now`; new ones outside any load."""
    return _current.get(LoadPhases()).timed_by(now)


def phase_facts(seconds: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the seconds of each phase, rounded to milliseconds, as fields of a log event."""
    return {f"{name.lower().replace(' ', '_')}_seconds": round(spent, 3) for name, spent in seconds}
