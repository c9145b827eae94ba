"""The public API of an engine around the stub executor; a few tests at the end use the real model."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Unpack

import anyio
import numpy as np
import pytest
import structlog
import uvloop

from cuelight import Chunk, Engine, Result, Stream, errors
from cuelight.actors.executor.stub import StubDevice
from cuelight.config import EngineConfig, EngineOptions
from cuelight.core import requests
from cuelight.core.parts import EngineParts
from cuelight.core.stub_model import StubEncoder
from cuelight.kernel import ActorCrashed, RestartPolicy
from cuelight.messages.request import Conversation, FinishReason, Turn, Usage
from cuelight.models.folder import ModelFacts
from cuelight.stream import Inbox
from cuelight.testing import END_TOKEN, crash, decode, encode, next_letter, stub_engine

NET_SECONDS = 240.0
"""Timeout around everything that waits; no test measures by it."""

ENDLESS = 4000
"""More tokens than any test here reads."""


class Gate:
    """Hold the device's thread before each token until a test allows it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._permits = 0.0
        self.held = threading.Event()

    def next_token(self, token_ids: Sequence[int]) -> int:
        with self._changed:
            while self._permits < 1:
                self.held.set()
                assert self._changed.wait(NET_SECONDS), "open a gate before the test ends"
            self._permits -= 1
        return next_letter(token_ids)

    def allow(self, tokens: float = float("inf")) -> None:
        with self._changed:
            self._permits += tokens
            self.held.clear()
            self._changed.notify_all()


@asynccontextmanager
async def started(engine: Engine) -> AsyncIterator[Engine]:
    async with asyncio.timeout(NET_SECONDS), engine:
        yield engine


def stub(
    next_token: Callable[[Sequence[int]], int] | None = None, **options: Unpack[EngineOptions]
) -> asynccontextmanager[Engine]:
    return started(stub_engine(next_token=next_token, **options))


@asynccontextmanager
async def gated(**options: Unpack[EngineOptions]) -> AsyncIterator[tuple[Engine, Gate]]:
    gate = Gate()
    async with stub(gate.next_token, **options) as engine:
        try:
            yield engine, gate
        finally:
            gate.allow()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(NET_SECONDS):
        while not condition():  # noqa: ASYNC110  # waits for a state
            await asyncio.sleep(0)


def at_rest(engine: Engine) -> bool:
    stats = engine.stats()
    return stats.running == stats.waiting == 0 and stats.blocks_free == stats.blocks_total > 0


def expected_tokens(prompt: object, count: int) -> tuple[int, ...]:
    """The stub's output for a prompt served alone."""
    tokens = list(encode(prompt))
    start = len(tokens)
    for _ in range(count):
        tokens.append(next_letter(tokens))
    return tuple(tokens[start:])


def expected_text(prompt: object, count: int) -> str:
    return decode(expected_tokens(prompt, count))


async def check_healthy(engine: Engine, prompt: str = "are you well?") -> None:
    """Check that the engine serves and is at rest afterwards."""
    result = await engine.generate(prompt, max_tokens=9)
    assert result.token_ids == expected_tokens(prompt, 9)
    await until(lambda: at_rest(engine))


# One request.


async def test_result_has_every_field_of_its_request() -> None:
    async with stub() as engine:
        result = await engine.generate("hello", max_tokens=12)
        assert result.token_ids == expected_tokens("hello", 12)
        assert result.text == decode(result.token_ids)
        assert result.finish_reason is FinishReason.LENGTH
        assert result.usage == Usage(prompt_tokens=5, cached_tokens=0, output_tokens=12)
        timings = result.timings
        assert 0 <= timings.queued_seconds <= timings.first_token_seconds <= timings.total_seconds
        again = await engine.generate("hello", max_tokens=12)
        assert again.request_id != result.request_id
        assert again.token_ids == result.token_ids


async def test_stream_yields_contiguous_chunks() -> None:
    async with stub() as engine:
        stream = engine.stream("hello", max_tokens=200)
        chunks = [chunk async for chunk in stream]
        assert all(isinstance(chunk, Chunk) and chunk.request_id == stream.request_id for chunk in chunks)
        position = 0
        for chunk in chunks:
            assert chunk.position == position
            position += len(chunk.token_ids)
        assert sum((chunk.token_ids for chunk in chunks), ()) == expected_tokens("hello", 200)
        result = await stream.result()
        assert result == await stream.result()
        assert "".join(chunk.text for chunk in chunks) == result.text == expected_text("hello", 200)
        assert [chunk async for chunk in stream] == [Chunk(stream.request_id, 0, result.token_ids, result.text)]


async def test_slow_reader_gets_larger_chunks() -> None:
    async with gated() as (engine, gate):
        stream = engine.stream("hello", max_tokens=30)
        sizes = []
        for allowed in (1, 7, 20):
            read = len(stream.inbox.token_ids)
            gate.allow(allowed)
            await until(lambda want=read + allowed: len(stream.inbox.token_ids) == want)
            sizes.append(len((await anext(stream)).token_ids))
        assert sizes == [1, 7, 20]
        gate.allow()
        assert (await stream.result()).token_ids == expected_tokens("hello", 30)


@pytest.mark.parametrize(
    "prompt",
    [
        "text, ünï and 🎈",
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        [Turn("user", "hi")],
        ({"role": "user", "content": ""},),
        [104, 101, END_TOKEN, 0],
        tuple(np.array([1, 2, 255])),
        "x" * 1000,  # long enough for the tokenizer's thread
    ],
)
async def test_prompt_is_text_messages_or_token_ids(prompt: object) -> None:
    as_messages = (
        Conversation(tuple(t if isinstance(t, Turn) else Turn(**t) for t in prompt))
        if not isinstance(prompt, str) and isinstance(prompt[0], dict | Turn)
        else prompt
        if isinstance(prompt, str)
        else tuple(int(token) for token in prompt)
    )
    async with stub() as engine:
        result = await engine.generate(prompt, max_tokens=5)
        assert result.token_ids == expected_tokens(as_messages, 5)
        assert result.usage.prompt_tokens == len(encode(as_messages))


