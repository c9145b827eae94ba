"""`Engine.health()`: states, reasons, phases, crashes and totals."""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path

import executors
import msgspec
import pytest
import structlog
from engines import NET_SECONDS, gated, until

from cuelight import Engine, errors
from cuelight.kernel import ActorCrashed
from cuelight.messages.observer import (
    BlockFigures,
    GaveUp,
    Loaded,
    Loading,
    Ready,
    Recovered,
    Recovering,
    RequestFigures,
)
from cuelight.models.progress import Progress
from cuelight.status import (
    BLOCK_TOTALS,
    CRASHES_REMEMBERED,
    ERROR_CHARS_MAX,
    REQUEST_TOTALS,
    HealthRecord,
    Recovery,
    StatusBoard,
    StatusCallbacks,
)
from cuelight.testing import crash, stub_engine

ACTORS = ("intake", "scheduler", "cache", "executor", "detokenizer")


class Clock:
    seconds = 0.0

    def now(self) -> float:
        return self.seconds


def record() -> tuple[HealthRecord, Clock]:
    clock = Clock()
    return HealthRecord(clock.now), clock


def test_unstarted_engine_is_starting_without_a_reason() -> None:
    health = stub_engine().health()
    assert (health.state, health.reason, health.phase) == ("starting", "", "")
    assert health.restarts == {}
    assert health.crashes == ()
    assert health.last_recovery is None


async def test_states_follow_the_life_of_an_engine_in_order() -> None:
    async with asyncio.timeout(NET_SECONDS), stub_engine() as engine:
        assert engine.health().state == "serving"
    assert engine.health().state == "closed"
    assert engine.health().reason == ""


async def test_drain_shows_until_the_end() -> None:
    async with gated() as (engine, gate):
        stream = engine.stream("hello", max_tokens=3)
        draining = asyncio.create_task(engine.drain(60))
        await until(lambda: engine.health().state == "draining")
        crash(engine, "cache")
        await until(lambda: engine.health().restarts == {"cache": 1})
        assert engine.health().state == "draining"
        gate.allow()
        await stream.result()
        await draining
        assert engine.health().state == "closed"


async def test_every_crash_is_counted_and_the_last_are_kept() -> None:
    async with asyncio.timeout(NET_SECONDS), stub_engine() as engine:
        for number, actor in enumerate(ACTORS, 1):
            crash(engine, actor)
            await until(lambda actor=actor: engine.health().restarts.get(actor) == 1)
            await engine.generate("are you well?", max_tokens=2)
            assert len(engine.health().crashes) == number
        health = engine.health()
    assert health.state == "serving"
    assert tuple(each.actor for each in health.crashes) == ACTORS
    assert all("crashed by cuelight.testing.crash" in each.error and each.seconds_ago >= 0 for each in health.crashes)
    assert health.last_recovery is not None


async def test_loss_of_the_executor_is_a_recovery_with_a_reason(tmp_path: Path) -> None:
    engine = Engine.from_parts("stub", lambda config: executors.parts(tmp_path, config))
    async with asyncio.timeout(NET_SECONDS), engine:
        stream = engine.stream("hello", max_tokens=4000)
        await anext(stream)
        (tmp_path / "hold the load").touch()
        crash(engine, "executor")
        await until(lambda: engine.health().state == "recovering")
        await until(lambda: engine.health().phase != "")
        assert "crashed by cuelight.testing.crash" in engine.health().reason
        (tmp_path / "hold the load").unlink()
        await until(lambda: engine.health().state == "serving")
        health = engine.health()
        assert (health.reason, health.phase) == ("", "")
        assert health.last_recovery is not None
        assert health.last_recovery.load_seconds > 0


async def test_long_start_logs_its_phase_repeatedly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuelight.core.lifecycle.REMIND_SECONDS", 0.001)
    (tmp_path / "hold the load").touch()
    engine = Engine.from_parts("stub", lambda config: executors.parts(tmp_path, config))
    with structlog.testing.capture_logs() as entries:
        async with asyncio.timeout(NET_SECONDS):
            starting = asyncio.create_task(engine.start())
            await until(lambda: [each.get("phase") for each in entries].count("loading the model: read weights") > 1)
            (tmp_path / "hold the load").unlink()
            await starting
            said = len(entries)
            await engine.generate("one that takes a while", max_tokens=200)
            await engine.stop()
    assert {(each["event"], each["log_level"], each["model"]) for each in entries if "phase" in each} == {
        ("still_starting", "warning", "stub")
    }
    assert not [each for each in entries[said:] if "phase" in each], "it has started"


async def test_start_cancelled_just_as_it_is_ready_crashes_no_actor(tmp_path: Path) -> None:
    (tmp_path / "hold the load").touch()
    engine = Engine.from_parts("stub", lambda config: executors.parts(tmp_path, config))
    async with asyncio.timeout(NET_SECONDS):
        starting = asyncio.create_task(engine.start())
        await until(lambda: engine.health().phase == "loading the model: read weights")
        starting.cancel()
        assert engine._lifecycle.running is not None
        engine._lifecycle.running.board.tell(Ready(16))  # as intake would within its handler
        (tmp_path / "hold the load").unlink()
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert engine.health().crashes == ()


