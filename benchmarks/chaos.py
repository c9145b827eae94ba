"""Stream requests while the actors that serve them are killed repeatedly, and check that no output is lost.

    python -m benchmarks.chaos [--requests 200] [--kills 50] [--crashes 20] [--model stub] [--json FILE]

The same requests, greedy and seeded, are served twice: undisturbed, and while the executor's process is killed
(SIGKILL) and each of the other actors crashed at random moments, some of them while the engine still recovers from the
one before. Every stream must have the same tokens and text. Exits with 1 where one has not, or anything is left over.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import children, options, percentile, report, sentences
from cuelight import Engine
from cuelight.status import Recovery
from cuelight.testing import crash, stub_engine

OTHERS = ("intake", "scheduler", "cache", "detokenizer")
FOLLOWING_SHARE = 0.3
"""Share of deaths that follow shortly after the one before, whether or not a token came in between."""
FOLLOWING_SECONDS_MAX = 0.5
REST_SECONDS = 60.0


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: str
    options: dict[str, Any]


def asks(count: int, tokens_max: int, seed: int) -> list[Ask]:
    """Half of them greedy, half with a seed, some with a stop string; each of a length of its own.

    What is computed again is a prefill and was a decode, and differs in the last bits. Of few tokens the same one is
    still drawn; of the whole vocabulary, thousands of which have next to no probability, now and then a neighbour.
    """
    chance = random.Random(seed)
    made = []
    for number in range(count):
        chosen: dict[str, Any] = {"max_tokens": chance.randint(tokens_max // 2, tokens_max), "ignore_eos": True}
        if number % 2:
            chosen |= {"temperature": chance.choice((0.7, 1.0)), "top_k": chance.choice((0, 5, 20)), "seed": number}
        if number % 8 == 7:
            chosen["stop"] = chance.choice(("the end of the world", "zebra", "qqq"))
        made.append(Ask(sentences(chance, 1), chosen))
    return made


@dataclass
class Heard:
    """The outcome of one stream: its chunks, each with its time, and how it ended."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    times: list[float] = field(default_factory=list)
    gaps: int = 0
    """Chunks that did not begin where the one before had ended."""
    error: str = ""
    ended_at: float | None = None

    async def read(self, engine: Engine, ask: Ask) -> None:
        """Submit, and stream to the end."""
        try:
            async for chunk in engine.stream(ask.prompt, **ask.options):
                self.times.append(time.monotonic())
                self.gaps += chunk.position != len(self.token_ids)
                self.token_ids += chunk.token_ids
                self.text += chunk.text
        except Exception as error:
            self.error = repr(error)
        self.ended_at = time.monotonic()


@dataclass(frozen=True)
class Death:
    """When something was killed, and when that was noticed."""

    actor: str
    at: float
    noticed_at: float


class Killer:
    """Kills actors by a plan: each death is due at a total number of tokens, or shortly after the one before."""

    def __init__(self, engine: Engine, streams: Sequence[Heard], is_process: bool, chance: random.Random) -> None:
        self._engine = engine
        self._streams = streams
        self._is_process = is_process
        self._chance = chance
        self.deaths: list[Death] = []
        self.recoveries: list[Recovery] = []

    async def kill(self, kills: int, crashes: int, tokens: int) -> None:
        """All of them, one after another."""
        victims = ["executor"] * kills + [name for name in OTHERS for _ in range(crashes)]
        self._chance.shuffle(victims)
        dues = sorted(self._chance.uniform(0.02, 0.85) * tokens for _ in victims)
        for victim, due in zip(victims, dues, strict=True):
            seconds = self._chance.uniform(0.0, FOLLOWING_SECONDS_MAX)
            latest = time.monotonic() + (seconds if self._chance.random() < FOLLOWING_SHARE else math.inf)

            def is_due(due: float = due, latest: float = latest) -> bool:
                return sum(len(heard.token_ids) for heard in self._streams) >= due or time.monotonic() >= latest

            await self._until(is_due)
            await self._strike(victim)

    async def _strike(self, victim: str) -> None:
        if victim == "executor" and self._is_process:
            await self._until(lambda: bool(children()))
        before = self._deaths_of(victim)
        at = time.monotonic()
        if victim == "executor" and self._is_process:
            for child in children():
                os.kill(child, signal.SIGKILL)
            await self._until(lambda: self._deaths_of(victim) > before)
        else:
            await self._until(lambda: self._deaths_of(victim) > before, lambda: crash(self._engine, victim))
        if self._deaths_of(victim) > before:
            self.deaths.append(Death(victim, at, time.monotonic()))

    def _deaths_of(self, victim: str) -> int:
        return self._engine.health().restarts.get(victim, 0)

    async def _until(self, condition: Callable[[], bool], attempt: Callable[[], object] = lambda: None) -> None:
        """Try again and again, unless all streams have ended."""
        while any(heard.ended_at is None for heard in self._streams):
            attempt()  # which does nothing while its victim is between two lives
            recovery = self._engine.health().last_recovery
            if recovery is not None and (not self.recoveries or self.recoveries[-1] != recovery):
                self.recoveries.append(recovery)
            if condition():
                return
            await asyncio.sleep(0.001)


