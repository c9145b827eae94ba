"""One actor's bounded queue of messages.

Two lanes: urgent messages overtake the others. Within a lane the order of arrival holds, so whatever must not overtake
a message belongs in that message's lane.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from cuelight.kernel.clock import Clock, Moment
from cuelight.kernel.errors import MailboxFull, NotAccepted

OWN: Final = "(own)"
"""The sender of what an actor's threads and timers post to it. Such messages die with the life that caused them."""

Entry: TypeAlias = tuple[float, str, object]
"""When it arrived, who sent it ("" is code outside the actors), and the message."""


@dataclass(frozen=True)
class MailboxStatistics:
    """`length` and `peak` count messages, against `capacity`; `dropped` came after the actor had stopped.

    What an actor posts to itself is never refused, so the peak may be above the capacity by that much.
    """

    length: int
    peak: int
    capacity: int
    oldest_age_seconds: float
    delivered: int
    dropped: int


class Mailbox:
    """A bounded queue with one reader. Belongs to the event loop's thread; not thread-safe."""

    __slots__ = (
        "_closed",
        "_delivered",
        "_dropped",
        "_lanes",
        "_moment",
        "_now",
        "_ordinary",
        "_peak",
        "_urgent",
        "_waiter",
        "capacity",
        "is_dropped",
        "name",
        "pack",
    )

    def __init__(
        self,
        name: str,
        capacity: int,
        accepts: Iterable[type],
        urgent: Iterable[type],
        clock: Clock,
        moment: Moment | None = None,
    ) -> None:
        assert capacity > 0, "a mailbox holds at least one message"
        self.name = name
        self.capacity = capacity
        self.pack: Callable[[object], object] | None = None
        """Turns a message into what the queue keeps of it; may raise, at the sender."""
        self._moment = moment or Moment()
        self._now = clock.now
        self._urgent: deque[Entry] = deque()
        self._ordinary: deque[Entry] = deque()
        self._lanes = dict.fromkeys(accepts, self._ordinary)
        for kind in urgent:
            assert kind in self._lanes, "what is urgent must also be accepted"
            self._lanes[kind] = self._urgent
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self.is_dropped = False
        """It was closed, and what waited in it was forgotten."""
        self._peak = 0
        self._delivered = 0
        self._dropped = 0

    def put(self, message: object) -> None:
        """Queue a message for the actor; dropped, and counted, once the actor has stopped.

        Raises:
            NotAccepted: the actor's protocol has no message of this type.
            MailboxFull: `capacity` messages are waiting.
            NotSendable: the actor lives elsewhere, and the message cannot go there.
        """
        lane = self._lanes.get(type(message))
        if lane is None:
            raise NotAccepted(f"{self.name} does not accept {type(message).__qualname__}")
        if self._closed:
            self._dropped += 1
            return
        length = len(self._urgent) + len(self._ordinary)
        if length >= self.capacity:
            raise MailboxFull(f"{self.name} already has {length} messages waiting")
        if self.pack is not None:
            message = self.pack(message)
        lane.append((self._now(), self._moment.acting, message))
        if length >= self._peak:
            self._peak = length + 1
        if self._waiter is not None:
            self.wake()

    def post(self, message: object, sender: str = OWN) -> None:
        """Queue what the actor caused itself, or the kernel tells it: of any type, and never refused."""
        self._append(self._lanes.get(type(message), self._ordinary), message, sender)

    def _append(self, lane: deque[Entry], message: object, sender: str) -> None:
        if self._closed:
            self._dropped += 1
            return
        lane.append((self._now(), sender, message))
        self._peak = max(self._peak, len(self))
        self.wake()

    def take(self) -> Entry:
        """The next entry: the oldest urgent one, else the oldest. Raises IndexError when there is none."""
        entry = (self._urgent or self._ordinary).popleft()
        self._delivered += 1
        return entry

    def put_back(self, entries: Iterable[Entry], *, urgent: bool) -> None:
        """Return entries that were taken and never handled to the front of their lane, in order."""
        returned = list(entries)
        self._delivered -= len(returned)
        (self._urgent if urgent else self._ordinary).extendleft(reversed(returned))

    def begin_life(self) -> None:
        """Forget what an earlier life's threads and timers have posted; everything else waits for the next one."""
        for lane in (self._urgent, self._ordinary):
            kept = [entry for entry in lane if entry[1] is not OWN]
            if len(kept) < len(lane):
                self._dropped += len(lane) - len(kept)
                lane.clear()
                lane.extend(kept)

    async def wait(self) -> None:
        """Return when there is a message to take, the mailbox is closed, or someone called `wake`."""
        if self._urgent or self._ordinary or self._closed:
            return
        assert self._waiter is None, "a mailbox has one reader"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """Let the reader look around."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self, *, drop: bool) -> None:
        """Accept nothing more; with `drop`, forget what is waiting too."""
        self._closed = True
        self.is_dropped = self.is_dropped or drop
        if drop:
            self._dropped += len(self)
            self._urgent.clear()
            self._ordinary.clear()
        self.wake()

    def lose(self, count: int) -> None:
        """So many entries that were taken will never be handled."""
        self._delivered -= count
        self._dropped += count

    @property
    def lanes(self) -> tuple[deque[Entry], deque[Entry]]:
        """What is waiting: urgent entries and the others, each oldest first."""
        return self._urgent, self._ordinary

    @property
    def closed(self) -> bool:
        """Whether the mailbox has stopped accepting messages."""
        return self._closed

    def is_urgent(self, kind: type) -> bool:
        """Whether messages of this type overtake others."""
        return self._lanes.get(kind) is self._urgent

    def __len__(self) -> int:
        return len(self._urgent) + len(self._ordinary)

    def statistics(self) -> MailboxStatistics:
        """A snapshot; costs nothing while messages flow."""
        arrivals = [lane[0][0] for lane in (self._urgent, self._ordinary) if lane]
        return MailboxStatistics(
            length=len(self),
            peak=self._peak,
            capacity=self.capacity,
            oldest_age_seconds=self._now() - min(arrivals) if arrivals else 0.0,
            delivered=self._delivered,
            dropped=self._dropped,
        )
