"""Addresses of actors, and the one way to await an answer from outside them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from cuelight.kernel.errors import AskTimeout
from cuelight.kernel.mailbox import Mailbox

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)
A = TypeVar("A")


class Ref(Generic[M_contra]):
    """The address of an actor: all that others hold of it."""

    __slots__ = ("_mailbox", "tell")

    def __init__(self, mailbox: Mailbox[M_contra]) -> None:
        self._mailbox = mailbox
        self.tell: Callable[[M_contra], None] = mailbox.put
        """Queue a message without waiting. Raises `NotAccepted` or `MailboxFull`; a stopped actor's are dropped."""

    def __repr__(self) -> str:
        return f"<Ref {self._mailbox.name}>"


class _Answer(Generic[A]):
    """A return address that resolves a future with the first message it is told."""

    __slots__ = ("_future",)

    def __init__(self, future: asyncio.Future[A]) -> None:
        self._future = future

    def tell(self, message: A, /) -> None:
        if not self._future.done():
            self._future.set_result(message)


async def ask(ref: Ref[M], request: Callable[[_Answer[A]], M], timeout_seconds: float) -> A:
    """Send `request(return_address)` and await its one answer. For code outside the actors only.

    Raises:
        AskTimeout: no answer within `timeout_seconds`.
        NotAccepted, MailboxFull: as `Ref.tell`.
    """
    future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
    ref.tell(request(_Answer(future)))
    try:
        async with asyncio.timeout(timeout_seconds):
            return await future
    except TimeoutError:
        raise AskTimeout(f"{ref!r} did not answer within {timeout_seconds} s") from None