@dataclass(frozen=True)
class Left:
    """Resources outside the engine that exist at some moment."""

    tasks: int
    threads: int
    descriptors: int
    children: int

    @classmethod
    def now(cls) -> Left:
        gc.collect()
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("cuelight")]
        descriptors = sum(1 for _ in Path("/proc/self/fd").iterdir())
        return cls(len(asyncio.all_tasks()), len(threads), descriptors, len(children()))


@dataclass
class Run:
    """One time that all requests were served."""

    streams: list[Heard]
    seconds: float
    blocks_left: int
    deaths: list[Death] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)


async def serve(
    engine: Engine, wanted: Sequence[Ask], kill: Callable[[Sequence[Heard]], Killer | None], **plan: int
) -> Run:
    """Serve all of them at once, and meanwhile whatever `kill` makes of the plan."""
    streams = [Heard() for _ in wanted]
    async with engine:
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for heard, ask in zip(streams, wanted, strict=True):
                group.create_task(heard.read(engine, ask))
            killer = kill(streams)
            if killer is not None:
                group.create_task(killer.kill(**plan))
        seconds = time.monotonic() - began
        blocks = await blocks_left(engine)
    run = Run(streams, seconds, blocks)
    if killer is not None:
        run.deaths, run.recoveries = killer.deaths, killer.recoveries
    return run


async def blocks_left(engine: Engine) -> int:
    """Blocks that are still held once all is at rest."""
    until = time.monotonic() + REST_SECONDS
    while (stats := engine.stats()).blocks_free != stats.blocks_total and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.01)  # figures, not an event
    return stats.blocks_total - stats.blocks_free


@dataclass
class Outcome:
    """Results of comparing the two runs, and the resources before and after."""

    different: int
    lost: int
    twice: int
    failed: list[str]
    spared: int
    """Deaths that were planned, and for which the streams did not last."""
    left: dict[str, int]

    @property
    def is_good(self) -> bool:
        faults = self.different + self.lost + self.twice + len(self.failed) + self.spared
        return faults == 0 and not any(self.left.values())


def compare(calm: Run, chaos: Run, planned: int, before: Left, after: Left) -> Outcome:
    """Stream by stream."""
    pairs = list(zip(calm.streams, chaos.streams, strict=True))
    left = {name: max(0, getattr(after, name) - getattr(before, name)) for name in vars(before)}
    return Outcome(
        different=sum((a.token_ids, a.text) != (b.token_ids, b.text) for a, b in pairs),
        lost=sum(max(0, len(a.token_ids) - len(b.token_ids)) for a, b in pairs),
        twice=sum(b.gaps + max(0, len(b.token_ids) - len(a.token_ids)) for a, b in pairs),
        failed=[heard.error for run in (calm, chaos) for heard in run.streams if heard.error],
        spared=planned - len(chaos.deaths),
        left={"blocks": chaos.blocks_left, **left},
    )


