"""Addresses of actors, and the one way to await an answer from outside them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, runtime_checkable

from cuelight.kernel.errors import ActorStopped, AskTimeout

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)
A = TypeVar("A")


@runtime_checkable
class Address(Protocol[M_contra]):
    """Anything that takes messages of type `M`. What a request's `reply_to` is."""

    def tell(self, message: M_contra, /) -> None:
        """Hand over one message without waiting."""


class Ref(Generic[M_contra]):
    """The address of an actor: all that others hold of it. Valid across its restarts, also on another thread's loop
    or in another process when it came there in a message.
    """

    __slots__ = ("__weakref__", "_is_stopped", "name", "tell")

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

    @property
    def is_stopped(self) -> bool:
        """Whether the actor has stopped for good. Only known where the actor's system runs."""
        return self._is_stopped()

    def __repr__(self) -> str:
        return f"<Ref {self.name}>"


class _Answer(Generic[A]):
    """A return address that resolves a future with the first message it is told."""

    __slots__ = ("__weakref__", "_future")

    def __init__(self, future: asyncio.Future[A]) -> None:
        self._future = future

    def tell(self, message: A, /) -> None:
        if not self._future.done():
            self._future.set_result(message)


def _expire(future: asyncio.Future[A]) -> None:
    if not future.done():
        future.set_exception(AskTimeout)


async def ask(ref: Ref[M], request: Callable[[Address[A]], M], timeout_seconds: float) -> A:
    """Send `request(return_address)` and await its one answer. For code outside the actors only.

    Raises:
        AskTimeout: no answer within `timeout_seconds`.
        ActorStopped: there will never be one.
        NotAccepted, MailboxFull, NotSendable: as `Ref.tell`.
    """
    if ref.is_stopped:
        raise ActorStopped(f"{ref!r} has stopped")
    loop = asyncio.get_running_loop()
    future: asyncio.Future[A] = loop.create_future()
    ref.tell(request(_Answer(future)))
    # A bare timer: the scope that `asyncio.timeout` opens costs more than the whole round trip.
    timer = loop.call_later(timeout_seconds, _expire, future)
    try:
        return await future
    except AskTimeout:
        raise AskTimeout(f"{ref!r} did not answer within {timeout_seconds} s") from None
    finally:
        timer.cancel()
