"""A thread for work that blocks, on behalf of one actor."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
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
    """A worker with a thread of its own, which posts each result to the event loop.

    To wake the loop is to let go of the interpreter's lock, which the loop then keeps for all that follows from the
    result. Where the next piece of work waits already it is to begin at once, so a second thread wakes the loop.
    """

    def __init__(self, name: str, post: Callable[[M_contra], None], loop: asyncio.AbstractEventLoop) -> None:
        self._jobs: SimpleQueue[Callable[[], Callable[[], None]] | None] = SimpleQueue()
        self._results: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._courier: threading.Thread | None = None
        self._post = post
        self._loop = loop
        self._drop = False
        self.has_ended = asyncio.Event()
        """Set when the thread has done all that it will do."""
        # A daemon, so that work which never returns cannot keep the host program from exiting.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[], T], done: Callable[[T], M_contra], failed: Callable[[Exception], M_contra]
    ) -> None:
        """Run `work()` on the thread; then the actor hears `done(result)`, or `failed(error)` if it raised."""

        def job() -> Callable[[], None]:
            try:
                try:
                    message = done(work())
                except BaseException as error:
                    # What would end a thread in silence, such as SystemExit, must not leave the actor waiting.
                    given_up = RuntimeError(f"the work gave up its thread: {error!r}")
                    message = failed(error if isinstance(error, Exception) else given_up)
            except BaseException as worse:
                # No message of the actor's says this, so it crashes on it, as it should.
                message = cast(M_contra, worse)
            return partial(self._post, message)

        self._jobs.put(job)

    def close(self, *, drop: bool = False) -> None:
        """Take no more work; the thread ends after what is queued (with `drop`, after what it is doing).

        Does not wait: see `ended`.
        """
        self._drop = self._drop or drop
        self._jobs.put(None)

    async def ended(self) -> None:
        """Wait until the thread is gone."""
        await self.has_ended.wait()
        self._thread.join()
        if self._courier is not None:
            self._courier.join()

    def _run(self) -> None:
        while not self._loop.is_closed() and (job := self._jobs.get()) is not None:
            if not self._drop:
                self._deliver(job())
            del job  # an idle thread keeps nothing of its last job alive
        self._deliver(self.has_ended.set)
        self._results.put(None)

    def _deliver(self, post: Callable[[], object]) -> None:
        if self._courier is None and self._jobs.empty():
            self._wake(post)
            return
        if self._courier is None:
            self._courier = threading.Thread(target=self._carry, name=f"{self._thread.name} courier", daemon=True)
            self._courier.start()
        self._results.put(post)

    def _carry(self) -> None:
        while (post := self._results.get()) is not None:
            self._wake(post)
            del post

    def _wake(self, post: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop was closed without stopping the system: there is nobody left to tell
            self._loop.call_soon_threadsafe(post)
