"""Reads from a journal the requests that its process had accepted and not finished.

The journal's header has the requests that were unfinished when the file was begun; its records add to them. Only
messages about requests and models are decoded.
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
"""The messages that change a request or the model, with the actor that receives each first."""

_WORK: Final = type_name(ExecuteStep)

_EXECUTORS: Final = ExecutorRoles(Role("executor", ExecutorMessage, capacity=1))

_TYPES: Final[dict[Name, type]] = {type_name(kind): kind for kind in _RECEIVERS}


class RestoredRequest(msgspec.Struct, frozen=True):
    """A request to continue: as it was submitted `seconds_ago`, and its output so far."""

    request_id: RequestId
    prompt: Prompt
    sampling: Sampling
    service: Service
    output: tuple[int, ...]
    seconds_ago: float
    is_over: bool = False
    """Whether the request has ended; its client may lack a part of the output."""
    is_accepted: bool = True
    """Whether intake has accepted the request; if not, it may still be rejected."""


class Header(msgspec.Struct):
    """The part of a journal's header that a resuming process needs.

    `written_at` (time of day) and `clock` (the clock of the records) are the same moment, both in seconds.
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
    """The state of an earlier process.

    `header` has the model that served when the file was begun; `model` is the fingerprint of the last one.
    """

    header: Header
    model: str
    next_id: int
    requests: tuple[RestoredRequest, ...]
    """Sorted by id: the unfinished requests, and those that ended within `recent_seconds`."""


@dataclass
class _Life:
    """One request, as the records read so far describe it."""

    submit: Submit
    submitted_at: float
    is_accepted: bool = False
    output: list[int] = field(default_factory=list)
    ended_at: float | None = None


def read_state(path: Path, *, time_of_day: float, recent_seconds: float) -> RestoredState:
    """Return the state that the journal at `path` records, up to its last whole record.

    Requests that ended within `recent_seconds` before that record are included, since their clients may have missed the
    end. `time_of_day` is the present one, from which the requests' ages are computed. Blocks. Raises WrongJournal for a
    file that is not the journal of an engine of this version.
    """
    try:
        journal = read_journal(path)
        header = msgspec.convert(journal.about, Header)
        return _Reading(header).read(journal, time_of_day, recent_seconds)
    except (JournalError, NotAccepted, NotSendable, msgspec.ValidationError) as error:
        raise WrongJournal(f"the journal {os.fspath(path)} cannot be resumed: {error}") from error


class _Reading:
    def __init__(self, header: Header) -> None:
        self._header = header
        self._codec = Codec(_TYPES, _no_id, lambda *_: _NO_CLIENT)
        self._lives: dict[RequestId, _Life] = {}
        self._next_id = header.next_id
        self._model = header.model
        self._models: dict[str, str] = {}
        """Fingerprints of the models that may take over, by the names of their executors."""
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
                self._apply(record)
        # Deadlines include the time between the last record and the present, when no process ran.
        downtime = max(0.0, time_of_day - self._header.written_at - (self._now - self._header.clock))
        requests = [
            RestoredRequest(
                request_id,
                life.submit.prompt,
                life.submit.sampling,
                life.submit.service,
                tuple(life.output),
                max(0.0, self._now - life.submitted_at + downtime),
                life.ended_at is not None,
            )
            for request_id, life in sorted(self._lives.items())
            if life.is_accepted and (life.ended_at is None or self._now - life.ended_at <= recent_seconds)
        ]
        return RestoredState(self._header, self._model, self._next_id, tuple(requests))

    def _apply(self, record: Recorded) -> None:
        if record.type_name == _WORK and record.actor in self._models:
            self._model = self._models.pop(record.actor)  # a step for the new executor: it has taken over
        kind = _TYPES.get(record.type_name)
        if kind is None or record.actor != _RECEIVERS[kind] or record.opaque:
            return
        message = self._codec.decode(record.type_name, record.body)
        if isinstance(message, TokensReady | Histories | RequestEnded):
            self._apply_output(message, record.seconds)
            return
        match message:
            case Submit(request_id):
                self._next_id = max(self._next_id, request_id + 1)
                self._lives.setdefault(request_id, _Life(message, record.seconds, output=list(message.output)))
            case Open(request_id):
                self._next_id = max(self._next_id, request_id + 1)  # the `Submit` may have been too long to record
                if (life := self._lives.get(request_id)) is not None:
                    life.is_accepted = True
            case Cancel(request_id) | FailRequest(request_id):
                self._lives.pop(request_id, None)
            case Switch():
                self._models[_EXECUTORS[message.executor_id].name] = message.model

    def _apply_output(self, message: TokensReady | Histories | RequestEnded, seconds: float) -> None:
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
    """The address in place of a client's, whose process has ended."""

    def tell(self, message: object, /) -> None:
        raise AssertionError("reading a journal sends no messages")


_NO_CLIENT: Final = _NoClient()


def _no_id(_: object) -> AddressId:
    raise AssertionError("reading a journal encodes no addresses")
