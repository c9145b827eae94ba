"""The terminal chat: questions are read on the main thread, answers stream from an event loop on another one.

So waiting for the keyboard never holds up the loop, and line editing and Ctrl-C behave as in any terminal program.
Knows nothing of how answers are made, only that a conversation can `say`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import AsyncIterable, Callable
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

from anyio import CancelScope
from anyio.from_thread import BlockingPortal, start_blocking_portal

from cuelight.errors import RequestFailed, RequestRejected

E = TypeVar("E")

WAIT_SECONDS = 0.5

HELP = "Ctrl-C stops an answer, /new starts over, /exit or Ctrl-D quits."


class Piece(Protocol):
    """A part of an answer."""

    @property
    def text(self) -> str: ...


class Conversation(Protocol):
    """What remembers the turns so far; leaving the iteration early ends the answer."""

    def say(self, text: str, /) -> AsyncIterable[Piece]: ...


def converse(
    opening: AbstractAsyncContextManager[E], new_chat: Callable[[E], Conversation], question: str | None
) -> None:
    """Open the engine, answer `question` on stdout, or every line typed where it is None, and close the engine.

    Raises `EngineError`, `KeyboardInterrupt` and `BrokenPipeError`, each once the engine is closed.
    """
    options = {"use_uvloop": importlib.util.find_spec("uvloop") is not None}
    with (
        start_blocking_portal("asyncio", options) as portal,
        portal.wrap_async_context_manager(opening) as engine,
    ):
        terminal = Terminal(portal, lambda: new_chat(engine))
        if question is None:
            terminal.loop()
        else:
            terminal.answer(question)


class Terminal:
    """One conversation at a time on stdin and stdout."""

    def __init__(self, portal: BlockingPortal, new_chat: Callable[[], Conversation]) -> None:
        self._portal = portal
        self._new_chat = new_chat
        self._chat = portal.call(new_chat)

    def answer(self, question: str) -> None:
        """Stream one answer. Ctrl-C cancels it and is raised once the request has really ended."""
        scope = self._portal.call(CancelScope)
        future: Future[None] | None = None
        try:
            future = self._portal.start_task_soon(self._stream, question, scope)
            # In slices: a signal that comes just before the wait begins is seen only when the wait ends.
            while wait([future], timeout=WAIT_SECONDS).not_done:
                pass
            future.result()
        except KeyboardInterrupt:
            self._portal.call(scope.cancel)
            if future is not None:
                future.result()
            raise

    def loop(self) -> None:
        """Answer each line until the end of input or `/exit`. Ctrl-C ends an answer, but at the prompt the loop."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # importing it gives `input` line editing and history
        sys.stderr.write(f"{HELP}\n")
        while (line := _read_line()) not in (None, "/exit"):
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
        except (RequestRejected, RequestFailed) as error:
            sys.stderr.write(f"cuelight: {error}\n")

    async def _stream(self, question: str, scope: CancelScope) -> None:
        with scope:
            async for piece in self._chat.say(question):
                sys.stdout.write(piece.text)
                sys.stdout.flush()
            sys.stdout.write("\n")
            sys.stdout.flush()


def _read_line() -> str | None:
    """The next line without its blanks; None at the end of input."""
    try:
        return input("you> ").strip()
    except EOFError:
        sys.stdout.write("\n")
        return None
