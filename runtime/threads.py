"""Blocking work, away from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from cuelight.kernel import WorkerThread

T = TypeVar("T")


async def in_thread(work: Callable[[], T], too_late: Callable[[T], object] = lambda _: None) -> T:
    """Run blocking `work` on a thread of its own, which is gone afterwards.

    Where this is cancelled the work goes on; what it gives is handed to `too_late`.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def done(result: T) -> None:
        if outcome.done():
            too_late(result)
        else:
            outcome.set_result(result)

    def failed(error: Exception) -> None:
        if not outcome.done():
            outcome.set_exception(error)

    worker = WorkerThread[Callable[[], None]]("cuelight load", lambda settle: settle(), loop)
    worker.submit(work, done=lambda result: partial(done, result), failed=lambda error: partial(failed, error))
    worker.close()
    try:
        return await outcome
    finally:
        if not outcome.cancelled():  # nobody waits for work that was given up
            await worker.ended()
