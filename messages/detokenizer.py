"""What the detokenizer hears: streams from intake, tokens and ends from the scheduler."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from cuelight.messages.address import Address
from cuelight.messages.client import Chunk, End
from cuelight.messages.intake import Opened
from cuelight.messages.request import FinishReason, RequestId, Usage


class Open(msgspec.Struct, frozen=True, tag=True):
    """Tokens of this request will come: turn them into text for `client`. Answered once: `Opened`.

    A `stop` string ends the text before itself; it is not looked for in the text of the first `min_tokens` tokens.
    """

    request_id: RequestId
    stop: tuple[str, ...]
    min_tokens: int
    client: Address[Chunk | End]
    reply_to: Address[Opened]


class TokensReady(msgspec.Struct, frozen=True, tag=True):
    """One step's tokens: `token_ids[i]` is the next output token of `request_ids[i]`."""

    request_ids: tuple[RequestId, ...]
    token_ids: tuple[int, ...]


class RequestEnded(msgspec.Struct, frozen=True, tag=True):
    """No more tokens of this request: flush its text and end its stream. Not answered.

    `queued_seconds` it waited for its first blocks; `running_seconds` it held blocks, in all.
    """

    request_id: RequestId
    reason: FinishReason
    usage: Usage
    queued_seconds: float
    preemptions: int
    error: str = ""
    running_seconds: float = 0.0


DetokenizerMessage: TypeAlias = Open | TokensReady | RequestEnded
