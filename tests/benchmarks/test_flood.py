"""A flood: refused early, at a small cost and with a retry time; and the long run in small."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from unittest.mock import patch

import pytest
from benchmark_modules import FOLDER, benchmark
from engines import NET_SECONDS, at_rest, expected_tokens, gated, until

from cuelight import Stream, errors
from cuelight.testing import crash, stub_engine


async def test_flood_is_refused_before_a_message_is_sent() -> None:
    async with gated(queue_limit=8) as (engine, gate):
        streams: list[Stream] = []
        refused: list[errors.QueueFull] = []
        for number in range(2000):  # in one turn of the loop
            try:
                streams.append(engine.stream(f"flood {number}", max_tokens=3))
            except errors.QueueFull as full:
                refused.append(full)
        assert (len(streams), len(refused)) == (8, 1992)
        assert engine.system is not None
        assert engine.system.statistics()["intake"].length == 8
        assert "8 requests are live, and the queue limit is 8" in str(refused[0])
        assert all(full.retry_after_seconds is None for full in refused), "no request has finished yet"
        gate.allow()
        for number, stream in enumerate(streams):
            assert (await stream.result()).token_ids == expected_tokens(f"flood {number}", 3)
        gate._permits = 0
        streams = [engine.stream(f"again {number}", max_tokens=3) for number in range(8)]
        with pytest.raises(errors.QueueFull) as caught:
            engine.stream("one more")
        assert caught.value.retry_after_seconds is not None
        assert caught.value.retry_after_seconds > 0


async def test_prompt_refused_by_a_full_queue_is_not_parsed() -> None:
    async with gated(queue_limit=1) as (engine, _):
        held = engine.stream("held")
        with patch("cuelight.core.requests.parse_prompt", side_effect=AssertionError("the prompt was parsed")):
            for refuse in (lambda: engine.stream("x" * 10**6), lambda: engine.samples("x", 1)):
                with pytest.raises(errors.QueueFull):
                    refuse()
        assert len(engine._lifecycle.open_requests) == 1
        await held.aclose()


async def test_place_is_free_as_soon_as_its_stream_has_ended() -> None:
    async with asyncio.timeout(NET_SECONDS), stub_engine(queue_limit=1) as engine:
        for number in range(100):
            result = await engine.generate(f"request {number}", max_tokens=2)
            assert result.token_ids == expected_tokens(f"request {number}", 2)


@pytest.mark.parametrize("role", ["executor", "scheduler", "cache", "intake", "detokenizer"])
async def test_crash_in_a_flood_drops_no_accepted_request(role: str) -> None:
    async with gated(queue_limit=6, running_max=2) as (engine, gate):
        streams = [engine.stream(f"request {number}", max_tokens=6) for number in range(6)]
        gate.allow(3)
        await until(lambda: gate.passed == 3)
        crash(engine, role)
        for _ in range(200):
            with pytest.raises(errors.QueueFull):
                engine.stream("flood")
            await asyncio.sleep(0)
        gate.allow()
        for number, stream in enumerate(streams):
            assert (await stream.result()).token_ids == expected_tokens(f"request {number}", 6)
        await until(lambda: at_rest(engine))


async def test_flood_benchmark_in_small() -> None:
    settings = {"submissions": 3000, "queue_limit": 50, "seconds": 0.2, "rounds": 1, "output_tokens": 8, "model": ""}
    async with asyncio.timeout(NET_SECONDS):
        (figures,) = await benchmark("flood").measure(argparse.Namespace(**settings))
    assert 0 < figures["refused"] <= 3000
    assert figures["tokens_per_s"] > 0


@pytest.mark.parametrize("executor", ["thread", "process"])
async def test_long_run_in_small(executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The executor's process must find the benchmarks, and nothing else of the checkout: each class would exist twice.
    (tmp_path / "benchmarks").symlink_to(FOLDER)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"minutes": 0.015, "clients": 8, "pause_seconds": 0.02, "kill_seconds": 0.3, "model": "", "step_ms": 0.0}
    async with asyncio.timeout(NET_SECONDS):
        figures = await benchmark("soak").soak(argparse.Namespace(**settings, executor=executor))
    assert figures["wrong"] == []
    assert figures["left_over"] == {}
    assert figures["kills"] >= 1
    assert figures["restarts"].keys() == {"executor"}
    assert figures["outcomes"]["healthy"] > 0


def test_slope_of_a_line_is_found() -> None:
    slope = benchmark("soak").slope_mib_per_hour
    assert slope([(float(second), 100.0 + second / 3600) for second in range(100)]) == pytest.approx(1.0)
    assert slope([(float(second), 100.0 if second >= 20 else 50.0) for second in range(101)]) == pytest.approx(0.0)
    assert slope([(0.0, 1.0)]) == 0.0
