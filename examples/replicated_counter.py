"""A counter on three replicas that agree in the end, whatever crashes and however late messages come.

    python examples/replicated_counter.py [SEED_COUNT] [bug]

A client sends each increment until a replica has acknowledged it; the replicas tell each other what they have. A seed
decides who crashes when and what comes first, and so the history. With "bug", replicas acknowledge before they save.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, assert_never

from cuelight.kernel import Actor, ActorSpec, Context, Recipient, RestartPolicy, Role
from cuelight.kernel.simulation.faults import Faults
from cuelight.kernel.simulation.simulator import Simulation, for_each_seed

INCREMENTS = frozenset(range(30))
RESTART_POLICY = RestartPolicy(restarts_max=100, window_seconds=1.0, backoff_max_seconds=0.5)


@dataclass(frozen=True)
class Increment:
    """Count one more, once for each number. Answered by `Acknowledged`, unless the replica crashes."""

    number: int
    reply_to: Recipient[Acknowledged]


@dataclass(frozen=True)
class Acknowledged:
    number: int


@dataclass(frozen=True)
class Merge:
    """From another replica: what it has counted. Not answered."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class _Tick:
    """To oneself, by a timer: send again those messages that may have been lost."""


ReplicaMessage: TypeAlias = Increment | Merge
CLIENT = Role[Acknowledged]("client", Acknowledged, capacity=1000)
REPLICAS = tuple(Role[ReplicaMessage](f"replica {number}", ReplicaMessage, capacity=1000) for number in range(3))


class Replica(Actor[ReplicaMessage | _Tick]):
    """Counts numbers, not messages, so that duplicates do no harm. Like a disk, `saved` survives its crashes."""

    def __init__(self, context: Context[ReplicaMessage | _Tick], saved: set[int], has_bug: bool) -> None:
        self._context, self._saved, self._has_bug = context, saved, has_bug
        self._others = [context.find(role) for role in REPLICAS if role.name != context.ref.name]

    def started(self) -> None:
        self._context.after(1.0, _Tick())

    def handle(self, message: ReplicaMessage | _Tick) -> None:
        match message:
            case Increment(number, reply_to):
                if not self._has_bug:
                    self._saved.add(number)
                reply_to.tell(Acknowledged(number))
                self._tell_others(number)  # with the bug, a crash here loses the increment
                self._saved.add(number)
            case Merge(numbers):
                self._saved.update(numbers)
            case _Tick():
                self._context.after(1.0, message)
                self._tell_others(*sorted(self._saved))
            case _:
                assert_never(message)

    def _tell_others(self, *numbers: int) -> None:
        for other in self._others:
            other.tell(Merge(numbers))


class Client(Actor[Acknowledged | _Tick]):
    def __init__(self, context: Context[Acknowledged | _Tick], unacknowledged: set[int]) -> None:
        self._context, self._unacknowledged = context, unacknowledged
        self._replicas = [context.find(role) for role in REPLICAS]

    def started(self) -> None:
        self.handle(_Tick())

    def handle(self, message: Acknowledged | _Tick) -> None:
        match message:
            case Acknowledged(number):
                self._unacknowledged.discard(number)
            case _Tick():
                self._context.after(1.0, message)
                for number in sorted(self._unacknowledged):
                    self._context.chance.choice(self._replicas).tell(Increment(number, self._context.ref))
            case _:
                assert_never(message)


def trial(seed: int, *, has_bug: bool) -> None:
    saved: list[set[int]] = [set() for _ in REPLICAS]
    builds = [partial(Replica, saved=numbers, has_bug=has_bug) for numbers in saved]
    replicas = [ActorSpec(role, build, RESTART_POLICY) for role, build in zip(REPLICAS, builds, strict=True)]
    client = ActorSpec(CLIENT, partial(Client, unacknowledged=set(INCREMENTS)), RESTART_POLICY)
    simulation = Simulation([*replicas, client], seed, faults=Faults(crash=0.05, delay_seconds_max=0.5))
    simulation.run(until_seconds=30)
    counts = [len(numbers) for numbers in saved]
    assert counts == [len(INCREMENTS)] * len(REPLICAS), f"the replicas count {counts} of {len(INCREMENTS)}"
    print(f"seed {seed}: {counts}, {hashlib.sha256(simulation.history).hexdigest()}")


if __name__ == "__main__":
    seeds = range(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
    for_each_seed(seeds, partial(trial, has_bug="bug" in sys.argv))
