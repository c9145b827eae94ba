"""An executor in its own process: however it dies, every stream continues with the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

import executors
import pytest

import cuelight.core.parts
from cuelight import Engine, Result, Stream, errors
from cuelight.cli.replay import replay
from cuelight.config import EngineConfig, EngineOptions, RequestOptions
from cuelight.kernel import System
from cuelight.testing import crash, decode, encode, next_letter, stub_engine, stub_parts

NET_SECONDS = 120.0
"""Timeout around everything that waits; no test measures by it."""

TOKENS = 60


def expected(prompt: str, count: int = TOKENS) -> str:
    tokens = list(encode(prompt))
    for _ in range(count):
        tokens.append(next_letter(tokens))
    return decode(tokens[len(prompt) :])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(NET_SECONDS):
        while not condition():  # noqa: ASYNC110  # waits for a state
            await asyncio.sleep(0.002)


OTHERS: set[int] = set()


def children() -> set[int]:
    """The processes that this test has started."""
    return _all_children() - OTHERS


def _all_children() -> set[int]:
    found: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended meanwhile
            found |= set(map(int, file.read_text().split()))
    return found


@pytest.fixture(scope="module", autouse=True)
def nothing_old_is_collected() -> Iterator[None]:
    """Freeze the objects of earlier tests, so that each test here does not collect them again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart executors without a delay."""
    restart_policy = replace(cuelight.core.parts.EXECUTOR_RESTART_POLICY, backoff_seconds=0.0, backoff_max_seconds=0.0)
    monkeypatch.setattr(cuelight.core.parts, "EXECUTOR_RESTART_POLICY", restart_policy)


@pytest.fixture(autouse=True)
def only_own_children() -> Iterator[None]:
    """Leave out processes that were there before, such as the resource tracker of `multiprocessing`."""
    gc.collect()  # garbage of earlier tests must not be collected within this one
    OTHERS.update(_all_children())
    yield
    OTHERS.clear()


def traces() -> set[object]:
    """Threads, tasks, processes and files, each by its identity; those from before the test may end or stay."""
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("cuelight")}
    return {*threads, *asyncio.all_tasks(), *children(), *descriptors()}


def descriptors() -> Iterator[tuple[str, Path]]:
    """Each file descriptor with its target: a socket or pipe has a unique number."""
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # such as the descriptor by which this folder is read
            yield file.name, file.readlink()


async def until_gone(before: set[object]) -> None:
    """Wait until only `before` is left."""
    await until(lambda: traces() <= before)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for name in ("hold the birth", "hold the load", "hold the steps"):
        (tmp_path / name).unlink(missing_ok=True)


@asynccontextmanager
async def serving(folder: Path, **options: Unpack[EngineOptions]) -> AsyncIterator[Engine]:
    """An engine whose process does what the files in `folder` say; checks that nothing of it is left at the end."""
    async with asyncio.timeout(NET_SECONDS):
        async with stub_engine():  # resources that the first engine leaves in this process do not belong to this one
            pass
        before = traces()
        options = {"executor": "process", **options}
        engine = Engine.from_parts("stub", lambda config: executors.parts(folder, config), **options)
        try:
            async with engine:
                yield engine
        finally:
            await until_gone(before)


async def check_all(streams: dict[str, Stream]) -> None:
    for prompt, stream in streams.items():
        result = await stream.result()
        assert result.text == expected(prompt)
        assert len(result.token_ids) == TOKENS


def submitted(engine: Engine, count: int = 6) -> dict[str, Stream]:
    return {f"prompt {n}": engine.stream(f"prompt {n}", max_tokens=TOKENS) for n in range(count)}


async def test_requests_are_served_from_another_process(folder: Path) -> None:
    async with serving(folder) as engine:
        await check_all(submitted(engine))
        assert set(executors.lives(folder)) == children()
        health = engine.health()
        assert (health.state, health.restarts, health.last_recovery) == ("serving", {}, None)
        assert list(health.load_phases) == ["read weights"], "phases that only the child has timed"


async def test_killed_process_loses_no_token(folder: Path) -> None:
    async with serving(folder) as engine:
        for deaths, number in enumerate((signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV), 1):
            (folder / "hold the steps").touch()
            streams = submitted(engine)
            await until(lambda streams=streams: any(len(stream.inbox.token_ids) > 1 for stream in streams.values()))
            os.kill(executors.lives(folder)[-1], number)
            (folder / "hold the steps").unlink()
            await check_all(streams)
            health = engine.health()
            assert health.restarts == {"executor": deaths}
            assert number.name in health.crashes[-1].error
            assert health.last_recovery is not None


async def test_exiting_process_loses_no_token(folder: Path) -> None:
    async with serving(folder) as engine:
        for trick in ("exit once", "raise SystemExit once"):
            (folder / trick).touch()
            await check_all(submitted(engine))
            assert not (folder / trick).exists()


async def test_hanging_process_is_killed_and_loses_no_token(folder: Path) -> None:
    # Where a healthy step takes longer than the limit, its process is killed as well, which must lose no token either.
    async with serving(folder, step_timeout_seconds=0.5, restarts_max=1000) as engine:
        for trick in ("stop once", "spin once"):
            (folder / trick).touch()
            await check_all(submitted(engine))
            assert not (folder / trick).exists()
        health = engine.health()
        assert health.restarts["executor"] >= 2
        assert "it was killed" in health.crashes[0].error


async def test_process_killed_repeatedly_loses_no_token(folder: Path) -> None:
    async with serving(folder) as engine:
        streams = submitted(engine)
        for death in range(1, 4):
            await until(lambda: any(stream.inbox.token_ids for stream in streams.values()))
            with suppress(ProcessLookupError):  # killed already, and its successor has not started
                os.kill(executors.lives(folder)[-1], signal.SIGKILL)
            await until(lambda death=death: engine.health().restarts.get("executor", 0) >= death)
            await until(lambda death=death: len(executors.lives(folder)) > death)
        await check_all(streams)


async def test_process_that_dies_while_loading_is_replaced(folder: Path) -> None:
    async with serving(folder) as engine:
        streams = submitted(engine)
        (folder / "hold the load").touch()
        os.kill(executors.lives(folder)[0], signal.SIGKILL)
        await until(lambda: len(executors.lives(folder)) == 2)
        os.kill(executors.lives(folder)[-1], signal.SIGKILL)
        await until(lambda: len(executors.lives(folder)) == 3)
        await until(lambda: engine.health().phase == "loading the model: read weights")
        assert engine.health().state == "recovering"
        (folder / "hold the load").unlink()
        await check_all(streams)
        await until(lambda: engine.health().state == "serving")


async def test_process_that_dies_at_the_start_is_replaced(folder: Path) -> None:
    (folder / "die at birth").touch()
    (folder / "hold the load").touch()
    engine = Engine.from_parts("stub", lambda config: executors.parts(folder, config), executor="process")
    async with asyncio.timeout(NET_SECONDS):
        starting = asyncio.create_task(engine.start())
        await until(lambda: len(executors.lives(folder)) == 1)
        assert engine.health().restarts == {"executor": 1}, "the first process sent no message"
        assert not (folder / "die at birth").exists()
        os.kill(executors.lives(folder)[0], signal.SIGKILL)
        await until(lambda: len(executors.lives(folder)) == 2)
        (folder / "hold the load").unlink()
        await starting
        await check_all(submitted(engine))
        await engine.stop()


async def test_silent_process_is_an_error_of_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "hold the birth").touch()
    async with stub_engine():
        pass
    before = traces()
    monkeypatch.setattr("cuelight.core.lifecycle.REPORT_SECONDS", 0.05)
    engine = Engine.from_parts("stub", lambda config: executors.parts(folder, config), executor="process")
    async with asyncio.timeout(NET_SECONDS):
        with pytest.raises(errors.ModelUnavailable, match=r"sent no message for 0\.05 s"):
            await engine.start()
    await until_gone(before)


class Unborn:
    """An object that no process can unpickle."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


