"""Warm restarts: requests that a killed process had accepted continue in the next one, without a lost token."""

# ruff: noqa: ASYNC240  # files here are small and local
from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Unpack

import msgspec
import pytest
from engines import NET_SECONDS, at_rest, expected_tokens, gated, read, until
from journals import killed, turns

from cuelight import Engine, Stream, errors
from cuelight.config import EngineOptions
from cuelight.journal import rotating
from cuelight.journal.restore import RestoredRequest, read_state
from cuelight.kernel.journal.records import MAGIC, VERSION, Recorded, encode_record, read_journal
from cuelight.messages.request import FinishReason
from cuelight.testing import crash, decode, next_letter, stub_engine, stub_parts


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@asynccontextmanager
async def next_process(journal: Path, **options: Unpack[EngineOptions]) -> AsyncIterator[Engine]:
    """An engine that resumes from this journal, in place of another process."""
    async with asyncio.timeout(NET_SECONDS), stub_engine(journal=journal, resume=True, **options) as engine:
        yield engine


async def rest(stream: Stream) -> tuple[list[int], str]:
    """The remaining tokens and text of a stream."""
    tokens: list[int] = []
    text = ""
    async for chunk in stream:
        tokens += chunk.token_ids
        text += chunk.text
    return tokens, text


def past(journal: Path) -> dict[int, RestoredRequest]:
    found = read_state(journal, time_of_day=0.0, recent_seconds=60.0)
    return {restored.request_id: restored for restored in found.requests}


async def test_streams_continue_at_their_position(journal: Path) -> None:
    prompts = [f"request {number}" for number in range(5)]
    async with gated(journal=journal, resume=True, running_max=3) as (engine, gate):
        streams = [engine.stream(prompt, max_tokens=20) for prompt in prompts]
        gate.allow(17)
        seen = [await read(stream, 5) for stream in streams[:3]] + [[], []]
        await turns()
        file = killed(journal)
    async with next_process(file) as engine:
        assert engine.unclaimed == tuple(stream.request_id for stream in streams)
        for prompt, stream, had in zip(prompts, streams, seen, strict=True):
            again = engine.resume(stream.request_id, len(had))
            tokens, text = await rest(again)
            assert (*had, *tokens) == expected_tokens(prompt, 20)
            assert text == decode(tokens)
            result = await again.result()
            assert (result.token_ids, result.finish_reason) == (expected_tokens(prompt, 20), FinishReason.LENGTH)
            assert result.usage.output_tokens == 20
        assert engine.unclaimed == ()
        await until(lambda: at_rest(engine))
        new = engine.stream("new", max_tokens=2)
        assert new.request_id > streams[-1].request_id + 1, "one more id may have been assigned in the last turn"
        assert (await new.result()).token_ids == expected_tokens("new", 2)


@pytest.mark.parametrize("position", [0, 1, 7, 12])
async def test_resume_at_any_existing_position(journal: Path, position: int) -> None:
    async with gated(journal=journal, resume=True) as (engine, gate):
        stream = engine.stream("a request", max_tokens=20, stop="never")
        gate.allow(12)
        await read(stream, 12)
        file = killed(journal)
    async with next_process(file) as engine:
        tokens, text = await rest(engine.resume(stream.request_id, position))
        expected = expected_tokens("a request", 20)
        assert tuple(tokens) == expected[position:]
        whole = decode(expected)
        assert whole.endswith(text), "text that lags behind its tokens comes later"
        assert len(text) >= 20 - position


async def test_resumed_text_ends_at_a_stop_string(journal: Path) -> None:
    whole = decode(expected_tokens("stop me", 40))
    stop = whole[20:24]
    shown = whole[: whole.index(stop)]
    async with gated(journal=journal, resume=True) as (engine, gate):
        stream = engine.stream("stop me", max_tokens=40, stop=stop)
        gate.allow(10)
        await read(stream, 10)
        head = "".join(stream.inbox.texts)
        file = killed(journal)
    async with next_process(file) as engine:
        again = engine.resume(stream.request_id, 10)
        _, text = await rest(again)
        assert head + text == shown
        assert (await again.result()).finish_reason is FinishReason.STOP


