"""Run all GPU measurements in less than eight minutes, or in two minutes with small shapes on a CPU.

    python -m benchmarks.cuda [--device cuda] [--parts tests,throughput,peer,decode,control] [--json FILE]

`tests` runs those marked `cuda`. `throughput` serves requests of random lengths with a small model, `peer` the same
ones with transformers' continuous batching, `decode` many rows of a large model, whose steps the memory limits.
`control` is what the scheduler and the cache manager cost where the executor answers at once. Weights are random, in
real shapes. Each part has a process of its own; one that fails does not keep the others from running. The limits are
measured in each part that has steps to compare with them, before it.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from benchmarks.common import options, percentile, versions
from benchmarks.random_models import LLAMA3_8B, QWEN3_06B, SMALL_LLAMA, SMALL_QWEN3, Shape, build

Row: TypeAlias = dict[str, object]

ROOT: Final = Path(__file__).parent.parent
PART_SECONDS: Final = {"tests": 150, "throughput": 110, "peer": 70, "decode": 130, "control": 20}
"""Eight minutes in all. A part that takes longer has failed."""


@dataclass(frozen=True)
class Plan:
    """The measurements for a kind of device: models, `requests` with their tokens in and out, `rows` that decode."""

    dtype: str
    small: Shape
    requests: int
    lengths: tuple[int, int]
    token_budget: int
    large: Shape
    rows: int
    context: int
    steps: int
    cold_bytes: int
    matrix: int


PLANS: Final = {
    "cuda": Plan("bfloat16", QWEN3_06B, 256, (100, 1024), 4096, LLAMA3_8B, 64, 1024, 128, 4 << 30, 8192),
    "cpu": Plan("float32", SMALL_QWEN3, 16, (10, 50), 128, SMALL_LLAMA, 8, 128, 32, 256 << 20, 1024),
}


@dataclass(frozen=True)
class Limits:
    """The device's measured limits, as torch reaches them: bytes and operations a second."""

    bytes: float
    operations: float

    @classmethod
    def measured(cls, plan: Plan, device: str) -> Limits:
        """The best of several tries."""
        import torch

        dtype = getattr(torch, plan.dtype)
        cold = torch.ones(plan.cold_bytes // 4, dtype=torch.float32, device=device)
        target = torch.empty_like(cold)
        a, b = torch.randn(2, plan.matrix, plan.matrix, device=device).to(dtype)
        reading = cold.nbytes / _best_seconds(cold.max, device)
        copying = 2 * cold.nbytes / _best_seconds(lambda: target.copy_(cold), device)
        return cls(max(reading, copying), 2 * plan.matrix**3 / _best_seconds(lambda: a @ b, device))

    def __str__(self) -> str:
        return f"{self.bytes / 1e9:.0f} GB/s, {self.operations / 1e9:,.0f} GFLOP/s"


def _best_seconds(work: Callable[[], object], device: str) -> float:
    import torch

    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    seconds = []
    for _ in range(12):
        wait()
        begin = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def run_tests(_plan: Plan, _device: str, _folder: Path) -> Row:
    """Run the tests marked `cuda`, which are skipped without a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", "tests"]
    begin, limit = time.perf_counter(), PART_SECONDS["tests"] - 5  # and nothing is left behind
    try:
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"passed": False, "pytest": f"not done after {limit} s"}
    if ran.returncode != 0:
        print(ran.stdout[-8000:], file=sys.stderr)
    lines = ran.stdout.strip().splitlines() or ["nothing"]
    return {"passed": ran.returncode == 0, "pytest": lines[-1], "seconds": f"{time.perf_counter() - begin:.0f}"}


def asks(plan: Plan) -> list[tuple[list[int], int]]:
    """(prompt, output tokens) of random lengths, the same for every engine."""
    chance = random.Random(256)
    vocabulary = int(str(plan.small.sizes["vocab_size"]))
    pairs = [(chance.randint(*plan.lengths), chance.randint(*plan.lengths)) for _ in range(plan.requests)]
    return [([chance.randrange(2, vocabulary) for _ in range(prompt)], output) for prompt, output in pairs]


def measure_throughput(plan: Plan, device: str, folder: Path) -> Row:
    """Requests of random lengths, all at once."""
    return asyncio.run(_throughput(plan, device, folder))


async def _throughput(plan: Plan, device: str, folder: Path) -> Row:
    import torch

    from benchmarks.device_watch import DeviceWatch
    from benchmarks.engine import serve
    from benchmarks.workloads import Ask
    from cuelight import Engine

    limits = Limits.measured(plan, device)
    requests = [Ask(prompt, output) for prompt, output in asks(plan)]
    model = build(plan.small, folder / "small", device, plan.dtype)
    begin = time.perf_counter()
    async with Engine(
        model,
        device=device,
        dtype=plan.dtype,
        decoder="transformers",
        running_max=plan.requests,
        token_budget=plan.token_budget,
        long_prefill_tokens=plan.token_budget,
    ) as engine:
        started = time.perf_counter() - begin
        await serve(engine, requests[: plan.requests // 4], one_after_another=False)
        with DeviceWatch(torch.device(device)) as watch:
            loop = time.thread_time()
            served = await serve(engine, requests, one_after_another=False)
            loop = time.thread_time() - loop
    figures = served.figures()
    least = _least_seconds(model, plan, limits, (step.batch for step in watch.steps))
    return {
        "output tok/s": f"{figures['output tok/s']:.0f}",
        "total tok/s": f"{figures['total tok/s']:.0f}",
        "ITL p50 / p99 ms": f"{figures['ITL p50 ms']:.1f} / {figures['ITL p99 ms']:.1f}",
        "device idle": f"{100 * watch.idle_share:.1f} %",
        "of the roofline": f"{100 * least / watch.span_seconds:.0f} %",
        "steps": len(watch.steps),
        "loop us per row and step": f"{1e6 * loop / watch.row_count:.2f}",
        "prepare us per row and step": f"{1e6 * watch.prepare_seconds / watch.row_count:.2f}",
        "start s": f"{started:.1f}",
        "limits": str(limits),
    }


def _least_seconds(model: Path, plan: Plan, limits: Limits, batches: Iterable[object]) -> float:
    """For the work of these steps, if reading and computing overlap in full."""
    from benchmarks.roofline import Model
    from cuelight.actors.executor.batch import Batch
    from cuelight.actors.executor.native.linear import WeightFormat

    counted = Model(model, WeightFormat.BF16 if plan.dtype == "bfloat16" else WeightFormat.F32, block_size=16)
    total = 0.0
    for batch in batches:
        assert isinstance(batch, Batch)
        work = counted.work(batch)
        total += max(work.bytes / limits.bytes, (work.products + work.attention) / limits.operations)
    return total


def measure_peer(plan: Plan, device: str, folder: Path) -> Row:
    """The same requests with transformers' continuous batching, as it chooses its options."""
    import torch
    import transformers

    requests = asks(plan)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        build(plan.small, folder / "small", device, plan.dtype), dtype=getattr(torch, plan.dtype), device_map=device
    )
    chosen = transformers.GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=plan.lengths[1]
    )
    # On the CPU it has no memory of its own to count blocks by.
    small = {"page_size": 32, "num_blocks": 256, "max_batch_tokens": 64} if device == "cpu" else {}
    batching = transformers.ContinuousBatchingConfig(max_requests_per_batch=plan.requests, **small)
    with model.train(False).continuous_batching_context_manager(
        generation_config=chosen, continuous_batching_config=batching, timeout=10, warmup=device != "cpu"
    ) as manager:
        _served_by(manager, requests[: plan.requests // 4])
        begin = time.perf_counter()
        _served_by(manager, requests)
        seconds = time.perf_counter() - begin
    output = sum(count for _, count in requests)
    total = output + sum(len(prompt) for prompt, _ in requests)
    return {
        "output tok/s": f"{output / seconds:.0f}",
        "total tok/s": f"{total / seconds:.0f}",
        "version": transformers.__version__,
    }


def _served_by(manager: object, requests: Sequence[tuple[list[int], int]]) -> None:
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    assert isinstance(manager, ContinuousBatchingManager)
    wanted = {}
    for prompt, count in requests:
        wanted[manager.add_request(prompt, max_new_tokens=count, eos_token_id=-1)] = count
    while wanted:
        result = manager.get_result(timeout=1.0)
        if result is None:
            assert manager.is_running(), "it goes on until all are served"
        elif result.is_finished():
            assert result.error is None and len(result.generated_tokens) == wanted.pop(result.request_id)


def measure_decode(plan: Plan, device: str, folder: Path) -> Row:
    """Steps in which all rows decode, at about the same context."""
    return asyncio.run(_decode(plan, device, folder))


async def _decode(plan: Plan, device: str, folder: Path) -> Row:
    import torch

    from benchmarks.device_watch import DeviceWatch
    from benchmarks.engine import serve
    from benchmarks.workloads import Ask
    from cuelight import Engine

    limits = Limits.measured(plan, device)
    begin = time.perf_counter()
    model = build(plan.large, folder / "large", device, plan.dtype)
    built = time.perf_counter()
    chance = random.Random(64)
    vocabulary = int(str(plan.large.sizes["vocab_size"]))
    prompt = plan.context - plan.steps // 2
    requests = [Ask([chance.randrange(2, vocabulary) for _ in range(prompt)], plan.steps) for _ in range(plan.rows)]
    async with Engine(
        model,
        device=device,
        dtype=plan.dtype,
        decoder="transformers",
        running_max=plan.rows,
        token_budget=plan.token_budget,
        long_prefill_tokens=plan.token_budget,
        context_length=plan.context + plan.steps,
    ) as engine:
        started = time.perf_counter()
        await serve(engine, requests, one_after_another=False)
        with DeviceWatch(torch.device(device)) as watch:
            await serve(engine, requests, one_after_another=False)
    decodes = watch.decodes(plan.rows)
    seconds = statistics.median(gap for gap, _ in decodes)
    busy = statistics.median(step.end - step.begin for _, step in decodes)
    least = _least_seconds(model, plan, limits, (step.batch for _, step in decodes)) / len(decodes)
    return {
        "rows": plan.rows,
        "steps": len(decodes),
        "step ms": f"{1e3 * seconds:.2f}",
        "p99 ms": f"{1e3 * percentile([gap for gap, _ in decodes], 0.99):.2f}",
        "of it computing ms": f"{1e3 * busy:.2f}",
        "least ms": f"{1e3 * least:.2f}",
        "of the roofline": f"{100 * least / seconds:.0f} %",
        "built s": f"{built - begin:.1f}",
        "start s": f"{started - built:.1f}",
        "limits": str(limits),
    }


def measure_control(_plan: Plan, _device: str, _folder: Path) -> Row:
    """The scheduler and the cache manager with the messages between them, over an executor that answers at once."""
    from benchmarks.scheduler import RUNNING, measure
    from benchmarks.scheduler import Shape as Waiting

    figures = asyncio.run(measure(Waiting(10, 200_000, is_used=False), 160, is_split=False))
    return {
        "running": RUNNING,
        "us per row and step": f"{1e3 * figures['median'] / RUNNING:.2f}",
        "p90": f"{1e3 * figures['p90'] / RUNNING:.2f}",
    }


PARTS: Final[Mapping[str, Callable[[Plan, str, Path], Row]]] = {
    "tests": run_tests,
    "throughput": measure_throughput,
    "peer": measure_peer,
    "decode": measure_decode,
    "control": measure_control,
}


def in_a_process(part: str, device: str) -> Row:
    """Return the part's row, or a row with the reason if it failed."""
    command = [sys.executable, "-m", "benchmarks.cuda", "--part", part, "--device", device]
    begin = time.perf_counter()
    try:
        ran = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=PART_SECONDS[part], check=True
        )
        row: Row = json.loads(ran.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        row = {"failed": f"{type(error).__name__}: {error}"}
    return {**row, "took s": f"{time.perf_counter() - begin:.0f}"}


def main() -> None:
    arguments = options(__doc__, device="cuda", parts=",".join(PARTS), part="")
    plan = PLANS["cpu" if arguments.device == "cpu" else "cuda"]
    if arguments.part:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(PARTS[arguments.part](plan, arguments.device, Path(folder))))
        return
    rows = {}
    for part in arguments.parts.split(","):
        rows[part] = row = in_a_process(part, arguments.device)
        print(f"\n## {part}\n\n| " + " | ".join(row) + " |\n|" + " --- |" * len(row))
        print("| " + " | ".join(map(str, row.values())) + " |", flush=True)
    if (ours := rows.get("throughput", {}).get("output tok/s")) and (
        theirs := rows.get("peer", {}).get("output tok/s")
    ):
        print(
            f"\noutput tokens a second beside transformers: {float(str(ours)) / float(str(theirs)):.2f} times as many"
        )
    facts = {"device": arguments.device, **versions()}
    print("\n" + ", ".join(f"{name} {value}" for name, value in facts.items()))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"facts": facts, "parts": rows}, indent=1) + "\n")
    if any("failed" in row or row.get("passed") is False for row in rows.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
