"""Cuelight: an LLM inference engine for async Python programs, built as actors on asyncio tasks.

```python
async with Engine("smollm2-135m-instruct") as engine:
    async for chunk in engine.stream("Once upon a time", max_tokens=64):
        print(chunk.text, end="")
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cuelight.chat import Chat
    from cuelight.engine import Engine
    from cuelight.errors import EngineError
    from cuelight.messages.client import Chunk
    from cuelight.models.store import model_path
    from cuelight.status import EngineStats, Health
    from cuelight.stream import Result, Stream

__version__ = "0.1.0"

__all__ = ["Chat", "Chunk", "Engine", "EngineError", "EngineStats", "Health", "Result", "Stream", "model_path"]

# Every import of a submodule runs this file first, so names are imported on first access.
_HOMES = {
    "Chat": "cuelight.chat",
    "Chunk": "cuelight.messages.client",
    "Engine": "cuelight.engine",
    "EngineError": "cuelight.errors",
    "EngineStats": "cuelight.status",
    "Health": "cuelight.status",
    "Result": "cuelight.stream",
    "Stream": "cuelight.stream",
    "model_path": "cuelight.models.store",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
