"""Flood a full queue with submissions: measure the answers and the effect on accepted requests.

    python -m benchmarks.flood [--submissions 50000] [--queue-limit 1000] [--seconds 5] [--rounds 3] [--model NAME]

In turn, in one process: first, as many clients as the queue has places keep it full, each with one request at a time;
then the same, and beside them all those submissions within the given seconds. Without a model the executor has no
weights, so that the event loop, which has to refuse, is what everything waits for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common import options, percentile, report
from cuelight import Engine, Stream
from cuelight.errors import QueueFull
from cuelight.testing import stub_engine

BURST = 100
"""Submissions in one turn of the event loop."""


@dataclass
class Figures:
    """Figures of the measured `seconds`."""

    seconds: float = 0.0
    tokens: int = 0
    """Number of output tokens."""
    token_seconds: list[float] = field(default_factory=list)
    """Seconds a token of each request, from its first token to its last."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Outcomes of the flood's submissions."""
    refusing_seconds: float = 0.0
    """That submitting took in all, for those that were refused at once."""
    hints: int = 0
    """How many refusals said when to come back."""


class Side:
    """Clients that keep the queue full, and maybe a flood beside them."""

    def __init__(self, engine: Engine, arguments: argparse.Namespace) -> None:
        self._engine = engine
        self._arguments = arguments
        self._figures = Figures()
        self._is_over = False
        self._warm = asyncio.Event()
        self._flooding = asyncio.TaskGroup()

    async def run(self, *, flooded: bool) -> Figures:
        """Fill the queue, then measure for the set time, or until every submission of the flood is answered."""
        figures = self._figures
        async with asyncio.TaskGroup() as clients:
            for number in range(self._arguments.queue_limit):
                clients.create_task(self._client(number))
            await self._warm.wait()
            figures.tokens, figures.token_seconds = 0, []
            begin = time.perf_counter()
            if flooded:
                async with self._flooding:
                    await self._flood(begin)
            else:
                await asyncio.sleep(self._arguments.seconds)
            figures.seconds = time.perf_counter() - begin
            tokens, token_seconds, self._is_over = figures.tokens, figures.token_seconds, True
        figures.tokens, figures.token_seconds = tokens, list(token_seconds)
        return figures

    def _submit(self, prompt: str) -> Stream:
        return self._engine.stream(prompt, max_tokens=self._arguments.output_tokens, ignore_eos=True)

    async def _client(self, number: int) -> None:
        while not self._is_over:
            try:
                await self._read(self._submit(f"client {number}"))
            except QueueFull:  # its place went to the flood
                await asyncio.sleep(0.1)

    async def _flood(self, begin: float) -> None:
        count, seconds = self._arguments.submissions, self._arguments.seconds
        for number in range(count):
            if number % BURST == 0:
                await asyncio.sleep(max(0.0, begin + seconds * number / count - time.perf_counter()))
            began = time.perf_counter()
            try:
                stream = self._submit(f"flood {number}")
            except QueueFull as refused:
                self._figures.refusing_seconds += time.perf_counter() - began
                self._refused(refused)
            else:
                self._flooding.create_task(self._one(stream))

    async def _one(self, stream: Stream) -> None:
        try:
            await self._read(stream)
        except QueueFull as refused:
            self._refused(refused)
        else:
            self._figures.outcomes["served"] += 1

    def _refused(self, refused: QueueFull) -> None:
        self._figures.outcomes["refused"] += 1
        self._figures.hints += refused.retry_after_seconds is not None

    async def _read(self, stream: Stream) -> None:
        first = last = 0.0
        count = 0
        async for chunk in stream:
            if chunk.token_ids:
                last = time.perf_counter()
                first = first or last
                count += len(chunk.token_ids)
                self._figures.tokens += len(chunk.token_ids)
        if count > 1:
            self._figures.token_seconds.append((last - first) / (count - 1))
        self._warm.set()


def peak_mib() -> float:
    """The most memory this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rounds: in each, both sides and what they make of each other."""
    limits = {"queue_limit": arguments.queue_limit}
    engine = Engine(arguments.model, **limits) if arguments.model else stub_engine(**limits)
    rounds = []
    async with engine:
        for _ in range(arguments.rounds):
            quiet = await Side(engine, arguments).run(flooded=False)
            before = peak_mib()
            flooded = await Side(engine, arguments).run(flooded=True)
            rounds.append(_round(quiet, flooded, arguments.submissions) | {"peak_mib_more": peak_mib() - before})
            print(json.dumps(rounds[-1]), flush=True)
    return rounds


def _round(quiet: Figures, flooded: Figures, submissions: int) -> dict[str, Any]:
    answered = flooded.outcomes["refused"] + flooded.outcomes["served"]
    assert answered == submissions, "every submission is answered"
    rates = [side.tokens / side.seconds for side in (quiet, flooded)]
    paces = [percentile(side.token_seconds, 0.5) for side in (quiet, flooded)]
    late = [percentile(side.token_seconds, 0.99) for side in (quiet, flooded)]
    return {
        "seconds": flooded.seconds,
        "refused": flooded.outcomes["refused"],
        "with_hint": flooded.hints,
        "refusal_us": 1e6 * flooded.refusing_seconds / max(1, flooded.outcomes["refused"]),
        "tokens_per_s": rates[1],
        "tokens_per_s_quiet": rates[0],
        "throughput_ratio": rates[1] / rates[0],
        "token_ms_p50": 1e3 * paces[1],
        "pace_ratio_p50": paces[1] / paces[0],
        "pace_ratio_p99": late[1] / late[0],
    }


def main() -> None:
    """Print the figures, the median of the rounds and each of them."""
    arguments = options(
        __doc__, submissions=50_000, queue_limit=1000, seconds=5.0, rounds=3, output_tokens=64, model=""
    )
    rounds = asyncio.run(measure(arguments))
    names = list(rounds[0])
    rows: list[dict[str, object]] = [
        {"figure": name, "median": f"{statistics.median(each[name] for each in rounds):.3f}"}
        | {f"round {number}": f"{each[name]:.3f}" for number, each in enumerate(rounds, 1)}
        for name in names
    ]
    facts = {name: getattr(arguments, name) for name in ("submissions", "queue_limit", "seconds", "output_tokens")}
    report(rows, arguments.json, model=arguments.model or "none", peak_mib=round(peak_mib()), **facts)


if __name__ == "__main__":
    main()
