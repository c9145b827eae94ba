"""What the detokenizer hears: streams from intake, tokens and ends from the scheduler."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from cuelight.messages.address import Address
from cuelight.messages.client import Chunk, End
from cuelight.messages.intake import Opened, Streams
from cuelight.messages.request import FailureCause, FinishReason, RequestId, Usage
from cuelight.messages.scheduler import IntakeStarted


class Open(msgspec.Struct, frozen=True, tag=True):
    """Tokens of this request will come: turn them into text for `client`. Answered once: `Opened`.

    A `stop` string ends the text before itself; it is not looked for in the text of the first `min_tokens` tokens.
    Harmless where the stream is open already. One that goes on from an earlier time has had `output` tokens so far.
    """

    request_id: RequestId
    stop: tuple[str, ...]
    min_tokens: int
    client: Address[Chunk | End]
    reply_to: Address[Opened]
    output: tuple[int, ...] = ()


class DropStream(msgspec.Struct, frozen=True, tag=True):
    """Intake knows of no such request: forget its stream without a word. A client that still waits sends it again."""

    request_id: RequestId


class RetainStreams(msgspec.Struct, frozen=True, tag=True):
    """A new intake knows of all that clients still wait for: forget every stream but theirs, without a word."""

    request_ids: tuple[RequestId, ...]


class Reopened(msgspec.Struct, frozen=True, tag=True):
    """Intake has told the detokenizer of this life to open every stream again that it knows of."""

    life: int


class Histories(msgspec.Struct, frozen=True, tag=True):
    """All output tokens of requests that live, and of some whose end was not confirmed, with those ends.

    Of all of them, as the answer to `GetHistories`; of one that is admitted again. Streams that lack some catch up.
    """

    live: tuple[tuple[RequestId, tuple[int, ...]], ...]
    ended: tuple[tuple[RequestEnded, tuple[int, ...]], ...]


class GetStreams(msgspec.Struct, frozen=True, tag=True):
    """What has each stream that has not ended been given? Answered once: `Streams`; not at all before `Reopened`."""

    reply_to: Address[Streams]


class TokensReady(msgspec.Struct, frozen=True, tag=True):
    """One step's tokens: `token_ids[i]` is the `positions[i]`-th output token, counted from 0, of `request_ids[i]`.

    Ignored where it is not the next one: who speaks of another may be a scheduler that is no more.
    """

    request_ids: tuple[RequestId, ...]
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]


class RequestEnded(msgspec.Struct, frozen=True, tag=True):
    """No more tokens of this request: flush its text and end its stream. Confirmed: `Finished` to intake, `Closed` to
    the scheduler. Ignored for a stream that is unknown, or that has not been given all `usage.output_tokens`.

    `queued_seconds` it waited for its first blocks; `running_seconds` it held blocks, in all. `failure` is set where
    `reason` is `FAILED`.
    """

    request_id: RequestId
    reason: FinishReason
    usage: Usage
    queued_seconds: float
    preemptions: int
    error: str = ""
    running_seconds: float = 0.0
    failure: FailureCause | None = None


DetokenizerMessage: TypeAlias = (
    Open | DropStream | RetainStreams | TokensReady | RequestEnded | IntakeStarted | Reopened | Histories | GetStreams
)
