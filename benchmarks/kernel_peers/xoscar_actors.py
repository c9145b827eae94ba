"""Xoscar: actors in its main pool (this process) and in a sub pool (a child process).

Two kinds of reference lead to an actor of the same process. What `create_actor` returns sends messages. What
`actor_ref` returns calls the method in the caller's task, under the actor's lock: no queue, so no bound on it either.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import xoscar  # type: ignore[import-not-found]  # lives in an environment of its own

from benchmarks.kernel_peers import (
    ASK,
    ASKERS,
    ASKS,
    BURST,
    PROCESS,
    ROUNDS,
    Effort,
    Outcome,
    asked,
    crowded,
    memory_kib,
    rate,
    spawned,
    told,
)

ADDRESS = "127.0.0.1"


class Replier(xoscar.Actor):  # type: ignore[misc]  # the same
    """Counts, and answers."""

    def __init__(self) -> None:
        super().__init__()
        self._total = 0

    def count(self, amount: int) -> None:
        """Add to the total."""
        self._total += amount

    def total(self) -> int:
        """Return the number of counted messages."""
        return self._total

    def echo(self, value: int) -> int:
        """The same value."""
        return value


@asynccontextmanager
async def _replier(kind: str) -> AsyncIterator[xoscar.ActorRefType[Replier]]:
    """One actor; `kind` of the reference is "local" or "message", or "process" for one in a sub pool."""
    async with await xoscar.create_actor_pool(ADDRESS, n_process=int(kind == "process")) as pool:
        address = next(iter(pool.sub_processes)) if kind == "process" else pool.external_address
        ref = await xoscar.create_actor(Replier, address=address, uid="replier")
        if kind == "local":
            ref = await xoscar.actor_ref(ref)
        assert (type(ref).__name__ == "LocalActorRef") == (kind == "local"), "the reference is of the other kind"
        yield ref


async def _tell(effort: Effort, kind: str) -> Outcome:
    sent = 0
    async with _replier(kind) as ref:

        async def burst() -> None:
            nonlocal sent
            for _ in range(BURST):
                await ref.count.tell(1)
            sent += BURST
            while (total := await ref.total()) < sent:  # noqa: ASYNC110  # nothing says when a tell is handled
                await asyncio.sleep(0)
            assert total == sent

        return told(await rate(burst, effort.seconds))


async def _ask(effort: Effort, kind: str, figure: str) -> Outcome:
    async with _replier(kind) as ref:

        async def batch() -> None:
            for value in range(ASKS):
                assert await ref.echo(value) == value

        return asked(await rate(batch, effort.seconds), figure)


async def _crowd(effort: Effort, kind: str) -> Outcome:
    async with _replier(kind) as ref:

        async def asker() -> None:
            for value in range(ROUNDS):
                assert await ref.echo(value) == value

        return crowded(await rate(lambda: asyncio.gather(*(asker() for _ in range(ASKERS))), effort.seconds))


async def spawn(effort: Effort) -> Outcome:
    """Many actors in the main pool."""
    async with await xoscar.create_actor_pool(ADDRESS, n_process=0) as pool:
        gc.collect()
        kib = memory_kib()
        begin = time.perf_counter()
        refs = [
            await xoscar.create_actor(Replier, address=pool.external_address, uid=f"replier-{number}")
            for number in range(effort.actors)
        ]
        assert await refs[-1].echo(-1) == -1
        seconds = time.perf_counter() - begin
        for value, ref in enumerate(refs):
            assert await ref.echo(value) == value
        gc.collect()
        return spawned(len(refs), seconds, memory_kib() - kib)


tell_local = partial(_tell, kind="local")
tell_message = partial(_tell, kind="message")
ask_local = partial(_ask, kind="local", figure=ASK)
ask_message = partial(_ask, kind="message", figure=ASK)
process_message = partial(_ask, kind="process", figure=PROCESS)
crowd_local = partial(_crowd, kind="local")
crowd_message = partial(_crowd, kind="message")
