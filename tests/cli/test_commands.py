"""The command line: its output, its exit statuses, and the chat on a pipe and on a real terminal."""

from __future__ import annotations

import importlib.metadata
import io
import os
import signal
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Self

import anyio
import pytest

from cuelight.cli import commands as cli
from cuelight.errors import ModelUnavailable, PromptTooLong

# The command with an engine that repeats each question, and never ends its answer to `wait`.
REPEATING = """
import sys, types
import anyio
from cuelight.cli import commands as cli

class Chat:
    async def say(self, text):
        yield types.SimpleNamespace(text=f"heard {text}")
        if text == "wait":
            try:
                await anyio.sleep_forever()
            finally:
                sys.stderr.write("<cancelled>")
                sys.stderr.flush()

class Engine:
    def __init__(self, model): pass
    def chat(self, **options): return Chat()
    async def __aenter__(self): return self
    async def __aexit__(self, *exception): pass

sys.modules["cuelight.engine"] = types.SimpleNamespace(Engine=Engine)
cli.model_path = lambda name, progress: name
"""


@dataclass
class FakeEngine:
    """An engine that answers by calling `reply`, and records its arguments."""

    model: Path
    reply: Callable[[str], AsyncIterator[str]]
    chats: list[dict[str, object]] = field(default_factory=list)
    closed: bool = False

    def chat(self, **options: object) -> FakeEngine:
        self.chats.append(options)
        return self

    async def say(self, text: str) -> AsyncIterator[SimpleNamespace]:
        async for piece in self.reply(text):
            yield SimpleNamespace(text=piece)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed = True


class Stage:
    """A fake engine behind the command."""

    def __init__(self) -> None:
        self.engines: list[FakeEngine] = []
        self.reply: Callable[[str], AsyncIterator[str]] = echo

    def open(self, model: Path) -> FakeEngine:
        self.engines.append(FakeEngine(model, self.reply))
        return self.engines[-1]


async def echo(text: str) -> AsyncIterator[str]:
    for word in ("You said ", text, "."):
        yield word


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    made = Stage()
    monkeypatch.setitem(sys.modules, "cuelight.engine", SimpleNamespace(Engine=made.open))
    monkeypatch.setattr(cli, "model_path", lambda name, progress: tmp_path / name)
    return made


