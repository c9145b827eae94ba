"""An answer that outlives its process: kill this program while it answers, start it again, and the answer goes on.

    python examples/warm_restart.py JOURNAL [PROMPT]

What a client must remember is its request's id and how many tokens it has had; this one keeps them beside the journal.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from cuelight import Engine, Stream
from cuelight.errors import BadPosition, UnknownRequest


def remember(note: Path, request_id: int, position: int) -> None:
    """Write request id and position atomically, so that a kill in the middle leaves the previous note."""
    draft = note.with_suffix(".draft")
    draft.write_text(json.dumps([request_id, position]))
    draft.replace(note)


async def show(stream: Stream, note: Path, position: int) -> None:
    """Print the chunks as they arrive, and note the position after each."""
    async for chunk in stream:
        print(chunk.text, end="", flush=True)
        position += len(chunk.token_ids)
        remember(note, stream.request_id, position)
    print()


async def main(journal: Path, prompt: str) -> None:
    note = journal.with_name(f"{journal.name}.client")
    async with Engine(journal=journal, resume=True, progress=True) as engine:
        if note.exists():
            request_id, position = json.loads(note.read_text())
            try:
                stream = engine.resume(request_id, position)
                print(f"[request {request_id} goes on after {position} tokens] ", end="")
                await show(stream, note, position)
                return
            except (UnknownRequest, BadPosition):
                print("The answer before is over.")
        await show(engine.stream([{"role": "user", "content": prompt}], max_tokens=100), note, 0)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    asyncio.run(main(Path(sys.argv[1]), " ".join(sys.argv[2:]) or "Explain in a few sentences why the sky is blue."))
