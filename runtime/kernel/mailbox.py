"""One actor's bounded queue of messages.

Two lanes: urgent messages overtake the others. Within a lane the order of arrival holds, so whatever must not overtake
a message belongs in that message's lane.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from cuelight.kernel.clock import Clock
from cuelight.kernel.errors import MailboxFull, NotAccepted

M = TypeVar("M")


@dataclass(frozen=True)
class MailboxStatistics:
    """`length` and `peak` count messages, against `capacity`; `dropped` came after the actor had stopped."""

    length: int
    peak: int
    capacity: int
    oldest_age_seconds: float
    delivered: int
    dropped: int


class Mailbox(Generic[M]):
    """A bounded queue with one reader. Belongs to the event loop's thread; not thread-safe."""

    __slots__ = (
        "_accepts",
        "_clock",
        "_closed",
        "_delivered",
        "_dropped",
        "_lanes",
        "_ordinary",
        "_peak",
        "_urgent",
        "_waiter",
        "capacity",
        "name",
    )

    def __init__(
        self, name: str, capacity: int, accepts: frozenset[type], urgent: frozenset[type], clock: Clock
    ) -> None:
        assert capacity > 0, "a mailbox holds at least one message"
        assert urgent <= accepts, "what is urgent must also be accepted"
        self.name = name
        self.capacity = capacity
        self._accepts = accepts
        self._clock = clock
        self._urgent: deque[tuple[float, M]] = deque()
        self._ordinary: deque[tuple[float, M]] = deque()
        self._lanes = {kind: self._urgent if kind in urgent else self._ordinary for kind in accepts}
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._peak = 0
        self._delivered = 0
        self._dropped = 0

    def put(self, message: M) -> None:
        """Queue a message for the actor; dropped, and counted, once the actor has stopped.

        Raises:
            NotAccepted: the actor's protocol has no message of this type.
            MailboxFull: `capacity` messages are waiting.
        """
        lane = self._lanes.get(type(message))
        if lane is None:
            raise NotAccepted(f"{self.name} does not accept {type(message).__qualname__}")
        self._append(lane, message)

    def put_private(self, message: M) -> None:
        """Queue a message that the actor sends to itself; its type need not be in the protocol."""
        self._append(self._ordinary, message)

    def _append(self, lane: deque[tuple[float, M]], message: M) -> None:
        if self._closed:
            self._dropped += 1
            return
        length = len(self._urgent) + len(self._ordinary)
        if length >= self.capacity:
            raise MailboxFull(f"{self.name} already has {length} messages waiting")
        lane.append((self._clock.now(), message))
        if length >= self._peak:
            self._peak = length + 1
        self._wake()

    def take(self) -> M:
        """The next message: the oldest urgent one, else the oldest. The mailbox must not be empty."""
        self._delivered += 1
        return (self._urgent or self._ordinary).popleft()[1]

    async def wait(self) -> None:
        """Return when there is a message to take or the mailbox is closed."""
        if len(self) or self._closed:
            return
        assert self._waiter is None, "a mailbox has one reader"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def close(self, *, drop: bool) -> None:
        """Accept nothing more; with `drop`, forget what is waiting too."""
        self._closed = True
        if drop:
            self._dropped += len(self)
            self._urgent.clear()
            self._ordinary.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def closed(self) -> bool:
        """Whether the mailbox has stopped accepting messages."""
        return self._closed

    def __len__(self) -> int:
        return len(self._urgent) + len(self._ordinary)

    def statistics(self) -> MailboxStatistics:
        """A snapshot; costs nothing while messages flow."""
        arrivals = [lane[0][0] for lane in (self._urgent, self._ordinary) if lane]
        return MailboxStatistics(
            length=len(self),
            peak=self._peak,
            capacity=self.capacity,
            oldest_age_seconds=self._clock.now() - min(arrivals) if arrivals else 0.0,
            delivered=self._delivered,
            dropped=self._dropped,
        )