@pytest.mark.parametrize("actor", ["scheduler", "cache"])
async def test_totals_survive_the_actors_that_count_them(actor: str) -> None:
    async with asyncio.timeout(NET_SECONDS), stub_engine() as engine:
        seen = [engine.stats()]
        for lives in range(1, 4):
            await engine.generate("a prompt of some length", max_tokens=5)
            seen.append(engine.stats())
            crash(engine, actor)
            await until(lambda lives=lives: engine.health().restarts == {actor: lives})
            seen.append(engine.stats())
        await engine.generate("a prompt of some length", max_tokens=5)
        seen.append(engine.stats())
    for name in (*REQUEST_TOTALS, *BLOCK_TOTALS):
        told = [getattr(stats, name) for stats in seen]
        assert told == sorted(told), name
    assert (seen[-1].finished, seen[-1].output_tokens, seen[-1].prompt_tokens) == (4, 20, 92)
    assert seen[-1].tokens_looked_up == 92


def test_every_figure_is_a_total_or_a_current_value() -> None:
    now = {"running", "waiting"}
    assert {field.name for field in msgspec.structs.fields(RequestFigures)} == now | set(REQUEST_TOTALS)
    now = {"blocks_total", "blocks_free", "blocks_cached", "host_blocks_total", "host_blocks_used"}
    assert {field.name for field in msgspec.structs.fields(BlockFigures)} == now | set(BLOCK_TOTALS)


async def test_failed_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "cannot load").touch()
    engine = Engine.from_parts("stub", lambda config: executors.parts(tmp_path, config))
    with pytest.raises(errors.ModelUnavailable):
        await engine.start()
    assert engine.health().state == "closed"
    assert "no such weights" in engine.health().reason


def test_crashes_kept_are_the_last_and_long_texts_are_cut() -> None:
    health, clock = record()
    for number in range(2 * CRASHES_REMEMBERED):
        clock.seconds = float(number)
        health.crashed(ActorCrashed("cache", "Reset", ValueError("x" * 10_000)))
    clock.seconds += 1.0
    told = health.snapshot()
    assert told.restarts == {"cache": 2 * CRASHES_REMEMBERED}
    assert [each.seconds_ago for each in told.crashes] == [float(n) for n in range(CRASHES_REMEMBERED, 0, -1)]
    assert {len(each.error) for each in told.crashes} == {ERROR_CHARS_MAX}


def test_ended_engine_enters_no_earlier_state() -> None:
    health, _ = record()
    health.enter("serving")
    health.enter("unavailable", "it has given up")
    health.recovering("too late")
    health.recovered(Recovered(1.0, 2.0, 3.0))
    health.enter("draining")
    assert (health.snapshot().state, health.snapshot().reason) == ("unavailable", "it has given up")
    health.enter("closed")
    health.enter("serving")
    assert (health.snapshot().state, health.snapshot().reason) == ("closed", "it has given up")


async def test_status_board_calls_the_callbacks_of_an_event() -> None:
    called: list[object] = []
    health, _ = record()
    board = StatusBoard(
        health, StatusCallbacks(lambda: called.append("again"), called.append, called.append, called.append)
    )
    board.tell(Loading("reading the weights"))
    assert health.snapshot().phase == "reading the weights"
    for _ in range(2):  # as by a new scheduler
        board.tell(Loaded(2.5, (("reading", 1.5), ("warm up", 0.75))))
    assert (health.snapshot().phase, health.snapshot().load_phases) == ("", {"reading": 1.5, "warm up": 0.75})
    board.tell(Ready(100))
    board.tell(Ready(100))
    board.tell(Loading("a later load, not part of the start"))
    board.tell(Loaded(1.0, ()))
    health.enter("serving")
    board.tell(Recovering("gone"))
    board.tell(Recovered(1.0, 2.0, 3.0))
    assert health.snapshot().last_recovery == Recovery(1.0, 2.0, 3.0)
    board.tell(GaveUp("no hope"))
    loaded = "loaded the model in 2.5 s: reading 1.5 s, warm up 0.8 s"
    assert called == ["reading the weights", loaded, "again", "no hope"]
    board.clear()
    board.tell(GaveUp("no hope"))
    assert len(called) == 4


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "shown", "expected"),
    [
        (Terminal, True, "read\r\x1b[2Kpack\r\x1b[2Kloaded\n"),
        (io.StringIO, True, "read\npack\nloaded\n"),
        (Terminal, False, ""),
    ],
    ids=["terminal", "log", "silent"],
)
def test_phase_replaces_the_one_before_on_a_terminal(
    stderr: type[io.StringIO], shown: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = stderr()
    monkeypatch.setattr(sys, "stderr", written)
    progress = Progress(shown)
    progress.phase("read")
    progress.phase("read")
    progress.phase("pack")
    progress.note("loaded")
    progress.close()
    assert written.getvalue() == expected


async def test_giving_up_before_the_start_fails_the_start() -> None:
    health, _ = record()
    board = StatusBoard(health, StatusCallbacks(lambda: None, pytest.fail))
    board.tell(GaveUp("it dies all the time"))
    with pytest.raises(errors.ModelUnavailable, match="it dies all the time"):
        await board.ready
