"""Executors without weights for tests that place them in a process: a module that the process imports.

What they do besides is told them through files in a folder, which outlives them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cuelight.actors.executor.options import current_phases
from cuelight.actors.executor.stub import StubDevice, next_letter

if TYPE_CHECKING:
    from cuelight.config import EngineConfig
    from cuelight.core.parts import EngineParts

POLL_SECONDS = 0.002


class Cradle(type(Path())):  # type: ignore[misc]  # a path of this system's kind
    """A folder that is heeded even before the executor's first word, when its process learns of it."""

    def __reduce__(self) -> tuple[object, ...]:
        return born, (str(self),)


def born(path: str) -> Path:
    """In the process, which lives and has not said so."""
    folder = Path(path)
    _wait_while(folder / "hold the birth")
    if (folder / "exit at birth").exists():
        os._exit(3)
    if _take(folder / "die at birth"):
        os.kill(os.getpid(), signal.SIGKILL)
    return folder


def parts(folder: Path, config: EngineConfig) -> EngineParts[object]:
    """A stub whose device heeds the folder."""
    from cuelight.core.parts import EngineParts  # which the process has no need of
    from cuelight.testing import stub_parts

    stub = stub_parts(config)
    return EngineParts(stub.facts, stub.encoder, stub.decode, partial(load, Cradle(folder), config.block_size))


class Ticks:
    """A clock by which all takes as long: to move a block of 16 tokens is then faster than to compute them."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __call__(self) -> float:
        self._seconds += 1.0
        return self._seconds


def of_model(folder: Path, config: EngineConfig) -> EngineParts[object]:
    """A model's real executor, for prompts of token ids."""
    from cuelight.actors.executor.build import load_model
    from cuelight.core.parts import EngineParts, lasting_memory, load_options
    from cuelight.models.folder import read_facts
    from cuelight.testing import stub_parts

    stub, facts = stub_parts(config), read_facts(folder)
    options = replace(load_options(folder, config, facts), now=Ticks())
    return EngineParts(facts, stub.encoder, stub.decode, partial(load_model, options), lasting_memory(config))


def load(folder: Path, block_size: int) -> StubDevice:
    """Says that it lives; then does what a file's name says, while the file is there."""
    with (folder / "lives").open("a") as lives:
        lives.write(f"{os.getpid()}\n")
    with current_phases(time.monotonic)("read weights"):
        if (folder / "cannot load").exists():
            raise OSError("no such weights")
        if (folder / "exit while loading").exists():
            os._exit(3)
        _wait_while(folder / "hold the load")
    return StubDevice(1024, block_size, partial(token, folder))


def token(folder: Path, token_ids: Sequence[int]) -> int:
    """As the stub's own, and as deadly as the prompt wants: then it lives for ten tokens of all."""
    if len(token_ids) > 10:
        if token_ids[0] == ord("!"):
            os.abort()
        if token_ids[0] == ord("?"):
            raise ValueError("cursed")
        _wait_while(folder / "hold the steps")
        if _take(folder / "stop once"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if _take(folder / "spin once"):
            while True:
                pass
        if _take(folder / "exit once"):
            os._exit(0)
        if _take(folder / "raise SystemExit once"):
            raise SystemExit
    return next_letter(token_ids)


def lives(folder: Path) -> list[int]:
    """The processes that have begun to load, oldest first."""
    file = folder / "lives"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def _wait_while(file: Path) -> None:
    while file.exists():
        time.sleep(POLL_SECONDS)


def _take(file: Path) -> bool:
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    return True