async def test_process_killed_by_a_signal(journal: Path) -> None:
    chance = random.Random(5)
    expected = {number: expected_tokens(f"request {number}", 700) for number in range(4)}
    seen: dict[int, int] = dict.fromkeys(expected, 0)
    with writing_process(journal) as process:
        assert process.stdout is not None
        for _ in range(chance.randrange(50, 200)):
            number, position = json.loads(process.stdout.readline())
            seen[number] = position
        process.kill()
        for line in process.stdout:
            if line.endswith("\n"):
                number, position = json.loads(line)
                seen[number] = position
    async with next_process(journal) as engine:
        assert len(engine.unclaimed) == 4
        for request_id, number in zip(engine.unclaimed, expected, strict=True):
            tokens, _ = await rest(engine.resume(request_id, seen[number]))
            assert tuple(tokens) == expected[number][seen[number] :]
        await until(lambda: at_rest(engine))


WRITING = """
import asyncio, json, sys
from cuelight.testing import stub_engine

async def one(engine, number):
    async for chunk in engine.stream(f"request {number}", max_tokens=700):
        print(json.dumps([number, chunk.position + len(chunk.token_ids)]), flush=True)

async def main():
    async with stub_engine(journal=sys.argv[1], resume=True) as engine:
        await asyncio.gather(*[one(engine, number) for number in range(4)])

asyncio.run(main())
"""


def writing_process(journal: Path) -> subprocess.Popen[str]:
    """A process whose streams print their positions."""
    return subprocess.Popen([sys.executable, "-c", WRITING, str(journal)], stdout=subprocess.PIPE, text=True)


async def test_process_killed_again_before_any_client_resumes(journal: Path) -> None:
    async with gated(journal=journal, resume=True) as (engine, gate):
        stream = engine.stream("a request", max_tokens=20)
        gate.allow(6)
        await read(stream, 6)
        file = killed(journal)
    for _ in range(3):
        async with gated(journal=file, resume=True) as (engine, gate):
            assert engine.unclaimed == (stream.request_id,)
            file = killed(file)
    async with gated(journal=file, resume=True) as (engine, gate):
        gate.allow(2)
        await until(lambda: len(engine._lifecycle.open_requests.get(stream.request_id).token_ids) > 6)
        await turns()
        file = killed(file)
    assert len(past(file)[stream.request_id].output) in (7, 8)
    async with next_process(file) as engine:
        tokens, _ = await rest(engine.resume(stream.request_id, 6))
        assert tuple(tokens) == expected_tokens("a request", 20)[6:]


async def test_process_that_closed_in_order_is_resumed(journal: Path) -> None:
    async with gated(journal=journal, resume=True) as (engine, gate):
        stream = engine.stream("a request", max_tokens=9)
        gate.allow(4)
        await read(stream, 4)
        gate.allow()
        stopping = asyncio.create_task(engine.stop())
        with pytest.raises(errors.EngineClosed):
            await stream.result()
        await stopping
    async with next_process(journal) as engine:
        tokens, _ = await rest(engine.resume(stream.request_id, 4))
        assert tuple(tokens) == expected_tokens("a request", 9)[4:]


async def test_streamed_tokens_are_in_the_journal(journal: Path) -> None:
    async with gated(journal=journal, resume=True) as (engine, gate):
        stream = engine.stream("a request", max_tokens=30)
        gate.allow()
        for position in range(5, 31, 5):
            await until(lambda at=position: len(stream.inbox.token_ids) >= at)
            chunk = await anext(stream)  # within a turn of the loop
            assert len(past(killed(journal))[stream.request_id].output) >= chunk.position + len(chunk.token_ids)
            if chunk.position + len(chunk.token_ids) == 30:
                break


