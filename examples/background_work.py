"""A program that keeps doing its own work while a model answers in the same event loop.

    python examples/background_work.py [PROMPT]

Its own work is a TCP echo server with one client that sends a line every few milliseconds. At the end it says how many
lines came back during the answer, and how long the slowest of them took.
"""

from __future__ import annotations

import asyncio
import sys

from cuelight import Engine


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The host program's server: sends every line back."""
    while line := await reader.readline():
        writer.write(line)
        await writer.drain()
    writer.close()


async def ping(port: int, seconds: list[float]) -> None:
    """The host program's client: notes how long each line took to come back."""
    now = asyncio.get_running_loop().time
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while True:
            sent_at = now()
            writer.write(b"still there?\n")
            assert await reader.readline() == b"still there?\n"
            seconds.append(now() - sent_at)
            await asyncio.sleep(0.005)
    finally:
        writer.close()


async def main(prompt: str) -> None:
    seconds: list[float] = []
    async with Engine(progress=True) as engine, await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        client = asyncio.create_task(ping(server.sockets[0].getsockname()[1], seconds))
        async for chunk in engine.stream([{"role": "user", "content": prompt}], max_tokens=40):
            print(chunk.text, end="", flush=True)
        client.cancel()
        await asyncio.wait([client])
    print(f"\n{len(seconds)} lines echoed meanwhile, the slowest in {1000 * max(seconds):.1f} ms")


if __name__ == "__main__":
    asyncio.run(main(" ".join(sys.argv[1:]) or "Explain in two sentences why the sky is blue."))
