"""The terminal chat: questions are read on the main thread, answers stream from an event loop on another one.

So waiting for the keyboard never holds up the loop, line editing and Ctrl-C behave as in any terminal program, and one
that is told to terminate finishes its answer. Knows nothing of how answers are made: a conversation can `say`.
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
    """What remembers the turns so far; leaving the iteration early ends the answer."""

    def say(self, text: str, /) -> AsyncIterable[Piece]: ...


class TerminationRequested(BaseException):
    """The program was told to terminate a second time, or while nothing was being answered."""


def converse(
    opening: AbstractAsyncContextManager[E],
    new_chat: Callable[[E], TerminalChat],
    drain: Callable[[E], Awaitable[object]],
    question: str | None,
) -> None:
    """Open the engine, answer `question` on stdout, or every line typed where it is None, and close the engine.

    SIGTERM drains: the answer that is streaming is finished, as far as `drain` lets it, and no other is begun.

    Raises `EngineError`, `KeyboardInterrupt`, `BrokenPipeError` and, at a second SIGTERM, `TerminationRequested`, each
    once the engine is closed.
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
        """Meanwhile SIGTERM ends the conversation once the present answer is finished; a second one ends that too."""
        if threading.current_thread() is not threading.main_thread():  # signals are none of its business
            yield
            return
        before = signal.signal(signal.SIGTERM, self._terminate)
        try:
            with interruptible_by_signals():
                yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _terminate(self, _signal: int, _frame: FrameType | None) -> None:
        """On the main thread, in the middle of anything."""
        if self._is_leaving or not self._is_answering:
            self._is_leaving = True
            raise TerminationRequested
        self._is_leaving = True

    def answer(self, question: str) -> None:
        """Stream one answer. Ctrl-C, or `TerminationRequested`, cancels it and is raised once the request has ended."""
        scope = self._portal.call(CancelScope)
        future: Future[None] | None = None
        try:
            self._is_answering = True
            future = self._portal.start_task_soon(self._stream, question, scope)
            # In slices: a signal that comes just before the wait begins is seen only when the wait ends.
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
        """Answer each line until the end of input or `/exit`. Ctrl-C ends an answer, but at the prompt the loop."""
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
            if not self._is_leaving:  # else the answer has taken too long for the drain
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
        """The next line without its blanks; None at the end of input, and where there is to be no other answer."""
        try:
            return input("you> ").strip()
        except (EOFError, TerminationRequested):
            sys.stdout.write("\n")
            return None


NUDGE_SECONDS = 0.05
NUDGES = 20


@contextmanager
def interruptible_by_signals() -> Iterator[None]:
    """Meanwhile whatever the main thread waits for is interrupted some moments after a signal. On the main thread."""
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
    """Interrupt a thread for a while after each signal: a nudge may come too early as well."""
    while numbers := os.read(reader, 64):
        if set(numbers) <= {signal.SIGURG}:
            continue
        for _ in range(NUDGES):
            if over.wait(NUDGE_SECONDS):
                break
            signal.pthread_kill(thread, signal.SIGURG)
