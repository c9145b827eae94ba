"""The fair policy's bound: beside a flood, a tenant waits little longer than alone on half the machine.

Runs are those of the benchmark, in virtual time and from seeds: nothing here depends on the machine.
"""

from __future__ import annotations

import statistics

import pytest
from benchmark_modules import benchmark

SEEDS = 2
REQUESTS = 30

fairness = benchmark("fairness")


@pytest.mark.parametrize("place", range(4))
def test_tenant_beside_a_flood_waits_little_longer_than_alone_on_half_the_machine(place: int) -> None:
    """The flood takes all rows, all blocks, both, or the token budget of every step."""
    scenario = fairness.SCENARIOS[place]
    alone = fairness.runs(scenario, None, SEEDS, REQUESTS)
    fair = fairness.runs(scenario, "fair", SEEDS, REQUESTS)
    for share in fairness.SHARES.values():
        assert statistics.mean(fairness.ratios(fair, alone, share)) <= fairness.WITHIN
    most = max(run.clients.preemptions_most for run in fair)
    assert most <= 10, "no request is preempted for ever"


def test_tenant_waits_behind_the_flood_in_order_of_arrival() -> None:
    """A control: without the fair policy, the bound of the test above is exceeded."""
    scenario = fairness.SCENARIOS[0]
    alone = fairness.runs(scenario, None, 1, 10)
    fcfs = fairness.runs(scenario, "fcfs", 1, 10)
    assert fairness.ratios(fcfs, alone, 0.5)[0] > 100


def test_seed_decides_the_waits() -> None:
    first, again, other = (fairness.FairnessRun(fairness.SCENARIOS[1], "fair", seed, 10) for seed in (3, 3, 4))
    for run in (first, again, other):
        run.run()
    assert first.clients.waits == again.clients.waits != other.clients.waits
