"""What an actor is and what it is given; and a cast as data: who there is, what each accepts, how each is built, where
it lives and what follows its death.
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

    Its life begins in its constructor and ends when it is stopped or when it raises anything: then it has crashed.
    """

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if inspect.iscoroutinefunction(cls.handle):
            raise TypeError(f"{cls.__name__}.handle must be synchronous: what must be waited for is a later message")

    def started(self) -> None:
        """Called once, before the first message."""

    @abstractmethod
    def handle(self, message: M_contra) -> None:
        """React to one message: change own state, tell others, or hand blocking work to a worker."""

    def stopped(self) -> None:
        """Called once, after the last message; not after a crash."""


class Context(Protocol[M_contra]):
    """An actor's surroundings, for one life: its own address, the others', time, chance, timers and threads."""

    @property
    def ref(self) -> Ref[M_contra]:
        """Its own address."""

    @property
    def clock(self) -> ActorClock:
        """Time as this actor sees it: `clock.now()` is when the message being handled was delivered."""

    @property
    def chance(self) -> random.Random:
        """This life's own source of chance."""

    def find(self, role: Role[M]) -> Ref[M]:
        """The address of the actor that plays `role`. Raises KeyError for a role outside the cast."""

    def worker(self, name: str) -> Worker[M_contra]:
        """A new thread for blocking work, which posts its results to this actor. It ends with this life."""

    def after(self, seconds: float, message: M_contra) -> Timer:
        """Post `message` to this actor once, `seconds` from now; not if it is cancelled or this life ends first."""

    def watch(self, role: Role[Never]) -> None:
        """Be told `Terminated` at the end of each life of the actor that plays `role`; at once if it has stopped.

        A watch outlives restarts of both. Raises KeyError for a role outside the cast, and NotAccepted unless this
        actor's own protocol has `Terminated`.
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

    `accepts` is the protocol's union (or its single type), `capacity` the bound of its mailbox in messages. `urgent`
    messages overtake the others; list with each all those that it must not overtake.
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
        """The members of the protocol, as classes: those of a generic one take messages of any of its types."""
        members = get_args(self.accepts) if get_origin(self.accepts) in (UnionType, Union) else (self.accepts,)
        return tuple(get_origin(member) or member for member in members)


@dataclass(frozen=True)
class InLoop:
    """The actor lives in its system's event loop: the default, and by far the fastest."""

    message_bytes_max = 0  # nothing crosses


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
class ActorSpec(Generic[M_contra]):
    """Who plays a role: `build` makes the actor, at the start and at each restart."""

    role: Role[M_contra]
    build: Callable[[Context[object]], Actor[M_contra]]
    restart_policy: RestartPolicy = field(default_factory=RestartPolicy)
    placement: Placement = field(default_factory=InLoop)

    def __post_init__(self) -> None:
        if not isinstance(self.restart_policy, RestartPolicy):
            raise TypeError(
                f"the restart policy of {self.role.name!r} must be a RestartPolicy, not {self.restart_policy!r}; "
                "the other fields are keywords"
            )
        if not isinstance(self.placement, Placement):
            raise TypeError(f"{self.role.name!r} can live InLoop(), OnThread() or InProcess(), not {self.placement!r}")
