"""Measure the engine on whole workloads: speed, latency, memory, time of each part, and the distance to machine limits.

    python -m benchmarks.engine [--workload W1,W2,W4] [--quantization int8] [--kv-cache-dtype int8] [--decoder auto]
        [--dtype auto] [--device cpu] [--threads 2] [--reps 3] [--workload-file FILE] [--json FILE]
    python -m benchmarks.engine --harness FOLDER [--workload W1] [--label NAME] [--json FILE]

Everything is greedy, and end tokens are ignored. Variant 0 of a workload warms up, the others are measured in turn, and
nothing is left in the prefix cache between them; each figure is the median of the repetitions. After them come two that
are for one thing alone: with a stopwatch, which tells where the time goes, and with a heartbeat, which tells how long
the event loop stood still. `--harness` serves the workloads of another benchmark's `harness.py` as one of its engines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import peers, process, roofline
from benchmarks.common import Heartbeat, options, percentile, spread, versions
from benchmarks.native_limits import Limits
from benchmarks.stopwatch import Span, Stopwatch
from benchmarks.workloads import Ask, FileWorkload, Workload, own_workloads
from cuelight import Engine, model_path
from cuelight.actors.executor.native.linear import WeightFormat
from cuelight.actors.executor.native.model_folder import NotNative
from cuelight.config import EngineConfig, EngineOptions

KINDS = {"int8": WeightFormat.INT8, "int4": WeightFormat.INT4, "bfloat16": WeightFormat.BF16}


@dataclass
class Trace:
    """One request: when it was due, and when each of its tokens came."""

    due: float
    times: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Repetition:
    """A workload served once."""

    asks: Sequence[Ask]
    traces: Sequence[Trace]
    begin: float
    own_cores: float
    other_cores: float

    @property
    def seconds(self) -> float:
        return max(trace.times[-1] for trace in self.traces) - self.begin

    def figures(self) -> dict[str, float]:
        """Tokens a second and milliseconds."""
        output = sum(ask.output_tokens for ask in self.asks)
        first = [trace.times[0] - trace.due for trace in self.traces]
        gaps = [b - a for trace in self.traces for a, b in zip(trace.times, trace.times[1:], strict=False)]
        lone = [(len(t.times) - 1) / (t.times[-1] - t.times[0]) for t in self.traces if t.times[-1] > t.times[0]]
        return {
            "output tok/s": output / self.seconds,
            "total tok/s": (output + sum(len(ask.token_ids) for ask in self.asks)) / self.seconds,
            "decode tok/s": statistics.median(lone),
            "TTFT p50 ms": 1e3 * percentile(first, 0.5),
            "TTFT p99 ms": 1e3 * percentile(first, 0.99),
            "ITL p50 ms": 1e3 * percentile(gaps, 0.5),
            "ITL p99 ms": 1e3 * percentile(gaps, 0.99),
            "own cores": self.own_cores,
            "others' cores": self.other_cores,
        }

    def at_work(self) -> list[Span]:
        """While any request was there."""
        spans: list[Span] = []
        for trace in sorted(self.traces, key=lambda trace: trace.due):
            if spans and trace.due <= spans[-1].end:
                spans[-1] = Span(spans[-1].begin, max(spans[-1].end, trace.times[-1]))
            else:
                spans.append(Span(trace.due, trace.times[-1]))
        return spans

    def all_running(self) -> Span:
        """From the moment that each request has a first token until one has its last; maybe never."""
        return Span(max(trace.times[0] for trace in self.traces), min(trace.times[-1] for trace in self.traces))


async def one(engine: Engine, ask: Ask, begin: float) -> Trace:
    """Send the request when it is due, and read it."""
    due = begin + ask.at
    if ask.at:
        await asyncio.sleep(due - time.perf_counter())
    trace = Trace(due)
    async for chunk in engine.stream(ask.token_ids, max_tokens=ask.output_tokens, ignore_eos=True):
        trace.times += [time.perf_counter()] * len(chunk.token_ids)
    assert len(trace.times) == ask.output_tokens, "a request gives as many tokens as were asked for"
    return trace


async def serve(engine: Engine, asks: Sequence[Ask], *, one_after_another: bool) -> Repetition:
    """All of them, with nothing in the prefix cache at the beginning."""
    engine.forget_prefixes()
    await asyncio.sleep(0)
    used, begin = process.Used.now(), time.perf_counter()
    if one_after_another:
        traces = [await one(engine, ask, time.perf_counter()) for ask in asks]
    else:
        traces = await asyncio.gather(*(one(engine, ask, begin) for ask in asks))
    own, others = process.Used.now().since(used, time.perf_counter() - begin)
    return Repetition(asks, traces, begin, own, others)


@dataclass(frozen=True)
class Measured:
    """All that was found out about one workload."""

    name: str
    repetitions: list[Repetition]
    peak_rss_mib: float
    watched: Repetition
    stopwatch: Stopwatch
    beside_heartbeat: Repetition
    pauses: list[float]

    def speed(self) -> dict[str, object]:
        figures = [repetition.figures() for repetition in self.repetitions]
        row: dict[str, object] = {"workload": self.name}
        for name in figures[0]:
            values = [each[name] for each in figures]
            row[name] = spread(values) if name == "output tok/s" else f"{statistics.median(values):.2f}"
        return {**row, "peak RSS MiB": f"{self.peak_rss_mib:.0f}"}

    def idleness(self) -> dict[str, object]:
        full, watch = self.watched.all_running(), self.stopwatch
        return {
            "workload": self.name,
            "steps": len(watch.steps),
            "device idle": f"{100 * watch.idle(self.watched.at_work()):.1f} %",
            "idle, all running": f"{100 * watch.idle([full]):.1f} % of {full.seconds:.2f} s"
            if full.seconds
            else "never",
            "output tok/s": f"{self.watched.figures()['output tok/s']:.1f}",
        }

    def responsiveness(self) -> dict[str, object]:
        pauses = {"p50": percentile(self.pauses, 0.5), "p99": percentile(self.pauses, 0.99), "max": max(self.pauses)}
        return {
            "workload": self.name,
            **{f"{name} ms": f"{1e3 * pause:.2f}" for name, pause in pauses.items()},
            "beats": len(self.pauses),
            "output tok/s": f"{self.beside_heartbeat.figures()['output tok/s']:.1f}",
        }

    def parts(self) -> dict[str, float]:
        return self.stopwatch.per_step(sum(span.seconds for span in self.watched.at_work()))

    def roofline(self, model: roofline.Model, limits: Limits) -> dict[str, object]:
        near = roofline.comparison(model, limits, self.stopwatch.steps, self.stopwatch.seconds["forward"])
        return {"workload": self.name, **near}


async def measure(engine: Engine, workload: Workload, reps: int) -> Measured:
    """Warm up, measure, and watch once more."""
    sequential = workload.one_after_another
    warming = workload.asks(0)
    await serve(engine, warming[: max(1, len(warming) // 4)], one_after_another=sequential)
    process.reset_peak_rss()
    repetitions = []
    for number in range(reps):
        asks = workload.asks(1 + number % (workload.variants - 1))
        repetitions.append(await serve(engine, asks, one_after_another=sequential))
    peak = process.peak_rss_mib()
    asks = workload.asks(1)
    with Stopwatch() as stopwatch:
        watched = await serve(engine, asks, one_after_another=sequential)
    async with Heartbeat() as heartbeat:
        beside = await serve(engine, asks, one_after_another=sequential)
    return Measured(workload.name, repetitions, peak, watched, stopwatch, beside, heartbeat.pauses)


def engine_options(arguments: argparse.Namespace) -> EngineOptions:
    """As they are given; empty texts and zeros leave it to the engine."""
    chosen = EngineOptions(dtype=arguments.dtype, decoder=arguments.decoder, device=arguments.device)
    if arguments.quantization:
        chosen["quantization"] = arguments.quantization
    if arguments.kv_cache_dtype:
        chosen["kv_cache_dtype"] = arguments.kv_cache_dtype
    if arguments.token_budget:
        chosen["token_budget"] = arguments.token_budget
    if arguments.kv_cache_mib:
        chosen["kv_cache_bytes"] = arguments.kv_cache_mib << 20
    return chosen


def wanted(arguments: argparse.Namespace, folder: Path) -> list[Workload]:
    """Return the workloads of the given files, or the built-in ones if no file is given."""
    if arguments.workload_file:
        return [FileWorkload(Path(file)) for file in arguments.workload_file.split(",")]
    own = own_workloads(folder)
    return [own[name] for name in arguments.workload.split(",")]


def use_cores(count: int) -> None:
    """Restrict this process, and the threads that libraries will create, to `count` processors."""
    os.environ["OMP_NUM_THREADS"] = str(count)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


async def run(arguments: argparse.Namespace) -> dict[str, list[dict[str, object]]]:
    """The tables by their titles."""
    folder = model_path(arguments.model)
    chosen = engine_options(arguments)
    is_on_cpu = arguments.device == "cpu"
    async with Engine(folder, **chosen) as engine:
        await one(engine, Ask([1, 2, 3, 4], 1), time.perf_counter())
        facts: dict[str, object] = {
            "start to first token s": f"{process.seconds_since_start():.2f}",
            "peak RSS until then MiB": f"{process.peak_rss_mib():.0f}",
        }
        limits = roofline.measured_limits(arguments.threads) if is_on_cpu else None
        measured = []
        for workload in wanted(arguments, folder):
            measured.append(await measure(engine, workload, arguments.reps))
            print(f"{workload.name}: {measured[-1].speed()['output tok/s']} output tok/s", flush=True)
    if is_on_cpu:
        limits = roofline.measured_limits(arguments.threads, limits)
    tables = {
        "Start": [facts],
        "Speed": [each.speed() for each in measured],
        "The device's idle time (with the stopwatch)": [each.idleness() for each in measured],
        "Milliseconds a step, by part (with the stopwatch)": parts_table(measured),
        "Pauses of the event loop (with the heartbeat)": [each.responsiveness() for each in measured],
    }
    if limits is not None:
        tables |= near_limits(folder, chosen, limits, measured)
    return tables


def parts_table(measured: Iterable[Measured]) -> list[dict[str, object]]:
    """A row a part."""
    columns = {each.name: each.parts() for each in measured}
    names = dict.fromkeys(name for parts in columns.values() for name in parts)
    return [
        {"part": name, **{column: f"{parts.get(name, 0.0):.3f}" for column, parts in columns.items()}} for name in names
    ]


def near_limits(
    folder: Path, chosen: EngineOptions, limits: Limits, measured: Iterable[Measured]
) -> dict[str, list[dict[str, object]]]:
    """Nothing for a model whose work is not known."""
    kind = KINDS.get(chosen.get("quantization") or chosen["dtype"], WeightFormat.F32)
    try:
        model = roofline.Model(folder, kind, EngineConfig(**chosen).block_size)
    except NotNative as reason:
        print(f"no limits for this model: {reason}")
        return {}
    rates = f"{limits.memory:.1f} GB/s, {limits.float32:.0f} GFLOP/s in float32, {limits.int8:.0f} GOP/s in int8"
    title = f"The forward pass beside the limits of this run: {rates}"
    return {title: [each.roofline(model, limits) for each in measured]}


def markdown(rows: Sequence[dict[str, object]]) -> Iterator[str]:
    """The lines of a table."""
    yield "| " + " | ".join(rows[0]) + " |"
    yield "|" + " --- |" * len(rows[0])
    for row in rows:
        yield "| " + " | ".join(str(value) for value in row.values()) + " |"


def main() -> None:
    arguments = options(
        __doc__,
        workload="W1,W2,W4",
        workload_file="",
        harness="",
        label="",
        model="smollm2-135m-instruct",
        quantization="",
        kv_cache_dtype="",
        decoder="auto",
        dtype="auto",
        device="cpu",
        token_budget=0,
        kv_cache_mib=0,
        threads=2,
        reps=3,
    )
    use_cores(arguments.threads)
    if arguments.harness:
        peers.run(Path(arguments.harness), arguments, engine_options(arguments))
        return
    tables = asyncio.run(run(arguments))
    shown = {name: value for name, value in vars(arguments).items() if value not in ("", 0, None) and name != "json"}
    for title, rows in tables.items():
        print(f"\n## {title}\n")
        print("\n".join(markdown(rows)))
    print("\n" + ", ".join(f"{name} {value}" for name, value in (shown | versions()).items()))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        document = {"options": shown, "versions": versions(), "tables": tables}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
