"""The actor kernel against bare queues and sockets, and against other actor libraries.

    python -m benchmarks.kernel [--peers PYTHON] [--reps 3] [--quick] [--json FILE]

PYTHON is the interpreter of an environment of its own, made with `pip install pykka xoscar ray`. Every experiment of
every side runs in a fresh process, side after side, and in the opposite order every second time. A ratio is to the
baseline of the same repetition and kind of loop; to the one in asyncio's loop where there is none of the side's kind.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from benchmarks.common import report
from benchmarks.kernel_peers import ASK, CAST, CROWD, MEMORY, PROCESS, SPAWN, TELL, Effort

ROOT = Path(__file__).parents[1]
EXPERIMENT_OF = {
    TELL: "tell",
    ASK: "ask",
    CROWD: "crowd",
    SPAWN: "spawn",
    CAST: "cast",
    MEMORY: "spawn",
    PROCESS: "process",
}
"""Which experiment yields a figure."""

FULL = Effort(seconds=1.0, actors=10_000)
QUICK = Effort(seconds=0.1, actors=500)
EXPERIMENT_SECONDS_MAX = 300.0


@dataclass(frozen=True, eq=False)
class Side:
    """One of those compared: the loop it runs in, and its experiments as functions of `benchmarks.kernel_peers`."""

    name: str
    loop: str
    functions: dict[str, str]
    is_peer: bool = False


def _each(module: str, *experiments: str, suffix: str = "") -> dict[str, str]:
    return {name: f"{module}.{name}{suffix}" for name in experiments}


def _sides() -> Iterable[Side]:
    """Baselines first."""
    loops = ("asyncio", "uvloop")
    for loop in loops:
        yield Side("asyncio.Queue pair", loop, _each("bare", "tell", "ask", "crowd", "spawn", "cast"))
        yield Side("socket pair", loop, {"process": "pipes.socketpair_in_loop"})
    yield Side("socket pair", "none", {"process": "pipes.socketpair"})
    yield Side("multiprocessing.Pipe", "none", {"process": "pipes.pipe"})
    for loop in loops:
        yield Side("cuelight", loop, _each("ours", *dict.fromkeys(EXPERIMENT_OF.values())))
    yield Side("pykka, threads", "none", _each("pykka_threads", "tell", "ask", "crowd", "spawn"), is_peer=True)
    for loop in loops:
        local = _each("xoscar_actors", "tell", "ask", "crowd", suffix="_local")
        message = _each("xoscar_actors", "tell", "ask", "crowd", "process", suffix="_message")
        yield Side("xoscar, messages", loop, message | _each("xoscar_actors", "spawn"), is_peer=True)
        yield Side("xoscar, direct calls", loop, local, is_peer=True)
    yield Side(
        "ray, processes", "none", _each("ray_processes", "tell", "ask", "crowd", "spawn", "process"), is_peer=True
    )


class Reply(TypedDict, total=False):
    """The output of a side's process; `missing` instead of figures if its library could not be imported."""

    figures: dict[str, float]
    note: str
    missing: str
    versions: dict[str, str]


@dataclass
class Results:
    """Figures by side, name and repetition; what a reader must know of a side's experiment; who ran where."""

    values: dict[tuple[Side, str], dict[int, float]] = field(default_factory=dict)
    notes: dict[tuple[Side, str], str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def add(self, side: Side, experiment: str, repetition: int, reply: Reply) -> None:
        """Keep what one process has printed."""
        for name, value in reply.get("figures", {}).items():
            self.values.setdefault((side, name), {})[repetition] = value
        if note := reply.get("missing") or reply.get("note"):
            self.notes[side, experiment] = note
        for package, version in reply.get("versions", {}).items():
            name = f"peers' {package}" if side.is_peer and package in ("python", "uvloop") else package
            self.versions[name] = version


def run_side(side: Side, experiment: str, python: str | None, effort: Effort) -> Reply:
    """One experiment in a fresh process. A peer's failure is a reply too, ours or a baseline's ends the benchmark."""
    if python is None:
        return {"missing": "not installed"}
    command = [python, "-m", "benchmarks.kernel_peers", side.functions[experiment], side.loop]
    command += [str(effort.seconds), str(effort.actors)]
    try:
        output = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True, timeout=EXPERIMENT_SECONDS_MAX
        ).stdout
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        if not side.is_peer:
            raise
        return {"missing": "timed out" if isinstance(error, subprocess.TimeoutExpired) else "failed"}
    reply: Reply = json.loads(output.splitlines()[-1])
    if "missing" in reply:
        if not side.is_peer:
            raise ImportError(reply["missing"])
        reply["missing"] = f"not installed ({reply['missing']})"
    return reply


def measure(sides: list[Side], peers: str | None, effort: Effort, repetitions: int) -> Results:
    """Each experiment of each side, once in each repetition."""
    results = Results()
    for repetition in range(repetitions):
        for experiment in dict.fromkeys(EXPERIMENT_OF.values()):
            print(f"repetition {repetition + 1} of {repetitions}: {experiment}", file=sys.stderr, flush=True)
            for side in sides[:: -1 if repetition % 2 else 1]:
                if experiment in side.functions:
                    python = peers if side.is_peer else sys.executable
                    results.add(side, experiment, repetition, run_side(side, experiment, python, effort))
    return results


def _shown(values: Iterable[float]) -> str:
    """Median and range with three digits, whatever the size."""
    ordered = sorted(values)
    median, low, high = (
        f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        for value in (statistics.median(ordered), ordered[0], ordered[-1])
    )
    return f"{median} ({low}..{high})"


def _row(figure: str, side: Side, baseline: Side, results: Results) -> dict[str, object]:
    row: dict[str, object] = {
        "figure": figure,
        "side": side.name,
        "loop": side.loop,
        "median (range)": "-",
        "ratio": "-",
    }
    values = results.values.get((side, figure), {})
    if values:
        base = results.values[baseline, figure]
        row["median (range)"] = _shown(values.values())
        row["ratio"] = _shown(value / base[repetition] for repetition, value in values.items())
    return row | {"note": results.notes.get((side, EXPERIMENT_OF[figure]), "")}


def table(sides: list[Side], results: Results) -> list[dict[str, object]]:
    """A row for each figure of each side, with its ratio to the first side of the same loop, or else to the first."""
    rows = []
    for figure, experiment in EXPERIMENT_OF.items():
        offering = [side for side in sides if experiment in side.functions]
        for side in offering:
            baseline = next((other for other in offering if other.loop == side.loop and not other.is_peer), offering[0])
            rows.append(_row(figure, side, baseline, results))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers", metavar="PYTHON", help="the interpreter of the environment with pykka, xoscar and ray"
    )
    parser.add_argument("--reps", type=int, default=3, help="(3)")
    parser.add_argument("--quick", action="store_true", help="see that everything runs; the figures mean little")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    effort = QUICK if arguments.quick else FULL
    sides = list(_sides())
    results = measure(sides, arguments.peers, effort, arguments.reps)
    report(table(sides, results), arguments.json, reps=arguments.reps, seconds=effort.seconds, **results.versions)


if __name__ == "__main__":
    main()
