"""Helpers that the benchmarks share: workloads of exact token counts, percentiles, a heartbeat, and the report."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

# (prompt tokens, output tokens) of 32 requests: prompts 32..512, outputs 16..256, 4,352 output tokens in all.
MIXED: tuple[tuple[int, int], ...] = (
    *((450, 132), (63, 24), (78, 140), (32, 62), (47, 210), (326, 155), (419, 241), (125, 186)),
    *((109, 70), (233, 148), (481, 194), (140, 39), (94, 31), (264, 86), (202, 16), (512, 225)),
    *((295, 109), (466, 233), (156, 171), (187, 179), (404, 163), (435, 202), (249, 101), (388, 47)),
    *((357, 117), (497, 217), (311, 256), (373, 55), (171, 248), (218, 93), (342, 124), (280, 78)),
)  # fmt: skip

_SUBJECTS = "the miller|a tired clerk|our neighbour|the ferry|an old map|the night train|a careful reader|the harbour"
_VERBS = "carries|remembers|repairs|measures|forgets|describes|waits for|returns to"
_OBJECTS = (
    "the lower bridge|seven crates of glass|a letter from the coast|the winter market|every second page|its own echo"
)
_ENDS = (
    "before noon|when the wind turns|without a word|for the third year|at the edge of town|as if nothing had happened"
)


def sentences(chance: random.Random, count: int) -> str:
    """Plain English of no great meaning, different for each state of `chance`."""
    parts = [text.split("|") for text in (_SUBJECTS, _VERBS, _OBJECTS, _ENDS)]
    return " ".join(" ".join(chance.choice(part) for part in parts).capitalize() + "." for _ in range(count))


@dataclass(frozen=True)
class Request:
    """A prompt of exactly the wanted length, and how many tokens to produce whatever they are."""

    token_ids: list[int]
    output_tokens: int


def workload(folder: Path, shapes: Iterable[tuple[int, int]], variant: int) -> list[Request]:
    """Requests of these shapes; another variant has other text, so that no prefix cache carries over."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    chance = random.Random(variant)
    requests = []
    for prompt_tokens, output_tokens in shapes:
        token_ids = tokenizer.encode(sentences(chance, prompt_tokens // 4 + 8)).ids
        requests.append(Request(token_ids[:prompt_tokens], output_tokens))
    assert all(len(r.token_ids) == shape[0] for r, shape in zip(requests, shapes, strict=True))
    return requests


class Heartbeat:
    """Beats every millisecond and keeps how late each beat was: the pauses of the event loop, in seconds."""

    def __init__(self, interval_seconds: float = 0.001) -> None:
        self._interval = interval_seconds
        self.pauses: list[float] = []

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _beat(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            due = now() + self._interval
            await asyncio.sleep(self._interval)
            self.pauses.append(now() - due)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the others lie, interpolated."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> str:
    """Median and range, as the tables show them."""
    return f"{statistics.median(values):.1f} ({min(values):.1f}..{max(values):.1f})"


def options(description: str | None, **defaults: object) -> argparse.Namespace:
    """The command line that every benchmark has: `--json FILE` and its own options, typed by their defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    for name, default in defaults.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default, help=f"({default})")
    return parser.parse_args()


def run(
    description: str | None, measure: Callable[..., Awaitable[list[dict[str, object]]]], **defaults: object
) -> None:
    """Ask for these options on the command line, measure with them, and report the rows beside the options."""
    asked = vars(options(description, **defaults))
    path = asked.pop("json")
    report(asyncio.run(measure(**asked)), path, **asked)


def quantized(name: str) -> str | None:
    """A quantization from the command line, as an engine knows it."""
    return None if name == "none" else name


def report(rows: list[dict[str, object]], path: Path | None, **facts: object) -> None:
    """Print the rows as a Markdown table and, if asked, write them with the machine's facts as JSON."""
    names = list(rows[0])
    print("| " + " | ".join(names) + " |\n|" + " --- |" * len(names))
    for row in rows:
        print("| " + " | ".join(str(row[name]) for name in names) + " |")
    machine = {"python": sys.version.split()[0], "machine": platform.machine(), "cpus": os.cpu_count(), **versions()}
    print("\n" + ", ".join(f"{name} {value}" for name, value in (facts | machine).items()))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"facts": facts, "machine": machine, "rows": rows}, indent=1) + "\n")


def versions() -> dict[str, str]:
    """Return the versions of the packages that determine the speed."""
    from importlib.metadata import version

    return {name: version(name) for name in ("cuelight", "torch", "transformers")}


def children() -> list[int]:
    """The processes of actors that this one has started."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # its thread has just ended
            found += [int(child) for child in path.read_text().split()]
    return [child for child in found if b"cuelight.kernel.child" in _command(child)]


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""  # it has just gone