async def test_usage_counts_cached_tokens_and_stats_add_up() -> None:
    prompt = "p" * 64
    async with stub() as engine:
        first = await engine.generate(prompt, max_tokens=4)
        second = await engine.generate(prompt, max_tokens=4)
        assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 48)  # a full hit computes one block
        assert first.token_ids == second.token_ids
        await until(lambda: at_rest(engine))
        stats = engine.stats()
        assert (stats.finished, stats.prompt_tokens, stats.cached_tokens, stats.output_tokens) == (2, 128, 48, 8)
        assert stats.blocks_cached > 0
        assert stats.steps >= 8
        assert (stats.preemptions, stats.evictions) == (0, 0)


def after(count: int, token_id: int) -> Callable[[Sequence[int]], int]:
    """A device that samples letters, and `token_id` once the row has `count` tokens."""
    return lambda token_ids: token_id if len(token_ids) == count else next_letter(token_ids)


async def test_end_token_ends_a_request_unless_ignored() -> None:
    async with stub(after(8, END_TOKEN)) as engine:
        ended = await engine.generate("12345", max_tokens=20)
        assert (ended.finish_reason, len(ended.token_ids)) == (FinishReason.STOP, 4)
        assert ended.token_ids[-1] == END_TOKEN
        assert ended.text == expected_text("12345", 3)
        ignored = await engine.generate("12345", max_tokens=20, ignore_eos=True)
        assert (ignored.finish_reason, ignored.usage.output_tokens) == (FinishReason.LENGTH, 20)
        later = await engine.generate("12345", max_tokens=20, min_tokens=5)
        assert later.usage.output_tokens == 20


async def test_stop_strings_and_stop_tokens_end_the_text() -> None:
    text = expected_text("hello", 60)
    stop = text[20:24]
    async with stub() as engine:
        result = await engine.generate("hello", max_tokens=60, stop=stop)
        assert result.finish_reason is FinishReason.STOP
        assert result.text == text[: text.index(stop)]
        assert result.usage.output_tokens == len(result.token_ids) == text.index(stop) + 4
        chunks = [chunk.text async for chunk in engine.stream("hello", max_tokens=60, stop=["~never~", stop])]
        assert "".join(chunks) == result.text
        letter = ord(text[10])
        by_token = await engine.generate("hello", max_tokens=60, stop_token_ids=[letter])
        assert by_token.text == text[: text.index(text[10]) + 1]
        await until(lambda: at_rest(engine))


async def test_no_chunk_ends_within_a_character() -> None:
    letters = "né🎈ö".encode()
    async with stub(lambda token_ids: letters[(len(token_ids) - 1) % len(letters)]) as engine:
        stream = engine.stream("p", max_tokens=3 * len(letters))
        texts = [chunk.text async for chunk in stream]
        assert "".join(texts) == "né🎈ö" * 3
        assert "\ufffd" not in "".join(texts)


async def test_request_ends_at_the_context_length() -> None:
    async with stub(context_length=20) as engine:
        result = await engine.generate("x" * 12, max_tokens=100)
        assert (result.finish_reason, result.usage.output_tokens) == (FinishReason.LENGTH, 8)


async def test_stream_has_one_reader_at_a_time() -> None:
    async with gated() as (engine, gate):
        stream = engine.stream("hello", max_tokens=3)
        first = asyncio.create_task(stream.result())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="one reader"):
            await stream.result()
        gate.allow()
        assert (await first).token_ids == expected_tokens("hello", 3)


# Leaving early.


async def leave_by_break(engine: Engine, keep: list[object]) -> Inbox:
    stream = engine.stream("leave", max_tokens=ENDLESS)
    keep.append(stream)  # the stream is still referenced: leaving the loop is what cancels it
    async for _ in stream:
        break
    return stream.inbox


async def leave_by_del(engine: Engine, keep: list[object]) -> Inbox:
    stream = engine.stream("leave", max_tokens=ENDLESS)
    await anext(stream)
    inbox = stream.inbox
    del stream
    return inbox


async def leave_by_del_unread(engine: Engine, keep: list[object]) -> Inbox:
    return engine.stream("leave", max_tokens=ENDLESS).inbox


async def leave_by_aclose(engine: Engine, keep: list[object]) -> Inbox:
    stream = engine.stream("leave", max_tokens=ENDLESS)
    keep.append(stream)
    await anext(stream)
    await stream.aclose()
    await stream.aclose()
    return stream.inbox


async def leave_by_async_with(engine: Engine, keep: list[object]) -> Inbox:
    async with engine.stream("leave", max_tokens=ENDLESS) as stream:
        keep.append(stream)
        await anext(stream)
    return stream.inbox


async def leave_by_exception(engine: Engine, keep: list[object]) -> Inbox:
    stream = engine.stream("leave", max_tokens=ENDLESS)
    try:
        async for _ in stream:
            raise ZeroDivisionError
    except ZeroDivisionError as error:
        keep += [stream, error]
    return stream.inbox


async def cancel_task(engine: Engine, keep: list[object], work: Awaitable[object]) -> Inbox:
    task = asyncio.ensure_future(work)
    await until(
        lambda: (
            bool(engine._lifecycle.open_requests) and bool(next(iter(engine._lifecycle.open_requests.values())).texts)
        )
    )
    (inbox,) = engine._lifecycle.open_requests.values()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    keep.append(task)
    return inbox


async def leave_by_cancel_in_loop(engine: Engine, keep: list[object]) -> Inbox:
    stream = engine.stream("leave", max_tokens=ENDLESS)
    keep.append(stream)

    async def read() -> None:
        async for _ in stream:
            pass

    return await cancel_task(engine, keep, read())


async def leave_by_cancel_in_generate(engine: Engine, keep: list[object]) -> Inbox:
    return await cancel_task(engine, keep, engine.generate("leave", max_tokens=ENDLESS))


async def leave_by_cancel_in_generate_many(engine: Engine, keep: list[object]) -> Inbox:
    return await cancel_task(engine, keep, engine.generate_many(["leave"], max_tokens=ENDLESS))


async def leave_by_wait_for(engine: Engine, keep: list[object]) -> Inbox:
    stream = engine.stream("leave", max_tokens=ENDLESS)
    keep.append(stream)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.result(), 0.001)
    return stream.inbox


async def leave_by_cancel_scope(engine: Engine, keep: list[object]) -> Inbox:
    stream = engine.stream("leave", max_tokens=ENDLESS)
    keep.append(stream)
    with anyio.CancelScope() as scope:
        async for _ in stream:
            scope.cancel()
    return stream.inbox


