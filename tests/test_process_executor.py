"""The executor in a process of its own: however it dies, every stream goes on with the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Unpack

import executors
import pytest

from cuelight import Engine, Stream, errors
from cuelight.config import EngineOptions
from cuelight.replay import replay
from cuelight.testing import crash, decode, encode, next_letter, stub_engine

NET_SECONDS = 120.0
"""A safety net around everything that waits; no test measures by it."""

TOKENS = 60


def expected(prompt: str, count: int = TOKENS) -> str:
    tokens = list(encode(prompt))
    for _ in range(count):
        tokens.append(next_letter(tokens))
    return decode(tokens[len(prompt) :])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(NET_SECONDS):
        while not condition():  # noqa: ASYNC110  # what it waits for is any state, not an event
            await asyncio.sleep(0.002)


OTHERS: set[int] = set()


def children() -> set[int]:
    """The processes this test has started."""
    return _all_children() - OTHERS


def _all_children() -> set[int]:
    found: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that ended meanwhile
            found |= set(map(int, file.read_text().split()))
    return found


@pytest.fixture(autouse=True)
def only_own_children() -> Iterator[None]:
    """Others may have been there before, such as one that keeps books for `multiprocessing`."""
    gc.collect()  # what earlier tests have left is not to go in the middle of one
    OTHERS.update(_all_children())
    yield
    OTHERS.clear()


def leftovers() -> dict[str, object]:
    threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("cuelight")}
    return {
        "threads": threads,
        "children": children(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "tasks": len(asyncio.all_tasks()),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for name in ("hold the load", "hold the steps"):
        (tmp_path / name).unlink(missing_ok=True)


@asynccontextmanager
async def serving(folder: Path, **options: Unpack[EngineOptions]) -> AsyncIterator[Engine]:
    """An engine in whose process everything is as the folder says; afterwards nothing may be left of it."""
    async with asyncio.timeout(NET_SECONDS):
        async with stub_engine():  # what the first engine of all leaves in this process is not this one's
            pass
        before = leftovers()
        options = {"executor": "process", **options}
        engine = Engine.from_ensemble("stub", lambda config: executors.ensemble(folder, config), **options)
        try:
            async with engine:
                yield engine
        finally:
            await until(lambda: leftovers() == before)


async def check_all(streams: dict[str, Stream]) -> None:
    for prompt, stream in streams.items():
        result = await stream.result()
        assert result.text == expected(prompt)
        assert len(result.token_ids) == TOKENS


def submitted(engine: Engine, count: int = 6) -> dict[str, Stream]:
    return {f"prompt {n}": engine.stream(f"prompt {n}", max_tokens=TOKENS) for n in range(count)}


async def test_it_serves_from_another_process(folder: Path) -> None:
    async with serving(folder) as engine:
        await check_all(submitted(engine))
        assert set(executors.lives(folder)) == children()
        health = engine.health()
        assert (health.state, health.restarts, health.last_recovery) == ("serving", {}, None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV], ids=lambda number: number.name)
async def test_a_process_that_is_killed_amid_streams_costs_no_token(folder: Path, number: signal.Signals) -> None:
    async with serving(folder) as engine:
        (folder / "hold the steps").touch()
        streams = submitted(engine)
        await until(lambda: any(len(stream.inbox.token_ids) > 1 for stream in streams.values()))
        os.kill(executors.lives(folder)[-1], number)
        (folder / "hold the steps").unlink()
        await check_all(streams)
        health = engine.health()
        assert health.restarts == {"executor": 1}
        assert number.name in health.crashes[-1].error
        assert health.last_recovery is not None


@pytest.mark.parametrize("trick", ["exit once", "raise SystemExit once"])
async def test_a_process_that_exits_by_itself_costs_no_token(folder: Path, trick: str) -> None:
    async with serving(folder) as engine:
        (folder / trick).touch()
        await check_all(submitted(engine))


@pytest.mark.parametrize("trick", ["stop once", "spin once"])
async def test_a_process_that_hangs_is_killed_and_costs_no_token(folder: Path, trick: str) -> None:
    async with serving(folder, step_timeout_seconds=0.5) as engine:
        (folder / trick).touch()
        await check_all(submitted(engine))
        health = engine.health()
        assert health.restarts["executor"] >= 1
        assert "it was killed" in health.crashes[0].error


async def test_a_process_that_is_killed_again_and_again_costs_no_token(folder: Path) -> None:
    async with serving(folder) as engine:
        streams = submitted(engine)
        for death in range(1, 5):
            await until(lambda: any(stream.inbox.token_ids for stream in streams.values()))
            with suppress(ProcessLookupError):  # as it has been asked for, and is not there yet
                os.kill(executors.lives(folder)[-1], signal.SIGKILL)
            await until(lambda death=death: engine.health().restarts.get("executor", 0) >= death)
            await until(lambda death=death: len(executors.lives(folder)) > death)
        await check_all(streams)


async def test_a_process_that_dies_while_it_loads_is_replaced(folder: Path) -> None:
    async with serving(folder) as engine:
        streams = submitted(engine)
        (folder / "hold the load").touch()
        os.kill(executors.lives(folder)[0], signal.SIGKILL)
        for count in (2, 3):
            await until(lambda count=count: len(executors.lives(folder)) == count)
            os.kill(executors.lives(folder)[-1], signal.SIGKILL)
        await until(lambda: len(executors.lives(folder)) == 4)
        assert engine.health().state == "recovering"
        (folder / "hold the load").unlink()
        await check_all(streams)
        await until(lambda: engine.health().state == "serving")


async def test_a_process_that_dies_at_the_start_is_replaced(folder: Path) -> None:
    (folder / "hold the load").touch()
    engine = Engine.from_ensemble("stub", lambda config: executors.ensemble(folder, config), executor="process")
    async with asyncio.timeout(NET_SECONDS):
        starting = asyncio.create_task(engine.start())
        await until(lambda: len(executors.lives(folder)) == 1)
        os.kill(executors.lives(folder)[0], signal.SIGKILL)
        await until(lambda: len(executors.lives(folder)) == 2)
        (folder / "hold the load").unlink()
        await starting
        await check_all(submitted(engine))
        await engine.stop()


async def test_a_model_that_does_not_load_is_an_error_of_the_start(folder: Path) -> None:
    (folder / "cannot load").touch()
    with pytest.raises(errors.ModelUnavailable, match="no such weights"):
        async with serving(folder):
            pass


async def test_a_process_that_dies_at_every_start_is_an_error_of_the_start(folder: Path) -> None:
    (folder / "exit while loading").touch()
    with pytest.raises(errors.ModelUnavailable, match="status 3"):
        async with serving(folder, restarts_max=2):
            pass


async def test_a_load_that_fails_for_a_while_is_tried_again(folder: Path) -> None:
    async with serving(folder) as engine:
        streams = submitted(engine)
        (folder / "cannot load").touch()
        os.kill(executors.lives(folder)[0], signal.SIGKILL)
        await until(lambda: len(executors.lives(folder)) == 3)
        (folder / "cannot load").unlink()
        await check_all(streams)


async def test_an_engine_that_cannot_recover_gives_up_and_gives_everything_back(folder: Path) -> None:
    others = set(threading.enumerate())
    async with serving(folder, restarts_max=2) as engine:
        (folder / "hold the steps").touch()
        streams = submitted(engine)
        (folder / "cannot load").touch()
        os.kill(executors.lives(folder)[0], signal.SIGKILL)
        ends = await asyncio.gather(*[stream.result() for stream in streams.values()], return_exceptions=True)
        assert {type(end) for end in ends} == {errors.EngineGaveUp}
        assert len(set(map(id, ends))) == len(ends)
        with pytest.raises(errors.EngineGaveUp, match="no such weights"):
            engine.stream("later")
        health = engine.health()
        assert health.state == "unavailable"
        assert "no such weights" in health.reason
        assert health.restarts["executor"] == len(executors.lives(folder)) == 3
        await until(lambda: not children())
        await until(lambda: not [t for t in set(threading.enumerate()) - others if t.name.startswith("cuelight")])
    assert engine.health().state == "closed"
    assert "no such weights" in engine.health().reason


async def test_a_request_that_kills_the_process_fails_alone(folder: Path) -> None:
    async with serving(folder) as engine:
        poison = engine.stream("!", max_tokens=TOKENS)
        streams = submitted(engine)
        with pytest.raises(errors.RequestFailed, match="brought the executor down"):
            await poison.result()
        await check_all(streams)
        assert engine.health().restarts["executor"] <= 3
        await check_all(submitted(engine))


async def test_a_request_on_which_a_step_raises_fails_alone_and_the_process_lives_on(folder: Path) -> None:
    async with serving(folder) as engine:
        bad = engine.stream("?", max_tokens=TOKENS)
        streams = submitted(engine)
        with pytest.raises(errors.RequestFailed, match="cursed"):
            await bad.result()
        await check_all(streams)
        assert engine.health().restarts == {}


async def test_a_stopped_process_does_not_hold_up_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuelight.engine.LINGER_SECONDS", 0.1)
    async with serving(folder) as engine:
        submitted(engine)
        os.kill(executors.lives(folder)[0], signal.SIGSTOP)


async def test_a_start_that_is_cancelled_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuelight.engine.LINGER_SECONDS", 0.1)
    (folder / "hold the load").touch()
    async with stub_engine():
        pass
    before = leftovers()
    engine = Engine.from_ensemble("stub", lambda config: executors.ensemble(folder, config), executor="process")
    starting = asyncio.create_task(engine.start())
    await until(lambda: len(executors.lives(folder)) == 1)
    starting.cancel()
    await asyncio.wait([starting], timeout=NET_SECONDS)
    assert starting.cancelled()
    await until(lambda: leftovers() == before)


async def test_a_stop_ends_a_start_that_hangs(folder: Path) -> None:
    (folder / "hold the load").touch()
    async with stub_engine():
        pass
    before = leftovers()
    engine = Engine.from_ensemble("stub", lambda config: executors.ensemble(folder, config), executor="process")
    starting = asyncio.create_task(engine.start())
    await until(lambda: len(children()) == 1)
    for child in children():
        os.kill(child, signal.SIGSTOP)  # before its first word
    async with asyncio.timeout(NET_SECONDS):
        await engine.stop()
        with pytest.raises(errors.EngineClosed):
            await starting
    await until(lambda: leftovers() == before)


async def test_what_no_process_can_import_is_a_mistake_in_the_options() -> None:
    with pytest.raises(errors.ConfigError, match="cannot be imported by another process"):
        async with stub_engine(next_token=lambda _: 65, executor="process"):
            pass


SCRIPT = """
import asyncio, os, sys
from pathlib import Path
import executors
from cuelight import Engine

