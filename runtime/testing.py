"""An engine without a model, for tests of programs that embed one: the real actors around an executor without weights.

Tokens are UTF-8 bytes, so that token counts are lengths of texts. The output is letters, each a pure function of all
tokens before it. Imports neither torch nor transformers.
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
    """Return an engine that is used like any other, and answers at once and deterministically.

    Args:
        next_token: returns the token, a byte or `END_TOKEN`, that follows a prompt and its output so far; by default
            `next_letter`. Called on a thread; an exception fails the step. With `executor="process"` it must be an
            importable function.
        models: other models for `Engine.reload`, by name: the `next_token` of each.
        options: the options of `Engine`. The pool has 1024 blocks by default; `kv_cache_bytes` and
            `host_kv_cache_bytes` are ignored.

    Raises:
        ConfigError: an option is invalid.
    """

    def other(name: str, config: EngineConfig) -> EngineParts[StubBatch]:
        if models is None or name not in models:
            raise ModelUnavailable(f"the stub engine has no model {name!r}: `models` has {list(models or ())}")
        return stub_parts(config, models[name])

    return Engine.from_parts(STUB_NAME, lambda config: stub_parts(config, next_token), other, **options)


def crash(engine: Engine, actor: str) -> None:
    """End one of the engine's actors as if its handler had raised.

    A new actor replaces it, and no stream loses or repeats a token. Does nothing if the actor is being restarted.

    Args:
        engine: a started engine.
        actor: "intake", "scheduler", "cache", "executor" or "detokenizer".

    Raises:
        NotStarted: the engine has no actors yet.
        KeyError: the engine has no actor of this name.
    """
    if engine.system is None:
        raise NotStarted(f"start the engine first: it has no actor {actor!r} yet")
    if actor not in ACTORS and actor not in engine.system.statistics():
        raise KeyError(f"an engine has no actor {actor!r}; it has {', '.join(ACTORS)}")
    running = engine._lifecycle.running
    name = running.models.serving if actor == "executor" and running is not None else actor
    engine.system.kill(Role(name, object, capacity=1), "crashed by cuelight.testing.crash")
