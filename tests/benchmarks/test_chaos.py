"""The chaos run in small: actors die repeatedly under streams, and no token may be missing; and the run's counts."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from dataclasses import replace

from benchmark_modules import benchmark

from cuelight.status import Recovery


def settings(**others: object) -> argparse.Namespace:
    small = {"requests": 12, "kills": 3, "crashes": 2, "tokens": 500, "running_max": 8, "model": "stub", "seed": 1}
    return argparse.Namespace(**{**small, "executor": "process", "decoder": "auto", "dtype": "float32", **others})


async def test_no_token_is_lost_when_every_actor_dies() -> None:
    chaos = benchmark("chaos")
    outcome, calm, stormy = await chaos.chaos(settings())
    assert replace(outcome, spared=0).is_good, outcome  # the stub may finish before the last actor has been killed
    assert {death.actor for death in stormy.deaths} == {"executor", *chaos.OTHERS}
    assert calm.deaths == []
    assert sum(len(heard.token_ids) for heard in stormy.streams) > 12 * 250
    assert all(heard.text for heard in stormy.streams)
    assert all(chaos.pauses(stormy, "executor"))


async def test_no_token_is_lost_with_actors_on_threads() -> None:
    outcome, _, _ = await benchmark("chaos").chaos(settings(executor="thread", seed=2))
    assert replace(outcome, spared=0).is_good, outcome


def test_differences_are_counted() -> None:
    chaos = benchmark("chaos")

    def run(*streams: object, **others: object) -> object:
        return chaos.Run(list(streams), 1.0, 0, **others)

    def heard(token_ids: list[int], text: str = "x", gaps: int = 0, error: str = "") -> object:
        return chaos.Heard(token_ids, text, gaps=gaps, error=error)

    nothing = chaos.Left(1, 0, 10, 0)
    calm = run(heard([1, 2, 3]))
    assert chaos.compare(calm, run(heard([1, 2, 3])), 0, nothing, nothing).is_good
    for bad, field in [
        (heard([1, 2, 4]), "different"),
        (heard([1, 2, 3], "y"), "different"),
        (heard([1, 2]), "lost"),
        (heard([1, 2, 3, 3]), "twice"),
        (heard([1, 2, 3], gaps=1), "twice"),
        (heard([1, 2, 3], error="RequestFailed"), "failed"),
    ]:
        outcome = chaos.compare(calm, run(bad), 0, nothing, nothing)
        assert getattr(outcome, field)
        assert not outcome.is_good
    assert chaos.compare(calm, calm, 1, nothing, nothing).spared == 1
    for left in (chaos.Left(2, 0, 10, 0), chaos.Left(1, 1, 10, 0), chaos.Left(1, 0, 11, 0), chaos.Left(1, 0, 10, 1)):
        assert not chaos.compare(calm, calm, 0, nothing, left).is_good
    assert not chaos.compare(calm, chaos.Run([heard([1, 2, 3])], 1.0, 2), 0, nothing, nothing).is_good


def test_pause_lasts_until_the_next_token_computed_after_the_death() -> None:
    chaos = benchmark("chaos")
    death = chaos.Death("executor", at=10.0, noticed_at=10.5)
    streams = [
        chaos.Heard(times=[1.0, 10.2, 13.0]),  # a token was on its way
        chaos.Heard(times=[1.0, 12.0, 14.0]),
        chaos.Heard(times=[11.0, 12.0]),  # had no token yet
        chaos.Heard(times=[1.0, 9.0]),  # had ended
    ]
    run = chaos.Run(streams, 1.0, 0, [death], [Recovery(0.5, 1.0, 1.0)])
    assert chaos.pauses(run, "executor") == [3.0, 2.0]
    assert chaos.pauses(run, "cache") == []
    assert chaos.row(run, "executor")["maximum ms"] == 3000
    assert chaos.whereto(run)["load"].startswith("1000")


def test_children_are_those_of_this_process() -> None:
    common = benchmark("common")
    program = "import sys, time; print('here', flush=True); time.sleep(100)  # cuelight.kernel.child"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        assert child.pid in common.children()
        os.kill(child.pid, signal.SIGKILL)
    assert child.pid not in common.children()
