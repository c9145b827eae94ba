"""What the fair policy promises: beside a flood, a tenant waits little longer than alone on half the machine.

In virtual time, and drawn from seeds: nothing here depends on the machine. The trials are the benchmark's.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
SEEDS = 2
REQUESTS = 30


@cache
def fairness() -> ModuleType:
    """The benchmark, no part of the package; with the checkout on the path there would be two of each class."""
    spec = importlib.util.spec_from_file_location("benchmarks", FOLDER / "__init__.py")
    assert spec is not None and spec.loader is not None
    sys.modules["benchmarks"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return importlib.import_module("benchmarks.fairness")


@pytest.mark.parametrize("place", range(4))
def test_beside_a_flood_a_tenant_waits_little_longer_than_alone_on_half_the_machine(place: int) -> None:
    """Whether the flood has all seats, all blocks, both, or the token budget of every step."""
    benchmark = fairness()
    scenario = benchmark.SCENARIOS[place]
    alone = benchmark.trials(scenario, None, SEEDS, REQUESTS)
    fair = benchmark.trials(scenario, "fair", SEEDS, REQUESTS)
    for share in benchmark.SHARES.values():
        assert statistics.mean(benchmark.ratios(fair, alone, share)) <= benchmark.WITHIN
    most = max(trial.clients.preemptions_most for trial in fair)
    assert most <= 10, "nobody is preempted for ever"


def test_in_order_of_arrival_the_flood_drowns_it() -> None:
    """So what the other test measures can be missed."""
    benchmark = fairness()
    scenario = benchmark.SCENARIOS[0]
    alone = benchmark.trials(scenario, None, 1, 10)
    fcfs = benchmark.trials(scenario, "fcfs", 1, 10)
    assert benchmark.ratios(fcfs, alone, 0.5)[0] > 100


def test_a_seed_gives_the_same_waits_each_time_and_another_seed_others() -> None:
    benchmark = fairness()
    first, again, other = (benchmark.Trial(benchmark.SCENARIOS[1], "fair", seed, 10) for seed in (3, 3, 4))
    for trial in (first, again, other):
        trial.run()
    assert first.clients.waits == again.clients.waits != other.clients.waits