async def test_end_that_a_client_missed_is_sent_again(journal: Path) -> None:
    async with gated(journal=journal, resume=True) as (engine, gate):
        gate.allow()
        stop = decode(expected_tokens("b", 6)[3:6])
        ended = [await engine.stream("a", max_tokens=6).result(), await engine.stream("b", stop=stop).result()]
        left = engine.stream("left by its client", max_tokens=2000)
        await left.aclose()
        await until(lambda: not engine._lifecycle.open_requests)
        await turns()
        file = killed(journal)
    async with next_process(file) as engine:
        assert engine.unclaimed == tuple(result.request_id for result in ended)
        for result in ended:
            again = engine.resume(result.request_id, 3)
            assert tuple((await rest(again))[0]) == result.token_ids[3:]
            told = await again.result()
            assert (told.text, told.token_ids, told.finish_reason) == (
                result.text,
                result.token_ids,
                result.finish_reason,
            )


async def test_unclaimed_request_is_cancelled_after_the_grace_period(journal: Path) -> None:
    async with gated(journal=journal, resume=True) as (engine, gate):
        stream = engine.stream("a request", max_tokens=4000)
        gate.allow(3)
        await read(stream, 3)
        file = killed(journal)
    async with gated(journal=file, resume=True, resume_seconds=0.001) as (engine, gate):
        await until(lambda: engine.unclaimed == ())
        with pytest.raises(errors.UnknownRequest):
            engine.resume(stream.request_id)
        gate.allow()
        await until(lambda: at_rest(engine) and not engine._lifecycle.open_requests)
        assert engine.stats().finished == 1
        result = await engine.generate("on it goes", max_tokens=3)
        assert result.token_ids == expected_tokens("on it goes", 3)
        file = killed(file)
    assert past(file)[result.request_id].is_over
    assert stream.request_id not in past(file)


async def test_claimed_request_outlives_the_grace_period(journal: Path) -> None:
    async with gated(journal=journal, resume=True) as (engine, gate):
        kept, other = (engine.stream(f"request {number}", max_tokens=9) for number in range(2))
        await turns()
        file = killed(journal)
    async with gated(journal=file, resume=True, resume_seconds=0.2) as (engine, gate):
        stream = engine.resume(kept.request_id)
        await until(lambda: engine.unclaimed == ())
        gate.allow()
        assert (await stream.result()).token_ids == expected_tokens("request 0", 9)
        with pytest.raises(errors.RequestTaken):
            engine.resume(kept.request_id)
        with pytest.raises(errors.UnknownRequest):
            engine.resume(other.request_id)


async def test_invalid_claims_are_refused(journal: Path) -> None:
    async with gated(journal=journal, resume=True) as (engine, gate):
        stream = engine.stream("a request", max_tokens=9, tenant="shop")
        gate.allow(3)
        await read(stream, 3)
        file = killed(journal)
    async with gated(journal=file, resume=True) as (engine, gate):
        for request_id, position, tenant, error in (
            (stream.request_id, 0, "", errors.WrongTenant),
            (stream.request_id, 0, "other", errors.WrongTenant),
            (stream.request_id, 4, "shop", errors.BadPosition),
            (stream.request_id, -1, "shop", errors.BadPosition),
            (stream.request_id + 1, 0, "shop", errors.UnknownRequest),
            (0, 0, "shop", errors.UnknownRequest),
            ("1", 0, "shop", errors.WrongType),
            (True, 0, "shop", errors.WrongType),
            (1, 0.5, "shop", errors.WrongType),
            (1, 0, None, errors.WrongType),
        ):
            with pytest.raises(error):
                engine.resume(request_id, position, tenant=tenant)  # type: ignore[arg-type]
        again = engine.resume(stream.request_id, 3, tenant="shop")
        with pytest.raises(errors.RequestTaken):
            engine.resume(stream.request_id, 3, tenant="shop")
        gate.allow()
        assert tuple((await rest(again))[0]) == expected_tokens("a request", 9)[3:]
    with pytest.raises(errors.EngineClosed):
        engine.resume(stream.request_id)


async def test_resumed_and_abandoned_stream_is_cancelled(journal: Path) -> None:
    async with gated(journal=journal, resume=True) as (engine, gate):
        stream = engine.stream("a request", max_tokens=4000)
        await turns()
        file = killed(journal)
    async with gated(journal=file, resume=True) as (engine, gate):
        again = engine.resume(stream.request_id)
        await again.aclose()
        gate.allow()
        await until(lambda: at_rest(engine) and not engine._lifecycle.open_requests)


