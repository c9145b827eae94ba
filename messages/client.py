"""Messages to a client's stream, from intake (`Accepted`, `Rejected`) and from the detokenizer (`Chunk`, `End`)."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from cuelight.messages.request import FailureCause, FinishReason, Refusal, RequestId, Usage


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The request is valid and queued. `prompt_tokens` is its length after the chat template and tokenizing."""

    request_id: RequestId
    prompt_tokens: int


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """The request was refused before any work; no other message follows.

    After `retry_after_seconds` a retry may be accepted; None if a retry would not help, or when is unknown.
    """

    request_id: RequestId
    refusal: Refusal
    reason: str
    retry_after_seconds: float | None = None


class Chunk(msgspec.Struct, frozen=True, tag=True):
    """New output. `position` is the output index of the first of `token_ids`; `text` never ends in half a character.

    Text is held back while a character or a possible stop string is incomplete, so either may be empty.
    """

    request_id: RequestId
    position: int
    token_ids: tuple[int, ...]
    text: str


class End(msgspec.Struct, frozen=True, tag=True):
    """The last message of an accepted request. If `reason` is `FAILED`, `error` describes the failure and `failure` is
    its kind.

    `queued_seconds` is the time until the first blocks, `running_seconds` the total time with blocks.
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
