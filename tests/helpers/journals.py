"""Journals of processes that were killed, for the tests of what the next process restores."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path


def killed(journal: Path) -> Path:
    """The file as a kill at this moment would leave it."""
    copy = journal.with_name(f"{journal.name} {len(list(journal.parent.iterdir()))}")
    shutil.copy(journal, copy)
    return copy


async def turns(count: int = 50) -> None:
    """Let the loop turn, so that what is under way comes to rest."""
    for _ in range(count):
        await asyncio.sleep(0)
