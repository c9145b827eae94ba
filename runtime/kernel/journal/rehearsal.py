"""The surroundings of an actor whose life is replayed: its context, addresses, and the messages that it sends.

Workers and timers are inert: their messages are in the recorded inbox.
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
"""The id of an address that the actor made itself: which number it has in the recording is unknown to a replay."""


@dataclass(frozen=True)
class SentMessage:
    """A message that the replayed actor sent, and the message that it was handling (`index`, `handling`)."""

    life: int
    index: int
    handling: object
    kind: Name
    body: bytes | None
    may_be_lost: bool = False


class SentMessages:
    """The sent messages that wait for comparison, in order: a queue for each receiver, lane, and actor of that name.

    A name can be that of several actors in succession: each spawn after a dismissal gives it a new actor.
    """

    def __init__(self, roles: dict[str, Role[Never]]) -> None:
        self._roles = roles
        self._queues: dict[tuple[str, str, int], deque[SentMessage]] = {}
        self._slots: Counter[str] = Counter()
        self._spawned: Counter[str] = Counter()
        self._known: dict[str, Role[Never] | None] = {}
        self._crashes: dict[int, int] = {}

    def spawned(self, actor: str) -> None:
        """Count an actor that the replayed actor spawns; its recorded start comes later in the journal."""
        self._slots[actor] += 1
        self._spawned[actor] += 1

    def started(self, actor: str, life: int) -> None:
        """Note a recorded start. A first life is that of a new actor, which gets queues of its own.

        Messages in the queues of its predecessor were never delivered.
        """
        if life > 1:
            return
        if self._spawned[actor]:
            self._spawned[actor] -= 1
        else:
            self._slots[actor] += 1

    def queue_of(self, receiver: str, kind: Name, kind_type: type | None) -> deque[SentMessage]:
        """Return the queue for messages of this type; each type has its own where the receiver's role is unknown."""
        role = self._known.setdefault(receiver, self._roles.get(receiver))
        lane = kind if role is None else "urgent" if kind_type in role.urgent else ""
        # Messages can be sent to an actor of the cast before its first life begins.
        return self._queues.setdefault((receiver, lane, max(1, self._slots[receiver])), deque())

    def crashed_at(self, life: int, index: int) -> None:
        """Note that the recorded life crashed at message `index`: messages sent since may be missing in it."""
        self._crashes[life] = index

    def process_died(self, receiver: str) -> None:
        """Note that a receiver's process died: messages that wait for comparison may be lost with it."""
        for (actor, _, _), queue in self._queues.items():
            if actor == receiver:
                lost = [replace(sent, may_be_lost=True) for sent in queue]
                queue.clear()
                queue.extend(lost)

    def may_be_missing(self, sent: SentMessage) -> bool:
        """Return whether a sent message may be missing in the recording."""
        return sent.may_be_lost or sent.index >= self._crashes.get(sent.life, sent.index + 1)


class Finder(Protocol):
    """Returns the address of the actor that plays a role."""

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
    """A worker or a timer that does nothing: its messages are in the recorded inbox."""

    def submit(
        self, work: Callable[[], T], done: Callable[[T], object], failed: Callable[[Exception], object]
    ) -> None: ...

    def close(self, *, drop: bool = False) -> None: ...

    def cancel(self) -> None: ...


class ExternalRecipient:
    """An address outside the actors, by its number in the journal."""

    def __init__(self, number: int) -> None:
        self.number = number

    def tell(self, message: object, /) -> None:
        """Ignore the message: messages to addresses outside the cast are not recorded."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExternalRecipient) and (
            self.number == other.number or UNKNOWN_ID in (self.number, other.number)
        )

    def __hash__(self) -> int:
        return hash(self.number)

    def __repr__(self) -> str:
        return f"<address {self.number}>"


def id_of(address: Recipient[object]) -> AddressId:
    """Return the id of an address in encoded messages."""
    if isinstance(address, Ref):
        return address.name
    return address.number if isinstance(address, ExternalRecipient) else UNKNOWN_ID
