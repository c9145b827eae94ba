"""Trace a stub engine: the modules that one request passes, and those of one step's control plane.

Run by `benchmarks.structure --trace` in a process of its own, with the package of the measured checkout on the path;
prints the names of the modules as JSON. Standard library and the package only.

A module is passed where one of its functions is entered, on any thread. Request: from `Engine.stream()` to the first
chunk, by all of several requests. Step: between two messages `StepDone` that the scheduler handles, in scheduler,
cache, executor, kernel and messages, by every step of a request that decodes; and by any step, admission included.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from types import FrameType

import cuelight
from cuelight.testing import stub_engine

REQUESTS = 5
TOKENS = 64
CONTROL_PLANE = tuple(
    f"cuelight.{name}" for name in ("actors.scheduler", "actors.cache", "actors.executor", "kernel", "messages")
)
PACKAGE = Path(cuelight.__file__).parent


class Tracer:
    """The modules entered since the last call of `take` or, for steps, between two messages `StepDone`."""

    def __init__(self) -> None:
        self._names: dict[str, str | None] = {}
        self._entered: set[str] = set()
        self._entered_in_step: set[str] = set()
        self.steps: list[set[str]] = []

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call" or (name := self._module(frame.f_code.co_filename)) is None:
            return
        if frame.f_code.co_qualname == "Scheduler.handle" and "StepDone" in _types(frame):
            self.steps.append({name for name in self._entered_in_step if name.startswith(CONTROL_PLANE)})
            self._entered_in_step = set()
        self._entered.add(name)
        self._entered_in_step.add(name)

    def take(self) -> set[str]:
        """The modules entered since the last call."""
        entered, self._entered = self._entered, set()
        return entered

    def _module(self, file: str) -> str | None:
        if file not in self._names:
            path = Path(file)
            parts = path.relative_to(PACKAGE).with_suffix("").parts if path.is_relative_to(PACKAGE) else None
            self._names[file] = None if parts is None else ".".join(["cuelight", *parts]).removesuffix(".__init__")
        return self._names[file]


def _types(frame: FrameType) -> set[str]:
    return {type(value).__name__ for value in frame.f_locals.values()}


async def trace(tracer: Tracer) -> dict[str, list[str]]:
    """Run requests one after another, the first of them untraced, and one of many steps."""
    async with stub_engine() as engine:
        await engine.generate("warm-up", max_tokens=TOKENS)
        requests = []
        for number in range(REQUESTS):
            tracer.take()
            async with engine.stream(f"request {number}", max_tokens=1) as stream:
                async for _ in stream:
                    requests.append(tracer.take())
                    break
        tracer.steps.clear()
        await engine.generate("steps", max_tokens=TOKENS)
    decoding = tracer.steps[len(tracer.steps) // 4 : -len(tracer.steps) // 4]
    return {
        "a request": sorted(set.intersection(*requests)),
        "every step": sorted(set.intersection(*decoding)),
        "any step": sorted(set.union(*tracer.steps)),
    }


if __name__ == "__main__":
    tracer = Tracer()
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    print(json.dumps(asyncio.run(trace(tracer))))
