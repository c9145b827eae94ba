"""A chat in the terminal, written against the public API alone.

    python examples/chat.py
    echo "Name three primary colours." | python examples/chat.py

Answers appear word by word. The keyboard is read on a thread, so the event loop stays free; Ctrl-D ends the chat.
(After Ctrl-C it takes one more Enter: a thread that reads cannot be interrupted.)
"""

from __future__ import annotations

import asyncio
import sys

from cuelight import Engine
from cuelight.errors import RequestFailed, RequestRejected


async def main() -> None:
    async with Engine(progress=True) as engine:
        chat = engine.chat(system="You answer in one or two short sentences.", max_tokens=80)
        print("you> ", end="", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                async for chunk in chat.say(line.strip()):
                    print(chunk.text, end="", flush=True)
            except (RequestRejected, RequestFailed) as error:
                print(f"[{error}]", end="")
            print("\nyou> ", end="", flush=True)
        print()


if __name__ == "__main__":
    asyncio.run(main())