def type_in(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Make stdin a terminal at which these lines are typed, then Ctrl-D."""
    typed: Iterator[str] = iter(lines)

    def read(prompt: str) -> str:
        assert prompt == "you> "
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))


def pipe_in(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"cuelight {importlib.metadata.version('cuelight')}\n"


def test_python_dash_m_runs_the_same_command() -> None:
    command = [sys.executable, "-m", "cuelight", "--version"]
    assert subprocess.check_output(command, text=True).startswith("cuelight ")


def test_missing_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_pull_prints_only_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "pull", lambda name: tmp_path / name)
    assert cli.main(["pull", "some-model"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'some-model'}\n"


def test_error_is_one_line_and_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(name: str) -> Path:
        raise ModelUnavailable(f"no {name}\nhere")

    monkeypatch.setattr(cli, "pull", fail)
    assert cli.main(["pull", "x"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "cuelight: no x here\n"
    assert captured.out == ""


def test_interrupt_is_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(name: str) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "pull", interrupt)
    assert cli.main(["pull"]) == 130


def test_prompt_is_answered_once(stage: Stage, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--model", "m", "--system", "Be brief.", "--max-tokens", "7", "--temperature", "0.5", "--seed", "3"]
    assert cli.main(["chat", *options, "hello"]) == 0
    assert capsys.readouterr().out == "You said hello.\n"
    (engine,) = stage.engines
    assert engine.model == tmp_path / "m"
    assert engine.chats == [{"system": "Be brief.", "max_tokens": 7, "temperature": 0.5, "seed": 3}]
    assert engine.closed


def test_piped_question_is_answered_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe_in(monkeypatch, "caf\u00e9".encode())
    assert cli.main(["chat"]) == 0
    assert capsys.readouterr().out == "You said caf\u00e9.\n"


@pytest.mark.parametrize("content", [b"", b" \n"])
def test_empty_question_is_refused_before_an_engine_starts(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    pipe_in(monkeypatch, content)
    assert cli.main(["chat"]) == 1
    assert "the question is empty" in capsys.readouterr().err
    assert stage.engines == []


def test_turns_share_a_conversation_until_new(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "one", "", "two", "/new", "three", "/exit", "never asked")
    assert cli.main(["chat"]) == 0
    assert capsys.readouterr().out == "You said one.\nYou said two.\nYou said three.\n"
    (engine,) = stage.engines
    assert len(engine.chats) == 2
    assert engine.closed


def test_refused_turn_is_explained_and_the_chat_continues(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def refuse_first(text: str) -> AsyncIterator[str]:
        if text == "long":
            raise PromptTooLong("too long by 3 tokens")
        yield text

    stage.reply = refuse_first
    type_in(monkeypatch, "long", "short")
    assert cli.main(["chat"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "short\n\n"
    assert "cuelight: too long by 3 tokens\n" in captured.err


def test_refused_single_question_is_status_1(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    async def refuse(text: str) -> AsyncIterator[str]:
        if text:
            raise PromptTooLong("too long by 3 tokens")
        yield text

    stage.reply = refuse
    assert cli.main(["chat", "x"]) == 1
    assert capsys.readouterr().err == "cuelight: too long by 3 tokens\n"
    assert stage.engines[0].closed


class Interrupted:
    """A reply that raises SIGINT while it streams, and counts its cancellations."""

    def __init__(self) -> None:
        self.cancelled = 0

    async def __call__(self, text: str) -> AsyncIterator[str]:
        yield "so far"
        if text == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            try:
                await anyio.sleep_forever()
            finally:
                self.cancelled += 1


def test_ctrl_c_cancels_only_the_answer(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.reply = reply = Interrupted()
    type_in(monkeypatch, "interrupt", "go on")
    assert cli.main(["chat"]) == 0
    assert reply.cancelled == 1
    assert capsys.readouterr().out == "so far\nso far\n\n"


def test_ctrl_c_at_the_prompt_ends_the_chat_with_130(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(prompt: str) -> str:
        raise KeyboardInterrupt

    type_in(monkeypatch)
    monkeypatch.setattr("builtins.input", interrupt)
    assert cli.main(["chat"]) == 130
    assert stage.engines[0].closed


def test_ctrl_c_ends_a_single_answer_with_130(stage: Stage) -> None:
    stage.reply = reply = Interrupted()
    assert cli.main(["chat", "interrupt"]) == 130
    assert reply.cancelled == 1
    assert stage.engines[0].closed


def test_closed_output_pipe_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    script = f"{REPEATING}\nsys.exit(cli.main(['chat', 'hello']))"
    try:
        result = subprocess.run(
            [sys.executable, "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writing)
    assert result.stderr == b""
    assert result.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_to_a_full_disk_is_a_one_line_error() -> None:
    script = f"{REPEATING}\nsys.exit(cli.main(['chat', 'hello']))"
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(
            [sys.executable, "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            text=True,
        )
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith("cuelight: ")


def test_closed_standard_files_are_no_error() -> None:
    # uvloop aborts if its own file descriptors get their numbers.
    script = f"{REPEATING}\nsys.exit(cli.main(['chat', 'hello']))"
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&-', sys.executable, script]
    result = subprocess.run(command, stderr=subprocess.PIPE, check=False)
    assert (result.returncode, result.stderr) == (0, b"")


def read_until(terminal: int, expected: bytes) -> bytes:
    """Read the program's output until `expected` has appeared."""
    seen = b""
    while expected not in seen:
        seen += os.read(terminal, 1024)
    return seen


def test_chat_on_a_terminal() -> None:
    terminal, inside = os.openpty()
    attributes = termios.tcgetattr(inside)
    # The terminal becomes the child's controlling terminal, so that a typed Ctrl-C reaches it as a signal.
    own = f"import fcntl; fcntl.ioctl(0, {termios.TIOCSCTTY}, 0)"
    script = f"{own}\n{REPEATING}\nsys.exit(cli.main(['chat']))"
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env=os.environ | {"TERM": "dumb"},
        start_new_session=True,
    )
    try:
        read_until(terminal, b"you> ")
        os.write(terminal, b"hello\n")
        read_until(terminal, b"heard hello\r\nyou> ")
        os.write(terminal, b"wait\n")
        read_until(terminal, b"heard wait")
        os.write(terminal, b"\x03")
        read_until(terminal, b"<cancelled>\r\nyou> ")
        os.write(terminal, b"again\n")
        read_until(terminal, b"heard again\r\nyou> ")
        os.write(terminal, b"\x04")
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
    assert termios.tcgetattr(inside) == attributes
    os.close(inside)
    os.close(terminal)


@pytest.mark.parametrize("option", [["--seeds", "0"], ["--requests", "-1"], ["--seeds", "many"], ["--seed", "3"]])
def test_invalid_simulation_options_are_refused(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        cli.main(["simulate", *option])
    assert refused.value.code == 2
    assert "at least 1" in capsys.readouterr().err or option[0] == "--seed"
