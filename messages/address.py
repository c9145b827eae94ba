"""The address that an answer is sent to, in the `reply_to` of a message."""

from __future__ import annotations

from typing import Protocol, TypeVar, runtime_checkable

M_contra = TypeVar("M_contra", contravariant=True)


@runtime_checkable
class Address(Protocol[M_contra]):
    """A receiver of messages of type `M`: an actor's ref, a client's stream or a test's list."""

    def tell(self, message: M_contra, /) -> None:
        """Send one message without waiting."""
