"""Addresses of actors, and the one way to await an answer from outside them."""

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
"""Between two looks at what has waited for too long, so that looking cannot take all the time where much does."""


@runtime_checkable
class Recipient(Protocol[M_contra]):
    """Anything that takes messages of type `M`. What a request's `reply_to` is."""

    def tell(self, message: M_contra, /) -> None:
        """Hand over one message without waiting."""


class Ref(Generic[M_contra]):
    """The address of an actor: all that others hold of it. Valid across its restarts, also on another thread's loop
    or in another process when it came there in a message.
    """

    __slots__ = ("__weakref__", "_is_stopped", "deadlines", "name", "tell")

    def __init__(
        self, name: str, tell: Callable[[M_contra], None], is_stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self.name = name
        self.tell: Callable[[M_contra], None] = tell
        """Queue a message without waiting. A stopped actor's are dropped.

        Raises `NotAccepted`, `MailboxFull`, or, for an actor that lives elsewhere, `NotSendable`. What another
        thread's or process's actor tells is checked against the mailbox's bound only when it arrives; a full mailbox
        then crashes its sender.
        """
        self._is_stopped = is_stopped
        self.deadlines: AskDeadlines | None = None
        """Those of its system, which everybody's asks share."""

    @property
    def is_stopped(self) -> bool:
        """Whether the actor has stopped for good. Only known where the actor's system runs."""
        return self._is_stopped()

    def __repr__(self) -> str:
        return f"<Ref {self.name}>"


class _FutureRecipient:
    """A return address that resolves a future with the first message it is told."""

    __slots__ = ("__weakref__", "_future")

    def __init__(self, future: asyncio.Future[object]) -> None:
        self._future = future

    def tell(self, message: object, /) -> None:
        if not self._future.done():
            self._future.set_result(message)


class AskDeadlines:
    """Until when each of the futures that wait in one event loop may wait: one timer, for the earliest of them.

    A timer of its own would cost each ask a sixth of its time, and hardly any ever fires.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self.loop = loop
        self._clock = clock
        self.due: dict[asyncio.Future[object], float] = {}
        """Those that wait. Whoever waits no longer takes itself away."""
        self._cancel: Callable[[], object] = lambda: None
        self._next_look = math.inf

    def add(self, future: asyncio.Future[object], seconds: float) -> None:
        """Give it `AskTimeout` so long from now, or a few milliseconds later, unless it is taken away before."""
        due = self.due[future] = self._clock.now() + seconds
        if due < self._next_look:
            self._look_at(due)

    def close(self) -> None:
        """Leave no timer behind where nothing waits."""
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
        ActorStopped: there will never be one.
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
        return await future  # type: ignore[return-value]  # as what was asked for takes no other
    except AskTimeout:
        raise AskTimeout(f"{ref!r} did not answer within {timeout_seconds} s") from None
    finally:
        del deadlines.due[future]
        if deadlines is not ref.deadlines:
            deadlines.close()
