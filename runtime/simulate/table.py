"""The table of `cuelight simulate`: histories of the engine's actors, one for each seed, until a check fails."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Final

from cuelight.kernel.simulation.simulator import SimulationError, for_each_seed
from cuelight.simulate.run import RunTotals, run_seed

ROW_SEEDS: Final = 100
"""Seeds after which the table gets another row of figures."""
HEADER: Final = "".join(f"{field.name:>11}" for field in fields(RunTotals)) + "\n"


def simulate(seeds: Iterable[int], requests: int, write: Callable[[str], object] | None = None) -> int:
    """Run and check one history for each seed, with this many requests, and return the exit status.

    Writes a table, to standard output by default; at the first history that fails a check, its seed and the failure.
    """
    write = write or sys.stdout.write
    total = RunTotals()
    began = time.perf_counter()

    def trial(seed: int) -> None:
        run_seed(seed, requests, total)
        total.seeds += 1
        if total.seeds % ROW_SEEDS == 0:
            write(total.row())

    write(HEADER)
    with _silence():
        try:
            for_each_seed(seeds, trial)
        except SimulationError as error:
            write(f"{error}\n")
            return 1
    if total.seeds % ROW_SEEDS:
        write(total.row())
    rate = total.seeds / (time.perf_counter() - began)
    write(f"{total.seeds:,} histories passed every check, {rate:,.0f} a second.\n")
    return 0


@contextmanager
def _silence() -> Iterator[None]:
    """Silence the engine's log, in which each injected fault is an event."""
    logger = logging.getLogger("cuelight")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
