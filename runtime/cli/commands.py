"""The `cuelight` command: one function per subcommand. An EngineError is a line on stderr and exit status 1."""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cuelight.core.availability import check_timeout
from cuelight.errors import EmptyPrompt, EngineError
from cuelight.models.store import DEFAULT_MODEL, model_path, pull

MODEL_HELP = f"{DEFAULT_MODEL}, a Hugging Face folder, a .gguf file, or a hub id org/name (default: %(default)s)"


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    _open_missing()
    arguments = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Print a question mark for a character that the terminal's encoding lacks, instead of failing.
        sys.stdout.reconfigure(errors="replace")
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except EngineError as error:
        print(f"cuelight: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        return _output_lost(141)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        print(f"cuelight: the output cannot be written: {error.strerror}", file=sys.stderr)
        return _output_lost(1)
    return status


def _open_missing() -> None:
    """Open closed standard files on the null device; else the next opened file would get their descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - never closed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cuelight", allow_abbrev=False, description="An LLM inference engine built as actors."
    )
    parser.add_argument("--version", action="version", version=f"cuelight {importlib.metadata.version('cuelight')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    chat = commands.add_parser("chat", allow_abbrev=False, help="talk to a model", description=_chat.__doc__)
    chat.add_argument("--model", default=DEFAULT_MODEL, help=MODEL_HELP)
    chat.add_argument("--system", help="the system message of the conversation")
    chat.add_argument("--max-tokens", type=int, default=512, help="length of an answer (default: %(default)s)")
    chat.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    chat.add_argument("--seed", type=int, help="seed that makes sampled answers repeatable")
    chat.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        help="time for an answer to finish after SIGTERM; a second SIGTERM ends it at once (default: %(default)s)",
    )
    chat.add_argument("prompt", nargs="?", help="answer this question and exit")
    chat.set_defaults(run=_chat)

    fetch = commands.add_parser("pull", allow_abbrev=False, help="fetch and prepare a model", description=_pull.__doc__)
    fetch.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="NAME", help=MODEL_HELP)
    fetch.set_defaults(run=_pull)

    again = commands.add_parser(
        "replay", allow_abbrev=False, help="replay a journal's messages to one actor", description=_replay.__doc__
    )
    again.add_argument("journal", metavar="FILE", help="the journal of an engine with journal=FILE")
    again.add_argument("--actor", required=True, help="intake, scheduler, cache, executor or detokenizer")
    again.set_defaults(run=_replay)

    trial = commands.add_parser(
        "simulate", allow_abbrev=False, help="run the engine's actors in a simulation", description=_simulate.__doc__
    )
    trial.add_argument("--seeds", type=_count, default=100, help="number of histories (default: %(default)s)")
    trial.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    trial.add_argument("--requests", type=_count, default=12, help="requests in each history (default: %(default)s)")
    trial.set_defaults(run=_simulate)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _pull(arguments: argparse.Namespace) -> int:
    """Fetch a model, convert it where needed, and print its folder."""
    print(pull(arguments.model))
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    """Answer PROMPT, or standard input if that is not a terminal, and exit; otherwise chat turn by turn."""
    check_timeout(arguments.drain_seconds)
    question = _question(arguments.prompt)
    folder = model_path(arguments.model, progress=True)

    from cuelight.cli.terminal import TerminalChat, TerminationRequested, converse
    from cuelight.engine import Engine

    def new_chat(engine: Engine) -> TerminalChat:
        return engine.chat(
            system=arguments.system,
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            seed=arguments.seed,
        )

    try:
        converse(Engine(folder), new_chat, lambda engine: engine.drain(arguments.drain_seconds), question)
    except TerminationRequested:
        return 143
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    """Replay the recorded messages of one actor, and print the first message in which the actor differs."""
    from cuelight.cli.replay import replay

    return replay(arguments.journal, arguments.actor)


def _simulate(arguments: argparse.Namespace) -> int:
    """Run the engine's actors, without weights, through histories that are drawn from seeds, and check each history."""
    from cuelight.simulate.table import simulate

    return simulate(range(arguments.first, arguments.first + arguments.seeds), requests=arguments.requests)


def _question(prompt: str | None) -> str | None:
    """Return the question to answer, or None if standard input is a terminal. Raises EmptyPrompt."""
    if prompt is None and sys.stdin.isatty():
        return None
    if prompt is None:
        # Read as bytes, since piped input may have another encoding than the locale.
        prompt = sys.stdin.buffer.read().decode("utf-8", "replace")
    if not prompt.strip():
        raise EmptyPrompt("the question is empty: give one as PROMPT, or on standard input")
    return prompt


def _output_lost(status: int) -> int:
    """Redirect stdout to the null device after its reader has closed it (`head -1`) or a disk is full."""
    # The interpreter flushes stdout once more on exit, which would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status
