"""Draining: running and waiting requests are finished, new ones are refused, and the deadline ends the rest."""

from __future__ import annotations

import asyncio
import threading

import pytest
from engines import NET_SECONDS, at_rest, expected_tokens, gated, read, until

from cuelight import errors
from cuelight.testing import crash, stub_engine

ENDLESS = 4000


async def draining(task: asyncio.Task[int]) -> None:
    """Let a drain that has just begun reach its wait."""
    await asyncio.sleep(0)
    assert not task.done()


async def test_running_and_waiting_requests_are_finished() -> None:
    async with gated(running_max=2) as (engine, gate):
        streams = [engine.stream(f"request {number}", max_tokens=6) for number in range(5)]
        gate.allow(2)
        await until(lambda: gate.passed == 2)
        task = asyncio.create_task(engine.drain(NET_SECONDS))
        await draining(task)
        assert engine.health().state == "draining"
        gate.allow()
        assert await task == 0
        for number, stream in enumerate(streams):
            assert (await stream.result()).token_ids == expected_tokens(f"request {number}", 6)
        assert engine.health().state == "closed"
        with pytest.raises(errors.EngineClosed):
            engine.stream("after")


async def test_new_requests_are_refused() -> None:
    async with gated() as (engine, gate):
        chat = engine.chat(max_tokens=3)
        stream = engine.stream("here before", max_tokens=3)
        task = asyncio.create_task(engine.drain(NET_SECONDS))
        await draining(task)
        for refuse in (
            lambda: engine.stream("new"),
            lambda: engine.samples("new", 2),
            lambda: chat.say("new"),
        ):
            with pytest.raises(errors.EngineDraining):
                refuse()
        for waits in (engine.generate("new"), engine.generate_many(["new"]), engine.reload("other")):
            with pytest.raises(errors.EngineDraining):
                await waits
        assert (await engine.explain(stream.request_id)).state in ("waiting", "running"), "explain() is answered"
        engine.set_policy("fair")
        gate.allow()
        assert await task == 0
        assert (await stream.result()).token_ids == expected_tokens("here before", 3)


async def test_requests_beyond_the_deadline_are_ended() -> None:
    async with gated(running_max=2) as (engine, gate):
        streams = [engine.stream(f"request {number}", max_tokens=ENDLESS) for number in range(4)]
        gone = engine.stream("left by its client", max_tokens=ENDLESS)
        await gone.aclose()
        gate.allow(4)
        seen = await read(streams[0], 1)
        gate.allow()  # else the current step would never end
        assert await engine.drain(0.001) == 4
        for stream in streams:
            with pytest.raises(errors.EngineClosed):
                await stream.result()
        assert streams[0].inbox.token_ids[: len(seen)] == seen, "earlier tokens stay readable"


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), True, "3", None, 10**400])
async def test_invalid_deadlines_are_refused(seconds: object) -> None:
    async with stub_engine() as engine:
        with pytest.raises(errors.ConfigError, match="timeout_seconds must be a number above 0"):
            await engine.drain(seconds)  # type: ignore[arg-type]
        assert (await engine.generate("on it goes", max_tokens=3)).token_ids == expected_tokens("on it goes", 3)


async def test_second_drain_is_refused_and_the_first_continues() -> None:
    async with gated() as (engine, gate):
        stream = engine.stream("a", max_tokens=3)
        task = asyncio.create_task(engine.drain(NET_SECONDS))
        await draining(task)
        with pytest.raises(errors.EngineDraining):
            await engine.drain(0.001)
        gate.allow()
        assert await task == 0
        assert (await stream.result()).token_ids == expected_tokens("a", 3)
        with pytest.raises(errors.EngineClosed):
            await engine.drain(1)


async def test_drain_before_the_start_is_refused() -> None:
    with pytest.raises(errors.NotStarted):
        await stub_engine().drain(1)


async def test_idle_engine_drains_at_once() -> None:
    engine = stub_engine()
    await engine.start()
    threads = threading.active_count()
    assert await engine.drain(NET_SECONDS) == 0
    assert at_rest(engine)
    assert threading.active_count() < threads
    await engine.stop()
    assert len(asyncio.all_tasks()) == 1


async def test_cancelled_drain_is_called_off() -> None:
    async with gated() as (engine, gate):
        stream = engine.stream("a", max_tokens=3)
        task = asyncio.create_task(engine.drain(NET_SECONDS))
        await draining(task)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.health().state == "serving"
        gate.allow()
        assert (await engine.generate("b", max_tokens=3)).token_ids == expected_tokens("b", 3)
        assert (await stream.result()).token_ids == expected_tokens("a", 3)


async def test_stop_ends_a_drain() -> None:
    async with gated() as (engine, gate):
        stream = engine.stream("a", max_tokens=ENDLESS)
        task = asyncio.create_task(engine.drain(NET_SECONDS))
        await draining(task)
        gate.allow()
        await engine.stop()
        assert await task == 0, "stop() had ended the requests, not the drain"
        with pytest.raises(errors.EngineClosed):
            await stream.result()


async def test_generate_many_begun_before_a_drain_is_served_whole() -> None:
    async with gated(running_max=1, queue_limit=2) as (engine, gate):
        prompts = [f"one of many {number}" for number in range(9)]
        many = asyncio.create_task(engine.generate_many(prompts, max_tokens=2))
        await until(lambda: engine.stats().running == 1)
        task = asyncio.create_task(engine.drain(NET_SECONDS))
        await draining(task)
        gate.allow()
        assert await task == 0
        assert [result.token_ids for result in await many] == [expected_tokens(prompt, 2) for prompt in prompts]


@pytest.mark.parametrize("role", ["executor", "scheduler", "intake", "detokenizer", "cache"])
async def test_drain_outlives_a_crash(role: str) -> None:
    async with gated(running_max=2) as (engine, gate):
        streams = [engine.stream(f"request {number}", max_tokens=8) for number in range(4)]
        gate.allow(3)
        await until(lambda: gate.passed == 3)
        task = asyncio.create_task(engine.drain(NET_SECONDS))
        await draining(task)
        crash(engine, role)
        gate.allow()
        assert await task == 0
        for number, stream in enumerate(streams):
            assert (await stream.result()).token_ids == expected_tokens(f"request {number}", 8)
        assert engine.health().restarts == {role: 1}
