"""Workers: threads for the blocking work of one actor."""

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
    """Runs blocking jobs for one actor outside its handlers, one after another, in order."""

    def submit(
        self, work: Callable[[], T], done: Callable[[T], M_contra], failed: Callable[[Exception], M_contra]
    ) -> None:
        """Run `work()`; then post `done(result)` to the actor, or `failed(error)` if the work raised."""

    def close(self, *, drop: bool = False) -> None:
        """Accept no more jobs; end after the queued ones (with `drop`, after the running one)."""


class WorkerThread(Generic[M_contra]):
    """A worker with its own thread, which posts each result to the event loop.

    Waking the loop releases the interpreter's lock, which the loop then holds while it handles the result. Where the
    next job waits already, a second thread, the courier, wakes the loop, so that the job begins at once.
    """

    def __init__(self, name: str, post: Callable[[M_contra], None], loop: asyncio.AbstractEventLoop) -> None:
        self._jobs: SimpleQueue[Callable[[], Callable[[], None]] | None] = SimpleQueue()
        self._results: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._courier: threading.Thread | None = None
        self._post = post
        self._loop = loop
        self._drop = False
        self.has_ended = asyncio.Event()
        """Set when the thread has finished its last job."""
        # A daemon, so that a job which never returns cannot keep the host program from exiting.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[], T], done: Callable[[T], M_contra], failed: Callable[[Exception], M_contra]
    ) -> None:
        """Run `work()` on the thread; then post `done(result)` to the actor, or `failed(error)` if the work raised."""

        def job() -> Callable[[], None]:
            try:
                try:
                    message = done(work())
                except BaseException as error:
                    # SystemExit and its like would end the thread in silence and leave the actor waiting.
                    given_up = RuntimeError(f"the work raised {error!r}, which is no Exception")
                    message = failed(error if isinstance(error, Exception) else given_up)
            except BaseException as worse:
                # `done` or `failed` raised: the actor receives the exception itself and crashes on it.
                message = cast(M_contra, worse)
            return partial(self._post, message)

        self._jobs.put(job)

    def close(self, *, drop: bool = False) -> None:
        """Accept no more jobs; the thread ends after the queued ones (with `drop`, after the running one).

        Does not wait: see `ended`.
        """
        self._drop = self._drop or drop
        self._jobs.put(None)

    async def ended(self) -> None:
        """Wait until the thread has ended."""
        await self.has_ended.wait()
        self._thread.join()
        if self._courier is not None:
            self._courier.join()

    def _run(self) -> None:
        while not self._loop.is_closed() and (job := self._jobs.get()) is not None:
            if not self._drop:
                self._deliver(job())
            del job  # do not keep the last job alive while waiting
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
        with suppress(RuntimeError):  # the loop was closed without stopping the system
            self._loop.call_soon_threadsafe(post)
