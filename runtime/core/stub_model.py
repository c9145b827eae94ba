"""A model without weights: its tokens are UTF-8 bytes, and the next token is a pure function of the tokens before it.

`cuelight.testing` offers an engine around this model. Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from cuelight.actors.executor.stub import StubBatch, StubDevice, next_letter, stub_host
from cuelight.actors.intake.errors import Refused
from cuelight.actors.intake.parsing import check_text
from cuelight.config import EngineConfig
from cuelight.core.parts import EngineParts
from cuelight.messages.request import Conversation, Prompt, Refusal
from cuelight.models.folder import ModelFacts

STUB_NAME: Final = "stub"
"""The name of an engine that serves this model."""

END_TOKEN: Final = 256
"""The end token, the only token that is not a byte. The default `next_token` never returns it."""

CONTEXT_LENGTH: Final = 4096
BLOCK_COUNT_DEFAULT: Final = 1024
ROLES: Final = ("system", "user", "assistant")


def encode(prompt: Prompt) -> tuple[int, ...]:
    """Return the bytes of a text, or the given token ids.

    A conversation is rendered as a line `role: content` for each message, then `assistant: `. Raises `Refused` for an
    unknown role, and for text that cannot be encoded.
    """
    check_text(prompt)
    if isinstance(prompt, str):
        return tuple(prompt.encode())
    if not isinstance(prompt, Conversation):
        return prompt
    for turn in prompt.turns:
        if turn.role not in ROLES:
            raise Refused(Refusal.BAD_MESSAGE, f"role must be one of {', '.join(ROLES)}, not {turn.role!r}")
    return tuple("".join([f"{turn.role}: {turn.content}\n" for turn in prompt.turns]).encode() + b"assistant: ")


def decode(token_ids: Sequence[int]) -> str:
    """Return the text of these bytes, with U+FFFD for invalid UTF-8; `END_TOKEN` has no text."""
    return bytes([token_id for token_id in token_ids if token_id < END_TOKEN]).decode("utf-8", "replace")


class StubEncoder:
    """The stub's tokenizer, whose tokens are bytes."""

    def encode(self, prompt: Prompt, token_limit: int) -> tuple[int, ...]:
        """Return `encode(prompt)`."""
        return encode(prompt)


def stub_parts(
    config: EngineConfig, next_token: Callable[[Sequence[int]], int] | None = None
) -> EngineParts[StubBatch]:
    """Return the parts of a stub engine; `next_token` is `next_letter` by default."""
    block_count = config.block_count or BLOCK_COUNT_DEFAULT
    host = stub_host(config.host_block_count)
    return EngineParts(
        facts=ModelFacts(vocab_size=END_TOKEN + 1, context_length=CONTEXT_LENGTH, eos_token_ids=(END_TOKEN,)),
        encoder=StubEncoder(),
        decode=decode,
        load_device=partial(StubDevice, block_count, config.block_size, next_token or next_letter, host),
    )
