"""One actor's bounded queue of messages.

Two lanes: urgent messages overtake the others. Within a lane the order of arrival holds, so whatever must not overtake
a message belongs in that message's lane.
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

    def __init__(self, role: Role[Never], clock: Clock, actor_clock: ActorClock | None = None) -> None:
        self.name = role.name
        self.capacity = role.capacity
        self.convert: Callable[[object], object] | None = None
        """Turns a message into what the queue keeps of it; may raise, at the sender."""
        self.urgent: deque[Entry] = deque()
        self.ordinary: deque[Entry] = deque()
        self._lanes = {kind: self.urgent if kind in role.urgent else self.ordinary for kind in role.message_types()}
        self._actor_clock = actor_clock or ActorClock()
        self._now = clock.now
        self._waiter: asyncio.Future[None] | None = None
        self.closed = False
        """It accepts nothing more."""
        self.is_dropped = False
        """It was closed, and what waited in it was forgotten."""
        self._peak = self._delivered = self._dropped = 0

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
        """Queue what the actor caused itself, or the kernel tells it: of any type, and never refused."""
        if self.closed:
            self._dropped += 1
            return
        self._lanes.get(type(message), self.ordinary).append((self._now(), sender, message))
        self._peak = max(self._peak, len(self))
        self.wake()

    def take(self) -> Entry:
        """The next entry: the oldest urgent one, else the oldest. Raises IndexError when there is none."""
        entry = (self.urgent or self.ordinary).popleft()
        self._delivered += 1
        return entry

    def give_back(self, lane: deque[Entry], entries: Sequence[Entry], *, lost: bool) -> None:
        """Entries that were taken and never handled return to the front of their lane, in order; or they are lost."""
        self._delivered -= len(entries)
        if lost or self.closed:
            self._dropped += len(entries)
        else:
            lane.extendleft(reversed(entries))

    def begin_life(self) -> None:
        """Forget what an earlier life's threads and timers have posted; everything else waits for the next one."""
        for lane in (self.urgent, self.ordinary):
            kept = [entry for entry in lane if entry[1] is not OWN]
            self._dropped += len(lane) - len(kept)
            lane.clear()
            lane.extend(kept)

    async def wait(self, *, for_more: bool = False) -> None:
        """Return when there is a message to take, the mailbox is closed, or someone called `wake`.

        With `for_more`, whatever there already is: when something is added, the mailbox is being closed, or on `wake`.
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
        """Let the reader look around."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self, *, drop: bool) -> None:
        """Accept nothing more; with `drop`, forget what is waiting too."""
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
        """A snapshot; costs nothing while messages flow."""
        arrivals = [lane[0][0] for lane in (self.urgent, self.ordinary) if lane]
        age = self._now() - min(arrivals) if arrivals else 0.0
        return MailboxStatistics(len(self), self._peak, self.capacity, age, self._delivered, self._dropped)