async def test_process_that_cannot_unpickle_its_actor_is_an_error_of_the_start() -> None:
    stub = stub_parts(EngineConfig())
    ensemble = replace(stub, load_device=partial(print, Unborn()))
    engine = Engine.from_parts("stub", lambda _: ensemble, executor="process")
    async with asyncio.timeout(NET_SECONDS):
        with pytest.raises(errors.EngineBroken, match="no number"):
            await engine.start()
        assert engine.health().restarts == {}


async def test_cancelled_reload_leaves_no_hanging_process(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cuelight.core.reload.LINGER_SECONDS", 0.0)
    engine = Engine.from_parts(
        "stub",
        lambda config: executors.parts(folder, config),
        lambda name, config: executors.parts(Path(name), config),
        executor="process",
    )
    async with asyncio.timeout(NET_SECONDS), engine:
        served = children()
        for hold in ("hold the birth", "hold the load"):
            other = tmp_path_factory.mktemp("other")
            (other / hold).touch()
            reload = asyncio.create_task(engine.reload(str(other)))
            await until(lambda: len(children()) == 2)
            if hold == "hold the load":
                await until(lambda other=other: executors.lives(other))
            reload.cancel()
            await asyncio.wait([reload])
            await until(lambda: children() == served)
        await check_all(submitted(engine))


async def test_model_that_does_not_load_is_an_error_of_the_start(folder: Path) -> None:
    (folder / "cannot load").touch()
    with pytest.raises(errors.ModelUnavailable, match="no such weights"):
        async with serving(folder):
            pass


@pytest.mark.parametrize("trick", ["exit at birth", "exit while loading"])
async def test_process_that_dies_at_every_start_is_an_error_of_the_start(folder: Path, trick: str) -> None:
    (folder / trick).touch()
    with pytest.raises(errors.ModelUnavailable, match="status 3"):
        async with serving(folder, restarts_max=1):
            pass


async def test_load_that_fails_for_a_while_is_retried(folder: Path) -> None:
    async with serving(folder) as engine:
        streams = submitted(engine)
        (folder / "cannot load").touch()
        os.kill(executors.lives(folder)[0], signal.SIGKILL)
        await until(lambda: len(executors.lives(folder)) == 3)
        (folder / "cannot load").unlink()
        await check_all(streams)


async def test_engine_that_cannot_recover_gives_up_and_frees_everything(folder: Path) -> None:
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


async def test_request_that_kills_the_process_fails_alone(folder: Path) -> None:
    async with serving(folder) as engine:
        poison = engine.stream("!", max_tokens=TOKENS)
        streams = submitted(engine)
        with pytest.raises(errors.RequestFailed, match="times with this request, the last time alone"):
            await poison.result()
        await check_all(streams)
        assert engine.health().restarts["executor"] <= 3
        await check_all(submitted(engine))


async def test_request_whose_step_raises_fails_alone_and_the_process_lives(folder: Path) -> None:
    async with serving(folder) as engine:
        bad = engine.stream("?", max_tokens=TOKENS)
        streams = submitted(engine)
        with pytest.raises(errors.RequestFailed, match="cursed"):
            await bad.result()
        await check_all(streams)
        assert engine.health().restarts == {}


async def test_stopped_process_does_not_delay_the_close(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuelight.core.lifecycle.LINGER_SECONDS", 0.1)
    async with serving(folder) as engine:
        submitted(engine)
        os.kill(executors.lives(folder)[0], signal.SIGSTOP)


def has_host(system: System) -> bool:
    return system._running is not None and system._running.host is not None


@pytest.mark.parametrize("moment", ["its actors begin", "the model is loaded"])
async def test_cancelled_start_leaves_nothing_behind(
    folder: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cuelight.core.lifecycle.LINGER_SECONDS", 0.1)
    (folder / "hold the load").touch()
    async with stub_engine():
        pass
    before = traces()
    engine = Engine.from_parts("stub", lambda config: executors.parts(folder, config), executor="process")
    starting = asyncio.create_task(engine.start())
    if moment == "its actors begin":
        async with asyncio.timeout(NET_SECONDS):
            while engine.system is None or not has_host(engine.system):  # noqa: ASYNC110  # waits for a state
                await asyncio.sleep(0)  # that moment is one turn of the loop
    else:
        await until(lambda: engine.health().phase == "loading the model: read weights")
    starting.cancel()
    await asyncio.wait([starting], timeout=NET_SECONDS)
    assert starting.cancelled()
    await until_gone(before)


async def test_stop_ends_a_hanging_start(folder: Path) -> None:
    (folder / "hold the birth").touch()
    async with stub_engine():
        pass
    before = traces()
    engine = Engine.from_parts("stub", lambda config: executors.parts(folder, config), executor="process")
    starting = asyncio.create_task(engine.start())
    await until(lambda: len(children()) == 1)
    for child in children():
        os.kill(child, signal.SIGSTOP)  # before its first message
    async with asyncio.timeout(NET_SECONDS):
        await engine.stop()
        with pytest.raises(errors.EngineClosed):
            await starting
    await until_gone(before)


async def test_device_that_no_process_can_import_is_an_option_error() -> None:
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
    ensemble = lambda config: executors.parts(folder, config)
    async with Engine.from_parts("stub", ensemble, executor="process") as engine:
        result = await engine.generate("prompt 1", max_tokens=60)
        (folder / "result").write_text(result.text)
        (folder / "ready").touch()
        await asyncio.sleep(3600)

os.close(0), os.close(1), os.close(2)
asyncio.run(main())
"""


async def test_process_needs_no_output_and_dies_with_the_program(folder: Path) -> None:
    program = [sys.executable, "-c", SCRIPT, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(program, env=environment) as parent:  # noqa: ASYNC220  # the child must start at once
        await until((folder / "ready").exists)
        child = os.pidfd_open(executors.lives(folder)[0])
        parent.kill()
    try:
        ended, _, _ = select.select([child], [], [], NET_SECONDS)
        assert ended
    finally:
        os.close(child)
    assert (folder / "result").read_text() == expected("prompt 1")


@pytest.fixture(scope="module")
def model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with the default model's tokens."""
    import transformers
    from tiny_models import GROUPED, save

    made = tmp_path_factory.mktemp("model")
    save(transformers.LlamaConfig(**{**GROUPED, "vocab_size": 49_152}), made)
    for file in model_folder.glob("*token*"):
        shutil.copy(file, made)
    return made


PHASES = {
    "native": {"imports", "compile", "read and pack weights", "KV pool", "warm up"},
    "transformers": {"imports", "read config", "read weights", "KV pool", "warm up", "pack weights", "compile"},
}


@pytest.mark.model
@pytest.mark.parametrize("decoder", ["native", "transformers"])
async def test_model_gives_the_same_tokens_in_a_process_and_after_its_loss(
    decoder: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # several threads of torch take minutes where cores are shared
    options = EngineOptions(decoder=decoder, device="cpu", dtype="float32", block_count=64)
    async with asyncio.timeout(NET_SECONDS):
        async with Engine(model, executor="thread", **options) as engine:
            calm = await asyncio.gather(*[stream.result() for stream in streams_of(engine)])
            after_loss = await lost_amid(engine)
        async with Engine(model, executor="process", **options) as engine:
            assert set(engine.health().load_phases) - {"host memory"} == PHASES[decoder]
            if decoder == "native":  # another process takes seconds to import transformers
                there = await lost_amid(engine)
            else:
                there = await asyncio.gather(*[stream.result() for stream in streams_of(engine)])
    for results in (after_loss, there):
        assert [result.token_ids for result in results] == [result.token_ids for result in calm]
        assert [result.text for result in results] == [result.text for result in calm]


def streams_of(engine: Engine) -> list[Stream]:
    asked = RequestOptions(max_tokens=64, ignore_eos=True), RequestOptions(max_tokens=64, temperature=1.0, seed=7)
    return [engine.stream(p, **how) for p in ("Once upon a time", "The capital of France is") for how in asked]


async def lost_amid(engine: Engine) -> list[Result]:
    """Outputs of streams during which the executor is lost."""
    engine.forget_prefixes()
    streams = streams_of(engine)
    await until(lambda: all(len(stream.inbox.token_ids) >= 5 for stream in streams))
    crash(engine, "executor")
    results = [await stream.result() for stream in streams]
    assert engine.health().restarts == {"executor": 1}
    return results


async def test_journal_of_a_lost_process_replays_for_all_other_actors(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps lost with the process were sent and never delivered: no difference."""
    journal = folder / "engine.cuelog"
    async with asyncio.timeout(NET_SECONDS), stub_engine(executor="process", journal=journal) as engine:
        for _ in range(2):
            streams = submitted(engine)
            await until(lambda streams=streams: any(stream.inbox.token_ids for stream in streams.values()))
            crash(engine, "executor")
            await check_all(streams)
    for actor in ("intake", "scheduler", "cache", "detokenizer"):
        assert replay(str(journal), actor) == 0, capsys.readouterr().out
    with pytest.raises(errors.ConfigError, match="executor lives outside the loop"):
        replay(str(journal), "executor")