async def leave_by_coroutine_close(engine: Engine, keep: list[object]) -> Inbox:
    work = engine.generate("leave", max_tokens=ENDLESS)
    work.send(None)
    (inbox,) = engine._lifecycle.open_requests.values()
    work.close()
    return inbox


async def leave_by_collection_elsewhere(engine: Engine, keep: list[object]) -> Inbox:
    stream = engine.stream("leave", max_tokens=ENDLESS)
    inbox = stream.inbox
    await anext(stream)
    cycle: list[object] = [stream]
    cycle.append(cycle)
    gc.disable()
    try:
        del stream, cycle
        assert not inbox.cancelled
        collector = threading.Thread(target=gc.collect)
        collector.start()
        await until(lambda: not collector.is_alive())
    finally:
        gc.enable()
    return inbox


LEAVING = [value for name, value in list(globals().items()) if name.startswith("leave_by_")]
Leave = Callable[[Engine, list[object]], Awaitable[Inbox]]


@pytest.mark.parametrize("leave", LEAVING, ids=lambda leave: leave.__name__)
async def test_leaving_early_cancels_and_frees(leave: Leave) -> None:
    async with stub() as engine:
        keep: list[object] = []
        inbox = await leave(engine, keep)
        await until(lambda: inbox.ended_at is not None)
        assert inbox.end is not None and inbox.end.reason is FinishReason.CANCELLED
        assert len(inbox.token_ids) < ENDLESS
        await until(lambda: at_rest(engine))
        await check_healthy(engine, "leave")


async def test_result_of_a_cancelled_stream_says_cancelled() -> None:
    async with gated() as (engine, gate):
        stream = engine.stream("leave", max_tokens=ENDLESS)
        gate.allow(3)
        await until(lambda: len(stream.inbox.token_ids) == 3)
        await stream.aclose()
        gate.allow()
        chunks = [chunk.token_ids async for chunk in stream]
        assert sum(chunks, ()) == expected_tokens("leave", 3)
        result = await stream.result()
        assert (result.finish_reason, result.token_ids) == (FinishReason.CANCELLED, expected_tokens("leave", 3))


async def test_cancel_before_the_first_token() -> None:
    async with gated(running_max=1) as (engine, gate):
        running = engine.stream("running", max_tokens=ENDLESS)
        waiting = engine.stream("waiting", max_tokens=ENDLESS)
        await until(lambda: gate.held.is_set() and engine.stats().waiting == 1)
        await waiting.aclose()
        await until(lambda: waiting.inbox.end is not None)
        assert engine.stats().waiting == 0
        await running.aclose()
        await until(lambda: running.inbox.end is not None)
        assert running.inbox.token_ids == waiting.inbox.token_ids == []
        await until(lambda: at_rest(engine))  # though the step is still held
        gate.allow()
        await check_healthy(engine)


async def test_cancel_while_the_prompt_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def slow(prompt: object) -> tuple[int, ...]:
        if prompt[0] == "s":
            begun.set()
            assert may_end.wait(NET_SECONDS)
        return encode(prompt)

    monkeypatch.setattr("cuelight.core.stub_model.encode", slow)
    async with stub(queue_limit=2) as engine:
        stream = engine.stream("s" * 1000, max_tokens=5)
        await until(begun.is_set)
        await stream.aclose()
        await check_healthy(engine)  # beside it
        may_end.set()
        assert (await stream.result()).finish_reason is FinishReason.CANCELLED
        assert engine.stats().finished == 1
        # Both places in the queue are free again.
        streams = [engine.stream("both", max_tokens=3) for _ in range(2)]
        assert [(await s.result()).token_ids for s in streams] == [expected_tokens("both", 3)] * 2


@pytest.mark.parametrize("seed", range(4))
async def test_cancel_at_any_moment_leaves_other_requests_unchanged(seed: int) -> None:
    chance = random.Random(seed)
    async with stub(block_count=24, token_budget=32, running_max=8, queue_limit=200, seed=seed) as engine:

        async def stay(prompt: str, count: int) -> None:
            assert (await engine.generate(prompt, max_tokens=count)).token_ids == expected_tokens(prompt, count)

        async def leave(prompt: str, turns: int, how: str) -> None:
            stream: Stream | None = engine.stream(prompt, max_tokens=150)
            reading = asyncio.create_task(stream.result()) if how == "cancel" else None
            for _ in range(turns):
                await asyncio.sleep(0)
            if reading is not None:
                reading.cancel()
                await asyncio.wait([reading])
            elif how == "aclose":
                await stream.aclose()
            stream = None

        async with asyncio.TaskGroup() as group:
            for number in range(80):
                prompt = f"{number % 7} " * chance.choice([1, 5, 30, 60])
                if number % 2:
                    group.create_task(stay(prompt, chance.randint(1, 60)))
                else:
                    how = chance.choice(["aclose", "del", "cancel"])
                    group.create_task(leave(prompt, chance.choice([0, 1, 2, 3, 5, 8, 20, 100, 300]), how))
                for _ in range(chance.choice([0, 0, 1, 10])):
                    await asyncio.sleep(0)
        await until(lambda: at_rest(engine) and not engine._lifecycle.open_requests)
        assert engine.stats().preemptions > 0
        await check_healthy(engine)


# Refusals.

