"""Run one experiment of one side and print its outcome as one line of JSON, the last one.

python -m benchmarks.kernel_peers MODULE.FUNCTION LOOP SECONDS ACTORS
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import platform
import sys
from collections.abc import Awaitable, Callable, Coroutine
from importlib.metadata import PackageNotFoundError, version
from typing import cast

from benchmarks.kernel_peers import Effort, Outcome

Experiment = Callable[[Effort], Outcome | Awaitable[Outcome]]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("pykka", "ray", "uvloop", "xoscar"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _run(experiment: Experiment, loop: str, effort: Effort) -> Outcome:
    if not inspect.iscoroutinefunction(experiment):
        return cast(Outcome, experiment(effort))
    coroutine = cast(Coroutine[object, object, Outcome], experiment(effort))
    if loop == "uvloop":
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(coroutine)
    return asyncio.run(coroutine)


def main() -> None:
    target, loop, seconds, actors = sys.argv[1:]
    module, function = target.split(".")
    try:
        experiment = getattr(importlib.import_module(f"benchmarks.kernel_peers.{module}"), function)
    except ImportError as error:
        print(json.dumps({"missing": str(error), "versions": _versions()}))
        return
    outcome = _run(experiment, loop, Effort(float(seconds), int(actors)))
    print(json.dumps({"figures": outcome.figures, "note": outcome.note, "versions": _versions()}))


if __name__ == "__main__":
    main()
