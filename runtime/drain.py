"""The end of an engine in good order: who is still here is waited for, up to a deadline. Knows nothing of actors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cuelight.config import is_positive, shown
from cuelight.errors import ConfigError


class Drain:
    """One wait until nobody is left; `is_empty` says whether that is so, and may be asked at any time."""

    def __init__(self, is_empty: Callable[[], bool]) -> None:
        self._is_empty = is_empty
        self._empty = asyncio.Event()
        self.look()

    def look(self) -> None:
        """Somebody may have left."""
        if self._is_empty():
            self._empty.set()

    async def over(self, timeout_seconds: float) -> None:
        """Return once nobody is left, or after so long."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._empty.wait()
        except TimeoutError:
            pass


def check_timeout(seconds: object) -> float:
    """The deadline of a drain, in seconds. Raises ConfigError for one that cannot be met."""
    if not is_positive(seconds):
        raise ConfigError(f"timeout_seconds must be a number above 0, not {shown(seconds)}; `stop` waits for nobody")
    return float(seconds)
