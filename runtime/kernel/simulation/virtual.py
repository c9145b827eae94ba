"""The world of a simulation: a clock that only jumps, mailboxes with slow ways to them, workers without threads.

Nothing here happens by itself: a driver decides what happens next.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple, TypeVar

from cuelight.kernel.actor import ActorSpec, InLoop
from cuelight.kernel.clock import ActorClock, Timer
from cuelight.kernel.errors import MailboxFull
from cuelight.kernel.mailbox import OWN, Mailbox

T = TypeVar("T")


class VirtualTimer:
    """A callback that is due at some moment of a virtual clock."""

    __slots__ = ("__weakref__", "callback")

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        """Let it not happen; harmless when it already has."""
        self.callback = None


class VirtualClock:
    """Starts at 0 and stands still, but for jumps from timer to timer. Those of one moment come in the order made."""

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._numbers = count()

    def now(self) -> float:
        """Seconds since the simulation began."""
        return self._now

    def call_later(self, delay: float, callback: Callable[[], object], /) -> Timer:
        """Call back once, `delay` seconds from now."""
        return self.call_at(self._now + delay, callback)

    def call_at(self, seconds: float, callback: Callable[[], object], /) -> Timer:
        """Call back once, at a moment; one that has passed is now."""
        timer = VirtualTimer(callback)
        heappush(self._timers, (max(seconds, self._now), next(self._numbers), timer))
        return timer

    def next_due(self) -> float | None:
        """The moment of the next timer, if there is one."""
        while self._timers and self._timers[0][2].callback is None:
            heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def jump(self) -> None:
        """To the next timer, which happens. There must be one."""
        assert self.next_due() is not None, "a clock jumps to a timer"
        self._now, _, timer = heappop(self._timers)
        callback, timer.callback = timer.callback, None
        assert callback is not None
        callback()


class _InTransit(NamedTuple):
    due: float
    message: object
    sender: str


class _Channel:
    """What is under way from one sender in one lane. The first `out_count` can no longer be lost with the sender."""

    __slots__ = ("in_transit", "settled_count")

    def __init__(self) -> None:
        self.in_transit: deque[_InTransit] = deque()
        self.settled_count = 0

    def settle(self) -> None:
        """Nothing of what is under way can be lost with the sender."""
        self.settled_count = len(self.in_transit)


class VirtualMailbox(Mailbox):
    """A mailbox to which each message may take up to `delay_seconds_max`, in order for each sender and lane.

    What is under way counts against the capacity. Closing lets it arrive first.
    """

    def __init__(
        self,
        part: ActorSpec[object],
        clock: VirtualClock,
        actor_clock: ActorClock,
        chance: random.Random,
        delay_seconds_max: float,
        before_put: Callable[[], None],
    ) -> None:
        super().__init__(part.role, clock, actor_clock)
        self._is_elsewhere = not isinstance(part.placement, InLoop)
        self._clock = clock
        self._chance = chance
        self._delay_seconds_max = delay_seconds_max
        self._before_put = before_put
        self._channels: dict[tuple[str, bool], _Channel] = {}
        self._in_transit = 0

    def put(self, message: object) -> None:
        """As any mailbox's."""
        self._before_put()
        is_full = len(self) + self._in_transit >= self.capacity
        if self._in_transit and is_full and not self.closed and type(message) in self._lanes:
            raise MailboxFull(f"{self.name} already has {self.capacity} messages waiting or under way")
        if self.closed or is_full or type(message) not in self._lanes:
            super().put(message)  # which refuses or drops it
        else:
            encoded = message if self.convert is None else self.convert(message)
            self._send(encoded, self._actor_clock.acting)

    def _send(self, message: object, sender: str) -> None:
        if self._is_elsewhere and sender == self.name:
            sender = OWN  # where it lives, it tells itself without us, and that ends with its life
        if not self._delay_seconds_max or sender is OWN or self.closed:
            super().post(message, sender)
            return
        now = self._clock.now()
        channel = self._channels.setdefault((sender, self._lanes.get(type(message)) is self.urgent), _Channel())
        # Half of all messages are as fast as can be, so that they meet those of other senders.
        due = now + max(0.0, 2 * self._chance.random() - 1) * self._delay_seconds_max
        if channel.in_transit:
            due = max(due, channel.in_transit[-1].due)
        elif due == now:
            super().post(message, sender)
            return
        channel.in_transit.append(_InTransit(due, message, sender))
        self._in_transit += 1
        self._clock.call_at(due, partial(self._arrive, channel))

    def post(self, message: object, sender: str = OWN) -> None:
        """As any mailbox's."""
        self._send(message, sender)
        if sender is not OWN:  # but the kernel, which does not die with whom it speaks of
            self._settle(sender)

    def sender_ended(self, sender: str, *, is_killed: bool) -> None:
        """A life of the sender is over. Where its process was killed, the last that it told may never have got out."""
        for is_urgent in (False, True):
            channel = self._channels.get((sender, is_urgent))
            if channel is not None and is_killed:
                for _ in range(int(self._chance.random() * (len(channel.in_transit) - channel.settled_count + 1))):
                    channel.in_transit.pop()
                    self._in_transit -= 1
        self._settle(sender)

    def _settle(self, sender: str) -> None:
        for is_urgent in (False, True):
            if (channel := self._channels.get((sender, is_urgent))) is not None:
                channel.settle()

    def _arrive(self, channel: _Channel) -> None:
        if (
            channel.in_transit and channel.in_transit[0].due <= self._clock.now()
        ):  # else it has come before, or was lost
            self._arrive_now(channel)

    def _arrive_now(self, channel: _Channel) -> None:
        _, message, sender = channel.in_transit.popleft()
        channel.settled_count = max(0, channel.settled_count - 1)
        self._in_transit -= 1
        super().post(message, sender)

    def close(self, *, drop: bool) -> None:
        """As any mailbox's; what is under way has come before."""
        for channel in self._channels.values():
            while channel.in_transit:
                self._arrive_now(channel)
        super().close(drop=drop)


class VirtualWorker:
    """A worker whose jobs are done one by one when its driver says so."""

    __slots__ = ("_chance", "_is_closed", "_post", "jobs")

    def __init__(self, post: Callable[[object], None], chance: random.Random) -> None:
        self._post = post
        self._chance = chance
        self._is_closed = False
        self.jobs: deque[Callable[[], None]] = deque()

    def submit(self, work: Callable[[], T], done: Callable[[T], object], failed: Callable[[Exception], object]) -> None:
        """Queue `work()`; when it is run, the actor hears `done(result)`, or `failed(error)` if it raised."""

        def job() -> None:
            try:
                message = done(work())
            except Exception as error:
                message = failed(error)
            self._post(message)

        if not self._is_closed:
            self.jobs.append(job)

    def close(self, *, drop: bool = False) -> None:
        """Take no more work; with `drop`, of what is queued no more is done than what may just be being done."""
        self._is_closed = True
        if drop and self.jobs:
            being_done = self.jobs[0]
            self.jobs.clear()
            if self._chance.random() < 0.5:
                self.jobs.append(being_done)

    @property
    def is_over(self) -> bool:
        """Nothing is left to do, and nothing will come."""
        return self._is_closed and not self.jobs

    def is_ready(self) -> bool:
        """Whether there is a job to run."""
        return bool(self.jobs)

    def step(self) -> None:
        """Run the next job."""
        self.jobs.popleft()()
