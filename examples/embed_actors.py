"""The actor runtime alone, inside an async program of one's own: no model, no tokens.

    python examples/embed_actors.py [FILE ...]

Two actors count words. The reader reads files on a worker thread, where blocking is allowed, and sends the tally the
words; the tally owns the counts, and no other actor changes them. The program asks it for the most common words.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias, assert_never

from cuelight.kernel import Actor, ActorSpec, Context, Recipient, Ref, Role, System, Worker, ask


@dataclass(frozen=True)
class Counted:
    """The words of one file. Not answered."""

    path: Path
    words: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Unreadable:
    """A file that could not be read. Not answered."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Report:
    """Request the most common words, once `file_count` files are done. Answered once: `Summary`."""

    file_count: int
    reply_to: Recipient[Summary]


@dataclass(frozen=True)
class Summary:
    """The most common words, and the files that could not be read."""

    words: tuple[tuple[str, int], ...]
    unreadable: tuple[Unreadable, ...]


@dataclass(frozen=True)
class Read:
    """Count the words of this file. Not answered: the words go to the tally."""

    path: Path


TallyMessage: TypeAlias = Counted | Unreadable | Report
# Mailboxes are bounded; a role has the capacity and the types of messages that its actor accepts.
TALLY = Role[TallyMessage]("tally", TallyMessage, capacity=1000)
READER = Role[Read]("reader", Read, capacity=1000)


class Tally(Actor[TallyMessage]):
    """Owns the counts."""

    def __init__(self) -> None:
        self._words: Counter[str] = Counter()
        self._done: list[Counted | Unreadable] = []
        self._asked: list[Report] = []

    def handle(self, message: TallyMessage) -> None:
        match message:
            case Counted():
                self._words.update(dict(message.words))
                self._done.append(message)
            case Unreadable():
                self._done.append(message)
            case Report():
                self._asked.append(message)
            case _:
                assert_never(message)
        # Handlers never wait. A question that cannot be answered yet is kept until a later message answers it.
        for report in [report for report in self._asked if len(self._done) >= report.file_count]:
            self._asked.remove(report)
            unreadable = tuple(done for done in self._done if isinstance(done, Unreadable))
            report.reply_to.tell(Summary(tuple(self._words.most_common(5)), unreadable))


class Reader(Actor[Read | Counted | Unreadable]):
    """Reads files, one after another, without ever blocking the event loop."""

    def __init__(self, context: Context[Read | Counted | Unreadable], tally: Ref[TallyMessage]) -> None:
        self._tally = tally
        self._disk: Worker[Read | Counted | Unreadable] = context.worker("disk")

    def handle(self, message: Read | Counted | Unreadable) -> None:
        match message:
            case Read(path):
                self._disk.submit(partial(count_words, path), done=lambda counted: counted, failed=partial(sorry, path))
            case Counted() | Unreadable():  # the thread's result arrives as a message
                self._tally.tell(message)
            case _:
                assert_never(message)


def count_words(path: Path) -> Counted:
    words = Counter(word for word in path.read_text(encoding="utf-8").lower().split() if word.isalpha())
    return Counted(path, tuple(words.items()))


def sorry(path: Path, error: Exception) -> Unreadable:
    return Unreadable(path, str(error))


async def main(paths: list[Path]) -> None:
    # Sinks first: actors start in this order and stop in reverse, so none sends to an actor that has stopped.
    cast = (
        ActorSpec(TALLY, lambda _: Tally()),
        ActorSpec(READER, lambda context: Reader(context, context.find(TALLY))),
    )
    async with System(cast) as system:
        for path in paths:
            system.find(READER).tell(Read(path))
        summary = await ask(system.find(TALLY), partial(Report, len(paths)), timeout_seconds=10)
        mailbox = system.statistics()["tally"]
    for word, count in summary.words:
        print(f"{count:6} {word}")
    for file in summary.unreadable:
        print(f"not read: {file.reason}")
    print(f"the tally handled {mailbox.delivered} messages, at most {mailbox.peak} waiting at once")


if __name__ == "__main__":
    asyncio.run(main([Path(name) for name in sys.argv[1:]] or [Path(__file__)]))
