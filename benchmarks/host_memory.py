"""Measure the gain from host memory for preempted requests: the same pool, too small, with host memory and without.

    python -m benchmarks.host_memory [--reps 3] [--blocks 300] [--host-blocks 900] [--quantization int8] [--json FILE]

The mixed workload's prompts come in three rounds, as turns of 32 chats would: each prompt is what its chat has come to.
The pool holds a part of what all of them need at once, so requests are preempted and prefixes evicted. Both engines
take turns in one process. On a CPU, host memory is the memory that the pool is in: what is measured is recomputing
against copying.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from benchmarks.common import MIXED, quantized, run, spread, workload
from cuelight import Engine, model_path

TURNS = 3
SHARE = 4
"""Answers are this many times shorter than in the mixed workload: it is the prompts that matter here."""


async def _rounds(engine: Engine, folder: Path, variant: int) -> float:
    """Output tokens a second over all turns of all chats."""
    chats = [
        (request.token_ids, max(4, request.output_tokens // SHARE)) for request in workload(folder, MIXED, variant)
    ]
    begin, produced = time.perf_counter(), 0
    for turn in range(TURNS):
        more = workload(folder, [(16, 1)] * len(chats), 1000 * variant + turn)
        results = await asyncio.gather(
            *(engine.generate(ids, max_tokens=count, ignore_eos=True) for ids, count in chats)
        )
        produced += sum(len(result.token_ids) for result in results)
        chats = [
            ([*ids, *result.token_ids, *new.token_ids], count)
            for (ids, count), result, new in zip(chats, results, more, strict=True)
        ]
    return produced / (time.perf_counter() - begin)


async def _measure(reps: int, blocks: int, host_blocks: int, quantization: str) -> list[dict[str, object]]:
    folder = model_path("smollm2-135m-instruct")
    engines = {
        name: Engine(quantization=quantized(quantization), block_count=blocks, host_block_count=count)
        for name, count in (("without", 0), ("with host memory", host_blocks))
    }
    rates: dict[str, list[float]] = {name: [] for name in engines}
    async with engines["without"], engines["with host memory"]:
        for rep in range(reps + 1):
            for name, engine in engines.items():
                rate = await _rounds(engine, folder, rep + 1)
                if rep:  # the first one warms up
                    rates[name].append(rate)
        return [
            {
                "engine": name,
                "output tok/s": spread(rates[name]),
                "ratio": spread([a / b for a, b in zip(rates[name], rates["without"], strict=True)]),
                "preemptions": engine.stats().preemptions,
                "evictions": engine.stats().evictions,
                "blocks saved": engine.stats().blocks_saved,
                "blocks loaded": engine.stats().blocks_loaded,
                "tokens found": f"{engine.stats().tokens_found / engine.stats().tokens_looked_up:.0%}",
            }
            for name, engine in engines.items()
        ]


if __name__ == "__main__":
    run(__doc__, _measure, reps=3, blocks=300, host_blocks=900, quantization="int8")
