"""What tests of whole engines share: a device that waits for permits, and what the stub must give."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Unpack

from cuelight import Engine, Stream
from cuelight.config import EngineOptions
from cuelight.testing import encode, next_letter, stub_engine

NET_SECONDS = 120.0
"""A safety net around everything that waits; no test measures by it."""

NextToken = Callable[[Sequence[int]], int]


class Gate:
    """Holds the device's thread before each token until told how many may pass."""

    def __init__(self, next_token: NextToken = next_letter) -> None:
        self._next_token = next_token
        self._changed = threading.Condition()
        self._permits = 0.0
        self.passed = 0

    def next_token(self, token_ids: Sequence[int]) -> int:
        with self._changed:
            while self._permits < 1:
                assert self._changed.wait(NET_SECONDS), "a gate is opened before the test ends"
            self._permits -= 1
            self.passed += 1
        return self._next_token(token_ids)

    def allow(self, tokens: float = float("inf")) -> None:
        with self._changed:
            self._permits += tokens
            self._changed.notify_all()


@asynccontextmanager
async def gated(**options: Unpack[EngineOptions]) -> AsyncIterator[tuple[Engine, Gate]]:
    """A stub engine whose device waits for permits, and the gate."""
    gate = Gate()
    async with asyncio.timeout(NET_SECONDS), stub_engine(next_token=gate.next_token, **options) as engine:
        try:
            yield engine, gate
        finally:
            gate.allow()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(NET_SECONDS):
        while not condition():  # noqa: ASYNC110  # what it waits for is any state, not an event
            await asyncio.sleep(0)


def at_rest(engine: Engine) -> bool:
    stats = engine.stats()
    return stats.running == stats.waiting == 0 and stats.blocks_free == stats.blocks_total > 0


def expected_tokens(prompt: object, count: int, next_token: NextToken = next_letter) -> tuple[int, ...]:
    """What the stub gives for a prompt alone."""
    tokens = list(encode(prompt))
    start = len(tokens)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tuple(tokens[start:])


async def read(stream: Stream, count: int) -> list[int]:
    """At least the next `count` output tokens; the stream stays open."""
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.extend((await anext(stream)).token_ids)
    return tokens


def next_capital(token_ids: Sequence[int]) -> int:
    """The other model speaks in capitals, and has no spaces."""
    return ord(chr(next_letter(token_ids)).upper().replace(" ", "_"))
