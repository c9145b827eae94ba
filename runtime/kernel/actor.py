"""Actors, their contexts, and the specs of a cast.

An `ActorSpec` is data: the role that an actor plays, how the actor is built, where it lives, and its restart policy.
"""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from types import UnionType
from typing import Generic, Never, Protocol, TypeAlias, TypeVar, Union, get_args, get_origin

from cuelight.kernel.clock import ActorClock, Timer
from cuelight.kernel.ref import Ref
from cuelight.kernel.supervision import RestartPolicy
from cuelight.kernel.worker import Worker

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)


class Actor(ABC, Generic[M_contra]):
    """State behind a mailbox. Handlers run to completion, one message at a time, and never await.

    A life begins in the constructor and ends when the actor is stopped or crashes: raises any exception.
    """

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if inspect.iscoroutinefunction(cls.handle):
            raise TypeError(f"{cls.__name__}.handle must be synchronous; send awaited results as a later message")

    def started(self) -> None:
        """Hook, called once before the first message."""

    @abstractmethod
    def handle(self, message: M_contra) -> None:
        """Handle one message: change the actor's state, send messages, or submit blocking work to a worker."""

    def stopped(self) -> None:
        """Hook, called once after the last message; not after a crash."""


class Context(Protocol[M_contra]):
    """The interface of one life of an actor to its system: addresses, time, randomness, timers and workers."""

    @property
    def ref(self) -> Ref[M_contra]:
        """The address of this actor."""

    @property
    def clock(self) -> ActorClock:
        """The actor's clock: `clock.now()` is the time at which the message being handled was delivered."""

    @property
    def chance(self) -> random.Random:
        """The random number generator of this life."""

    def find(self, role: Role[M]) -> Ref[M]:
        """Return the address of the actor that plays `role`. Raises KeyError for a role outside the cast."""

    def worker(self, name: str) -> Worker[M_contra]:
        """Start a worker for blocking work, which posts its results to this actor and ends with this life."""

    def after(self, seconds: float, message: M_contra) -> Timer:
        """Post `message` to this actor once, `seconds` from now, unless the timer is cancelled or this life ends."""

    def watch(self, role: Role[Never]) -> None:
        """Receive `Terminated` at the end of each life of the actor that plays `role`; at once if it has stopped.

        A watch survives restarts of both actors. Raises KeyError for a role outside the cast, and NotAccepted where
        this actor's protocol lacks `Terminated`.
        """

    def spawn(self, part: ActorSpec[M]) -> Ref[M]:
        """Add an actor to the running system; see `System.spawn`."""

    def dismiss(self, role: Role[Never], *, drop: bool = False) -> None:
        """Stop an actor of the running system; see `System.dismiss`."""

    def kill(self, role: Role[Never], reason: str) -> None:
        """End the present life of an actor as a crash; see `System.kill`."""


@dataclass(frozen=True)
class Role(Generic[M_contra]):
    """A name with a protocol: the key under which the cast finds an actor's address.

    `accepts` is the protocol's union (or its single type), `capacity` the bound of the mailbox in messages. Messages of
    the `urgent` types overtake the others; list with each type all those that it must not overtake.
    """

    name: str
    accepts: type | UnionType
    capacity: int
    urgent: tuple[type, ...] = ()

    def __post_init__(self) -> None:
        assert self.capacity > 0, "a mailbox holds at least one message"
        types = self.message_types()
        if not all(isinstance(kind, type) for kind in types):
            raise TypeError(f"{self.name!r} must accept a class or a union of classes, not {self.accepts!r}")
        if not isinstance(self.urgent, tuple) or not set(self.urgent) <= set(types):
            raise TypeError(f"urgent must be a tuple of types that {self.name!r} accepts, not {self.urgent!r}")

    def message_types(self) -> tuple[type, ...]:
        """Return the members of the protocol as classes, a generic member without its arguments."""
        members = get_args(self.accepts) if get_origin(self.accepts) in (UnionType, Union) else (self.accepts,)
        return tuple(get_origin(member) or member for member in members)


@dataclass(frozen=True)
class InLoop:
    """The actor lives in its system's event loop: the default, and by far the fastest."""

    message_bytes_max = 0  # nothing crosses


@dataclass(frozen=True)
class OnThread:
    """The actor lives in its own event loop on its own thread. Messages cross as msgpack."""

    message_bytes_max: int = 64 * 1024 * 1024


@dataclass(frozen=True)
class InProcess:
    """The actor lives in a fresh child process, which inherits no state. Messages cross as msgpack.

    `build` must be a function, or a `functools.partial` of one, that another process can import.
    """

    message_bytes_max: int = 64 * 1024 * 1024


Placement: TypeAlias = InLoop | OnThread | InProcess


@dataclass(frozen=True)
class ActorSpec(Generic[M_contra]):
    """The spec of one actor of a cast. `build` makes the actor, at the start and at each restart."""

    role: Role[M_contra]
    build: Callable[[Context[object]], Actor[M_contra]]
    restart_policy: RestartPolicy = field(default_factory=RestartPolicy)
    placement: Placement = field(default_factory=InLoop)

    def __post_init__(self) -> None:
        if not isinstance(self.restart_policy, RestartPolicy):
            raise TypeError(
                f"the restart policy of {self.role.name!r} must be a RestartPolicy, not {self.restart_policy!r}; "
                "pass the other fields as keywords"
            )
        if not isinstance(self.placement, Placement):
            raise TypeError(
                f"the placement of {self.role.name!r} must be InLoop(), OnThread() or InProcess(), not "
                f"{self.placement!r}"
            )
