"""The bounded message queue of one actor.

A mailbox has two lanes: urgent messages overtake ordinary ones. Within a lane, messages keep their order of arrival, so
messages that must not overtake each other belong in the same lane.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Never, TypeAlias

from cuelight.kernel.actor import Role
from cuelight.kernel.clock import ActorClock, Clock
from cuelight.kernel.errors import MailboxFull, NotAccepted

OWN: Final = "(own)"
"""The sender of messages that an actor's workers and timers post. They are dropped when the life ends that caused them.
"""

Entry: TypeAlias = tuple[float, str, object]
"""Time of arrival, name of the sender ("" for code outside the actors), and the message."""


@dataclass(frozen=True)
class MailboxStatistics:
    """The figures of a mailbox. `length`, `peak`, `capacity`, `delivered` and `dropped` count messages.

    Messages that an actor posts to itself are never refused, so the peak may exceed the capacity by their number.
    `dropped` messages arrived after the mailbox was closed, or were discarded with it, with an ended life, or with a
    process.
    """

    length: int
    peak: int
    capacity: int
    oldest_age_seconds: float
    delivered: int
    dropped: int


class Mailbox:
    """A bounded queue with one reader. Belongs to the event loop's thread; not thread-safe."""

    def __init__(self, role: Role[Never], clock: Clock, actor_clock: ActorClock | None = None) -> None:
        self.name = role.name
        self.capacity = role.capacity
        self.convert: Callable[[object], object] | None = None
        """Converts a message to the form in which the queue holds it; may raise, at the sender."""
        self.urgent: deque[Entry] = deque()
        self.ordinary: deque[Entry] = deque()
        self._lanes = {kind: self.urgent if kind in role.urgent else self.ordinary for kind in role.message_types()}
        self._actor_clock = actor_clock or ActorClock()
        self._now = clock.now
        self._waiter: asyncio.Future[None] | None = None
        self.closed = False
        """Whether the mailbox accepts no more messages."""
        self.is_dropped = False
        """Whether the mailbox was closed and its waiting messages were dropped."""
        self._peak = self._delivered = self._dropped = 0

    def put(self, message: object) -> None:
        """Queue a message for the actor. A closed mailbox drops and counts the message.

        Raises:
            NotAccepted: the actor's protocol has no message of this type.
            MailboxFull: `capacity` messages are waiting.
            NotSendable: the actor lives on a thread or in a process, and the message cannot be encoded.
        """
        lane = self._lanes.get(type(message))
        if lane is None:
            raise NotAccepted(f"{self.name} does not accept {type(message).__qualname__}")
        if self.closed:
            self._dropped += 1
            return
        length = len(self.urgent) + len(self.ordinary)
        if length >= self.capacity:
            raise MailboxFull(f"{self.name} already has {length} messages waiting")
        if self.convert is not None:
            message = self.convert(message)
        lane.append((self._now(), self._actor_clock.acting, message))
        if length >= self._peak:
            self._peak = length + 1
        if self._waiter is not None:
            self.wake()

    def post(self, message: object, sender: str = OWN) -> None:
        """Queue a message of the actor's own workers and timers, or of the kernel: of any type, and never refused."""
        if self.closed:
            self._dropped += 1
            return
        self._lanes.get(type(message), self.ordinary).append((self._now(), sender, message))
        self._peak = max(self._peak, len(self))
        self.wake()

    def take(self) -> Entry:
        """Remove and return the oldest urgent entry, or else the oldest ordinary one. Raises IndexError when empty."""
        entry = (self.urgent or self.ordinary).popleft()
        self._delivered += 1
        return entry

    def give_back(self, lane: deque[Entry], entries: Sequence[Entry], *, lost: bool) -> None:
        """Return entries that were taken and never handled to the front of their lane, in order; drop them if `lost`.

        A closed mailbox drops them, too.
        """
        self._delivered -= len(entries)
        if lost or self.closed:
            self._dropped += len(entries)
        else:
            lane.extendleft(reversed(entries))

    def begin_life(self) -> None:
        """Drop the messages that an earlier life's workers and timers have posted; all others keep waiting."""
        for lane in (self.urgent, self.ordinary):
            kept = [entry for entry in lane if entry[1] is not OWN]
            self._dropped += len(lane) - len(kept)
            lane.clear()
            lane.extend(kept)

    async def wait(self, *, for_more: bool = False) -> None:
        """Return when there is a message to take, the mailbox is closed, or `wake` was called.

        With `for_more`, disregard the present state: return at the next message, `close` or `wake`.
        """
        if not for_more and (self.urgent or self.ordinary or self.closed):
            return
        assert self._waiter is None, "a mailbox has one reader"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """Let `wait` return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self, *, drop: bool) -> None:
        """Accept no more messages; with `drop`, drop the waiting ones, too."""
        self.closed = True
        if drop:
            self.is_dropped = True
            self._dropped += len(self)
            self.urgent.clear()
            self.ordinary.clear()
        self.wake()

    def __len__(self) -> int:
        return len(self.urgent) + len(self.ordinary)

    def statistics(self) -> MailboxStatistics:
        """Return the mailbox's present figures."""
        arrivals = [lane[0][0] for lane in (self.urgent, self.ordinary) if lane]
        age = self._now() - min(arrivals) if arrivals else 0.0
        return MailboxStatistics(len(self), self._peak, self.capacity, age, self._delivered, self._dropped)
