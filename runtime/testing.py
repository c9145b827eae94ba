"""An engine without a model, for tests of programs that embed one: the real actors around an executor without weights.

Tokens are UTF-8 bytes, so everything about a request can be told by counting; what is "generated" are letters that
depend on all the text before them and on nothing else. Loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Unpack

from cuelight.actors.executor.stub import StubBatch, next_letter
from cuelight.config import EngineConfig, EngineOptions
from cuelight.core.parts import EngineParts
from cuelight.core.stub_model import (
    BLOCK_COUNT_DEFAULT,
    CONTEXT_LENGTH,
    END_TOKEN,
    ROLES,
    STUB_NAME,
    decode,
    encode,
    stub_parts,
)
from cuelight.engine import Engine
from cuelight.errors import ModelUnavailable, NotStarted
from cuelight.kernel import Role

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
    "stub_parts",
]

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

    def other(name: str, config: EngineConfig) -> EngineParts[StubBatch]:
        if models is None or name not in models:
            raise ModelUnavailable(f"the stub has no model {name!r}")
        return stub_parts(config, models[name])

    return Engine.from_parts(STUB_NAME, lambda config: stub_parts(config, next_token), other, **options)


def crash(engine: Engine, actor: str) -> None:
    """End one of the engine's actors as if it had raised: "intake", "scheduler", "cache", "executor", "detokenizer".

    Another one takes its place, and no stream loses or repeats a token. Harmless where none is alive at this moment.

    Raises NotStarted, and KeyError for an actor that there is not.
    """
    if engine.system is None:
        raise NotStarted("start the engine first: there is nobody to crash")
    if actor not in ACTORS and actor not in engine.system.statistics():
        raise KeyError(f"no actor {actor!r} is in an engine; there are {', '.join(ACTORS)}")
    running = engine._lifecycle.running
    name = running.models.serving if actor == "executor" and running is not None else actor
    engine.system.kill(Role(name, object, capacity=1), "a test wants it")
