"""Measure the time of an engine's parts from outside, by wrapping methods of the actors and the device.

The engine knows nothing of it, and runs as ever before and after. On the event loop and on the thread that prepares,
the time of the processor counts, since that work is hidden behind the device's; on the device's thread the wall's.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np

from cuelight.actors.cache.actor import CacheManager
from cuelight.actors.detokenizer.actor import Detokenizer
from cuelight.actors.executor.batch import Batch
from cuelight.actors.executor.native.decoder import PARTS, NativeDecoder
from cuelight.actors.executor.native.runner import NativeRunner
from cuelight.actors.intake.actor import Intake
from cuelight.actors.scheduler.actor import Scheduler

GENERAL_RUNNER = "cuelight.actors.executor.runner"
"""Not imported unless it is in use: it brings torch."""


@dataclass(frozen=True)
class Step:
    """When the device was busy with which batch."""

    begin: float
    end: float
    batch: Batch


@dataclass(frozen=True)
class Span:
    """From one moment to another."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return max(0.0, self.end - self.begin)

    def within(self, begin: float, end: float) -> float:
        """Seconds that lie between these moments, too."""
        return max(0.0, min(self.end, end) - max(self.begin, begin))


class Stopwatch:
    """While it is entered, gathers `seconds` by what was done, and the device's `steps`. For one engine at a time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.parts = np.zeros(len(PARTS))
        self.steps: list[Step] = []
        self.loop_seconds = 0.0
        self._timed_decoder: NativeDecoder | None = None
        self._restore: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        """On the event loop's thread."""
        for kind, name in (
            (Scheduler, "plan"),
            (CacheManager, "blocks"),
            (Detokenizer, "detokenize"),
            (Intake, "intake"),
        ):
            self._wrap(kind, "handle", partial(self._summed, name, time.thread_time))
        runners: list[tuple[type, str]] = [(NativeRunner, "run")]
        if (general := sys.modules.get(GENERAL_RUNNER)) is not None:
            runners.append((general.ModelRunner, "_compute"))  # which its stream calls, at once or on a thread
            self._wrap(general.ModelRunner, "_forward", partial(self._summed, "forward", time.perf_counter))
        for runner, computes in runners:
            self._wrap(runner, "prepare", partial(self._summed, "prepare", time.thread_time))
            self._wrap(runner, computes, self._stepped)
        self._wrap(NativeDecoder, "decode", self._decoded)
        self._loop_began = time.thread_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.loop_seconds = time.thread_time() - self._loop_began
        for restore in self._restore:
            restore()
        if self._timed_decoder is not None:
            self._timed_decoder.seconds = None

    def _wrap(self, kind: type, name: str, wrapped: Callable[[Callable[..., object]], Callable[..., object]]) -> None:
        method = kind.__dict__[name]
        setattr(kind, name, wrapped(method))
        self._restore.append(partial(setattr, kind, name, method))

    def _summed(self, name: str, now: Callable[[], float], method: Callable[..., object]) -> Callable[..., object]:
        seconds = self.seconds

        def call(*arguments: object) -> object:
            begin = now()
            result = method(*arguments)
            seconds[name] += now() - begin
            return result

        return call

    def _decoded(self, method: Callable[..., object]) -> Callable[..., object]:
        timed = self._summed("forward", time.perf_counter, method)

        def decode(decoder: NativeDecoder, *arguments: object) -> object:
            if self._timed_decoder is None:
                self._timed_decoder = decoder
                decoder.seconds = self.parts
            return timed(decoder, *arguments)

        return decode

    def _stepped(self, method: Callable[..., object]) -> Callable[..., object]:
        steps = self.steps

        def run(runner: object, batch: Batch) -> object:
            begin = time.perf_counter()
            result = method(runner, batch)
            steps.append(Step(begin, time.perf_counter(), batch))
            return result

        return run

    def idle(self, spans: Sequence[Span]) -> float:
        """The share of these spans in which the device computed nothing."""
        total = sum(span.seconds for span in spans)
        busy = sum(span.within(step.begin, step.end) for span in spans for step in self.steps)
        return 1 - busy / total if total else 0.0

    def per_step(self, wall_seconds: float) -> dict[str, float]:
        """Milliseconds a step: the device's thread first, which together give the wall; then what is hidden."""
        seconds, run = self.seconds, sum(step.end - step.begin for step in self.steps)
        forward = seconds["forward"]
        parts = {f"forward: {name}": float(spent) for name, spent in zip(PARTS, self.parts, strict=True)}
        handlers = {name: seconds[name] for name in ("plan", "blocks", "detokenize", "intake")}
        shown = {
            **(parts if self.parts.any() else {}),
            "forward: rest": forward - float(self.parts.sum()),
            "sample, read back": run - forward,
            "device idle": wall_seconds - run,
            **{f"hidden: {name}": spent for name, spent in handlers.items()},
            "hidden: messages, clients": self.loop_seconds - sum(handlers.values()),
            "hidden: prepare": seconds["prepare"],
        }
        return {name: 1e3 * spent / max(1, len(self.steps)) for name, spent in shown.items()}