CHAT = [{"role": "user", "content": "hi"}]
NAN, INF = float("nan"), float("inf")
BAD_REQUESTS: list[tuple[object, dict[str, object], type[errors.RequestRejected]]] = [
    ("", {}, errors.EmptyPrompt),
    ([], {}, errors.EmptyPrompt),
    ((), {}, errors.EmptyPrompt),
    ("x" * 1008, {}, errors.PromptTooLong),  # the whole pool is 63 blocks of 16
    ("x" * 100_000, {}, errors.PromptTooLong),
    ([1] * 1008, {}, errors.PromptTooLong),
    ([{"role": "user", "content": "x" * 1000}], {}, errors.PromptTooLong),
    *[("p", {"max_tokens": value}, errors.BadSampling) for value in (0, -1, -(10**30))],
    *[("p", {"temperature": value}, errors.BadSampling) for value in (NAN, -0.1, INF, -INF)],
    *[("p", {"top_p": value}, errors.BadSampling) for value in (0, 1.5, NAN, -1, INF)],
    ("p", {"top_k": -1}, errors.BadSampling),
    ("p", {"min_tokens": 5, "max_tokens": 4}, errors.BadSampling),
    ("p", {"min_tokens": -1}, errors.BadSampling),
    ("p", {"stop": ""}, errors.BadSampling),
    ("p", {"stop": ["fine", ""]}, errors.BadSampling),
    ("p", {"max_token": 3}, errors.UnknownField),
    ("p", {"": 1}, errors.UnknownField),
    *[(prompt, {}, errors.WrongType) for prompt in (3, None, b"bytes", object(), True, {1: 2}, CHAT[0], {1}, 1.5)],
    *[(prompt, {}, errors.WrongType) for prompt in ([1, "a"], ["a"], [1.5], [True], [None], [1, CHAT[0]], [[1]])],
    ([*CHAT, "text"], {}, errors.WrongType),
    *[("p", {"max_tokens": value}, errors.WrongType) for value in ("3", True, 1.5, None, [3])],
    *[("p", {"temperature": value}, errors.WrongType) for value in ("hot", None, True, 1j)],
    ("p", {"top_p": "0.5"}, errors.WrongType),
    ("p", {"seed": "7"}, errors.WrongType),
    ("p", {"stop": 3}, errors.WrongType),
    ("p", {"stop": [3]}, errors.WrongType),
    ("p", {"stop_token_ids": 3}, errors.WrongType),
    ("p", {"ignore_eos": 1}, errors.WrongType),
    *[(ids, {}, errors.TokenOutOfRange) for ids in ([-1], [1, 257], [10**30], [-(10**30)])],
    ("p", {"stop_token_ids": [257]}, errors.TokenOutOfRange),
    ("p", {"stop_token_ids": [-1]}, errors.TokenOutOfRange),
    ("half \ud83d", {}, errors.BadPrompt),
    ("\udc80" * 1000, {}, errors.BadPrompt),
    ([{"role": "user", "content": "\ud800"}], {}, errors.BadPrompt),
    ([{"content": "hi"}], {}, errors.BadMessage),
    ([{"role": "user"}], {}, errors.BadMessage),
    ([{}], {}, errors.BadMessage),
    ([{"role": "user", "content": None}], {}, errors.BadMessage),
    ([{"role": None, "content": "hi"}], {}, errors.BadMessage),
    ([{"role": "", "content": "hi"}], {}, errors.BadMessage),
    ([{"role": "narrator", "content": "hi"}], {}, errors.BadMessage),
    ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], {}, errors.BadMessage),
    ([{"role": "user", "content": "hi", "name": "me"}], {}, errors.BadMessage),
    ([Turn("user", None)], {}, errors.BadMessage),
]


async def refusal(engine: Engine, prompt: object, options: dict[str, object]) -> errors.RequestRejected:
    with pytest.raises(errors.RequestRejected) as caught:
        await engine.generate(prompt, **options)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value)
    return caught.value


async def test_bad_input_raises_its_own_error_before_any_work() -> None:
    async with stub(block_count=64) as engine:
        for prompt, options, error in BAD_REQUESTS:
            refused = await refusal(engine, prompt, options)
            assert type(refused) is error, f"{str(prompt)[:50]!r} {options}: {refused!r}"
        assert (engine.stats().steps, engine.stats().finished) == (0, 0)
        assert at_rest(engine)
        assert not engine._lifecycle.open_requests
        await check_healthy(engine)


async def test_bad_input_leaves_healthy_requests_unchanged() -> None:
    async with gated(block_count=64) as (engine, gate):
        healthy = engine.stream("healthy", max_tokens=2 * len(BAD_REQUESTS))
        for prompt, options, error in BAD_REQUESTS:
            gate.allow(2)
            assert type(await refusal(engine, prompt, options)) is error
        result = await healthy.result()
        assert result.token_ids == expected_tokens("healthy", 2 * len(BAD_REQUESTS))


async def test_largest_requests_that_fit_are_served() -> None:
    async with stub(block_count=8) as engine:
        assert (await engine.generate("x" * 111, max_tokens=9)).usage.output_tokens == 1
        with pytest.raises(errors.PromptTooLong, match="whole block pool holds 112"):
            await engine.generate("x" * 112)


async def test_engine_that_does_not_serve_says_why() -> None:
    engine = stub_engine()
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: engine.generate("p"),
        lambda: engine.generate_many(["p"]),
        lambda: engine.stream("p").result(),
        lambda: engine.chat().say("p").result(),
    ]
    assert set(vars(engine.stats()).values()) == {0}
    for call in calls:
        with pytest.raises(errors.NotStarted):
            await call()
    async with started(engine):
        await check_healthy(engine)
        with pytest.raises(errors.EngineClosed, match="started or stopped before"):
            await engine.start()
        await check_healthy(engine)
    for call in calls:
        with pytest.raises(errors.EngineClosed):
            await call()
    with pytest.raises(errors.EngineClosed):
        await engine.start()
    await engine.stop()


async def test_each_caller_gets_its_own_exception() -> None:
    engine = stub_engine()
    raised = []
    for _ in range(3):
        with pytest.raises(errors.NotStarted) as caught:
            engine.stream("p")
        raised.append(caught.value)
    assert len(set(map(id, raised))) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float8"},
        {"dtype": None},
        {"quantization": "int3"},
        {"quantization": "None"},
        {"decoder": "torch"},
        {"decoder": None},
        {"executor": "remote"},
        {"restarts_max": -1},
        {"step_timeout_seconds": 0},
        {"step_timeout_seconds": float("nan")},
        {"device": 3},
        {"token_budget": 0},
        {"running_max": -1},
        {"queue_limit": 0},
        {"queue_limit": True},
        {"block_size": 1.5},
        {"block_size": "16"},
        {"block_count": 1},
        {"kv_cache_bytes": 0},
        {"watermark_fraction": 1},
        {"watermark_fraction": float("nan")},
        {"watermark_fraction": "0.1"},
        {"context_length": 1},
        {"steps_in_flight": 0},
        {"seed": -1},
        {"seed": 1.0},
        {"no_such_option": 1},
    ],
    ids=str,
)
def test_bad_engine_option_is_refused_at_construction(options: dict[str, object]) -> None:
    for make in (Engine, stub_engine):
        with pytest.raises(errors.ConfigError) as caught:
            make(**options)
        assert next(iter(options)) in str(caught.value)
        assert isinstance(caught.value, ValueError)


