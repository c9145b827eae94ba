"""What a journal tells of the process that wrote it: the requests that it had accepted and not finished.

A journal's header carries those of the process before it; its records come on top. Only what is needed is decoded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from cuelight.actors.scheduler.outbox import ExecutorRoles
from cuelight.errors import WrongJournal
from cuelight.kernel import JournalError, NotAccepted, NotSendable, Role
from cuelight.kernel.codec import AddressId, Codec, Name, type_name
from cuelight.kernel.journal.records import JournalReader, Recorded, read_journal
from cuelight.messages.detokenizer import Histories, Open, RequestEnded, TokensReady
from cuelight.messages.executor import ExecuteStep, ExecutorMessage
from cuelight.messages.intake import Cancel, Submit
from cuelight.messages.request import FinishReason, Prompt, RequestId, Sampling, Service
from cuelight.messages.scheduler import FailRequest, Switch

_RECEIVERS: Final[Mapping[type, str]] = {
    Submit: "intake",
    Cancel: "intake",
    FailRequest: "intake",
    Open: "detokenizer",
    TokensReady: "detokenizer",
    Histories: "detokenizer",
    RequestEnded: "detokenizer",
    Switch: "scheduler",
}
"""Of each message that says something of a request, the one who is told it first."""

_WORK: Final = type_name(ExecuteStep)

_EXECUTORS: Final = ExecutorRoles(Role("executor", ExecutorMessage, capacity=1))

_TYPES: Final[dict[Name, type]] = {type_name(kind): kind for kind in _RECEIVERS}


class RestoredRequest(msgspec.Struct, frozen=True):
    """A request that is to go on: as it was submitted, and its output so far. `seconds_ago` it was submitted."""

    request_id: RequestId
    prompt: Prompt
    sampling: Sampling
    service: Service
    output: tuple[int, ...]
    seconds_ago: float
    is_over: bool = False
    """It has ended, but its client may not have heard all of it."""
    is_accepted: bool = True
    """Else nobody knows yet whether it will be."""


class Header(msgspec.Struct):
    """What an engine's journal says of itself for the sake of whoever goes on from it.

    `written_at` is the time of day, `clock` that of its records' clock, both in seconds, at the same moment.
    """

    name: str
    tokenizer: str = ""
    model: str = ""
    next_id: int = 1
    written_at: float = 0.0
    clock: float = 0.0
    restored: tuple[RestoredRequest, ...] = ()


@dataclass(frozen=True)
class RestoredState:
    """What is known of an earlier process. Its model may have been another one at the end than at its start."""

    header: Header
    model: str
    next_id: int
    requests: tuple[RestoredRequest, ...]
    """By id. Those that are over ended within the last seconds."""


@dataclass
class _Life:
    """One request, as far as the journal has told of it."""

    submit: Submit
    submitted_at: float
    is_accepted: bool = False
    output: list[int] = field(default_factory=list)
    ended_at: float | None = None


def read_state(path: Path, *, time_of_day: float, recent_seconds: float) -> RestoredState:
    """The past of a journal, up to its last whole record.

    A request that ended within `recent_seconds` of that is among the others: its client may have missed the end.
    Blocks. Raises WrongJournal for a file that is no journal of an engine of this version.
    """
    try:
        journal = read_journal(path)
        header = msgspec.convert(journal.about, Header)
        return _Reading(header).read(journal, time_of_day, recent_seconds)
    except (JournalError, NotAccepted, NotSendable, msgspec.ValidationError) as error:
        raise WrongJournal(f"{os.fspath(path)} cannot be gone on from: {error}") from error


class _Reading:
    def __init__(self, header: Header) -> None:
        self._header = header
        self._codec = Codec(_TYPES, _no_id, lambda *_: _NO_CLIENT)
        self._lives: dict[RequestId, _Life] = {}
        self._next_id = header.next_id
        self._model = header.model
        self._models: dict[str, str] = {}
        """Of executors that may take over, by their names."""
        self._now = header.clock
        for restored in header.restored:
            submit = Submit(restored.request_id, restored.prompt, restored.sampling, _NO_CLIENT, restored.service)
            life = _Life(submit, header.clock - restored.seconds_ago, restored.is_accepted, list(restored.output))
            life.ended_at = header.clock if restored.is_over else None
            self._lives[restored.request_id] = life

    def read(self, journal: JournalReader, time_of_day: float, recent_seconds: float) -> RestoredState:
        for record in journal:
            self._now = record.seconds
            if isinstance(record, Recorded):
                self._hear(record)
        # What has passed since the last record, in which nobody lived, counts for deadlines too.
        asleep = max(0.0, time_of_day - self._header.written_at - (self._now - self._header.clock))
        requests = [
            RestoredRequest(
                request_id,
                life.submit.prompt,
                life.submit.sampling,
                life.submit.service,
                tuple(life.output),
                max(0.0, self._now - life.submitted_at + asleep),
                life.ended_at is not None,
            )
            for request_id, life in sorted(self._lives.items())
            if life.is_accepted and (life.ended_at is None or self._now - life.ended_at <= recent_seconds)
        ]
        return RestoredState(self._header, self._model, self._next_id, tuple(requests))

    def _hear(self, record: Recorded) -> None:
        if record.type_name == _WORK and record.actor in self._models:
            self._model = self._models.pop(record.actor)  # it has been given work, so it has taken over
        kind = _TYPES.get(record.type_name)
        if kind is None or record.actor != _RECEIVERS[kind] or record.opaque:
            return
        message = self._codec.decode(record.type_name, record.body)
        if isinstance(message, TokensReady | Histories | RequestEnded):
            self._hear_output(message, record.seconds)
            return
        match message:
            case Submit(request_id):
                self._next_id = max(self._next_id, request_id + 1)
                self._lives.setdefault(request_id, _Life(message, record.seconds, output=list(message.output)))
            case Open(request_id):
                self._next_id = max(self._next_id, request_id + 1)  # of a prompt that was too long to be recorded
                if (life := self._lives.get(request_id)) is not None:
                    life.is_accepted = True
            case Cancel(request_id) | FailRequest(request_id):
                self._lives.pop(request_id, None)
            case Switch():
                self._models[_EXECUTORS[message.executor_id].name] = message.model

    def _hear_output(self, message: TokensReady | Histories | RequestEnded, seconds: float) -> None:
        match message:
            case TokensReady():
                for request_id, token_id, at in zip(
                    message.request_ids, message.token_ids, message.positions, strict=True
                ):
                    if (life := self._lives.get(request_id)) is not None and len(life.output) == at:
                        life.output.append(token_id)
            case Histories():
                for request_id, output in message.live:
                    self._catch_up(request_id, output)
                for ended, output in message.ended:
                    self._catch_up(ended.request_id, output)
                    self._ended(ended, seconds)
            case RequestEnded():
                self._ended(message, seconds)

    def _catch_up(self, request_id: RequestId, output: tuple[int, ...]) -> None:
        if (life := self._lives.get(request_id)) is not None:
            life.output.extend(output[len(life.output) :])

    def _ended(self, ended: RequestEnded, seconds: float) -> None:
        life = self._lives.get(ended.request_id)
        if life is None or ended.usage.output_tokens > len(life.output):
            return
        if ended.reason in (FinishReason.STOP, FinishReason.LENGTH):
            life.ended_at = seconds
            del life.output[ended.usage.output_tokens :]
        else:
            del self._lives[ended.request_id]


class _NoClient:
    """Stands for the clients of a process that is no more."""

    def tell(self, message: object, /) -> None:
        raise AssertionError("nobody tells them anything")


_NO_CLIENT: Final = _NoClient()


def _no_id(_: object) -> AddressId:
    raise AssertionError("a journal that is read is not written")