async def test_resume_without_a_journal_starts_afresh(journal: Path) -> None:
    async with next_process(journal) as engine:
        assert engine.unclaimed == ()
        assert engine.stream("the first", max_tokens=1).request_id == 1
    journal.write_bytes(b"")  # its process was killed before writing a byte
    async with next_process(journal) as engine:
        with pytest.raises(errors.UnknownRequest):
            engine.resume(1)
    async with asyncio.timeout(NET_SECONDS), stub_engine() as engine:
        with pytest.raises(errors.UnknownRequest):
            engine.resume(1)


@pytest.mark.parametrize(
    "options",
    [
        {"resume": True},
        {"resume": 1, "journal": "x"},
        {"resume_seconds": 0},
        {"resume_seconds": float("nan")},
        {"resume_seconds": "3"},
    ],
)
def test_invalid_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(errors.ConfigError, match="resume"):
        stub_engine(**options)


async def test_seeds_services_and_samples_are_kept(journal: Path) -> None:
    async with gated(journal=journal, resume=True, seed=3) as (engine, _):
        first = engine.stream("drawn", temperature=1.0, priority=3, deadline_seconds=1000, queue_seconds=500)
        many = engine.samples("samples", 3, temperature=1.0, seed=7)
        many += [engine.stream([{"role": "user", "content": "told"}]), engine.stream([1, 2, 3], stop=("a", "b"))]
        await turns()
        submits = {
            stream.request_id: engine._lifecycle.open_requests._submits[stream.request_id] for stream in (first, *many)
        }
        file = killed(journal)
    for request_id, restored in past(file).items():
        assert restored.sampling == submits[request_id].sampling
        assert restored.service == submits[request_id].service
        assert restored.prompt == submits[request_id].prompt
    assert past(file)[first.request_id].sampling.seed is not None
    async with next_process(file) as engine:
        again = engine._lifecycle.open_requests._submits
        assert {i: submit.sampling for i, submit in again.items()} == {i: s.sampling for i, s in submits.items()}
        service = again[first.request_id].service
        assert service.priority == 3
        assert service.deadline_seconds is not None and service.queue_seconds is not None
        assert 900 < service.deadline_seconds < 1000
        assert 400 < service.queue_seconds < 500


async def test_deadlines_run_while_no_process_runs(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gated(journal=journal, resume=True) as (engine, _):
        fine = engine.stream("fine", deadline_seconds=10_000, max_tokens=3)
        late = engine.stream("late", deadline_seconds=100)
        queued = engine.stream("queued", queue_seconds=100)
        await turns()
        file = killed(journal)
    now = rotating.time.time
    monkeypatch.setattr(rotating.time, "time", lambda: now() + 1000)
    async with gated(journal=file, resume=True, running_max=1) as (engine, gate):
        for stream in (late, queued):
            with pytest.raises(errors.DeadlineExceeded):
                await engine.resume(stream.request_id).result()
        gate.allow()
        assert (await engine.resume(fine.request_id).result()).token_ids == expected_tokens("fine", 3)


@pytest.mark.parametrize("role", ["executor", "scheduler", "cache", "intake", "detokenizer"])
async def test_crash_before_any_client_resumes_loses_nothing(journal: Path, role: str) -> None:
    async with gated(journal=journal, resume=True) as (engine, gate):
        streams = [engine.stream(f"request {number}", max_tokens=12) for number in range(3)]
        gate.allow(13)
        for stream in streams:
            await read(stream, 4)
        file = killed(journal)
    async with gated(journal=file, resume=True) as (engine, gate):
        for _ in range(2):
            crash(engine, role)
            gate.allow(4)
            await turns(200)
        gate.allow()
        for number, stream in enumerate(streams):
            tokens, _ = await rest(engine.resume(stream.request_id, 4))
            assert tuple(tokens) == expected_tokens(f"request {number}", 12)[4:]
        await until(lambda: at_rest(engine))


async def test_journal_truncated_anywhere_is_resumed(journal: Path) -> None:
    async with gated(journal=journal, resume=True) as (engine, gate):
        streams = [engine.stream(f"request {number}", max_tokens=8) for number in range(3)]
        gate.allow(9)
        for stream in streams:
            await read(stream, 2)
        content = killed(journal).read_bytes()
    reader = read_journal(journal)
    begin = reader._offset
    chance = random.Random(1)
    for cut in sorted(chance.sample(range(begin, len(content)), 12)):
        file = journal.with_name(f"cut at {cut}")
        file.write_bytes(content[:cut])
        async with next_process(file) as engine:
            for request_id in engine.unclaimed:
                result = await engine.resume(request_id).result()
                assert result.token_ids == expected_tokens(f"request {request_id - 1}", 8)
    damaged = bytearray(content)
    damaged[len(content) - 40] ^= 0xFF
    journal.write_bytes(damaged)
    async with next_process(journal) as engine:
        assert len(engine.unclaimed) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no journal at all", "is no journal"),
        (b"cuelight journal\xfe" + b"x" * 20, "is of version 254"),
        (MAGIC + bytes([VERSION, 5]), "breaks off before its first record"),
    ],
)
async def test_other_file_is_refused_and_unchanged(journal: Path, content: bytes, message: str) -> None:
    journal.write_bytes(content)
    with pytest.raises(errors.WrongJournal, match=message):
        await stub_engine(journal=journal, resume=True).start()
    assert journal.read_bytes() == content
    assert list(journal.parent.iterdir()) == [journal]