async def test_flood_is_refused_and_accepted_requests_are_served() -> None:
    async with stub(queue_limit=10) as engine:
        streams: list[Stream] = []
        refused = 0
        for number in range(5000):  # in one turn of the loop
            try:
                streams.append(engine.stream(f"flood {number}", max_tokens=5))
            except errors.QueueFull:
                refused += 1
        assert len(engine._lifecycle.open_requests) <= 20
        outcomes = await asyncio.gather(*[stream.result() for stream in streams], return_exceptions=True)
        served = [outcome for outcome in outcomes if isinstance(outcome, Result)]
        assert [result.token_ids for result in served] == [expected_tokens(f"flood {n}", 5) for n in range(10)]
        assert all(isinstance(outcome, Result | errors.QueueFull) for outcome in outcomes)
        assert len(outcomes) + refused == 5000
        figures = engine.system.statistics()
        assert all(box.peak <= box.capacity for box in figures.values())
        assert figures["intake"].peak <= 8 * 10 + 64
        await check_healthy(engine)


async def test_cancelling_many_requests_at_once_fits_the_mailboxes() -> None:
    async with stub(queue_limit=10, block_count=8) as engine:
        for _ in range(200):
            for number in range(30):
                try:
                    stream = engine.stream(f"storm {number}", max_tokens=50)
                except errors.QueueFull:
                    break
                if number % 2:
                    await stream.aclose()
            await asyncio.sleep(0)
        del stream
        await until(lambda: at_rest(engine) and not engine._lifecycle.open_requests)
        await check_healthy(engine)


# Closing the engine.


async def test_closing_the_engine_ends_every_stream_with_a_typed_error() -> None:
    async with asyncio.timeout(NET_SECONDS):
        engine = stub_engine()
        await engine.start()
        read = engine.stream("read", max_tokens=ENDLESS)
        waited = asyncio.create_task(engine.generate("waited", max_tokens=ENDLESS))
        seen = await anext(read)
        ahead = engine.stream("never begun", max_tokens=ENDLESS)
        await engine.stop()
        with pytest.raises(errors.EngineClosed):
            async for _ in read:
                pass
        with pytest.raises(errors.EngineClosed):
            await waited
        with pytest.raises(errors.EngineClosed):
            await ahead.result()
        assert seen.token_ids == expected_tokens("read", len(seen.token_ids))
        await read.aclose()


async def test_cancelling_all_tasks_of_the_host_ends_every_wait() -> None:
    async with asyncio.timeout(NET_SECONDS):
        engine = stub_engine()
        await engine.start()
        stream = engine.stream("read", max_tokens=ENDLESS)
        await anext(stream)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        with pytest.raises(errors.EngineClosed):
            await stream.result()
        with pytest.raises(errors.EngineClosed):
            await engine.generate("later")
        await engine.stop()
        assert asyncio.all_tasks() == {asyncio.current_task()}


def test_engine_of_a_closed_loop_says_so_in_another_loop() -> None:
    engine = stub_engine()
    asyncio.run(engine.start())

    async def later() -> None:
        with pytest.raises(errors.EngineClosed):
            await engine.generate("later")
        await engine.stop()

    asyncio.run(later())


async def test_stats_of_a_closed_engine() -> None:
    async with stub_engine() as engine:
        streams = [engine.stream(f"read {n}", max_tokens=ENDLESS) for n in range(3)]
        for stream in streams:
            await anext(stream)
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.blocks_free == stats.blocks_total > 0
    assert stats.steps > 0


async def test_reader_within_its_loop_gets_engine_closed() -> None:
    async with asyncio.timeout(NET_SECONDS):
        engine = stub_engine()
        await engine.start()
        heard = 0

        async def read() -> None:
            nonlocal heard
            async for _ in engine.stream("read", max_tokens=ENDLESS):
                heard += 1

        readers = [asyncio.create_task(read()) for _ in range(5)]
        await until(lambda: heard > 10)
        await engine.stop()
        ends = await asyncio.gather(*readers, return_exceptions=True)
        assert {type(end) for end in ends} == {errors.EngineClosed}


async def test_crash_beyond_the_restart_limit_reaches_every_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuelight.core.parts.RESTART_POLICY", RestartPolicy())
    async with asyncio.timeout(NET_SECONDS):
        engine = stub_engine()
        await engine.start()
        streams = [engine.stream(f"victim {n}", max_tokens=ENDLESS) for n in range(5)]
        await anext(streams[0])
        crash(engine, "intake")
        ends = await asyncio.gather(*[stream.result() for stream in streams], return_exceptions=True)
        assert {type(end) for end in ends} == {errors.EngineBroken}
        assert len(set(map(id, ends))) == 5
        for end in ends:
            assert isinstance(end.__cause__, ActorCrashed)
            assert "intake" in str(end)
        assert engine.health().state == "unavailable"
        assert "intake" in engine.health().reason
        for _ in range(2):
            with pytest.raises(errors.EngineBroken) as caught:
                engine.stream("later")
            assert isinstance(caught.value.__cause__, ActorCrashed)
        await engine.stop()
        with pytest.raises(errors.EngineBroken):
            await engine.generate("after stop")
        await engine.stop()
        assert engine.health().state == "closed"
        assert "intake" in engine.health().reason
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("cuelight")]


def ensemble(load_device: Callable[[], object]) -> Callable[[EngineConfig], EngineParts[object]]:
    facts = ModelFacts(vocab_size=257, context_length=100, eos_token_ids=(256,))
    return lambda _: EngineParts(facts, StubEncoder(), decode, load_device)


def fail() -> object:
    raise OSError("no such weights")


def not_found(_: EngineConfig) -> EngineParts[object]:
    raise errors.ModelUnavailable("no such folder")


