"""A cast as data: who there is, what each accepts, how each is built, where it lives and what follows its death."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import UnionType
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar, Union, get_args, get_origin

from cuelight.kernel.supervision import Fate

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

    def __post_init__(self) -> None:
        types = self.message_types()
        if not all(isinstance(kind, type) for kind in types):
            raise TypeError(f"{self.name!r} must accept a class or a union of classes, not {self.accepts!r}")
        if not isinstance(self.urgent, tuple) or not set(self.urgent) <= set(types):
            raise TypeError(f"urgent must be a tuple of types that {self.name!r} accepts, not {self.urgent!r}")

    def message_types(self) -> tuple[type, ...]:
        """The members of the protocol, as classes: those of a generic one take messages of any of its types."""
        is_union = get_origin(self.accepts) in (UnionType, Union)
        members = get_args(self.accepts) if is_union else (self.accepts,)
        return tuple(get_origin(member) or member for member in members)


@dataclass(frozen=True)
class InLoop:
    """The actor lives in its system's event loop: the default, and by far the fastest."""


@dataclass(frozen=True)
class OnThread:
    """The actor lives in an event loop of its own, on a thread of its own. Messages cross as msgpack."""

    message_bytes_max: int = 64 * 1024 * 1024


@dataclass(frozen=True)
class InProcess:
    """The actor lives in a child process, started afresh; nothing is inherited. Messages cross as msgpack.

    `build` must be a function, or a `functools.partial` of one, that another process can import.
    """

    message_bytes_max: int = 64 * 1024 * 1024


Placement: TypeAlias = InLoop | OnThread | InProcess


@dataclass(frozen=True)
class Part(Generic[M_contra]):
    """Who plays a role: `build` makes the actor, at the start and at each restart."""

    role: Role[M_contra]
    build: Callable[[Context[object]], Actor[M_contra]]
    fate: Fate = field(default_factory=Fate)
    placement: Placement = field(default_factory=InLoop)

    def __post_init__(self) -> None:
        if not isinstance(self.fate, Fate):
            raise TypeError(
                f"the fate of {self.role.name!r} must be a Fate, not {self.fate!r}; others go by their names"
            )
        if not isinstance(self.placement, Placement):
            raise TypeError(f"{self.role.name!r} can live InLoop(), OnThread() or InProcess(), not {self.placement!r}")