async def test_journal_with_messages_of_another_version_is_refused_and_unchanged(journal: Path) -> None:
    async with gated(journal=journal, resume=True) as (engine, _):
        engine.stream("a request")
        await turns()
        file = killed(journal)
    body = msgspec.msgpack.encode({"type": "TokensReady", "request_ids": [1], "token_ids": [2]})
    old = Recorded(0.0, "scheduler", "detokenizer", "cuelight.messages.detokenizer:TokensReady", body)
    content = file.read_bytes() + encode_record(old)
    file.write_bytes(content)
    with pytest.raises(errors.WrongJournal, match="cannot be resumed"):
        await stub_engine(journal=file, resume=True).start()
    assert file.read_bytes() == content


async def test_journal_of_another_model_is_refused_and_unchanged(journal: Path) -> None:
    async with gated(journal=journal, resume=True) as (engine, _):
        held = engine.stream("a request")
        await turns()
        file = killed(journal)
        del held
    content = file.read_bytes()
    other = Engine.from_parts("other", stub_parts, journal=file, resume=True)
    with pytest.raises(errors.WrongJournal, match="'stub', and has unfinished requests: 'other' cannot resume it"):
        await other.start()
    assert file.read_bytes() == content
    with pytest.raises(errors.ConfigError, match="queue_limit is"):
        async with gated(journal=journal, resume=True) as (engine, _):
            many = [engine.stream(f"request {number}") for number in range(4)]
            await turns()
            file = killed(journal)
            del many
        content = file.read_bytes()
        await stub_engine(journal=file, resume=True, queue_limit=3).start()
    assert file.read_bytes() == content


async def test_journal_being_written_is_refused(journal: Path) -> None:
    async with gated(journal=journal, resume=True) as (engine, gate):
        stream = engine.stream("a request", max_tokens=5)
        with pytest.raises(errors.ConfigError, match="is in use by another engine"):
            await stub_engine(journal=journal, resume=True).start()
        gate.allow()
        assert (await stream.result()).token_ids == expected_tokens("a request", 5)


async def test_leftover_of_a_takeover_killed_midway_is_removed(journal: Path) -> None:
    async with gated(journal=journal, resume=True) as (engine, _):
        stream = engine.stream("a request", max_tokens=5)
        await turns()
        file = killed(journal)
    file.with_name(f"{file.name}.new").write_bytes(b"cuelig")
    async with next_process(file) as engine:
        assert engine.unclaimed == (stream.request_id,)
        assert not file.with_name(f"{file.name}.new").exists()


