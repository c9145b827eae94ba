"""What a client's stream hears, from intake (`Accepted`, `Rejected`) and from the detokenizer (`Chunk`, `End`)."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from cuelight.messages.request import FailureCause, FinishReason, Refusal, RequestId, Usage


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The request is valid and queued. `prompt_tokens` is its length after the chat template and tokenizing."""

    request_id: RequestId
    prompt_tokens: int


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """The request was refused before any work; nothing more follows.

    After `retry_after_seconds` there may be room; None where trying again would not help or nobody can tell.
    """

    request_id: RequestId
    refusal: Refusal
    reason: str
    retry_after_seconds: float | None = None


class Chunk(msgspec.Struct, frozen=True, tag=True):
    """New output. `position` is the output index of the first of `token_ids`; `text` never ends in half a character.

    Text lags behind the tokens while a character or a possible stop string is incomplete, so either may be empty.
    """

    request_id: RequestId
    position: int
    token_ids: tuple[int, ...]
    text: str


class End(msgspec.Struct, frozen=True, tag=True):
    """The last message of an accepted request. `error` says what went wrong when `reason` is `FAILED`, and
    `failure` which kind of failure that was.

    `queued_seconds` it waited for its first blocks; `running_seconds` it held blocks, in all.
    """

    request_id: RequestId
    reason: FinishReason
    usage: Usage
    queued_seconds: float
    preemptions: int
    error: str = ""
    running_seconds: float = 0.0
    failure: FailureCause | None = None


ClientMessage: TypeAlias = Accepted | Rejected | Chunk | End
