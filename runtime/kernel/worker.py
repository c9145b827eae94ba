"""A thread for work that blocks, on behalf of one actor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar, cast

M_contra = TypeVar("M_contra", contravariant=True)
T = TypeVar("T")


class Worker(Protocol[M_contra]):
    """Blocking work for one actor, done one piece after another, in order, elsewhere than in its handlers."""

    def submit(
        self, work: Callable[[], T], done: Callable[[T], M_contra], failed: Callable[[Exception], M_contra]
    ) -> None:
        """Run `work()`; then the actor hears `done(result)`, or `failed(error)` if it raised."""

    def close(self, *, drop: bool = False) -> None:
        """Take no more work; end after what is queued (with `drop`, after what is being done)."""


class WorkerThread(Generic[M_contra]):
    """A worker with a thread of its own, which posts each result to the event loop."""

    def __init__(self, name: str, post: Callable[[M_contra], None], loop: asyncio.AbstractEventLoop) -> None:
        self._jobs: SimpleQueue[Callable[[], Callable[[], None]] | None] = SimpleQueue()
        self._post = post
        self._loop = loop
        self._drop = False
        self._ended = asyncio.Event()
        # A daemon, so that work which never returns cannot keep the host program from exiting.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[], T], done: Callable[[T], M_contra], failed: Callable[[Exception], M_contra]
    ) -> None:
        """Run `work()` on the thread; then the actor hears `done(result)`, or `failed(error)` if it raised."""

        def job() -> Callable[[], None]:
            try:
                return partial(self._post, done(work()))
            except Exception as error:
                return told_of(error)
            except BaseException as error:
                # Such as SystemExit: what would end a thread in silence must not leave the actor waiting.
                return told_of(RuntimeError(f"the work gave up its thread: {error!r}"))

        def told_of(error: Exception) -> Callable[[], None]:
            try:
                return partial(self._post, failed(error))
            except BaseException as worse:
                # No message of the actor's says this, so it crashes on it, as it should.
                return partial(cast(Callable[[object], None], self._post), worse)

        self._jobs.put(job)

    def close(self, *, drop: bool = False) -> None:
        """Take no more work; the thread ends after what is queued (with `drop`, after what it is doing).

        Does not wait: see `ended`.
        """
        self._drop = self._drop or drop
        self._jobs.put(None)

    async def ended(self) -> None:
        """Wait until the thread is gone."""
        await self._ended.wait()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                if not self._drop:
                    self._loop.call_soon_threadsafe(job())
                del job  # an idle thread keeps nothing of its last job alive
            self._loop.call_soon_threadsafe(self._ended.set)
        except RuntimeError:
            # The loop was closed without stopping the system: there is nobody left to tell.
            if not self._loop.is_closed():
                raise
