"""Addresses of actors, and `ask`, with which code outside the actors awaits an answer."""

import asyncio
import math
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar, runtime_checkable

from cuelight.kernel.clock import Clock, LoopClock
from cuelight.kernel.errors import ActorStopped, AskTimeout

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)
A = TypeVar("A")

PAUSE_SECONDS: Final = 0.002
"""Least time between two scans for overdue futures, so that scans cannot take all the time where many are overdue."""


@runtime_checkable
class Recipient(Protocol[M_contra]):
    """Any object that takes messages of one type: the type of a request's `reply_to`."""

    def tell(self, message: M_contra, /) -> None:
        """Send one message without waiting."""


class Ref(Generic[M_contra]):
    """The address of an actor, valid across its restarts.

    A message can carry an address to an actor on another thread or in another process, where it works as well.
    """

    __slots__ = ("__weakref__", "_is_stopped", "deadlines", "name", "tell")

    def __init__(
        self, name: str, tell: Callable[[M_contra], None], is_stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self.name = name
        self.tell: Callable[[M_contra], None] = tell
        """Queue a message without waiting. A stopped actor's messages are dropped.

        Raises `NotAccepted`, `MailboxFull`, or, for an actor on a thread or in a process, `NotSendable`. A message from
        an actor on another thread or in another process is checked against the mailbox's capacity when it arrives; a
        full mailbox then crashes the sender.
        """
        self._is_stopped = is_stopped
        self.deadlines: AskDeadlines | None = None
        """The deadlines that all asks of the actor's system share."""

    @property
    def is_stopped(self) -> bool:
        """Whether the actor has stopped for good. False on other threads and in other processes than its system's."""
        return self._is_stopped()

    def __repr__(self) -> str:
        return f"<Ref {self.name}>"


class _FutureRecipient:
    """A return address that resolves a future with the first message."""

    __slots__ = ("__weakref__", "_future")

    def __init__(self, future: asyncio.Future[object]) -> None:
        self._future = future

    def tell(self, message: object, /) -> None:
        if not self._future.done():
            self._future.set_result(message)


class AskDeadlines:
    """The deadlines of all asks in one event loop, with one timer for the earliest.

    A timer for each ask would cost a sixth of the ask's time, and hardly any timer ever fires.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self.loop = loop
        self._clock = clock
        self.due: dict[asyncio.Future[object], float] = {}
        """The waiting futures with their deadlines in seconds of the clock. `ask` removes its future."""
        self._cancel: Callable[[], object] = lambda: None
        self._next_look = math.inf

    def add(self, future: asyncio.Future[object], seconds: float) -> None:
        """Set `AskTimeout` on the future `seconds` from now or a few milliseconds later, unless it is removed first."""
        due = self.due[future] = self._clock.now() + seconds
        if due < self._next_look:
            self._look_at(due)

    def close(self) -> None:
        """Cancel the timer if no future waits."""
        if not self.due:
            self._cancel()

    def _look_at(self, seconds: float) -> None:
        self._cancel()
        self._next_look = seconds
        self._cancel = self._clock.call_later(seconds - self._clock.now(), self._look).cancel

    def _look(self) -> None:
        now, self._next_look = self._clock.now(), math.inf
        for future, due in self.due.items():
            if due <= now and not future.done():
                future.set_exception(AskTimeout)
        if (earliest := min((due for due in self.due.values() if due > now), default=math.inf)) < math.inf:
            self._look_at(max(earliest, now + PAUSE_SECONDS))


async def ask(ref: Ref[M], request: Callable[[Recipient[A]], M], timeout_seconds: float) -> A:
    """Send `request(return_address)` and await its one answer. For code outside the actors only.

    Raises:
        AskTimeout: no answer within `timeout_seconds`.
        ActorStopped: the actor had stopped for good.
        NotAccepted, MailboxFull, NotSendable: as `Ref.tell`.
    """
    if ref.is_stopped:
        raise ActorStopped(f"{ref!r} has stopped")
    loop = asyncio.get_running_loop()
    future: asyncio.Future[object] = loop.create_future()
    ref.tell(request(_FutureRecipient(future)))
    deadlines = ref.deadlines
    if deadlines is None or deadlines.loop is not loop:
        deadlines = AskDeadlines(loop, LoopClock())
    deadlines.add(future, timeout_seconds)
    try:
        return await future  # type: ignore[return-value]  # the request's `reply_to` takes no other type
    except AskTimeout:
        raise AskTimeout(f"{ref!r} did not answer within {timeout_seconds} s") from None
    finally:
        del deadlines.due[future]
        if deadlines is not ref.deadlines:
            deadlines.close()