async def test_journal_that_cannot_be_replaced_is_unchanged(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gated(journal=journal, resume=True) as (engine, _):
        engine.stream("a request")
        await turns()
        file = killed(journal)
    content = file.read_bytes()

    def refuse(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(errors.ConfigError, match="the disk is full"):
        await stub_engine(journal=file, resume=True).start()
    assert file.read_bytes() == content
    assert not file.with_name(f"{file.name}.new").exists()


async def test_long_journal_is_rotated(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotating, "BYTES_MAX", 6_000)
    async with gated(journal=journal, resume=True, running_max=40) as (engine, gate):
        kept = engine.stream("kept " * 20, max_tokens=1200)
        gate.allow()
        largest = 0
        for number in range(25):
            await engine.generate(f"request {number}", max_tokens=20)
            largest = max(largest, journal.stat().st_size)
        await turns()
        had = len(kept.inbox.token_ids)
        file = killed(journal)
        assert largest < 30_000
        assert had > 50
    assert len(past(file)[kept.request_id].output) >= had
    async with next_process(file) as engine:
        tokens, _ = await rest(engine.resume(kept.request_id, had))
        assert tuple(tokens) == expected_tokens("kept " * 20, 1200)[had:]
        assert engine.stream("new", max_tokens=1).request_id > 25


async def test_journal_on_a_full_disk_disturbs_no_request(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotating, "BYTES_MAX", 5_000)

    def refuse(*_: object) -> None:
        raise OSError("the disk is full")

    async with gated(journal=journal, resume=True) as (engine, gate):
        gate.allow()
        monkeypatch.setattr(Path, "replace", refuse)
        for number in range(20):
            result = await engine.generate(f"request {number}", max_tokens=20)
            assert result.token_ids == expected_tokens(f"request {number}", 20)
        await turns()
    assert len(past(journal)) == 20, "the old file is still written"


def capitals(token_ids: list[int]) -> int:
    return ord(chr(next_letter(token_ids)).upper())


async def test_other_model_may_resume_where_no_request_is_left(journal: Path) -> None:
    async with next_process(journal) as engine:
        last = (await engine.generate("a request", max_tokens=3)).request_id
    other = Engine.from_parts("other", stub_parts, journal=journal, resume=True)
    async with asyncio.timeout(NET_SECONDS), other as engine:
        assert engine.unclaimed == ()
        assert engine.stream("new", max_tokens=1).request_id > last


@pytest.mark.parametrize("running", ["finish", "recompute"])
async def test_journal_without_resume_names_the_model_across_a_reload(journal: Path, running: str) -> None:
    models = {"other": capitals}
    async with asyncio.timeout(NET_SECONDS), stub_engine(models=models, journal=journal) as engine:
        stream = engine.stream("a request", max_tokens=4000)
        reload = asyncio.create_task(engine.reload("other", running=running))  # type: ignore[arg-type]
        if running == "finish":
            await until(lambda: len(engine.system.statistics()) > 5)  # type: ignore[union-attr]
            await turns(200)
            assert read_state(killed(journal), time_of_day=0.0, recent_seconds=60.0).model == "stub"
            await stream.aclose()
        await reload
        stream = engine.stream("another", max_tokens=2000)
        await read(stream, 2)
        await turns()
        assert read_state(killed(journal), time_of_day=0.0, recent_seconds=60.0).model == "other"


async def test_journal_names_the_other_model_after_a_reload(journal: Path) -> None:
    models = {"other": capitals}
    async with asyncio.timeout(NET_SECONDS), stub_engine(models=models, journal=journal, resume=True) as engine:
        await engine.reload("other")
        stream = engine.stream("a request", max_tokens=4000)
        await read(stream, 3)
        file = killed(journal)
    assert read_journal(file).about["model"] == "other"
    with pytest.raises(errors.WrongJournal, match="another model"):
        await stub_engine(journal=file, resume=True).start()
    # The stub's tokenizer is named after the engine, and so is its model.
    ensemble = Engine.from_parts("other", lambda config: stub_parts(config, capitals), journal=file, resume=True)
    async with asyncio.timeout(NET_SECONDS), ensemble as engine:
        again = engine.resume(stream.request_id, 3)
        assert tuple(await read(again, 5))[:5] == expected_tokens("a request", 8, capitals)[3:8]


async def test_cancelled_start_leaves_no_journal_open(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def slow(*arguments: object) -> object:
        made = rotating.open_journal(*arguments)  # type: ignore[arg-type]  # passed through
        begun.set()
        assert may_go_on.wait(NET_SECONDS)
        return made

    monkeypatch.setattr("cuelight.core.lifecycle.open_journal", slow)
    start = asyncio.create_task(stub_engine(journal=journal, resume=True).start())
    await until(begun.is_set)
    start.cancel()
    await asyncio.wait([start])
    with pytest.raises(errors.ConfigError, match="another journal is being written"):
        await stub_engine(journal=journal).start()
    may_go_on.set()
    monkeypatch.undo()
    await until(lambda: not any("load" in thread.name for thread in threading.enumerate()))
    await turns()
    async with next_process(journal) as engine:
        assert (await engine.generate("a", max_tokens=2)).token_ids == expected_tokens("a", 2)


class Asked:
    """A request of the test below, and the part of its output that its client has."""

    def __init__(self, number: int, chance: random.Random) -> None:
        self.prompt = f"request {number} " + "x" * chance.randrange(30)
        self.count = chance.randrange(1, 60)
        expected = decode(expected_tokens(self.prompt, self.count))
        at = chance.randrange(len(expected))
        self.stop = expected[at : at + 3] if chance.random() < 0.4 else ""
        self.text = expected[: expected.index(self.stop)] if self.stop else expected
        self.request_id = 0
        self.had: list[int] = []
        self.shown = ""
        self.is_over = False

    def submit(self, engine: Engine) -> Stream:
        stream = engine.stream(self.prompt, max_tokens=self.count, stop=self.stop or ())
        self.request_id = stream.request_id
        return stream

    def note(self) -> None:
        """Remember this state: the process is killed now."""
        self._noted = list(self.had), self.shown, self.is_over

    def die(self) -> None:
        """Return to the state when the process was killed."""
        self.had, self.shown, self.is_over = self._noted

    async def read(self, stream: Stream) -> None:
        async for chunk in stream:
            assert chunk.position == len(self.had)
            self.had += chunk.token_ids
            self.shown += chunk.text
        self.is_over = True

    def check(self) -> None:
        assert tuple(self.had) == expected_tokens(self.prompt, self.count)[: len(self.had)]
        assert self.shown == self.text
        assert self.stop or len(self.had) == self.count


@pytest.mark.parametrize("seed", range(6))
async def test_process_killed_repeatedly_at_any_moment(
    journal: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(rotating, "BYTES_MAX", chance.choice((4_000, 10**6)))
    asked = [Asked(number, chance) for number in range(8)]
    file = journal
    for life in range(10):
        is_last = life == 9
        options = EngineOptions(running_max=chance.choice((2, 8)), block_count=chance.choice((24, 1024)), block_size=8)
        async with next_process(file, **options) as engine:
            reading = []
            for each in asked:
                if not each.had and each.request_id not in engine.unclaimed:
                    each.request_id = 0  # it had not been accepted yet
                if not each.request_id and (is_last or chance.random() < 0.3):
                    reading.append(asyncio.create_task(each.read(each.submit(engine))))
                elif each.request_id and not each.is_over and (is_last or chance.random() < 0.8):
                    stream = engine.resume(each.request_id, len(each.had))
                    reading.append(asyncio.create_task(each.read(stream)))
            if is_last:
                await asyncio.gather(*reading)
                break
            tokens = sum(len(each.had) for each in asked) + chance.randrange(40)
            await until(lambda: sum(len(each.had) for each in asked) >= tokens or all(t.done() for t in reading))  # noqa: B023
            await turns(chance.randrange(20))
            file = killed(file)
            for each in asked:
                each.note()
            for task in reading:
                task.cancel()
        for each in asked:
            each.die()
    for each in asked:
        each.check()
