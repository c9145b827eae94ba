"""What users' own fault scripts have found: crashes asked for by name, and disks without room."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from engines import expected_tokens, until

from cuelight import cli, errors
from cuelight.testing import crash, next_letter, stub_engine


async def test_a_crash_of_nobody_is_a_key_error() -> None:
    async with stub_engine() as engine:
        with pytest.raises(KeyError, match="'nobody'"):
            crash(engine, "nobody")
    crash(engine, "intake")  # which is over, as all are


async def test_after_a_reload_it_is_the_new_executor_that_crashes() -> None:
    async with stub_engine(models={"other": next_letter}) as engine:
        await engine.reload("other")
        crash(engine, "executor")  # while the one before is still leaving
        await until(lambda: engine.health().restarts == {"executor 2": 1})
        assert (await engine.generate("go on", max_tokens=4)).token_ids == expected_tokens("go on", 4)


async def test_a_disk_without_room_for_the_next_journal_keeps_the_one_before(
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
def test_output_to_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "pull", lambda _: "folder")
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["pull"]) == 1
    error = capsys.readouterr().err
    assert error == "cuelight: the output cannot be written: No space left on device\n"
