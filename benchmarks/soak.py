"""Mixed traffic for a long time, with faults: memory growth and the latency of healthy requests.

    python -m benchmarks.soak [--minutes 30] [--clients 16] [--kill-seconds 60] [--model NAME] [--executor process]

First a while without faults, then as long as asked with them: of the requests 5 % are left by their clients, 5 % are
no valid requests, 5 % are read slowly, and the executor is killed once in a while. The same prompt must always give the
same tokens. Without a model the executor has no weights, and its steps take `--step-ms` milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import children, options, percentile, report, sentences
from benchmarks.stand_in import slow_parts
from cuelight import Engine
from cuelight.errors import RequestRejected
from cuelight.testing import crash

PROMPTS = 64
"""Different prompts, each of which is asked again and again."""

WARM_UP_SHARE = 0.2
"""Share of the run before memory is measured."""

SHARE_OF_FAULTS = 0.05
"""Share of requests with a fault, for each kind of fault."""

PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass
class Figures:
    """Figures of one part of the run. Times are in seconds."""

    latencies: list[float] = field(default_factory=list)
    """Seconds of healthy requests, from submission to end."""
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """Descriptions of violations that were found."""
    memory: list[tuple[float, float]] = field(default_factory=list)
    """When, and the MiB of this process then."""
    kills: int = 0


class Traffic:
    """Clients of one engine, each with one request at a time and a pause after it."""

    def __init__(self, engine: Engine, arguments: argparse.Namespace) -> None:
        self._engine = engine
        self._arguments = arguments
        chance = random.Random(1)
        self._prompts = [sentences(chance, chance.randint(1, 8)) for _ in range(PROMPTS)]
        self._known: dict[tuple[str, int], tuple[int, ...]] = {}
        self._numbers = itertools.count()

    async def run(self, seconds: float, *, with_faults: bool) -> Figures:
        """Let the clients work for so long, and wait until the last one is served."""
        figures = Figures()
        until = time.perf_counter() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(self._arguments.clients):
                group.create_task(self._client(figures, until, with_faults))
            others = [group.create_task(self._look(figures))]
            if with_faults:
                others.append(group.create_task(self._kill(figures, until)))
            await asyncio.sleep(seconds)
            for task in others:
                task.cancel()
        return figures

    async def _client(self, figures: Figures, until: float, with_faults: bool) -> None:
        chance = random.Random(next(self._numbers))
        while time.perf_counter() < until:
            draw = chance.random() if with_faults else 1.0
            if draw < SHARE_OF_FAULTS:
                await self._leave(figures, chance)
            elif draw < 2 * SHARE_OF_FAULTS:
                await self._ask_nonsense(figures, chance)
            else:
                await self._ask(figures, chance, is_slow=draw < 3 * SHARE_OF_FAULTS)
            await asyncio.sleep(chance.expovariate(1 / self._arguments.pause_seconds))

    def _options(self, chance: random.Random) -> dict[str, Any]:
        """Greedy or sampled, of a length of its own."""
        seed = chance.randrange(2)
        return {"max_tokens": 16 * chance.randint(1, 8), "ignore_eos": True, "seed": seed, "temperature": float(seed)}

    async def _ask(self, figures: Figures, chance: random.Random, *, is_slow: bool) -> None:
        prompt, asked = chance.choice(self._prompts), self._options(chance)
        stream = self._engine.stream(prompt, **asked)
        async for _ in stream:
            if is_slow:
                await asyncio.sleep(0.2)
        result = await stream.result()
        if not is_slow:
            figures.latencies.append(result.timings.total_seconds)
        figures.outcomes["read slowly" if is_slow else "healthy"] += 1
        known = self._known.setdefault((prompt, asked["seed"]), result.token_ids)
        if len(known) < len(result.token_ids):
            self._known[prompt, asked["seed"]] = result.token_ids
        length = min(len(known), len(result.token_ids))
        if len(result.token_ids) != asked["max_tokens"] or known[:length] != result.token_ids[:length]:
            figures.wrong.append(f"{prompt!r} with {asked} gave {result.token_ids}, and {known} before")

    async def _leave(self, figures: Figures, chance: random.Random) -> None:
        stream = self._engine.stream(chance.choice(self._prompts), max_tokens=128, ignore_eos=True)
        count = chance.randrange(40)
        async for chunk in stream:
            count -= len(chunk.token_ids)
            if count <= 0:
                break
        await stream.aclose()
        figures.outcomes["left"] += 1

    async def _ask_nonsense(self, figures: Figures, chance: random.Random) -> None:
        prompt, asked = chance.choice(
            [
                ("", {}),
                ("x", {"temperature": -1.0}),
                ([10**9], {}),
                ("word " * 50_000, {}),
                (["x"], {}),
                ("x", {"y": 1}),
            ]
        )
        try:
            await self._engine.generate(prompt, **asked)
        except RequestRejected:
            figures.outcomes["refused"] += 1
        else:
            figures.wrong.append(f"nonsense was served: {prompt!r:.40} with {asked}")

    async def _kill(self, figures: Figures, until: float) -> None:
        """Kill the executor until the deadline: its process, or its actor if it has no process of its own."""
        pause = self._arguments.kill_seconds
        while time.perf_counter() + pause < until:
            await asyncio.sleep(pause)
            if found := children():
                for child in found:
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
            else:
                crash(self._engine, "executor")
            figures.kills += 1

    async def _look(self, figures: Figures) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._arguments.minutes))
            figures.memory.append((time.perf_counter(), memory_mib()))


def memory_mib() -> float:
    """Return the resident memory of this process, in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_MIB


