"""The event loop's pauses while the model runs: a heartbeat beside 16 streams, against a heartbeat alone.

    python -m benchmarks.loop_pause [--json FILE]

Two baselines in the same run: the idle loop, and the loop beside a thread that computes the same model with
transformers' `generate`, which is what an application does without an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path

from benchmarks.common import Heartbeat, options, percentile, report, workload


async def _beside(work: Awaitable[object]) -> list[float]:
    async with Heartbeat() as heartbeat:
        await work
    return heartbeat.pauses


async def _streams(folder: Path, dtype: str) -> list[float]:
    from cuelight import Engine

    async with Engine(folder, dtype=dtype) as engine:

        async def read(token_ids: list[int]) -> None:
            async for _ in engine.stream(token_ids, max_tokens=120, ignore_eos=True):
                pass

        requests = workload(folder, [(200, 120)] * 16, variant=1)
        await read(requests[0].token_ids)
        return await _beside(asyncio.gather(*(read(request.token_ids) for request in requests)))


async def _thread(folder: Path, dtype: str) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ids = torch.tensor([request.token_ids for request in workload(folder, [(200, 120)] * 16, variant=2)])

    def generate() -> None:
        with torch.inference_mode():
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=120,
                min_new_tokens=120,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )

    return await _beside(asyncio.to_thread(generate))


def main() -> None:
    arguments = options(__doc__, dtype="float32", threads=2, model="smollm2-135m-instruct")
    import torch

    from cuelight import model_path

    torch.set_num_threads(arguments.threads)
    folder = model_path(arguments.model)
    measured = {
        "idle loop": asyncio.run(_beside(asyncio.sleep(5))),
        "cuelight, 16 streams": asyncio.run(_streams(folder, arguments.dtype)),
        "generate in a thread": asyncio.run(_thread(folder, arguments.dtype)),
    }
    rows: list[dict[str, object]] = [
        {
            "beside": name,
            "beats": len(pauses),
            "p50 ms": f"{1e3 * percentile(pauses, 0.5):.2f}",
            "p99 ms": f"{1e3 * percentile(pauses, 0.99):.2f}",
            "max ms": f"{1e3 * max(pauses):.2f}",
        }
        for name, pauses in measured.items()
    ]
    report(rows, arguments.json, dtype=arguments.dtype, threads=arguments.threads)


if __name__ == "__main__":
    main()
