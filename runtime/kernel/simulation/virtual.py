"""The virtual parts of a simulation: a clock that jumps, mailboxes with delays, workers without threads.

The simulator decides when a timer fires, a message is delivered, or a job runs.
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
    """A callback that is due at a time of a virtual clock."""

    __slots__ = ("__weakref__", "callback")

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        """Cancel the callback; harmless after it was called."""
        self.callback = None


class VirtualClock:
    """A clock that starts at 0 and jumps from timer to timer. Timers of the same time fire in the order of creation."""

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._numbers = count()

    def now(self) -> float:
        """Return the seconds since the simulation began."""
        return self._now

    def call_later(self, delay: float, callback: Callable[[], object], /) -> Timer:
        """Call back once, `delay` seconds from now."""
        return self.call_at(self._now + delay, callback)

    def call_at(self, seconds: float, callback: Callable[[], object], /) -> Timer:
        """Call back once, at a time, or now if that has passed."""
        timer = VirtualTimer(callback)
        heappush(self._timers, (max(seconds, self._now), next(self._numbers), timer))
        return timer

    def next_due(self) -> float | None:
        """Return the time of the next timer, or None."""
        while self._timers and self._timers[0][2].callback is None:
            heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def jump(self) -> None:
        """Advance to the next timer, which must exist, and call it back."""
        assert self.next_due() is not None, "there is no timer to jump to"
        self._now, _, timer = heappop(self._timers)
        callback, timer.callback = timer.callback, None
        assert callback is not None
        callback()


class _InTransit(NamedTuple):
    due: float
    message: object
    sender: str


class _Channel:
    """The messages in transit from one sender in one lane. The first `settled_count` cannot be lost with the sender."""

    __slots__ = ("in_transit", "settled_count")

    def __init__(self) -> None:
        self.in_transit: deque[_InTransit] = deque()
        self.settled_count = 0

    def settle(self) -> None:
        """Keep all present messages, also where the sender's process is killed."""
        self.settled_count = len(self.in_transit)


class VirtualMailbox(Mailbox):
    """A mailbox that each message reaches after up to `delay_seconds_max`, in order for each sender and lane.

    Messages in transit count against the capacity. A close lets them arrive first.
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
        """Queue a message for the actor, as `Mailbox.put`, after a drawn delay."""
        self._before_put()
        is_full = len(self) + self._in_transit >= self.capacity
        if self._in_transit and is_full and not self.closed and type(message) in self._lanes:
            raise MailboxFull(f"{self.name} already has {self.capacity} messages waiting or in transit")
        if self.closed or is_full or type(message) not in self._lanes:
            super().put(message)  # raises, or drops the message
        else:
            encoded = message if self.convert is None else self.convert(message)
            self._send(encoded, self._actor_clock.acting)

    def _send(self, message: object, sender: str) -> None:
        if self._is_elsewhere and sender == self.name:
            sender = (
                OWN  # a placed actor sends to itself within its thread or process, so the message ends with its life
            )
        if not self._delay_seconds_max or sender is OWN or self.closed:
            super().post(message, sender)
            return
        now = self._clock.now()
        channel = self._channels.setdefault((sender, self._lanes.get(type(message)) is self.urgent), _Channel())
        # Half of all messages have no delay, so that messages of different senders arrive at the same time.
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
        """Queue a message of the actor's own workers and timers, or of the kernel, as `Mailbox.post`."""
        self._send(message, sender)
        if sender is not OWN:  # the kernel posts it, so it is not lost with the actor that it names as sender
            self._settle(sender)

    def sender_ended(self, sender: str, *, is_killed: bool) -> None:
        """Settle the messages of a sender whose life has ended; where its process was killed, lose some of the last."""
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
        ):  # otherwise it has arrived before, or was lost
            self._arrive_now(channel)

    def _arrive_now(self, channel: _Channel) -> None:
        _, message, sender = channel.in_transit.popleft()
        channel.settled_count = max(0, channel.settled_count - 1)
        self._in_transit -= 1
        super().post(message, sender)

    def close(self, *, drop: bool) -> None:
        """Let the messages in transit arrive; then close, as `Mailbox.close`."""
        for channel in self._channels.values():
            while channel.in_transit:
                self._arrive_now(channel)
        super().close(drop=drop)


class VirtualWorker:
    """A worker whose jobs run one at a time, at steps of the simulation."""

    __slots__ = ("_chance", "_is_closed", "_post", "jobs")

    def __init__(self, post: Callable[[object], None], chance: random.Random) -> None:
        self._post = post
        self._chance = chance
        self._is_closed = False
        self.jobs: deque[Callable[[], None]] = deque()

    def submit(self, work: Callable[[], T], done: Callable[[T], object], failed: Callable[[Exception], object]) -> None:
        """Queue `work()`; when it has run, post `done(result)` to the actor, or `failed(error)` if the work raised."""

        def job() -> None:
            try:
                message = done(work())
            except Exception as error:
                message = failed(error)
            self._post(message)

        if not self._is_closed:
            self.jobs.append(job)

    def close(self, *, drop: bool = False) -> None:
        """Accept no more jobs; with `drop`, drop the queued ones, except by chance the first, which may be running."""
        self._is_closed = True
        if drop and self.jobs:
            being_done = self.jobs[0]
            self.jobs.clear()
            if self._chance.random() < 0.5:
                self.jobs.append(being_done)

    @property
    def is_over(self) -> bool:
        """Whether the worker is closed and its last job has run."""
        return self._is_closed and not self.jobs

    def is_ready(self) -> bool:
        """Return whether there is a job to run."""
        return bool(self.jobs)

    def step(self) -> None:
        """Run the next job."""
        self.jobs.popleft()()
