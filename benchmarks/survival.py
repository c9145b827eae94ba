"""Measure the gain from host memory that survives the executor: prompts whose blocks are loaded or computed again.

    python -m benchmarks.survival [--reps 3] [--requests 8] [--tokens 512] [--quantization none] [--json FILE]

The prompts are served once, and then others push their blocks out of the pool. The executor's process is killed, and as
soon as there is another one the same prompts are asked for again, all at once, for one token each: after one death what
is in host memory is found, after another one it has been forgotten.
"""

from __future__ import annotations

import asyncio
import time

from benchmarks.common import quantized, run, spread, workload
from cuelight import Engine, model_path
from cuelight.testing import crash

BLOCK_SIZE = 16


async def _serve(engine: Engine, prompts: list[list[int]]) -> float:
    """Seconds until each has its first token."""
    begin = time.perf_counter()
    await asyncio.gather(*(engine.generate(prompt, max_tokens=1, ignore_eos=True) for prompt in prompts))
    return time.perf_counter() - begin


async def _kill(engine: Engine, *, forgets: bool) -> None:
    deaths = engine.health().restarts.get("executor", 0)
    crash(engine, "executor")
    if forgets:
        engine.forget_prefixes()
    while engine.health().restarts.get("executor", 0) == deaths or engine.health().state != "serving":  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await engine.generate([1], max_tokens=1)


async def _measure(reps: int, requests: int, tokens: int, quantization: str) -> list[dict[str, object]]:
    folder = model_path("smollm2-135m-instruct")
    blocks = requests * -(-(tokens + 1) // BLOCK_SIZE)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    pool = {"block_size": BLOCK_SIZE, "block_count": blocks + 8, "host_block_count": 4 * blocks}
    loaded = 0
    async with Engine(quantization=quantized(quantization), executor="process", **pool) as engine:
        for rep in range(reps):
            prompts, others = (
                [request.token_ids for request in workload(folder, [(tokens, 1)] * count, 2 * rep + number)]
                for number, count in enumerate((requests, requests + 2))
            )
            await _serve(engine, prompts)
            await _serve(engine, others)
            before = engine.stats().blocks_loaded
            for forgets in (False, True):
                await _kill(engine, forgets=forgets)
                seconds[forgets].append(await _serve(engine, prompts))
            loaded += engine.stats().blocks_loaded - before
    return [
        {
            "blocks": "computed again" if forgets else "loaded",
            "seconds": spread(seconds[forgets]),
            "ratio": spread([a / b for a, b in zip(seconds[True], seconds[forgets], strict=True)]),
            "blocks loaded": 0 if forgets else loaded,
        }
        for forgets in (True, False)
    ]


if __name__ == "__main__":
    run(__doc__, _measure, reps=3, requests=8, tokens=512, quantization="none")
