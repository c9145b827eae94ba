"""What an actor finds around it while its life is replayed: addresses and the ways to them, and nobody there.

No thread and no timer does anything: what they have said is in the recorded inbox.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Never, Protocol, TypeVar

from cuelight.kernel.actor import ActorSpec, Role
from cuelight.kernel.clock import ActorClock, Timer
from cuelight.kernel.codec import AddressId, Name
from cuelight.kernel.ref import Recipient, Ref
from cuelight.kernel.worker import Worker

M = TypeVar("M")
T = TypeVar("T")

UNKNOWN_ID: Final = -1
"""The id of an address that the actor made itself: the recording has a number for it, the replay cannot know which."""


@dataclass(frozen=True)
class SentMessage:
    """A message on its way, and the one in whose handling it was told."""

    life: int
    index: int
    handling: object
    kind: Name
    body: bytes | None
    may_be_lost: bool = False


class SentMessages:
    """What was told and not compared yet, in order: a queue for each receiver, lane, and occupant of its slot."""

    def __init__(self, roles: dict[str, Role[Never]]) -> None:
        self._roles = roles
        self._queues: dict[tuple[str, str, int], deque[SentMessage]] = {}
        self._slots: Counter[str] = Counter()
        self._spawned: Counter[str] = Counter()
        self._known: dict[str, Role[Never] | None] = {}
        self._crashes: dict[int, int] = {}

    def spawned(self, actor: str) -> None:
        """There is a newcomer, whose recorded start comes only after the message that made it."""
        self._slots[actor] += 1
        self._spawned[actor] += 1

    def started(self, actor: str, life: int) -> None:
        """A first life is that of a newcomer: what its predecessor had not heard by its end, nobody will."""
        if life > 1:
            return
        if self._spawned[actor]:
            self._spawned[actor] -= 1
        else:
            self._slots[actor] += 1

    def queue_of(self, receiver: str, kind: Name, kind_type: type | None) -> deque[SentMessage]:
        """The queue for messages of this type. Where the receiver's lanes are unknown, each type has its own."""
        role = self._known.setdefault(receiver, self._roles.get(receiver))
        lane = kind if role is None else "urgent" if kind_type in role.urgent else ""
        # Whoever stands in a cast can be told things before its own life begins.
        return self._queues.setdefault((receiver, lane, max(1, self._slots[receiver])), deque())

    def crashed_at(self, life: int, index: int) -> None:
        """This life crashed at `index`: what is told there now need not have been told when it was recorded."""
        self._crashes[life] = index

    def process_died(self, receiver: str) -> None:
        """Its process was killed, with what had been handed over to it."""
        for (actor, _, _), queue in self._queues.items():
            if actor == receiver:
                lost = [replace(sent, may_be_lost=True) for sent in queue]
                queue.clear()
                queue.extend(lost)

    def may_be_missing(self, sent: SentMessage) -> bool:
        """Whether it may be missing in the recording."""
        return sent.may_be_lost or sent.index >= self._crashes.get(sent.life, sent.index + 1)


class Finder(Protocol):
    """Gives the address of the actor that plays a role."""

    def __call__(self, role: Role[M], /) -> Ref[M]: ...


class ReplayContext:
    """The context of an actor whose inbox is replayed."""

    def __init__(
        self, ref: Ref[object], clock: ActorClock, seed: int, find: Finder, on_spawn: Callable[[str], None]
    ) -> None:
        self.ref = ref
        self.clock = clock
        self.chance = random.Random(seed)
        self._find = find
        self._on_spawn = on_spawn

    def find(self, role: Role[M]) -> Ref[M]:
        return self._find(role)

    def worker(self, name: str) -> Worker[object]:
        return Inert()

    def after(self, seconds: float, message: object) -> Timer:
        return Inert()

    def watch(self, role: Role[Never]) -> None: ...

    def spawn(self, part: ActorSpec[M]) -> Ref[M]:
        self._on_spawn(part.role.name)
        return self._find(part.role)

    def dismiss(self, role: Role[Never], *, drop: bool = False) -> None: ...

    def kill(self, role: Role[Never], reason: str) -> None: ...


class Inert:
    """A thread or a timer that does nothing: what it would post is in the recorded inbox."""

    def submit(
        self, work: Callable[[], T], done: Callable[[T], object], failed: Callable[[Exception], object]
    ) -> None: ...

    def close(self, *, drop: bool = False) -> None: ...

    def cancel(self) -> None: ...


class ExternalRecipient:
    """The address of someone who is no actor, as the journal numbered it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def tell(self, message: object, /) -> None:
        """What leaves the cast is not recorded."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExternalRecipient) and (
            self.number == other.number or UNKNOWN_ID in (self.number, other.number)
        )

    def __hash__(self) -> int:
        return hash(self.number)

    def __repr__(self) -> str:
        return f"<address {self.number}>"


def id_of(address: Recipient[object]) -> AddressId:
    """What an address crosses as."""
    if isinstance(address, Ref):
        return address.name
    return address.number if isinstance(address, ExternalRecipient) else UNKNOWN_ID
