"""Measure a step's control plane: the real scheduler and cache manager as actors, with the messages between them.

    python -m benchmarks.scheduler [--reps 3] [--steps 160] [--vllm PYTHON --vllm-script FILE] [--json FILE]

256 requests decode while 10 to 100,000 others wait, over pools of 10,000 to 1,000,000 blocks; 10,000 is about the
least in which 256 such requests all run. The executor answers at once, and a clock that stops while it makes up its
answer times the steps, so what is left is the engine's own: planning, tokens, stops, blocks, and the messages both
ways. Two steps are in flight, as in an engine, so a time is that of two steps in a row, halved. A "used" pool is full
of what earlier requests computed, so each new block costs an eviction; in a "fresh" one no block was ever held. A step
in which requests need blocks costs most; each needs one every 16 steps.

Each measurement has a process of its own. With `--vllm`, an interpreter that has vLLM, FILE puts the same load through
vLLM's own scheduler and KV-cache manager in the same repetition, before ours every second time: a script that takes
`--waiting`, `--blocks` and `--steps`, and prints a JSON line with the medians `schedule_us` and `update_us`. It has
no p90 to compare, and no messages. A last repetition with timers around our two actors' handlers splits the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final, Never, TypedDict, TypeVar

from benchmarks.common import percentile, report
from benchmarks.control_plane import Rows
from cuelight.config import EngineConfig
from cuelight.core.parts import roles
from cuelight.kernel import Actor, ActorSpec, System
from cuelight.messages import executor, observer, scheduler
from cuelight.messages.request import RequestId, Sampling, Service
from cuelight.simulate.engine import engine_specs, stand_ins_without_clients

M = TypeVar("M")

RUNNING: Final = 256
PROMPT_TOKENS: Final = 256
OUTPUT_TOKENS: Final = 400
TOKEN_BUDGET: Final = 8192
BLOCK_SIZE: Final = 16
STEPS_IN_FLIGHT: Final = 2
WARM_UP_STEPS: Final = 32
FLAT: Final = 1.3
"""Limit on the ratio of the slowest shape's time to the fastest's."""

VOCABULARY: Final = tuple(range(49_000))
"""One object for each token id, which leaves room in memory for many prompts."""


@dataclass(frozen=True)
class Shape:
    """How many requests wait, and the pool's blocks; `is_used` where all of them hold earlier requests' prefixes."""

    waiting: int
    blocks: int
    is_used: bool

    def options(self) -> list[str]:
        """The command line's options that say so."""
        return ["--waiting", str(self.waiting), "--blocks", str(self.blocks)]


SHAPES: Final = (
    *(Shape(waiting, 200_000, is_used=False) for waiting in (10, 1_000, 100_000)),
    *(Shape(1_000, blocks, is_used=False) for blocks in (10_000, 100_000, 1_000_000)),
    *(Shape(1_000, blocks, is_used=True) for blocks in (10_000, 100_000, 1_000_000)),
)


class Figures(TypedDict):
    """Measurements of one process, in milliseconds a step; the parts only if the handlers were timed."""

    median: float
    p90: float
    max: float
    mean: float
    parts: dict[str, float]


