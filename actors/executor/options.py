"""What is to be loaded, for whichever path loads it."""

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
"""A Linux machine with a GPU that torch calls CUDA has one of these; to ask torch takes seconds."""


class CannotLoad(Exception):
    """The model cannot be served as asked; the message says why."""


@dataclass(frozen=True)
class LoadOptions:
    """Which model, in which precision, with how large a pool.

    `block_count` wins over `kv_cache_bytes`; with neither, the pool takes a quarter of the CPU's free memory, at most
    2 GiB, and with the native decoder no more than `pool_tokens` need, or of CUDA's what everything else leaves over of
    `memory_fraction`. `host_kv_cache_bytes` wins over `host_block_count`. Steps have `token_budget` tokens of
    `running_max` requests at most. What takes how long is measured by `now`, in seconds. Compiled code is kept in
    `code_folder`, if there is one; `eager` compiles none of the model's own, None decides by the device. `host_memory`,
    if there is a claim, holds the blocks in host memory.
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
        """Blocks of the pool; by default as many as `budget` bytes hold. Raises CannotLoad."""
        if self.block_count is not None:
            return self.block_count
        budget = self.kv_cache_bytes or budget
        if budget // block_bytes < 2:
            raise CannotLoad(f"a KV cache of {budget} bytes holds no block: one takes {block_bytes} bytes")
        return budget // block_bytes

    def useful_budget(self, block_bytes: int) -> int:
        """Bytes for a pool on the CPU where nobody says how many."""
        if self.pool_tokens is None:
            return cpu_budget()
        return min(cpu_budget(), (1 + -(-self.pool_tokens // self.block_size)) * block_bytes)

    def host_blocks(self, block_bytes: int) -> int:
        """Blocks in host memory. Raises CannotLoad."""
        if self.host_kv_cache_bytes is None:
            return self.host_block_count
        if self.host_kv_cache_bytes < block_bytes:
            asked = f"{self.host_kv_cache_bytes} bytes of host memory hold no block"
            raise CannotLoad(f"{asked}: one takes {block_bytes} bytes")
        return self.host_kv_cache_bytes // block_bytes

    def map_host_memory(self, byte_count: int, *how: object) -> HostMemoryMapping | None:
        """Map host memory for keys and values of this model as it is now, stored as `how` says; None if unclaimed."""
        if self.host_memory is None or not byte_count:
            return None
        files = [(file.name, file.stat()) for file in self.folder.iterdir() if file.is_file()]
        model = sorted([(name, status.st_size, status.st_mtime_ns) for name, status in files])
        return self.host_memory.open(byte_count, repr((self.folder, model, self.quantization, self.block_size, how)))


def may_have_gpu() -> bool:
    """Whether it is worth asking torch for one."""
    return sys.platform == "win32" or any(file.exists() for file in GPU_FILES)


def cpu_budget() -> int:
    """Bytes of a CPU's memory for the pool, where nobody says how many."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(free * MEMORY_SHARE_DEFAULT), KV_BYTES_MAX_DEFAULT)


class LoadPhases:
    """Seconds by name, as a clock tells that is given by `timed_by`; `begun` is told of each phase as it begins."""

    def __init__(self, begun: Callable[[str], object] = lambda _: None) -> None:
        self._begun = begun
        self._now: Callable[[], float] = lambda: 0.0
        self.seconds: dict[str, float] = {}

    def timed_by(self, now: Callable[[], float]) -> Self:
        """This is the clock."""
        self._now = now
        return self

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what happens within; what happens under one name adds up."""
        self._begun(name)
        began = self._now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - began

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Whatever is loaded within is a part of this start."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def facts(self) -> dict[str, float]:
        """For the log."""
        return phase_facts(self.seconds.items())


_current: ContextVar[LoadPhases] = ContextVar("phases")


def current_phases(now: Callable[[], float]) -> LoadPhases:
    """Those of the start that is under way here, or new ones where nobody waits to hear of them."""
    return _current.get(LoadPhases()).timed_by(now)


def phase_facts(seconds: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Seconds by phase, as facts for the log."""
    return {f"{name.lower().replace(' ', '_')}_seconds": round(spent, 3) for name, spent in seconds}
