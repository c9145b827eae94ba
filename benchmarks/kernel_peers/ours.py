"""Our kernel: one actor in the loop, many of them, and one in a child process."""

from __future__ import annotations

import asyncio
import gc
import time
from functools import partial
from typing import TypeAlias, assert_never

import msgspec

from benchmarks.kernel_peers import (
    ASKERS,
    ASKS,
    BURST,
    CAPACITY,
    CAST,
    PROCESS,
    ROUNDS,
    TIMEOUT_SECONDS,
    Effort,
    Outcome,
    asked,
    crowded,
    memory_kib,
    rate,
    spawned,
    told,
)
from cuelight.kernel import Actor, ActorSpec, Context, InProcess, Recipient, Ref, Role, System
from cuelight.kernel import ask as ask_actor


class Count(msgspec.Struct, frozen=True, tag=True):
    """Add to the total. Not answered."""

    amount: int


class Total(msgspec.Struct, frozen=True, tag=True):
    """Answered with the total."""

    reply_to: Recipient[int]


class Echo(msgspec.Struct, frozen=True, tag=True):
    """Answered with the same value."""

    value: int
    reply_to: Recipient[int]


Message: TypeAlias = Count | Total | Echo

REPLIER = Role[Message]("replier", Count | Total | Echo, CAPACITY)


class Replier(Actor[Message]):
    """Counts, and answers."""

    def __init__(self) -> None:
        self._total = 0

    def handle(self, message: Message) -> None:
        match message:
            case Count(amount=amount):
                self._total += amount
            case Total(reply_to=reply_to):
                reply_to.tell(self._total)
            case Echo(value=value, reply_to=reply_to):
                reply_to.tell(value)
            case _:
                assert_never(message)


def build(context: Context[object]) -> Replier:
    """A replier; a function that a child process can import."""
    return Replier()


async def tell(effort: Effort) -> Outcome:
    """Bursts of messages without an answer, each followed by a question after their number."""
    sent = 0
    async with System([ActorSpec(REPLIER, build)]) as system:
        ref = system.find(REPLIER)

        async def burst() -> None:
            nonlocal sent
            for _ in range(BURST):
                ref.tell(Count(1))
            sent += BURST
            assert await ask_actor(ref, Total, TIMEOUT_SECONDS) == sent

        return told(await rate(burst, effort.seconds))


async def _batch(ref: Ref[Message]) -> None:
    for value in range(ASKS):
        assert await ask_actor(ref, partial(Echo, value), TIMEOUT_SECONDS) == value


async def ask(effort: Effort) -> Outcome:
    """One question, its answer, the next question."""
    async with System([ActorSpec(REPLIER, build)]) as system:
        return asked(await rate(partial(_batch, system.find(REPLIER)), effort.seconds))


async def process(effort: Effort) -> Outcome:
    """The same, and the actor lives in a child process."""
    async with System([ActorSpec(REPLIER, build, placement=InProcess())]) as system:
        return asked(await rate(partial(_batch, system.find(REPLIER)), effort.seconds), PROCESS)


async def crowd(effort: Effort) -> Outcome:
    """Many tasks ask one actor."""
    async with System([ActorSpec(REPLIER, build)]) as system:
        ref = system.find(REPLIER)

        async def asker() -> None:
            for value in range(ROUNDS):
                assert await ask_actor(ref, partial(Echo, value), TIMEOUT_SECONDS) == value

        return crowded(await rate(lambda: asyncio.gather(*(asker() for _ in range(ASKERS))), effort.seconds))


def _part(number: int) -> ActorSpec[Message]:
    return ActorSpec(Role[Message](f"replier-{number}", Count | Total | Echo, CAPACITY), build)


async def _all_answer(refs: list[Ref[Message]]) -> None:
    for value, ref in enumerate(refs):
        assert await ask_actor(ref, partial(Echo, value), TIMEOUT_SECONDS) == value


async def spawn(effort: Effort) -> Outcome:
    """Many actors, each spawned while the system runs."""
    async with System([]) as system:
        gc.collect()
        kib = memory_kib()
        begin = time.perf_counter()
        refs = [system.spawn(_part(number)) for number in range(effort.actors)]
        await _all_answer(refs[-1:])
        seconds = time.perf_counter() - begin
        await _all_answer(refs)
        gc.collect()
        return spawned(len(refs), seconds, memory_kib() - kib)


async def cast(effort: Effort) -> Outcome:
    """As many, as the cast of one system."""
    begin = time.perf_counter()
    parts = [_part(number) for number in range(effort.actors)]
    async with System(parts) as system:
        await _all_answer([system.find(parts[-1].role)])
        seconds = time.perf_counter() - begin
        await _all_answer([system.find(part.role) for part in parts])
        return Outcome({CAST: len(parts) / seconds}, f"{len(parts):,} alive, each has answered")
