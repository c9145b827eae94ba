"""32 mixed requests at once: Cuelight against transformers' static `generate`, same weights, dtype and threads.

    python -m benchmarks.mixed [--reps 3] [--dtype float32] [--threads 2] [--json FILE]

The two take turns. Static generation pads prompts to the longest and runs every row until the longest output is done;
tokens beyond a request's own length are not counted. A heartbeat measures the event loop's pauses while Cuelight works.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import MIXED, Heartbeat, Request, options, percentile, report, spread, workload

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class Static:
    """transformers' own batch generation."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def run(self, requests: list[Request]) -> float:
        """Seconds for all requests as one left-padded batch."""
        import torch

        width = max(len(request.token_ids) for request in requests)
        steps = max(request.output_tokens for request in requests)
        pads = [width - len(request.token_ids) for request in requests]
        ids = torch.tensor([[0] * pad + request.token_ids for pad, request in zip(pads, requests, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
        begin = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=steps,
                min_new_tokens=steps,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        return time.perf_counter() - begin


class Ours:
    """The engine, opened anew for each repetition; its start is not counted."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._folder, self._dtype = folder, dtype

    async def _run(self, requests: list[Request], warm_up: list[Request]) -> tuple[float, list[float], list[float]]:
        from cuelight import Engine

        async with Engine(self._folder, dtype=self._dtype) as engine:

            async def one(request: Request) -> float:
                stream = engine.stream(request.token_ids, max_tokens=request.output_tokens, ignore_eos=True)
                result = await stream.result()
                assert len(result.token_ids) == request.output_tokens
                return result.timings.first_token_seconds

            await asyncio.gather(*map(one, warm_up))
            async with Heartbeat() as heartbeat:
                begin = time.perf_counter()
                first = await asyncio.gather(*map(one, requests))
                seconds = time.perf_counter() - begin
            return seconds, first, heartbeat.pauses

    def run(self, requests: list[Request], warm_up: list[Request]) -> tuple[float, list[float], list[float]]:
        """Seconds for all requests; each one's seconds to the first token; the loop's pauses."""
        return asyncio.run(self._run(requests, warm_up))


def main() -> None:
    arguments = options(__doc__, reps=3, dtype="float32", threads=2, model="smollm2-135m-instruct")
    import torch

    from cuelight import model_path

    torch.set_num_threads(arguments.threads)
    folder = model_path(arguments.model)
    static, ours = Static(folder, getattr(torch, arguments.dtype)), Ours(folder, arguments.dtype)
    warm_up = workload(folder, [(40, 8)] * 4, variant=0)
    output_tokens = sum(shape[1] for shape in MIXED)
    static.run(warm_up)
    static_rate: list[float] = []
    our_rate: list[float] = []
    first: list[float] = []
    pauses: list[float] = []
    for variant in range(1, arguments.reps + 1):
        requests = workload(folder, MIXED, variant)
        seconds, first_token, paused = ours.run(requests, warm_up)
        our_rate.append(output_tokens / seconds)
        first += first_token
        pauses += paused
        static_rate.append(output_tokens / static.run(requests))
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
