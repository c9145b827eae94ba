"""The terminal chat: questions are read on the main thread, answers stream from an event loop on another thread.

Waiting for input therefore does not block the loop, line editing and Ctrl-C work as in other terminal programs, and
SIGTERM lets an answer finish. Independent of the engine: any object with a method `say` is a `TerminalChat`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import AsyncIterable, Awaitable, Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager, contextmanager
from types import FrameType
from typing import Protocol, TypeVar

from anyio import CancelScope
from anyio.from_thread import BlockingPortal, start_blocking_portal

from cuelight.errors import EngineUnavailable, RequestFailed, RequestRejected

E = TypeVar("E")

WAIT_SECONDS = 0.5

HELP = "Ctrl-C stops an answer, /new starts over, /exit or Ctrl-D quits."


class Piece(Protocol):
    """A part of an answer."""

    @property
    def text(self) -> str: ...


class TerminalChat(Protocol):
    """A conversation that keeps its turns; leaving an answer's iteration early cancels the answer."""

    def say(self, text: str, /) -> AsyncIterable[Piece]: ...


class TerminationRequested(BaseException):
    """A second SIGTERM was received, or one while no answer was in progress."""


def converse(
    opening: AbstractAsyncContextManager[E],
    new_chat: Callable[[E], TerminalChat],
    drain: Callable[[E], Awaitable[object]],
    question: str | None,
) -> None:
    """Open the engine, answer `question` on stdout, or every typed line if it is None, and close the engine.

    At SIGTERM, the present answer may finish within the limits of `drain`, and no other is begun.

    Raises `EngineError`, `KeyboardInterrupt`, `BrokenPipeError` or `TerminationRequested` once the engine is closed.
    """
    options = {"use_uvloop": importlib.util.find_spec("uvloop") is not None}
    with (
        start_blocking_portal("asyncio", options) as portal,
        portal.wrap_async_context_manager(opening) as engine,
    ):
        terminal = Terminal(portal, lambda: new_chat(engine), lambda: drain(engine))
        with terminal.told_to_terminate():
            if question is None:
                terminal.loop()
            else:
                terminal.answer(question)


class Terminal:
    """One conversation at a time on stdin and stdout."""

    def __init__(
        self,
        portal: BlockingPortal,
        new_chat: Callable[[], TerminalChat],
        drain: Callable[[], Awaitable[object]],
    ) -> None:
        self._portal = portal
        self._new_chat = new_chat
        self._drain = drain
        self._chat = portal.call(new_chat)
        self._is_answering = False
        self._is_leaving = False
        self._draining: Future[object] | None = None

    @contextmanager
    def told_to_terminate(self) -> Iterator[None]:
        """Handle SIGTERM: the first ends the conversation after the present answer, a second ends the answer, too."""
        if threading.current_thread() is not threading.main_thread():  # only the main thread may set signal handlers
            yield
            return
        before = signal.signal(signal.SIGTERM, self._terminate)
        try:
            with interruptible_by_signals():
                yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _terminate(self, _signal: int, _frame: FrameType | None) -> None:
        """Handle SIGTERM; runs on the main thread, between any two instructions."""
        if self._is_leaving or not self._is_answering:
            self._is_leaving = True
            raise TerminationRequested
        self._is_leaving = True

    def answer(self, question: str) -> None:
        """Stream one answer to stdout.

        `KeyboardInterrupt` and `TerminationRequested` cancel the answer, and are raised once the request has ended.
        """
        scope = self._portal.call(CancelScope)
        future: Future[None] | None = None
        try:
            self._is_answering = True
            future = self._portal.start_task_soon(self._stream, question, scope)
            # With a timeout, since a signal just before the wait begins is handled only after the wait.
            while wait([future], timeout=WAIT_SECONDS).not_done:
                if self._is_leaving and self._draining is None:
                    self._draining = self._portal.start_task_soon(self._drain)
            future.result()
        except (KeyboardInterrupt, TerminationRequested):
            self._portal.call(scope.cancel)
            if future is not None:
                future.result()
            raise
        finally:
            self._is_answering = False

    def loop(self) -> None:
        """Answer each line until the end of input or `/exit`.

        Ctrl-C ends the answer in progress, or, at the prompt, raises KeyboardInterrupt.
        """
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # importing it gives `input` line editing and history
        sys.stderr.write(f"{HELP}\n")
        while not self._is_leaving and (line := self._read_line()) not in (None, "/exit"):
            if line == "/new":
                self._chat = self._portal.call(self._new_chat)
                sys.stderr.write("A new conversation.\n")
            elif line:
                self._answer_or_explain(line)

    def _answer_or_explain(self, line: str) -> None:
        try:
            self.answer(line)
        except KeyboardInterrupt:
            sys.stdout.write("\n")
        except EngineUnavailable:
            if not self._is_leaving:  # else the answer exceeded the drain's time limit
                raise
            sys.stdout.write("\n")
        except (RequestRejected, RequestFailed) as error:
            sys.stderr.write(f"cuelight: {error}\n")

    async def _stream(self, question: str, scope: CancelScope) -> None:
        with scope:
            async for piece in self._chat.say(question):
                sys.stdout.write(piece.text)
                sys.stdout.flush()
            sys.stdout.write("\n")
            sys.stdout.flush()

    @staticmethod
    def _read_line() -> str | None:
        """Return the next line, stripped; None at the end of input and after `TerminationRequested`."""
        try:
            return input("you> ").strip()
        except (EOFError, TerminationRequested):
            sys.stdout.write("\n")
            return None


NUDGE_SECONDS = 0.05
NUDGES = 20


@contextmanager
def interruptible_by_signals() -> Iterator[None]:
    """Interrupt the main thread's blocking calls shortly after each signal. Call on the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before, fd_before = signal.signal(signal.SIGURG, lambda *_: None), signal.set_wakeup_fd(writer)
    over = threading.Event()
    nudging = threading.Thread(target=_nudge, args=(reader, threading.get_ident(), over), name="cuelight nudge")
    nudging.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(fd_before)
        os.close(writer)
        nudging.join()
        os.close(reader)
        signal.signal(signal.SIGURG, before)


def _nudge(reader: int, thread: int, over: threading.Event) -> None:
    """Interrupt `thread` several times after each signal, since an interrupt before a blocking call has no effect."""
    while numbers := os.read(reader, 64):
        if set(numbers) <= {signal.SIGURG}:
            continue
        for _ in range(NUDGES):
            if over.wait(NUDGE_SECONDS):
                break
            signal.pthread_kill(thread, signal.SIGURG)
