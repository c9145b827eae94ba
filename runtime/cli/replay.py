"""The `cuelight replay` command: the recorded messages of one actor, handled again by a new actor."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from cuelight.actors.executor.actor import ExecutorInbox
from cuelight.actors.executor.device import Device
from cuelight.actors.intake.actor import IntakeInbox
from cuelight.actors.scheduler.actor import SchedulerInbox
from cuelight.core.parts import ActiveExecutor, EngineParts, actor_specs, load_parts, roles
from cuelight.core.stub_model import STUB_NAME, stub_parts
from cuelight.errors import ConfigError
from cuelight.journal.origin import Origin, read_origin
from cuelight.kernel import JournalError
from cuelight.kernel.journal.records import read_journal
from cuelight.kernel.journal.replay import Difference, Replay
from cuelight.kernel.journal.replay import replay as replay_part
from cuelight.messages.observer import ObserverMessage
from cuelight.messages.request import Prompt

SHOWN_CHARS: Final = 400
"""Largest number of characters shown of a message that differs."""


def replay(path: str, actor: str) -> int:
    """Replay one actor's messages, print the outcome on standard output, and return the exit status.

    The status is 0 if the actor sent the recorded messages, and 1 at a difference.

    Raises:
        ConfigError: the journal cannot be read, has no such actor, or its model's folder does not exist.
        ModelUnavailable: the model's tokenizer, which intake and detokenizer need, cannot be loaded.
    """
    try:
        outcome = _replay(path, actor)
    except JournalError as error:
        raise ConfigError(str(error)) from error
    sys.stdout.write(_report(outcome))
    return 0 if outcome.difference is None else 1


def _replay(path: str, actor: str) -> Replay:
    journal = read_journal(path)
    origin = read_origin(journal.about, path)
    cast = roles(origin.config)
    names = asdict(cast)
    if actor not in names:
        raise JournalError(f"an engine has no actor {actor!r}: it has {', '.join(names)}")
    parts = actor_specs(_parts(origin, actor), origin.config, cast, _NoObserver(), ActiveExecutor(cast.executors))
    part = next(part for part in parts if part.role.name == actor)
    return replay_part(journal, part, (IntakeInbox, ExecutorInbox, SchedulerInbox), [each.role for each in parts])


def _parts(origin: Origin, actor: str) -> EngineParts[None]:
    """Return the parts for the actor's spec, with a tokenizer only for intake and detokenizer, and without a device."""
    absent = _Absent()
    if actor not in ("intake", "detokenizer"):
        return EngineParts(origin.facts, absent, absent.decode, absent.load_device)
    if origin.folder is not None:
        if not origin.folder.is_dir():
            raise ConfigError(f"{actor} needs the model's tokenizer, but the folder {origin.folder} does not exist")
        found = load_parts(origin.folder, origin.config)
        return EngineParts(origin.facts, found.encoder, found.decode, absent.load_device)
    if origin.name != STUB_NAME:
        raise ConfigError(
            f"{actor} needs a tokenizer, but the journal of {origin.name!r} names no model folder: replay another actor"
        )
    stub = stub_parts(origin.config)
    return EngineParts(origin.facts, stub.encoder, stub.decode, absent.load_device)


class _Absent:
    """The parts that the replayed actor does not use."""

    def encode(self, prompt: Prompt, token_limit: int) -> tuple[int, ...]:
        raise AssertionError("only intake tokenizes")

    def decode(self, token_ids: Sequence[int]) -> str:
        raise AssertionError("only the detokenizer decodes")

    def load_device(self) -> Device[None]:
        raise AssertionError("a replay has no device")


class _NoObserver:
    """The observer's address in a replay."""

    def tell(self, message: ObserverMessage, /) -> None:
        """Drop the message: messages to the observer are not recorded, so not compared."""


def _report(outcome: Replay) -> str:
    lines = [f"{outcome.handled} messages replayed, {_verdict(outcome.difference)}"]
    if outcome.stopped:
        lines.append(f"stopped there: {outcome.stopped}")
    return "\n".join(lines) + "\n"


def _verdict(difference: Difference | None) -> str:
    if difference is None:
        return "no difference"
    expected, got = _around_difference(difference.expected, difference.got)
    where = f"message {difference.index}" if difference.index else "the start"
    return (
        f"and at {where} a difference\n"
        f"handling: {_cut(difference.handling)}\n"
        f"receiver: {difference.receiver}\n"
        f"expected: {expected}\n"
        f"got:      {got}"
    )


def _around_difference(expected: str, got: str) -> tuple[str, str]:
    """Return at most `SHOWN_CHARS` characters of both texts around their first difference."""
    difference = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), 0)
    start = max(0, difference - SHOWN_CHARS // 2)
    lead = "…" if start else ""
    return lead + _cut(expected[start:]), lead + _cut(got[start:])


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"