class Watch:
    """A clock that stands still while the executor computes, and the seconds that each actor has spent in handlers."""

    def __init__(self) -> None:
        self.paused_seconds = 0.0
        self.handler_seconds = {"scheduler": 0.0, "cache": 0.0}

    def now(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter() - self.paused_seconds


class Timed(Actor[M]):
    """Another actor, with a watch on its handler."""

    def __init__(self, actor: Actor[M], name: str, watch: Watch) -> None:
        self._actor, self._name, self._watch = actor, name, watch

    def started(self) -> None:
        self._actor.started()

    def handle(self, message: M) -> None:
        begin = time.perf_counter()
        self._actor.handle(message)
        self._watch.handler_seconds[self._name] += time.perf_counter() - begin


class Echo(Actor[executor.ExecutorMessage]):
    """An executor that answers at once: token 5 for every row that reaches its last token.

    Notes when each step of nothing but `RUNNING` decodes comes, until there are `wanted` of them.
    """

    def __init__(self, watch: Watch, wanted: int) -> None:
        self._watch = watch
        self._wanted = wanted
        self._rows = Rows()
        self.times: list[float] = []
        self.handler_seconds: list[dict[str, float]] = []
        self.is_done = asyncio.Event()

    def handle(self, message: executor.ExecutorMessage) -> None:
        if isinstance(message, executor.GetExecutorState):
            return  # the driver of the trial sends `ExecutorReady` itself
        begin = time.perf_counter()
        sampling = self._rows.compute(message)
        decodes = len(sampling) == len(message.chunks) == RUNNING and not message.rows
        self._watch.paused_seconds += time.perf_counter() - begin
        if decodes:
            self._note()
        else:
            assert not self.times, "a request ended or was preempted after all decoded"
        answer = scheduler.StepDone(message.epoch, message.step, sampling, (5,) * len(sampling))
        message.reply_to.tell(answer)

    def _note(self) -> None:
        if len(self.times) < self._wanted:
            self.times.append(self._watch.now())
            self.handler_seconds.append(dict(self._watch.handler_seconds))
            if len(self.times) == self._wanted:
                self.is_done.set()


class Board:
    """Hears the figures; `is_idle` while no request is live."""

    def __init__(self) -> None:
        self.is_idle = asyncio.Event()
        self.evictions = 0

    def tell(self, message: observer.ObserverMessage, /) -> None:
        """Take note."""
        match message:
            case observer.RequestFigures(running=0, waiting=0):
                self.is_idle.set()
            case observer.RequestFigures():
                self.is_idle.clear()
            case observer.BlockFigures():
                self.evictions = message.evictions


class Rig:
    """A control plane of an engine's own kind over an echo."""

    def __init__(self, shape: Shape, steps: int, *, is_split: bool) -> None:
        self.watch = Watch()
        self.echo = Echo(self.watch, WARM_UP_STEPS + steps + 1)
        self.board = Board()
        self._is_split = is_split
        self._config = EngineConfig(
            executor="thread",
            token_budget=TOKEN_BUDGET,
            running_max=RUNNING,
            queue_limit=RUNNING + shape.waiting + shape.blocks // 100 + 1000,
            steps_in_flight=STEPS_IN_FLIGHT,
            watermark_fraction=0.0,
            long_prefill_tokens=TOKEN_BUDGET,
        )
        self.scheduler = roles(self._config).scheduler

    def cast(self) -> list[ActorSpec[Never]]:
        """Return the specs, with timers around the handlers where the time is to be split."""
        stand_ins = stand_ins_without_clients(self._config)
        stand_ins["executor"] = lambda _: self.echo
        return engine_specs(self._config, self.board, stand_ins=stand_ins, wrap=self._timed)

    def _timed(self, actor: Actor[M], name: str, /) -> Actor[M]:
        return Timed(actor, name, self.watch) if self._is_split and name in self.watch.handler_seconds else actor


def admissions(first_id: int, count: int, prompt_tokens: int, max_tokens: int) -> Iterator[scheduler.Admit]:
    """Requests whose prompts have nothing in common."""
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    for number in range(first_id, first_id + count):
        prompt = tuple(random.Random(number).choices(VOCABULARY, k=prompt_tokens))
        yield scheduler.Admit(RequestId(number), prompt, sampling, 2 * TOKEN_BUDGET, Service(), 0.0)


async def measure(shape: Shape, steps: int, *, is_split: bool) -> Figures:
    """One shape, in this process."""
    rig = Rig(shape, steps, is_split=is_split)
    async with System(rig.cast()) as system:
        to = system.find(rig.scheduler)
        to.tell(scheduler.ExecutorReady(shape.blocks + 1, BLOCK_SIZE))  # one is the null block
        used = 0
        if shape.is_used:
            # A step for each, with one block left for the token that is not a prefix of anything.
            used = shape.blocks // (TOKEN_BUDGET // BLOCK_SIZE - 1) + 1
            for admit in admissions(0, used, TOKEN_BUDGET - BLOCK_SIZE + 1, 1):
                to.tell(admit)
            await rig.board.is_idle.wait()
        evictions = rig.board.evictions
        for admit in admissions(used, RUNNING + shape.waiting, PROMPT_TOKENS, OUTPUT_TOKENS):
            to.tell(admit)
        await rig.echo.is_done.wait()
        assert shape.is_used == (rig.board.evictions > evictions), (
            "a new block costs an eviction where the pool is used"
        )
    return figures(rig.echo)


def figures(echo: Echo) -> Figures:
    """Return the figures of all steps after the warm-up."""
    times = echo.times[WARM_UP_STEPS:]
    pairs = times[::STEPS_IN_FLIGHT]
    each = [1e3 * (end - begin) / STEPS_IN_FLIGHT for begin, end in pairwise(pairs)]
    mean = 1e3 * (times[-1] - times[0]) / (len(times) - 1)
    first, last = echo.handler_seconds[WARM_UP_STEPS], echo.handler_seconds[-1]
    parts = {name: 1e3 * (last[name] - first[name]) / (len(times) - 1) for name in first}
    return {
        "median": statistics.median(each),
        "p90": percentile(each, 0.9),
        "max": max(each),
        "mean": mean,
        "parts": parts,
    }


def ours(shape: Shape, steps: int, *, is_split: bool = False) -> Figures:
    """One shape, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scheduler", "--only", *shape.options(), "--steps", str(steps)]
    command += ["--used"] * shape.is_used + ["--split"] * is_split
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    answer: Figures = json.loads(output.splitlines()[-1])
    return answer


def theirs(shape: Shape, arguments: argparse.Namespace) -> float:
    """Milliseconds a step of vLLM's scheduler, the median; in a process of its own."""
    command = [arguments.vllm, arguments.vllm_script, *shape.options(), "--steps", str(arguments.steps)]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    answer = json.loads(output.splitlines()[-1])
    return float(answer["schedule_us"] + answer["update_us"]) / 1e3


@dataclass
class Results:
    """Results for one shape: the figures of each repetition."""

    ours: list[Figures] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def row(self, shape: Shape, split: Figures) -> dict[str, object]:
        """Return a row of the table."""
        medians = [each["median"] for each in self.ours]
        parts = split["parts"]
        row: dict[str, object] = {
            "waiting": f"{shape.waiting:,}",
            "blocks": f"{shape.blocks:,}",
            "pool": "used" if shape.is_used else "fresh",
            "median ms (range)": _shown(medians),
            "p90 ms": f"{statistics.median(each['p90'] for each in self.ours):.2f}",
            "max ms": f"{max(each['max'] for each in self.ours):.1f}",
            "mean ms": f"{statistics.median(each['mean'] for each in self.ours):.2f}",
        }
        row |= {f"{name} %": f"{100 * seconds / split['mean']:.0f}" for name, seconds in parts.items()}
        row["rest %"] = f"{100 * (1 - sum(parts.values()) / split['mean']):.0f}"
        ratios = [theirs / ours for theirs, ours in zip(self.theirs, medians, strict=False)]
        row["vLLM ms (range)"] = _shown(self.theirs) if ratios else "-"
        row["vLLM / ours"] = _shown(ratios) if ratios else "-"
        return row


def _shown(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})"


