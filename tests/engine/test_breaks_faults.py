"""Faults that users' own scripts found: crashes requested by role, and disks without room."""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from pathlib import Path

import executors
import numpy as np
import pytest
from engines import expected_tokens, until

from cuelight import Engine, Stream, errors
from cuelight.cli import commands as cli
from cuelight.config import CHOICES, EngineConfig
from cuelight.testing import crash, next_letter, stub_engine


async def test_crash_of_an_unknown_role_is_a_key_error() -> None:
    async with stub_engine() as engine:
        with pytest.raises(KeyError, match="'nobody'"):
            crash(engine, "nobody")
    crash(engine, "intake")  # it is closed, as all roles are


async def test_crash_after_a_reload_hits_the_new_executor() -> None:
    async with stub_engine(models={"other": next_letter}) as engine:
        await engine.reload("other")
        crash(engine, "executor")  # while the old executor is still stopping
        await until(lambda: engine.health().restarts == {"executor 2": 1})
        assert (await engine.generate("go on", max_tokens=4)).token_ids == expected_tokens("go on", 4)


async def test_journal_that_cannot_rotate_on_a_full_disk_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "journal"
    async with stub_engine(journal=file, resume=True) as engine:
        await engine.generate("a request", max_tokens=5)
    content = file.read_bytes()
    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data)[:10]))
        with pytest.raises(errors.ConfigError, match="no room"):
            await stub_engine(journal=file, resume=True).start()
    assert file.read_bytes() == content
    assert not file.with_name("journal.new").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_to_a_full_disk_is_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "pull", lambda _: "folder")
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["pull"]) == 1
    error = capsys.readouterr().err
    assert error == "cuelight: the output cannot be written: No space left on device\n"


class Odd:
    """An object whose every operation raises."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    def __hash__(self) -> int:
        return 1

    def __repr__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize("value", [Odd(), 10**5000, np.zeros(3), [10**5000]], ids=["odd", "huge", "array", "list"])
async def test_values_without_repr_or_comparison_are_named_by_type(value: object) -> None:
    async with stub_engine() as engine:
        for call in (
            lambda: engine.set_policy(value),  # type: ignore[arg-type]
            lambda: engine.set_policy("fair", tenant_weights={"": value}),  # type: ignore[dict-item]
            lambda: engine.samples("a", value),  # type: ignore[arg-type]
            lambda: engine.resume(value),  # type: ignore[arg-type]
            lambda: engine.resume(1, value),  # type: ignore[arg-type]
        ):
            with pytest.raises(errors.EngineError):
                call()
        for pending in (
            engine.reload("other", running=value),  # type: ignore[arg-type]
            engine.generate_many(value),  # type: ignore[arg-type]
        ):
            with pytest.raises(errors.EngineError):
                await pending
        if not isinstance(value, int):
            with pytest.raises(errors.ConfigError):
                await engine.drain(value)  # type: ignore[arg-type]
        assert (await engine.explain(10**5000)).state == "unknown"
        for name in CHOICES:
            with pytest.raises(errors.ConfigError, match=name):
                EngineConfig.of({name: value})
        assert (await engine.generate("a", max_tokens=3)).token_ids == expected_tokens("a", 3)


async def test_attention_backends_exclude_the_native_decoders() -> None:
    with pytest.raises(errors.ConfigError, match="decoder 'transformers'"):
        EngineConfig(decoder="native", attention="reference")


def test_another_event_loop_on_the_same_thread_is_refused() -> None:
    """Waiting there for events of the first loop would never end."""

    async def start() -> Engine:
        engine = stub_engine()
        await engine.start()
        return engine

    async def use(engine: Engine, stream: Stream) -> None:
        asked = engine.generate("a"), engine.explain(1), engine.drain(1), engine.stop()
        for pending in (*asked, stream.result(), anext(stream)):
            with pytest.raises(errors.EngineUnavailable, match="event loop"):
                await pending

    with asyncio.Runner() as first:
        engine = first.run(start())
        stream = engine.stream("between two runs", max_tokens=2)
        with asyncio.Runner() as second:
            second.run(use(engine, stream))
        assert first.run(stream.result()).finish_reason == "length"
        first.run(engine.stop())


async def test_drain_of_an_engine_that_gives_up_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with executors_engine(tmp_path) as engine:
        (tmp_path / "hold the steps").touch()
        stream = engine.stream("a", max_tokens=20)
        draining = asyncio.create_task(engine.drain(100))
        await until(lambda: engine.health().state == "draining")
        (tmp_path / "cannot load").touch()
        (tmp_path / "hold the steps").unlink()
        crash(engine, "executor")
        with pytest.raises(errors.EngineGaveUp):
            await draining
        with pytest.raises(errors.EngineGaveUp):
            await stream.result()
    (line,) = (record for record in caplog.records if "gave_up" in record.getMessage())
    assert (line.name, line.levelname) == ("cuelight.engine", "ERROR")
    assert "the executor died 1 times in a row" in line.getMessage()


def executors_engine(folder: Path) -> Engine:
    return Engine.from_parts("stub", partial(executors.parts, folder), executor="thread", restarts_max=0)


async def test_cancelling_all_tasks_of_the_host_closes_the_engine() -> None:
    engine = stub_engine()
    await engine.start()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await until(lambda: engine.health().state == "closed")
    await engine.stop()


def test_truncated_journal_header_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve() -> None:
        async with stub_engine(journal=tmp_path / "journal", resume=True) as engine:
            await engine.generate("a", max_tokens=2)

    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data)[:10]))
        with pytest.raises(errors.ConfigError, match="no room"):
            asyncio.run(serve())
    asyncio.run(serve())
