"""Linux's figures on this process: start time, memory, and the use of the processors meanwhile."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def seconds_since_start() -> float:
    """Since this process was made, to a hundredth."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / TICKS_PER_SECOND


def peak_rss_mib() -> float:
    """The most memory that was resident since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("the system tells the peak")


def reset_peak_rss() -> None:
    """Begin anew; where that is not allowed, the peak stays that of the whole life."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


@dataclass(frozen=True)
class Used:
    """Seconds of processors until now: this process's, and all, those that the host took included."""

    own: float
    all: float

    @classmethod
    def now(cls) -> Self:
        busy = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        del busy[3:5]  # idle, and idle while something is read
        return cls(time.process_time(), sum(busy) / TICKS_PER_SECOND)

    def since(self, before: Used, seconds: float) -> tuple[float, float]:
        """Cores that this process used, and cores that others did."""
        own = self.own - before.own
        return own / seconds, max(0.0, self.all - before.all - own) / seconds
