"""An engine without a model, for tests of programs that embed one: the real actors around an executor without weights.

Tokens are UTF-8 bytes, so everything about a request can be told by counting; what is "generated" are letters that
depend on all the text before them and on nothing else. Loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Unpack

from cuelight.actors.executor.stub import StubBatch, StubDevice, next_letter, stub_host
from cuelight.actors.intake.prompts import check_text
from cuelight.actors.intake.refusal import Refused
from cuelight.config import EngineConfig, EngineOptions, ModelFacts
from cuelight.engine import Engine
from cuelight.ensemble import Ensemble
from cuelight.errors import ModelUnavailable, NotStarted
from cuelight.kernel import Role
from cuelight.messages.request import Conversation, Prompt, Refusal

__all__ = [
    "BLOCK_COUNT_DEFAULT",
    "CONTEXT_LENGTH",
    "END_TOKEN",
    "ROLES",
    "STUB_NAME",
    "crash",
    "decode",
    "encode",
    "next_letter",
    "stub_engine",
    "stub_ensemble",
]

STUB_NAME: Final = "stub"
"""What such an engine calls itself."""

END_TOKEN: Final = 256
"""The stub's end token, the only one that is no byte. The default `next_token` never gives it."""

CONTEXT_LENGTH: Final = 4096
BLOCK_COUNT_DEFAULT: Final = 1024
ROLES: Final = ("system", "user", "assistant")

ACTORS: Final = ("intake", "scheduler", "cache", "executor", "detokenizer")


def stub_engine(
    *,
    next_token: Callable[[Sequence[int]], int] | None = None,
    models: Mapping[str, Callable[[Sequence[int]], int]] | None = None,
    **options: Unpack[EngineOptions],
) -> Engine:
    """An engine to start and use like any other, which answers at once and always the same.

    `next_token` gives the token that follows all those before it, prompt included: a byte or `END_TOKEN`. It is called
    on a thread; if it raises, the step fails. With `executor="process"` it must be a function of a module. Options are
    those of `Engine`; the pool has 1024 blocks by default, and of host memory none: sizes in bytes are not heeded.

    `models` are others to `reload` with, by name: of each its `next_token`.

    Raises ConfigError as `Engine` does.
    """

    def other(name: str, config: EngineConfig) -> Ensemble[StubBatch]:
        if models is None or name not in models:
            raise ModelUnavailable(f"the stub has no model {name!r}")
        return stub_ensemble(config, models[name])

    return Engine.from_ensemble(STUB_NAME, lambda config: stub_ensemble(config, next_token), other, **options)


def crash(engine: Engine, actor: str) -> None:
    """End one of the engine's actors as if it had raised: "intake", "scheduler", "cache", "executor", "detokenizer".

    Another one takes its place, and no stream loses or repeats a token. Harmless where none is alive at this moment.

    Raises NotStarted, and KeyError for an actor that there is not.
    """
    if engine.system is None:
        raise NotStarted("start the engine first: there is nobody to crash")
    if actor not in ACTORS and actor not in engine.system.statistics():
        raise KeyError(f"no actor {actor!r} is in an engine; there are {', '.join(ACTORS)}")
    serving = engine._lifecycle.models.serving
    name = serving if actor == "executor" and serving else actor
    engine.system.kill(Role(name, object, capacity=1), "a test wants it")


def encode(prompt: Prompt) -> tuple[int, ...]:
    """Bytes of the text; a conversation is a line `role: content` for each message, then `assistant: `."""
    check_text(prompt)
    if isinstance(prompt, str):
        return tuple(prompt.encode())
    if not isinstance(prompt, Conversation):
        return prompt
    for turn in prompt.turns:
        if turn.role not in ROLES:
            raise Refused(Refusal.BAD_MESSAGE, f"the stub's chat template knows no role {turn.role!r}")
    return tuple("".join([f"{turn.role}: {turn.content}\n" for turn in prompt.turns]).encode() + b"assistant: ")


def decode(token_ids: Sequence[int]) -> str:
    """The text of these bytes, with U+FFFD for what is no UTF-8; `END_TOKEN` has no text."""
    return bytes([token_id for token_id in token_ids if token_id < END_TOKEN]).decode("utf-8", "replace")


class _Encoder:
    def encode(self, prompt: Prompt, token_limit: int) -> tuple[int, ...]:
        return encode(prompt)


def stub_ensemble(
    config: EngineConfig, next_token: Callable[[Sequence[int]], int] | None = None
) -> Ensemble[StubBatch]:
    """What the stub engine's actors are built from."""
    block_count = config.block_count or BLOCK_COUNT_DEFAULT
    host = stub_host(config.host_block_count)
    return Ensemble(
        facts=ModelFacts(vocab_size=END_TOKEN + 1, context_length=CONTEXT_LENGTH, eos_token_ids=(END_TOKEN,)),
        encoder=_Encoder(),
        decode=decode,
        load_device=partial(StubDevice, block_count, config.block_size, next_token or next_letter, host),
    )