def compare(arguments: argparse.Namespace) -> dict[Shape, Results]:
    """In each repetition every shape of ours and, where they can have it too and there is a vLLM, of theirs."""
    results = {shape: Results() for shape in SHAPES}
    for repetition in range(arguments.reps):
        for shape, result in results.items():
            print(f"repetition {repetition + 1} of {arguments.reps}: {shape}", file=sys.stderr, flush=True)
            has_theirs = arguments.vllm and not shape.is_used
            if has_theirs and repetition % 2 == 0:
                result.theirs.append(theirs(shape, arguments))
            result.ours.append(ours(shape, arguments.steps))
            if has_theirs and repetition % 2 == 1:
                result.theirs.append(theirs(shape, arguments))
    return results


def command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=3, help="(3)")
    parser.add_argument("--steps", type=int, default=160, help="to measure, a multiple of the block size at best (160)")
    parser.add_argument("--vllm", metavar="PYTHON", help="the interpreter of an environment that has vLLM")
    parser.add_argument("--vllm-script", metavar="FILE", help="what it is to run")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    only = parser.add_argument_group("one measurement, in this process")
    only.add_argument("--only", action="store_true", help="of the shape that these say:")
    only.add_argument("--waiting", type=int, default=10, help="(10)")
    only.add_argument("--blocks", type=int, default=200_000, help="(200000)")
    only.add_argument("--used", action="store_true", help="the pool is full of prefixes")
    only.add_argument("--split", action="store_true", help="with timers around the handlers")
    arguments = parser.parse_args()
    if bool(arguments.vllm) != bool(arguments.vllm_script):
        parser.error("--vllm and --vllm-script go together")
    return arguments


def main() -> None:
    arguments = command_line()
    if arguments.only:
        shape = Shape(arguments.waiting, arguments.blocks, arguments.used)
        print(json.dumps(asyncio.run(measure(shape, arguments.steps, is_split=arguments.split))))
        return
    results = compare(arguments)
    rows = [result.row(shape, ours(shape, arguments.steps, is_split=True)) for shape, result in results.items()]
    medians = [statistics.median(each["median"] for each in result.ours) for result in results.values()]
    ratio = max(medians) / min(medians)
    verdict = f"{ratio:.2f}, {'flat' if ratio <= FLAT else 'NOT flat'} within {FLAT}"
    report(
        rows, arguments.json, running=RUNNING, reps=arguments.reps, steps=arguments.steps, slowest_to_fastest=verdict
    )


if __name__ == "__main__":
    main()
