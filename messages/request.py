"""Values shared by several protocols: ids, prompts, sampling options, reasons and usage."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NewType, TypeAlias

import msgspec

RequestId = NewType("RequestId", int)

ExecutorId = NewType("ExecutorId", int)
"""The number of an executor in its engine: each `reload` starts another. Restarts of an executor keep its id."""

FIRST_EXECUTOR: Final = ExecutorId(1)
"""The executor that an engine starts with."""

NULL_BLOCK: Final = 0
"""The block that is never granted: padding in block tables points to it, and no request has tokens in it."""


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A chat message: its role (`system`, `user`, `assistant`, …) and content."""

    role: str
    content: str


class Conversation(msgspec.Struct, frozen=True, tag=True):
    """A chat so far; the prompt ends where the assistant's next answer begins."""

    turns: tuple[Turn, ...]


Prompt: TypeAlias = str | Conversation | tuple[int, ...]
"""Text, a conversation, or token ids."""


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are chosen and when the output ends."""

    max_tokens: int = 256
    """Largest number of output tokens; the end of the context ends the output, too."""
    min_tokens: int = 0
    """Output tokens before which neither end tokens nor stop strings end the output."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy: always the most probable token."""
    top_k: int = 0
    """Sample from the `top_k` most probable tokens; 0 samples from all."""
    top_p: float = 1.0
    """Sample from the most probable tokens whose probabilities reach `top_p` in total."""
    seed: int | None = None
    """Seed of the request: the token at a position depends on the seed, the position and the model's output alone, not
    on other requests. `None` draws a seed at submission.
    """
    stop: tuple[str, ...] = ()
    """One string or up to 16 that end the output; the text is cut before them."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, beside the model's own end tokens."""
    ignore_eos: bool = False
    """Whether to continue after the model's end tokens."""


class Service(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a request is served beside others."""

    tenant: str = ""
    """Tenant whose share the request counts against under policy `"fair"`."""
    priority: int = 0
    """Priority under policy `"priority"`; higher is served sooner."""
    queue_seconds: float | None = None
    """Seconds from the submission after which a request without blocks ends with `DeadlineExceeded`; `None` waits
    without limit.
    """
    deadline_seconds: float | None = None
    """Seconds from the submission after which an unfinished request ends with `DeadlineExceeded`; output received
    before stays readable.
    """
    cache_salt: str = ""
    """Salt of the prefix cache: prefixes are shared between requests with the same salt only."""


class CopyKind(StrEnum):
    """The memories between which blocks are copied."""

    SAVE = "save"
    """From the pool to host memory."""
    LOAD = "load"
    """From host memory to the pool."""
    FORK = "fork"
    """Within the pool."""


class BlockCopies(msgspec.Struct, frozen=True):
    """Copy the K/V of whole blocks, each `sources[i]` to `targets[i]`. No block is both a source and a target."""

    copying: CopyKind
    sources: tuple[int, ...]
    targets: tuple[int, ...]


class HostTier(msgspec.Struct, frozen=True):
    """Host memory for `block_count` blocks that leave the pool, and the cost of using it, as measured on the device.

    `move_seconds` is the time to save a block and load it again, `recompute_seconds` the time to recompute one of its
    tokens. While `memory` is the same, saved blocks are still there; 0 never equals an earlier value.
    """

    block_count: int = 0
    move_seconds: float = 0.0
    recompute_seconds: float = 0.0
    memory: int = 0


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """The end token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, or no room left in the context."""
    CANCELLED = "cancelled"
    """The client left."""
    EXPIRED = "expired"
    """`deadline_seconds`, or `queue_seconds` without blocks, has passed."""
    FAILED = "failed"
    """The engine could not continue the request; the `End` has the error."""


class FailureCause(StrEnum):
    """Why a request ended for `FinishReason.FAILED`."""

    EXECUTOR_DEATHS = "executor_deaths"
    """The executor died several times while it computed this request, the last time this request alone."""
    ACTOR_CRASHES = "actor_crashes"
    """Another actor crashed twice in a row on a message about this request."""
    STEP_FAILED = "step_failed"
    """Two steps with this request raised, or the device refused its result."""
    NO_ROOM = "no_room"
    """The block pool cannot hold the request, even alone."""
    STALLED = "stalled"
    """No step could be planned for any request, and this request was the first."""
    NOT_ADMITTED = "not_admitted"
    """The scheduler could not restore a request that it was sent again."""
    UNDECODABLE = "undecodable"
    """The tokenizer raised on the request's output tokens."""


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one request. `cached_tokens` of the prompt were found in the prefix cache."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Refusal(StrEnum):
    """Why intake refuses a request; the client library maps each to one exception class."""

    EMPTY_PROMPT = "empty_prompt"
    PROMPT_TOO_LONG = "prompt_too_long"
    BAD_PROMPT = "bad_prompt"
    BAD_MESSAGE = "bad_message"
    TOKEN_OUT_OF_RANGE = "token_out_of_range"
    BAD_SAMPLING = "bad_sampling"
    WRONG_TYPE = "wrong_type"
    QUEUE_FULL = "queue_full"
    BAD_SERVICE = "bad_service"
    UNKNOWN_TENANT = "unknown_tenant"