@pytest.mark.parametrize(
    ("gather", "error"),
    [
        (not_found, errors.ModelUnavailable),
        (ensemble(fail), errors.ModelUnavailable),
        (ensemble(lambda: StubDevice(10, 16)), errors.EngineBroken),  # with a cache manager that cannot be built
    ],
)
async def test_failed_start_leaves_nothing_behind(
    gather: Callable[..., EngineParts[object]], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    if error is errors.EngineBroken:
        monkeypatch.setattr("cuelight.core.parts.CacheManager", None)
    before = traces()
    async with asyncio.timeout(NET_SECONDS):
        engine = Engine.from_parts("broken", gather)
        with pytest.raises(error):
            await engine.start()
        with pytest.raises(errors.EngineUnavailable):
            engine.stream("p")
        await engine.stop()
    assert traces() == before


async def test_step_that_fails_on_one_request_fails_that_request() -> None:
    def next_token(token_ids: Sequence[int]) -> int:
        if token_ids[0] == ord("!") and len(token_ids) > 10:
            raise ValueError("cursed")
        return next_letter(token_ids)

    async with stub(next_token) as engine:
        bad = engine.stream("!", max_tokens=50)
        good = [engine.stream(f"good {n}", max_tokens=30) for n in range(4)]
        with pytest.raises(errors.RequestFailed, match="cursed"):
            await bad.result()
        for n, stream in enumerate(good):
            assert (await stream.result()).token_ids == expected_tokens(f"good {n}", 30)
        with pytest.raises(errors.RequestFailed):
            async for _ in engine.stream("!", max_tokens=50):
                pass
        await check_healthy(engine)


# Inside host programs.


def children() -> set[str]:
    found: set[str] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended meanwhile
            found.update(file.read_text().split())
    return found


def traces() -> dict[str, object]:
    """State of the process and the loop that an engine must leave unchanged."""
    return {
        "threads": {thread.ident for thread in threading.enumerate()},
        "tasks": asyncio.all_tasks(),
        "signals": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "files": set(os.listdir("/proc/self/fd")) if sys.platform == "linux" else set(),  # noqa: PTH208  # names alone
        "children": children() | {child.name for child in multiprocessing.active_children()},
        "switch interval": sys.getswitchinterval(),
        "policy": type(asyncio.get_event_loop_policy()),
    }


async def test_engine_leaves_nothing_behind() -> None:
    before = traces()
    async with stub() as engine:
        during = traces()
        assert during["threads"] > before["threads"]
        assert [during[key] for key in ("signals", "switch interval", "policy", "children")] == [
            before[key] for key in ("signals", "switch interval", "policy", "children")
        ]
        await check_healthy(engine)
        left = engine.stream("left open", max_tokens=ENDLESS)
        await anext(left)
    assert traces() == before
    del left
    await asyncio.sleep(0)
    assert traces() == before


async def serve_once() -> tuple[int, ...]:
    async with stub() as engine:
        return (await engine.generate("hello", max_tokens=7)).token_ids


def test_engine_runs_on_asyncio_and_uvloop() -> None:
    expected = expected_tokens("hello", 7)
    assert asyncio.run(serve_once()) == expected
    assert uvloop.run(serve_once()) == expected
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(serve_once()) == expected
        assert runner.run(serve_once()) == expected


async def test_engine_runs_in_the_loop_of_another_thread() -> None:
    outcomes: list[tuple[int, ...]] = []
    thread = threading.Thread(target=lambda: outcomes.append(asyncio.run(serve_once())))
    async with stub() as engine:
        thread.start()
        await check_healthy(engine)
        await until(lambda: not thread.is_alive())
    assert outcomes == [expected_tokens("hello", 7)]


async def test_two_engines_run_at_once_and_in_sequence() -> None:
    for _ in range(2):
        async with stub() as one, stub(lambda token_ids: ord("z")) as two:
            first, second = await asyncio.gather(
                one.generate("hello", max_tokens=7), two.generate("hello", max_tokens=7)
            )
            assert (first.token_ids, second.text) == (expected_tokens("hello", 7), "zzzzzzz")
            assert (one.stats().finished, two.stats().finished) == (1, 1)


async def test_engine_is_stopped_from_another_task_and_twice() -> None:
    before = traces()
    async with asyncio.timeout(NET_SECONDS):
        engine = stub_engine()
        await asyncio.create_task(engine.start())
        await check_healthy(engine)
        await asyncio.gather(asyncio.create_task(engine.stop()), engine.stop())
        await engine.stop()
    assert traces() == before


async def test_start_can_be_cancelled_at_any_moment() -> None:
    before = traces()
    outcomes = set()
    for turns in range(60):
        engine = stub_engine()

        async def use(engine: Engine = engine) -> None:
            async with engine:
                await check_healthy(engine)

        task = asyncio.create_task(use())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        async with asyncio.timeout(NET_SECONDS):
            await asyncio.wait([task])
        outcomes.add(task.cancelled())
        with pytest.raises(errors.EngineUnavailable):
            engine.stream("p")
        await until(lambda: traces() == before)
    assert True in outcomes


async def test_start_that_another_task_stops_says_so() -> None:
    before = traces()
    for turns in range(0, 60, 3):
        engine = stub_engine()
        starting = asyncio.create_task(engine.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        await engine.stop()
        async with asyncio.timeout(NET_SECONDS):
            await asyncio.wait([starting])
        assert not starting.cancelled()
        assert starting.exception() is None or isinstance(starting.exception(), errors.EngineClosed)
        with pytest.raises(errors.EngineClosed):
            engine.stream("p")
        await until(lambda: traces() == before)


async def test_stop_just_before_the_engine_is_ready_wins() -> None:
    may_load = threading.Event()

    def load() -> StubDevice:
        assert may_load.wait(NET_SECONDS)
        return StubDevice(8, 16)

    async def stop_when_ready() -> None:
        await engine._lifecycle.running.board.ready  # first in line, so that this stops before the start continues
        await engine.stop()

    async with asyncio.timeout(NET_SECONDS):
        engine = Engine.from_parts("slow", ensemble(load))
        starting = asyncio.create_task(engine.start())
        await until(lambda: engine._lifecycle.running is not None)
        stopping = asyncio.create_task(stop_when_ready())
        await asyncio.sleep(0)
        may_load.set()
        await stopping
        with pytest.raises(errors.EngineClosed):
            await starting
        with pytest.raises(errors.EngineClosed):
            engine.stream("p")


async def test_cancelled_scope_around_an_engine_is_left_once_it_is_closed() -> None:
    before = traces()
    with anyio.CancelScope() as scope:
        async with stub() as engine:
            async for _ in engine.stream("scoped", max_tokens=ENDLESS):
                scope.cancel()
    assert scope.cancelled_caught
    assert traces() == before


INTERRUPTED = """
import asyncio, sys, threading
from cuelight.testing import stub_engine

async def main():
    async with stub_engine() as engine:
        assert (await engine.generate("hello", max_tokens=3)).text
        print(sorted({"torch", "transformers", "tokenizers"} & set(sys.modules)), flush=True)
        while True:
            async for chunk in engine.stream("on and on", max_tokens=3000):
                pass

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print([thread.name for thread in threading.enumerate()], flush=True)
    sys.exit(7)
"""


def test_ctrl_c_ends_the_program_and_the_stub_loads_no_torch() -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        try:
            assert program.stdout.readline() == "[]\n"
            program.send_signal(signal.SIGINT)
            out, err = program.communicate(timeout=NET_SECONDS)
        finally:
            program.kill()
    assert (program.returncode, out, err) == (7, "['MainThread']\n", "")


# Many prompts.


async def test_generate_many_keeps_the_order_and_fits_any_queue() -> None:
    prompts = [f"prompt {n} " * (1 + n % 5) for n in range(60)]
    for queue_limit in (1, 3, 1024):
        async with stub(queue_limit=queue_limit, running_max=4) as engine:
            results = await engine.generate_many(iter(prompts), max_tokens=6)
            assert [result.token_ids for result in results] == [expected_tokens(p, 6) for p in prompts]
            assert await engine.generate_many([]) == []
            await until(lambda engine=engine: at_rest(engine))


async def test_loop_runs_other_tasks_while_many_prompts_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "TURN_SECONDS", 0.0)
    events: list[str] = []
    parse = requests.parse_prompt
    monkeypatch.setattr(requests, "parse_prompt", lambda prompt: events.append("read") or parse(prompt))
    prompts = [f"prompt {n}" for n in range(9)]
    async with stub() as engine:
        many = asyncio.create_task(engine.generate_many(prompts, max_tokens=2))
        while events.count("read") < 3:
            await asyncio.sleep(0)
            events.append("turn")
        drain = asyncio.create_task(engine.drain(NET_SECONDS))
        while not many.done():
            await asyncio.sleep(0)
            events.append("turn")
        assert events.count("read") == len(prompts)
        assert all(pair != ("read", "read") for pair in itertools.pairwise(events))
        assert [result.token_ids for result in await many] == [expected_tokens(p, 2) for p in prompts], (
            "begun before the drain"
        )
        assert await drain == 0


async def test_generate_many_shows_progress_only_when_asked(capfd: pytest.CaptureFixture[str]) -> None:
    def monitors() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if "Monitor" in type(thread).__name__}

    before = monitors()  # other libraries' bars may have started one
    async with stub() as engine:
        await engine.generate_many(["a", "b", "c"], max_tokens=2)
        assert capfd.readouterr() == ("", "")
        await engine.generate_many(["a", "b", "c"], max_tokens=2, progress=True)
        out, err = capfd.readouterr()
        assert out == ""
        assert "3/3" in err
    assert monitors() <= before


