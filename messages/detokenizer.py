"""Messages to the detokenizer: streams from intake, tokens and ends from the scheduler."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from cuelight.messages.address import Address
from cuelight.messages.client import Chunk, End
from cuelight.messages.intake import Opened, Streams
from cuelight.messages.request import FailureCause, FinishReason, RequestId, Usage
from cuelight.messages.scheduler import IntakeStarted


class Open(msgspec.Struct, frozen=True, tag=True):
    """Open a stream: send the text of this request's tokens to `client`. Answered once: `Opened`.

    A `stop` string ends the text before itself; the text of the first `min_tokens` tokens is not searched for it. Has
    no effect if the stream is open already. A resumed request begins with its earlier `output` tokens.
    """

    request_id: RequestId
    stop: tuple[str, ...]
    min_tokens: int
    client: Address[Chunk | End]
    reply_to: Address[Opened]
    output: tuple[int, ...] = ()


class DropStream(msgspec.Struct, frozen=True, tag=True):
    """Drop the stream of a request that intake does not have, without an end. A waiting client submits again."""

    request_id: RequestId


class RetainStreams(msgspec.Struct, frozen=True, tag=True):
    """Drop every stream but these, without an end: a new intake has received all requests that clients wait for."""

    request_ids: tuple[RequestId, ...]


class Reopened(msgspec.Struct, frozen=True, tag=True):
    """Intake has sent the `Open` of every stream again to the detokenizer of this life."""

    life: int


class Histories(msgspec.Struct, frozen=True, tag=True):
    """All output tokens of live requests, and of ended ones whose end was not confirmed, with their ends.

    The answer to `GetHistories`, with all of them; or sent for one request that is admitted again. A stream continues
    from the tokens it has.
    """

    live: tuple[tuple[RequestId, tuple[int, ...]], ...]
    ended: tuple[tuple[RequestEnded, tuple[int, ...]], ...]


class GetStreams(msgspec.Struct, frozen=True, tag=True):
    """Return the output tokens of each open stream. Answered once: `Streams`; not at all before `Reopened`."""

    reply_to: Address[Streams]


class TokensReady(msgspec.Struct, frozen=True, tag=True):
    """One step's tokens: `token_ids[i]` is the `positions[i]`-th output token, counted from 0, of `request_ids[i]`.

    A token that is not its stream's next one is ignored: an earlier scheduler may have sent it.
    """

    request_ids: tuple[RequestId, ...]
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]


class RequestEnded(msgspec.Struct, frozen=True, tag=True):
    """Flush the text of this request and end its stream. Confirmed: `Finished` to intake, `Closed` to the scheduler.
    Ignored for a stream that is unknown or lacks some of the `usage.output_tokens`.

    `queued_seconds` is the time until the first blocks, `running_seconds` the total time with blocks. `failure` is set
    if `reason` is `FAILED`.
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