async def main():
    folder = Path(sys.argv[1])
    ensemble = lambda config: executors.ensemble(folder, config)
    async with Engine.from_ensemble("stub", ensemble, executor="process") as engine:
        result = await engine.generate("prompt 1", max_tokens=60)
        (folder / "result").write_text(result.text)
        if "stay" in sys.argv:
            (folder / "ready").touch()
            await asyncio.sleep(3600)

if "closed" in sys.argv:
    os.close(0), os.close(1), os.close(2)
asyncio.run(main())
"""


def test_it_needs_no_output(folder: Path) -> None:
    program = [sys.executable, "-c", SCRIPT, str(folder), "closed"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(program, env=environment, timeout=NET_SECONDS, check=True)
    assert (folder / "result").read_text() == expected("prompt 1")


async def test_it_dies_with_the_program(folder: Path) -> None:
    program = [sys.executable, "-c", SCRIPT, str(folder), "stay"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(program, env=environment) as parent:  # noqa: ASYNC220  # it begins at once
        await until((folder / "ready").exists)
        child = os.pidfd_open(executors.lives(folder)[0])
        parent.kill()
    try:
        ended, _, _ = select.select([child], [], [], NET_SECONDS)
        assert ended
    finally:
        os.close(child)


@pytest.mark.model
@pytest.mark.parametrize("decoder", ["native", "transformers"])
async def test_the_real_model_goes_on_where_it_stood(decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # several threads of torch take minutes where cores are shared
    asked: list[dict[str, object]] = [{"max_tokens": 16}, {"max_tokens": 16, "temperature": 1.0, "seed": 7}]
    prompts = ["Once upon a time", "The capital of France is"]
    options: EngineOptions = {"device": "cpu", "dtype": "float32", "block_count": 64, "executor": "process"}
    async with asyncio.timeout(2 * NET_SECONDS), Engine(decoder=decoder, **options) as engine:
        calm = await asyncio.gather(*[engine.generate(p, **how) for p in prompts for how in asked])
        engine.forget_prefixes()
        streams = [engine.stream(p, **how) for p in prompts for how in asked]
        await until(lambda: all(len(stream.inbox.token_ids) >= 5 for stream in streams))
        crash(engine, "executor")
        stormy = [await stream.result() for stream in streams]
        assert engine.health().restarts == {"executor": 1}
    assert [result.token_ids for result in stormy] == [result.token_ids for result in calm]
    assert [result.text for result in stormy] == [result.text for result in calm]


async def test_a_journal_of_it_is_replayed_for_all_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps that were lost with the process were told, and never delivered: that is no difference."""
    journal = folder / "engine.cuelog"
    async with asyncio.timeout(NET_SECONDS), stub_engine(executor="process", journal=journal) as engine:
        for _ in range(3):
            streams = submitted(engine)
            await until(lambda streams=streams: any(stream.inbox.token_ids for stream in streams.values()))
            crash(engine, "executor")
            await check_all(streams)
    for actor in ("intake", "scheduler", "cache", "detokenizer"):
        assert replay(str(journal), actor) == 0, capsys.readouterr().out
    with pytest.raises(errors.ConfigError, match="executor lives outside the loop"):
        replay(str(journal), "executor")