async def test_generate_many_checks_every_prompt_before_serving_any() -> None:
    async with stub() as engine:
        for prompts in (["fine", 3], [[1], []], 3, None, "a text is not a list of prompts"):
            with pytest.raises(errors.RequestRejected):
                await engine.generate_many(prompts)
        with pytest.raises(errors.UnknownField):
            await engine.generate_many(["fine"], max_token=3)
        assert engine.stats().steps == 0


async def test_first_error_of_generate_many_cancels_the_rest() -> None:
    def next_token(token_ids: Sequence[int]) -> int:
        if token_ids[0] == ord("!"):
            raise ValueError("cursed")
        return next_letter(token_ids)

    async with stub(next_token, running_max=2) as engine:
        with pytest.raises(errors.RequestFailed, match="cursed"):
            await engine.generate_many(["!", *[f"fine {n}" for n in range(50)]], max_tokens=300)
        await until(lambda: at_rest(engine) and not engine._lifecycle.open_requests)
        assert engine.stats().finished <= 4
        await check_healthy(engine)


# Conversations.


def conversation(*turns: str, system: str | None = None) -> Conversation:
    """User and assistant turns in alternation."""
    spoken = [Turn(("user", "assistant")[n % 2], text) for n, text in enumerate(turns)]
    return Conversation((*([] if system is None else [Turn("system", system)]), *spoken))


async def test_chat_keeps_its_turns_and_its_prefix_is_cached() -> None:
    async with stub() as engine:
        chat = engine.chat("be a stub", max_tokens=40)
        assert chat.messages == [{"role": "system", "content": "be a stub"}]
        first = await chat.say("hello").result()
        assert first.text == expected_text(conversation("hello", system="be a stub"), 40)
        second = await chat.say("and again", max_tokens=5).result()
        whole = conversation("hello", first.text, "and again", system="be a stub")
        assert second.token_ids == expected_tokens(whole, 5)
        assert second.usage.cached_tokens >= 64
        assert [(m["role"], m["content"]) for m in chat.messages] == [
            *[(turn.role, turn.content) for turn in whole.turns],
            ("assistant", second.text),
        ]


async def test_chat_is_busy_while_an_answer_streams() -> None:
    async with gated() as (engine, gate):
        chat = engine.chat(max_tokens=20)
        answer = chat.say("hello")
        with pytest.raises(errors.ChatBusy):
            chat.say("hurry")
        gate.allow(4)
        await until(lambda: len(answer.inbox.token_ids) == 4)
        with pytest.raises(errors.ChatBusy):
            chat.say("hurry")
        assert chat.messages == []
        await answer.aclose()
        heard = expected_text(conversation("hello"), 4)
        broken_off = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": heard}]
        assert chat.messages == broken_off  # the part that was streamed
        gate.allow()
        again = await chat.say("go on", max_tokens=6).result()
        assert again.token_ids == expected_tokens(conversation("hello", heard, "go on"), 6)


async def test_leaving_the_loop_over_an_answer_frees_the_chat() -> None:
    async with stub() as engine:
        chat = engine.chat(max_tokens=ENDLESS)
        async for chunk in chat.say("hello"):
            heard = chunk.text
            break
        assert chat.messages[1]["content"].startswith(heard)
        await chat.say("again", max_tokens=2).result()
        assert len(chat.messages) == 4
        await until(lambda: at_rest(engine))