def slope_mib_per_hour(memory: list[tuple[float, float]]) -> float:
    """By least squares, after the warm-up."""
    kept = memory[int(len(memory) * WARM_UP_SHARE) :]
    if len(kept) < 2:
        return 0.0
    mean_time = sum(at for at, _ in kept) / len(kept)
    mean = sum(mib for _, mib in kept) / len(kept)
    spread = sum((at - mean_time) ** 2 for at, _ in kept)
    return 3600 * sum((at - mean_time) * (mib - mean) for at, mib in kept) / spread


async def _at_rest(engine: Engine) -> None:
    """Until nothing runs, and every block is free."""
    async with asyncio.timeout(60):
        while (stats := engine.stats()).running or stats.waiting or stats.blocks_free < stats.blocks_total:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def _holdings() -> dict[str, int]:
    gc.collect()
    return {
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "children": len(children()),
    }


def _engine(arguments: argparse.Namespace, **shared: Any) -> Engine:
    if arguments.model:
        return Engine(arguments.model, **shared)
    return Engine.from_parts("stand-in", partial(slow_parts, arguments.step_ms / 1e3), **shared)


async def soak(arguments: argparse.Namespace) -> dict[str, Any]:
    """The whole run, and what came of it."""
    before = _holdings()
    engine = _engine(arguments, executor=arguments.executor, queue_limit=4 * arguments.clients)
    seconds = 60 * arguments.minutes
    async with engine:
        traffic = Traffic(engine, arguments)
        quiet = await traffic.run(max(seconds / 6, min(seconds, 30.0)), with_faults=False)
        faulty = await traffic.run(seconds, with_faults=True)
        await _at_rest(engine)
        restarts = engine.health().restarts
    after = _holdings()
    return {
        "minutes": arguments.minutes,
        "outcomes": dict(faulty.outcomes),
        "wrong": quiet.wrong + faulty.wrong,
        "kills": faulty.kills,
        "restarts": dict(restarts),
        "left_over": {name: after[name] - before[name] for name in after if after[name] > before[name]},
        "memory_mib": faulty.memory[-1][1] if faulty.memory else memory_mib(),
        "slope_mib_per_hour": slope_mib_per_hour(faulty.memory),
        "latency_ms_p50": 1e3 * percentile(faulty.latencies, 0.5),
        "latency_ms_p50_quiet": 1e3 * percentile(quiet.latencies, 0.5),
        "latency_ratio_p50": percentile(faulty.latencies, 0.5) / percentile(quiet.latencies, 0.5),
        "latency_ms_p99": 1e3 * percentile(faulty.latencies, 0.99),
        "latency_ms_p99_quiet": 1e3 * percentile(quiet.latencies, 0.99),
        "latency_ratio_p99": percentile(faulty.latencies, 0.99) / percentile(quiet.latencies, 0.99),
    }


def main() -> None:
    """Print the figures. Exits with status 1 where an output was wrong or something was left over."""
    arguments = options(
        __doc__,
        minutes=30.0,
        clients=16,
        pause_seconds=0.5,
        kill_seconds=60.0,
        model="",
        step_ms=20.0,
        executor="process",
    )
    figures = asyncio.run(soak(arguments))
    rows: list[dict[str, object]] = [
        {"figure": name, "value": f"{value:.2f}" if isinstance(value, float) else json.dumps(value)}
        for name, value in figures.items()
    ]
    facts = {
        name: getattr(arguments, name) for name in ("clients", "pause_seconds", "kill_seconds", "step_ms", "executor")
    }
    report(rows, arguments.json, model=arguments.model or "none", **facts)
    if figures["wrong"] or figures["left_over"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
