"""Cuelight as an engine of another benchmark's harness: a folder with `harness.py`, whose `Engine` adapters extend.

The harness owns the workloads, the timing and the form of the results; here is how it starts, asks and stops ours.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Protocol

from cuelight import Engine, model_path
from cuelight.config import EngineOptions


class Trace(Protocol):
    """The harness's interface for the events of a request."""

    def token(self, at: float, token_id: int, /) -> None: ...


class Served:
    """An engine in an event loop of its own, which turns only while requests are served."""

    def __init__(self, model: str, options: EngineOptions, new_trace: Callable[[float], Trace]) -> None:
        self.folder = model_path(model)
        self._engine = Engine(self.folder, **options)
        self._runner = asyncio.Runner()
        self._new_trace = new_trace

    def start(self) -> None:
        self._runner.run(self._engine.start())

    def stop(self) -> None:
        self._runner.run(self._engine.stop())
        self._runner.close()

    def run(self, requests: Sequence[Mapping[str, object]]) -> list[Trace]:
        return self._runner.run(self._run(requests))

    async def _run(self, requests: Sequence[Mapping[str, object]]) -> list[Trace]:
        begin = time.perf_counter()
        return await asyncio.gather(*(self._one(request, begin) for request in requests))

    async def _one(self, request: Mapping[str, object], begin: float) -> Trace:
        at, max_new = request["at"], request["max_new"]
        assert isinstance(at, float) and isinstance(max_new, int)
        if at:
            await asyncio.sleep(begin + at - time.perf_counter())
        trace = self._new_trace(begin + at)
        async for chunk in self._engine.stream(request["ids"], max_tokens=max_new, ignore_eos=True):
            now = time.perf_counter()
            for token_id in chunk.token_ids:
                trace.token(now, token_id)
        return trace

    def decode(self, token_ids: list[int]) -> str:
        from tokenizers import Tokenizer

        return str(Tokenizer.from_file(str(self.folder / "tokenizer.json")).decode(token_ids))


def run(folder: Path, arguments: argparse.Namespace, options: EngineOptions) -> None:
    """Let the harness in this folder measure us. It reads the command line, so it is given its own."""
    sys.path.insert(0, str(folder.resolve()))
    harness = importlib.import_module("harness")
    sys.argv = ["engine", "--workload", arguments.workload, "--reps", str(arguments.reps)]
    for name, value in (("--out", arguments.json), ("--label", arguments.label)):
        if value:
            sys.argv += [name, str(value)]
    harness.main(_adapter(harness, arguments.model, options))


def _adapter(harness: ModuleType, model: str, options: EngineOptions) -> type:
    base: type = harness.Engine

    class Cuelight(base):  # type: ignore[misc]  # known when it runs
        name = f"cuelight {options.get('quantization') or options['dtype']}"
        config: ClassVar = dict(options)

        def start(self) -> None:
            self._served = Served(model, options, harness.Trace)
            self._served.start()

        def run(self, requests: Sequence[Mapping[str, object]]) -> list[Trace]:
            return self._served.run(requests)

        def decode(self, token_ids: list[int]) -> str:
            return self._served.decode(token_ids)

        def versions(self) -> object:
            return harness.package_versions("cuelight", "numpy")

        def stop(self) -> None:
            self._served.stop()

    return Cuelight