async def test_refused_or_failed_question_is_not_kept() -> None:
    def next_token(token_ids: Sequence[int]) -> int:
        if b"curse" in bytes(token_ids):
            raise ValueError("cursed")
        return next_letter(token_ids)

    async with stub(next_token) as engine:
        chat = engine.chat(max_tokens=5)
        await chat.say("hello").result()
        before = chat.messages
        for text, options, error in [
            ("x" * 5000, {}, errors.PromptTooLong),
            ("\ud800", {}, errors.BadPrompt),
            (3, {}, errors.BadMessage),
            ("fine", {"top_p": 7}, errors.BadSampling),
            ("a curse", {}, errors.RequestFailed),
        ]:
            with pytest.raises(error):
                await chat.say(text, **options).result()
            assert chat.messages == before
        answer = await chat.say("again").result()
        assert answer.token_ids == expected_tokens(conversation("hello", before[1]["content"], "again"), 5)


# Logs.


async def test_nothing_is_logged_unless_configured(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async with stub() as engine:
        await check_healthy(engine)
        await refusal(engine, "", {})
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


async def test_each_finished_request_is_one_line_at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cuelight")
    async with stub() as engine:
        results = [await engine.generate(f"p{n}", max_tokens=3) for n in range(4)]
        stream = engine.stream("left", max_tokens=ENDLESS)
        await anext(stream)
        await stream.aclose()
        await until(lambda: engine.stats().finished == 5)
    lines = [record.getMessage() for record in caplog.records]
    assert sum("engine_ready" in line for line in lines) == 1
    finished = [line for line in lines if "request_finished" in line]
    assert len(finished) == 5
    for result, line in zip(results, finished, strict=False):
        assert f"request_id={result.request_id} " in line
        assert "reason='length'" in line
        assert "output_tokens=3" in line
    assert "reason='cancelled'" in finished[-1]
    assert not [line for line in lines if "event='step'" in line]


async def test_each_step_is_a_line_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "cuelight")
    async with stub() as engine:
        await check_healthy(engine)
        steps = engine.stats().steps
    assert sum("event='step'" in record.getMessage() for record in caplog.records) == steps >= 9


async def test_logs_go_to_structlog_where_the_host_configured_it(caplog: pytest.LogCaptureFixture) -> None:
    structlog.configure()
    try:
        with structlog.testing.capture_logs() as events:
            async with stub() as engine:
                result = await engine.generate("hello", max_tokens=3)
    finally:
        structlog.reset_defaults()
    (event,) = [event for event in events if event["event"] == "request_finished"]
    assert event["log_level"] == "info"
    assert (event["request_id"], event["reason"], event["prompt_tokens"]) == (result.request_id, "length", 5)
    assert caplog.records == []


# The real model.


@pytest.mark.model
async def test_real_model_answers_and_frees_everything() -> None:
    async with started(Engine(block_count=64, token_budget=64)) as engine:
        assert at_rest(engine)
        result = await engine.generate("The capital of France is", max_tokens=8)
        assert "Paris" in result.text
        chunks = [chunk async for chunk in engine.stream("The capital of France is", max_tokens=8)]
        assert "".join(chunk.text for chunk in chunks) == result.text
        many = await engine.generate_many(["The capital of France is"] * 3, max_tokens=8)
        assert {answer.token_ids for answer in many} == {result.token_ids}

        chat = engine.chat(max_tokens=8)
        await chat.say("Say hello.").result()
        again = await chat.say("Once more.").result()
        assert again.usage.cached_tokens > 0

        # No polling here: a loop that never idles would keep the interpreter lock from the device's thread.
        stream = engine.stream("Once upon a time", max_tokens=500)
        async for _ in stream:
            break
        assert (await stream.result()).finish_reason is FinishReason.CANCELLED
        assert at_rest(engine)
        stream = engine.stream("Once upon a time", max_tokens=500)
        await anext(stream)
        waiting = asyncio.create_task(stream.result())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert (await stream.result()).finish_reason is FinishReason.CANCELLED
        assert at_rest(engine)
        for prompt, options, error in [
            ("", {}, errors.EmptyPrompt),
            ("word " * 5000, {}, errors.PromptTooLong),
            ([49152], {}, errors.TokenOutOfRange),
            ("\ud800", {}, errors.BadPrompt),
            ("p", {"temperature": NAN}, errors.BadSampling),
        ]:
            assert type(await refusal(engine, prompt, options)) is error
        assert (await engine.generate("The capital of France is", max_tokens=8)).token_ids == result.token_ids
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cuelight")]


@pytest.mark.model
async def test_real_model_is_closed_within_a_stream() -> None:
    engine = Engine(block_count=64)
    async with started(engine):
        stream = engine.stream("Once upon a time", max_tokens=500)
        await anext(stream)
    with pytest.raises(errors.EngineClosed):
        await stream.result()


@pytest.mark.model
@pytest.mark.parametrize("quantization", ["int8", "int4"])
async def test_real_model_answers_with_quantized_weights(quantization: str) -> None:
    async with started(Engine(block_count=64, quantization=quantization, device="cpu")) as engine:
        greedy = await engine.generate("The capital of France is", max_tokens=8)
        assert "Paris" in greedy.text or quantization == "int4", "4 bits are few for so small a model"
        sampled = [await engine.generate("Once upon a time", temperature=1.0, seed=s, max_tokens=8) for s in (1, 1, 2)]
        assert sampled[0].token_ids == sampled[1].token_ids != sampled[2].token_ids


@pytest.mark.model
async def test_unavailable_decoder_is_refused_with_the_reason() -> None:
    with pytest.raises(errors.ModelUnavailable, match="quantization 'int4' runs on the CPU only: give device='cpu'"):
        await Engine(quantization="int4", device="cuda").start()


async def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 10, "max_position_embeddings": 10, "model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(errors.ModelUnavailable):
            await Engine(folder).start()


async def test_request_from_another_thread_is_refused() -> None:
    async with stub_engine() as engine:
        with pytest.raises(errors.EngineUnavailable, match="thread"):
            await asyncio.get_running_loop().run_in_executor(None, engine.stream, "from elsewhere")
        assert (await engine.generate("from here", max_tokens=2)).finish_reason == "length"
