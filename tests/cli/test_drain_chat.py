"""The chat under SIGTERM: it finishes its answer and begins no other; a second signal ends it at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cuelight.cli import commands as cli

NET_SECONDS = 60

# The command with an engine whose answer ends once it is drained, and never for `wait`.
DRAINING = """
import sys, types
import anyio
from cuelight.cli import commands as cli
from cuelight.errors import EngineClosed

drained = None

class Chat:
    async def say(self, text):
        yield types.SimpleNamespace(text="so far,")
        try:
            await drained.wait()
            if text == "wait":
                await anyio.sleep_forever()
            if text == "late":
                raise EngineClosed("the engine is closed")
        finally:
            sys.stderr.write("<left>")
            sys.stderr.flush()
        yield types.SimpleNamespace(text=" and done")

class Engine:
    def __init__(self, model): pass
    def chat(self, **options): return Chat()
    async def drain(self, seconds):
        sys.stderr.write(f"<draining for {seconds}>")
        sys.stderr.flush()
        drained.set()
    async def __aenter__(self):
        global drained
        drained = anyio.Event()
        return self
    async def __aexit__(self, *exception):
        sys.stderr.write("<closed>")
        sys.stderr.flush()

sys.modules["cuelight.engine"] = types.SimpleNamespace(Engine=Engine)
cli.model_path = lambda name, progress: name
"""


class Chatting:
    """The command in its own terminal."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process = process
        self.terminal = terminal
        self.seen = ""

    def read_until(self, expected: str) -> None:
        while expected not in self.seen:
            self.seen += os.read(self.terminal, 1024).decode()

    def type_in(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def status(self) -> int:
        """Return the exit status, after all output is read."""
        try:
            while data := os.read(self.terminal, 1024):
                self.seen += data.decode()
        except OSError:  # the child has closed its end of the terminal
            pass
        return self.process.wait(timeout=NET_SECONDS)


@contextmanager
def chatting(*arguments: str) -> Iterator[Chatting]:
    terminal, inside = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", f"{DRAINING}\nsys.exit(cli.main({['chat', *arguments]!r}))"],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env=os.environ | {"TERM": "dumb"},
        start_new_session=True,
    )
    os.close(inside)
    try:
        yield Chatting(process, terminal)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_answer_is_finished_and_no_other_begun() -> None:
    with chatting("--drain-seconds", "7") as chat:
        chat.read_until("you> ")
        chat.type_in("hello\n")
        chat.read_until("so far,")
        chat.terminate()
        assert chat.status() == 0
        assert "<draining for 7.0>" in chat.seen
        assert "and done\r\n" in chat.seen
        assert chat.seen.count("you> ") == 1
        assert chat.seen.endswith("<closed>")


def test_single_answer_is_finished() -> None:
    with chatting("hello") as chat:
        chat.read_until("so far,")
        chat.terminate()
        assert chat.status() == 0
        assert "and done\r\n" in chat.seen
        assert chat.seen.endswith("<closed>")


def test_signal_at_the_prompt_ends_the_chat() -> None:
    with chatting() as chat:
        chat.read_until("you> ")
        chat.terminate()
        assert chat.status() == 0
        assert "<draining" not in chat.seen
        assert chat.seen.endswith("<closed>")


@pytest.mark.parametrize("arguments", [(), ("wait",)], ids=["dialogue", "question"])
def test_second_signal_ends_at_once(arguments: tuple[str, ...]) -> None:
    with chatting(*arguments) as chat:
        if not arguments:
            chat.read_until("you> ")
            chat.type_in("wait\n")
        chat.read_until("so far,")
        chat.terminate()
        chat.read_until("<draining for 30.0>")
        chat.terminate()
        assert chat.status() == 143
        assert "<left>" in chat.seen
        assert "and done" not in chat.seen
        assert chat.seen.endswith("<closed>")


def test_ctrl_c_ends_a_drain() -> None:
    with chatting("wait") as chat:
        chat.read_until("so far,")
        chat.terminate()
        chat.read_until("<draining for 30.0>")
        chat.process.send_signal(signal.SIGINT)
        assert chat.status() == 130
        assert "<left>" in chat.seen
        assert "<closed>" in chat.seen


@pytest.mark.parametrize(("arguments", "status"), [((), 0), (("late",), 1)], ids=["dialogue", "question"])
def test_answer_beyond_the_deadline_is_cut_off(arguments: tuple[str, ...], status: int) -> None:
    with chatting(*arguments) as chat:
        if not arguments:
            chat.read_until("you> ")
            chat.type_in("late\n")
        chat.read_until("so far,")
        chat.terminate()
        assert chat.status() == status
        assert chat.seen.count("you> ") == (0 if arguments else 1)
        assert "<closed>" in chat.seen


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_invalid_deadline_is_refused_before_a_model_loads(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--drain-seconds", seconds, "hello"]) == 1
    assert "timeout_seconds must be a number above 0" in capsys.readouterr().err
