"""A cast as data: who there is, what each accepts, and how each is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import UnionType
from typing import TYPE_CHECKING, Generic, TypeVar, get_args

if TYPE_CHECKING:
    from cuelight.kernel.actor import Actor, Context

M_contra = TypeVar("M_contra", contravariant=True)


@dataclass(frozen=True)
class Role(Generic[M_contra]):
    """A name with a protocol: the key under which the cast finds an actor's address.

    `accepts` is the protocol's union (or its single type), `capacity` the bound of its mailbox in messages. `urgent`
    messages overtake the others; list with each all those that it must not overtake.
    """

    name: str
    accepts: type | UnionType
    capacity: int
    urgent: tuple[type, ...] = ()

    def message_types(self) -> frozenset[type]:
        """The members of the protocol."""
        return frozenset(get_args(self.accepts) or (self.accepts,))


@dataclass(frozen=True)
class Part(Generic[M_contra]):
    """Who plays a role: `build` makes the actor, at the start and at each restart."""

    role: Role[M_contra]
    build: Callable[[Context[object]], Actor[M_contra]]
