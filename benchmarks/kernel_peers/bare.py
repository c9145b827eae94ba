"""The baseline in the loop: a pair of bounded `asyncio.Queue`s, for requests and replies, and one task between them."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import NamedTuple, TypeAlias

import msgspec

from benchmarks.kernel_peers import (
    ASKERS,
    ASKS,
    BURST,
    CAPACITY,
    CAST,
    ROUNDS,
    SPAWN,
    Effort,
    Outcome,
    asked,
    crowded,
    memory_kib,
    rate,
    spawned,
    told,
)


class Count(msgspec.Struct, frozen=True):
    """Add to the total. Not answered."""

    amount: int


class Total(msgspec.Struct, frozen=True):
    """Asks for the total."""


class Echo(msgspec.Struct, frozen=True):
    """Asks for the same value."""

    value: int


Request: TypeAlias = Count | Total | Echo


class Pair(NamedTuple):
    """Where to put a request and where to get its reply; the task in between is kept alive."""

    requests: asyncio.Queue[Request]
    replies: asyncio.Queue[int]
    server: asyncio.Task[None]


async def _serve(requests: asyncio.Queue[Request], replies: asyncio.Queue[int]) -> None:
    total = 0
    while True:
        match await requests.get():
            case Count(amount=amount):
                total += amount
            case Total():
                replies.put_nowait(total)
            case Echo(value=value):
                replies.put_nowait(value)


def _pair() -> Pair:
    requests: asyncio.Queue[Request] = asyncio.Queue(CAPACITY)
    replies: asyncio.Queue[int] = asyncio.Queue(CAPACITY)
    return Pair(requests, replies, asyncio.create_task(_serve(requests, replies)))


async def tell(effort: Effort) -> Outcome:
    """Bursts of requests without a reply, each followed by a question after their number."""
    requests, replies, server = _pair()
    sent = 0

    async def burst() -> None:
        nonlocal sent
        for _ in range(BURST):
            requests.put_nowait(Count(1))
        sent += BURST
        requests.put_nowait(Total())
        assert await replies.get() == sent

    outcome = told(await rate(burst, effort.seconds))
    server.cancel()
    return outcome


async def ask(effort: Effort) -> Outcome:
    """One request, its reply, the next request."""
    requests, replies, server = _pair()

    async def batch() -> None:
        for value in range(ASKS):
            requests.put_nowait(Echo(value))
            assert await replies.get() == value

    outcome = asked(await rate(batch, effort.seconds))
    server.cancel()
    return outcome


async def _serve_crowd(requests: asyncio.Queue[tuple[Echo, asyncio.Queue[int]]]) -> None:
    while True:
        request, replies = await requests.get()
        replies.put_nowait(request.value)


async def crowd(effort: Effort) -> Outcome:
    """One queue of requests, and for each asker a queue of replies."""
    requests: asyncio.Queue[tuple[Echo, asyncio.Queue[int]]] = asyncio.Queue(CAPACITY)
    server = asyncio.create_task(_serve_crowd(requests))

    async def asker() -> None:
        replies: asyncio.Queue[int] = asyncio.Queue(1)
        for value in range(ROUNDS):
            requests.put_nowait((Echo(value), replies))
            assert await replies.get() == value

    outcome = crowded(await rate(lambda: asyncio.gather(*(asker() for _ in range(ASKERS))), effort.seconds))
    server.cancel()
    return outcome


async def spawn(effort: Effort) -> Outcome:
    """Many pairs alive at once."""
    gc.collect()
    kib = memory_kib()
    begin = time.perf_counter()
    pairs = [_pair() for _ in range(effort.actors)]
    pairs[-1].requests.put_nowait(Echo(-1))
    assert await pairs[-1].replies.get() == -1
    seconds = time.perf_counter() - begin
    for value, pair in enumerate(pairs):
        pair.requests.put_nowait(Echo(value))
        assert await pair.replies.get() == value
    gc.collect()
    return spawned(len(pairs), seconds, memory_kib() - kib)


async def cast(effort: Effort) -> Outcome:
    """The same again: tasks know no other way to start together."""
    return Outcome({CAST: (await spawn(effort)).figures[SPAWN]})
