"""32 mixed requests at once: Cuelight against transformers' static `generate`, same weights, dtype and threads.

    python -m benchmarks.mixed [--reps 3] [--dtype float32] [--threads 2] [--json FILE]

The two take turns, each time in a process of its own: OpenMP slows down where two threads of one process have used it.
Static generation pads prompts to the longest and runs every row until the longest output is done;
tokens beyond a request's own length are not counted. A heartbeat measures the event loop's pauses while Cuelight works.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import MIXED, Heartbeat, Request, options, percentile, report, spread, workload


def static(folder: Path, dtype: str, warm_up: list[Request], requests: list[Request]) -> dict[str, object]:
    """transformers' own batch generation: seconds for all requests as one left-padded batch."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def run(batch: list[Request]) -> float:
        width = max(len(request.token_ids) for request in batch)
        steps = max(request.output_tokens for request in batch)
        pads = [width - len(request.token_ids) for request in batch]
        ids = torch.tensor([[0] * pad + request.token_ids for pad, request in zip(pads, batch, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
        begin = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=steps,
                min_new_tokens=steps,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        return time.perf_counter() - begin

    run(warm_up)
    return {"seconds": run(requests)}


async def ours(folder: Path, dtype: str, warm_up: list[Request], requests: list[Request]) -> dict[str, object]:
    """The engine: seconds for all requests, each one's seconds to the first token, and the loop's pauses."""
    from cuelight import Engine

    async with Engine(folder, dtype=dtype) as engine:

        async def one(request: Request) -> float:
            result = await engine.generate(request.token_ids, max_tokens=request.output_tokens, ignore_eos=True)
            assert len(result.token_ids) == request.output_tokens
            return result.timings.first_token_seconds

        await asyncio.gather(*map(one, warm_up))
        async with Heartbeat() as heartbeat:
            begin = time.perf_counter()
            first = await asyncio.gather(*map(one, requests))
            seconds = time.perf_counter() - begin
        return {"seconds": seconds, "first": first, "pauses": heartbeat.pauses}


def one_side(side: str, variant: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one side in a fresh process and return its figures."""
    command = [sys.executable, "-m", "benchmarks.mixed", "--side", side, "--variant", str(variant)]
    for name in ("dtype", "threads", "model"):
        command += [f"--{name}", str(getattr(arguments, name))]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    return figures


def measure_here(arguments: argparse.Namespace) -> None:
    """The child's part: one side, its figures as JSON on the last line."""
    import torch

    from cuelight import model_path

    torch.set_num_threads(arguments.threads)
    folder = model_path(arguments.model)
    warm_up = workload(folder, [(40, 8)] * 4, variant=0)
    requests = workload(folder, MIXED, arguments.variant)
    if arguments.side == "cuelight":
        figures = asyncio.run(ours(folder, arguments.dtype, warm_up, requests))
    else:
        figures = static(folder, arguments.dtype, warm_up, requests)
    print(json.dumps(figures))


def main() -> None:
    arguments = options(__doc__, reps=3, dtype="float32", threads=2, model="smollm2-135m-instruct", side="", variant=1)
    if arguments.side:
        measure_here(arguments)
        return
    output_tokens = sum(shape[1] for shape in MIXED)
    our_rate: list[float] = []
    static_rate: list[float] = []
    first: list[float] = []
    pauses: list[float] = []
    for variant in range(1, arguments.reps + 1):
        figures = one_side("cuelight", variant, arguments)
        our_rate.append(output_tokens / figures["seconds"])
        first += figures["first"]
        pauses += figures["pauses"]
        static_rate.append(output_tokens / one_side("static", variant, arguments)["seconds"])
        print(f"repetition {variant}: {our_rate[-1]:.1f} against {static_rate[-1]:.1f} output tokens/s", flush=True)
    ratio = statistics.median(our_rate) / statistics.median(static_rate)
    rows: list[dict[str, object]] = [
        {"engine": "cuelight", "output tokens/s": spread(our_rate), "ratio": f"{ratio:.2f}"},
        {"engine": "transformers generate", "output tokens/s": spread(static_rate), "ratio": "1.00"},
    ]
    report(
        rows,
        arguments.json,
        dtype=arguments.dtype,
        threads=arguments.threads,
        first_token_p50_ms=round(1e3 * percentile(first, 0.5)),
        loop_pause_p50_ms=round(1e3 * percentile(pauses, 0.5), 2),
        loop_pause_p99_ms=round(1e3 * percentile(pauses, 0.99), 2),
        loop_pause_max_ms=round(1e3 * max(pauses), 2),
    )


if __name__ == "__main__":
    main()
