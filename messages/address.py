"""Where an answer goes: the only thing a message knows of its sender."""

from __future__ import annotations

from typing import Protocol, TypeVar, runtime_checkable

M_contra = TypeVar("M_contra", contravariant=True)


@runtime_checkable
class Address(Protocol[M_contra]):
    """Anything that takes messages of type `M`: an actor's ref, a client's stream, a test's list."""

    def tell(self, message: M_contra, /) -> None:
        """Hand over one message without waiting."""
