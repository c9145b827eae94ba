"""The sides that `benchmarks.kernel` compares; `python -m benchmarks.kernel_peers` runs one in its own process.

An experiment is a function from `Effort` to `Outcome`, plain or a coroutine function. This module needs the standard
library only, since the other libraries live in an environment without ours.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TELL: Final = "tell, 1,000 messages/s"
ASK: Final = "ask, µs a round trip"
CROWD: Final = "ask by 100 at once, 1,000 answers/s"
SPAWN: Final = "spawn, actors/s"
CAST: Final = "start as one cast, actors/s"
MEMORY: Final = "memory, KiB an actor"
PROCESS: Final = "ask into a process, µs a round trip"

BURST: Final = 1000
"""Messages told at once, before waiting until they are handled."""
CAPACITY: Final = 1024
"""Capacity of every bounded queue: a burst and the question that follows it fit."""
ASKS: Final = 100
"""Round trips of one batch, one after another."""
ASKERS: Final = 100
"""Questions in flight at once."""
ROUNDS: Final = 10
"""Questions of each asker in one batch."""
TIMEOUT_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Effort:
    """How long to measure a rate, and how many actors to keep alive at once, at most."""

    seconds: float
    actors: int


@dataclass(frozen=True)
class Outcome:
    """Figures by their names above, and what a reader of them must know."""

    figures: dict[str, float]
    note: str = ""


async def rate(batch: Callable[[], Awaitable[object]], seconds: float) -> float:
    """Batches per second: one after another for `seconds`, after a tenth of that unmeasured."""
    now = time.perf_counter
    warm = now() + seconds / 10
    while now() < warm:
        await batch()
    count = 0
    begin = now()
    while now() < begin + seconds:
        await batch()
        count += 1
    return count / (now() - begin)


def blocking_rate(batch: Callable[[], object], seconds: float) -> float:
    """As `rate`, for what blocks."""
    now = time.perf_counter
    warm = now() + seconds / 10
    while now() < warm:
        batch()
    count = 0
    begin = now()
    while now() < begin + seconds:
        batch()
        count += 1
    return count / (now() - begin)


def memory_kib(process: int | str = "self") -> float:
    """Resident memory, in which each page that processes share counts by its share. Linux only."""
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return float(line.split()[1])
    raise OSError(f"no proportional set size of process {process}")


def told(bursts_per_second: float) -> Outcome:
    """The outcome of bursts of `BURST` messages."""
    return Outcome({TELL: bursts_per_second * BURST / 1e3})


def asked(batches_per_second: float, figure: str = ASK, note: str = "") -> Outcome:
    """The outcome of batches of `ASKS` questions."""
    return Outcome({figure: 1e6 / (batches_per_second * ASKS)}, note)


def crowded(batches_per_second: float) -> Outcome:
    """The outcome of batches in which each of `ASKERS` asks `ROUNDS` times."""
    return Outcome({CROWD: batches_per_second * ASKERS * ROUNDS / 1e3})


def spawned(count: int, seconds: float, kib: float) -> Outcome:
    """The outcome of `count` actors alive at once, which all have answered."""
    return Outcome({SPAWN: count / seconds, MEMORY: kib / count}, f"{count:,} alive, each has answered")