def pauses(run: Run, actor: str) -> list[float]:
    """Seconds from each of this actor's deaths to each stream's next token; what was on its way then does not count."""
    found = []
    for death in (each for each in run.deaths if each.actor == actor):
        for heard in run.streams:
            if not heard.times or heard.times[0] > death.at:
                continue
            following = next((at for at in heard.times if at > death.noticed_at), None)
            if following is not None:
                found.append(following - death.at)
    return found


def row(run: Run, actor: str) -> dict[str, object]:
    """How long the streams paused where this actor died."""
    waited = pauses(run, actor) or [0.0]
    return {
        "actor": actor,
        "deaths": sum(death.actor == actor for death in run.deaths),
        "next tokens": len(waited),
        "median ms": round(1000 * statistics.median(waited)),
        "p95 ms": round(1000 * percentile(waited, 0.95)),
        "maximum ms": round(1000 * max(waited)),
    }


def whereto(run: Run) -> dict[str, str]:
    """Median and maximum milliseconds of each part of the executor's recoveries."""
    detect = [death.noticed_at - death.at for death in run.deaths if death.actor == "executor"]
    parts = {
        "detect": detect,
        "start": [recovery.start_seconds for recovery in run.recoveries],
        "load": [recovery.load_seconds for recovery in run.recoveries],
        "recompute": [recovery.recompute_seconds for recovery in run.recoveries],
    }
    return {
        name: f"{1000 * statistics.median(values):.0f} (up to {1000 * max(values):.0f})"
        for name, values in parts.items()
        if values
    }


async def chaos(settings: argparse.Namespace) -> tuple[Outcome, Run, Run]:
    """Both runs, and what became of them."""
    wanted = asks(settings.requests, settings.tokens, settings.seed)
    chance = random.Random(settings.seed)
    calm = await serve(_engine(settings), wanted, lambda _: None)
    tokens = sum(len(heard.token_ids) for heard in calm.streams)
    before = Left.now()
    engine = _engine(settings)

    def killer(streams: Sequence[Heard]) -> Killer:
        return Killer(engine, streams, settings.executor == "process", chance)

    plan = {"kills": settings.kills, "crashes": settings.crashes, "tokens": tokens}
    stormy = await serve(engine, wanted, killer, **plan)
    await asyncio.sleep(0)
    planned = settings.kills + settings.crashes * len(OTHERS)
    return compare(calm, stormy, planned, before, Left.now()), calm, stormy


def _engine(settings: argparse.Namespace) -> Engine:
    chosen: dict[str, Any] = {"executor": settings.executor, "running_max": settings.running_max, "seed": settings.seed}
    if settings.model == "stub":
        return stub_engine(**chosen)
    return Engine(settings.model, dtype=settings.dtype, decoder=settings.decoder, **chosen)


def main() -> None:
    settings = options(
        __doc__,
        requests=200,
        kills=50,
        crashes=20,
        tokens=24,
        running_max=64,
        model="smollm2-135m-instruct",
        executor="process",
        decoder="auto",
        dtype="float32",
        seed=1,
    )
    outcome, calm, stormy = asyncio.run(chaos(settings))
    facts = {
        "requests": settings.requests,
        "tokens": sum(len(heard.token_ids) for heard in stormy.streams),
        "different": outcome.different,
        "lost": outcome.lost,
        "twice": outcome.twice,
        "failed": len(outcome.failed),
        "spared": outcome.spared,
        **{f"{name} left": count for name, count in outcome.left.items()},
        "undisturbed s": round(calm.seconds, 1),
        "s": round(stormy.seconds, 1),
        **{f"{name} ms": text for name, text in whereto(stormy).items()},
        "model": settings.model,
        "dtype": settings.dtype,
        "executor": settings.executor,
    }
    report([row(stormy, actor) for actor in ("executor", *OTHERS)], settings.json, **facts)
    for error in outcome.failed:
        print(error)
    sys.exit(0 if outcome.is_good else 1)


if __name__ == "__main__":
    main()
