"""Journals of killed processes, for the tests of restored state."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path


def killed(journal: Path) -> Path:
    """Copy the journal as a kill at this moment would leave it."""
    copy = journal.with_name(f"{journal.name} {len(list(journal.parent.iterdir()))}")
    shutil.copy(journal, copy)
    return copy


async def turns(count: int = 50) -> None:
    """Run `count` turns of the loop, so that messages under way arrive."""
    for _ in range(count):
        await asyncio.sleep(0)
