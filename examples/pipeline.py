"""A pipeline of three actors, in which the slowest sets the pace: its mailboxes stay small however much passes.

    python examples/pipeline.py FILE [COUNT]

The source makes numbers, the hasher hashes them, the writer writes lines to FILE on a worker thread. Items are sent
only against credit from the writer, so every mailbox has a bound that follows from WINDOW.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO, TypeAlias, assert_never

from cuelight.kernel import Actor, ActorSpec, Context, Recipient, Role, System, Worker, ask

WINDOW = 16
"""Most items that may be in flight between the source and the file."""


@dataclass(frozen=True)
class Credit:
    """To the stage before: `count` more items may come. Not answered."""

    count: int


@dataclass(frozen=True)
class Item:
    """To the next stage. Not answered, but the writer's credit follows once it is written."""

    text: str


@dataclass(frozen=True)
class AwaitEnd:
    """Answered once: when `count` items are written."""

    count: int
    reply_to: Recipient[int]


@dataclass(frozen=True)
class _Written:
    error: Exception | None


WriterMessage: TypeAlias = Item | AwaitEnd | _Written
WRITER = Role[WriterMessage]("writer", WriterMessage, capacity=WINDOW + 1)  # the items, and one question
HASHER = Role[Item | Credit]("hasher", Item | Credit, capacity=WINDOW)  # each item, or the credit for it
SOURCE = Role[Credit]("source", Credit, capacity=WINDOW)


class Source(Actor[Credit]):
    def __init__(self, context: Context[Credit], count: int) -> None:
        self._hasher, self._numbers = context.find(HASHER), iter(range(count))

    def handle(self, message: Credit) -> None:
        for _, number in zip(range(message.count), self._numbers, strict=False):
            self._hasher.tell(Item(str(number)))


class Hasher(Actor[Item | Credit]):
    """Hashes items. Passes the writer's credit on to the source and stores no items."""

    def __init__(self, context: Context[Item | Credit]) -> None:
        self._source, self._writer = context.find(SOURCE), context.find(WRITER)

    def handle(self, message: Item | Credit) -> None:
        match message:
            case Item(text):
                self._writer.tell(Item(f"{text} {hashlib.sha256(text.encode()).hexdigest()}"))
            case Credit():
                self._source.tell(message)
            case _:
                assert_never(message)


class Writer(Actor[WriterMessage]):
    def __init__(self, context: Context[WriterMessage], file: TextIO) -> None:
        self._hasher, self._file = context.find(HASHER), file
        self._disk: Worker[WriterMessage] = context.worker("disk")
        self._written = 0
        self._asked: AwaitEnd | None = None

    def started(self) -> None:
        self._hasher.tell(Credit(WINDOW))

    def handle(self, message: WriterMessage) -> None:
        match message:
            case Item(text):  # the file may be slow, so a thread writes, and says so in a message
                self._disk.submit(partial(self._file.write, text + "\n"), lambda _: _Written(None), _Written)
            case _Written(error):
                if error is not None:
                    raise error
                self._written += 1
                self._hasher.tell(Credit(1))
            case AwaitEnd():
                self._asked = message
            case _:
                assert_never(message)
        if self._asked is not None and self._written == self._asked.count:
            self._asked.reply_to.tell(self._written)


async def main(file: TextIO, count: int) -> None:
    parts = ActorSpec(WRITER, lambda context: Writer(context, file)), ActorSpec(HASHER, Hasher)
    async with System([*parts, ActorSpec(SOURCE, lambda context: Source(context, count))]) as system:
        print(await ask(system.find(WRITER), partial(AwaitEnd, count), timeout_seconds=60), "lines written")
        for name, mailbox in system.statistics().items():
            print(f"{name}: {mailbox.delivered} messages, at most {mailbox.peak} of {mailbox.capacity} waiting at once")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    with Path(sys.argv[1]).open("w", encoding="utf-8") as output:
        asyncio.run(main(output, int(sys.argv[2]) if len(sys.argv) > 2 else 10_000))
