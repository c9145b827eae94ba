"""A cast that passes numbered messages around, and a ledger that knows which of them may be missing, and why.

The ledger hears from the actors what they tell and handle, and from the tap what the driver says it does. It knows
nothing of mailboxes.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, assert_never

import msgspec

from cuelight.kernel import (
    OWN,
    Actor,
    ActorSpec,
    Context,
    Delivered,
    Ended,
    Event,
    ExitCause,
    InLoop,
    InProcess,
    MailboxFull,
    OnThread,
    Ref,
    RestartPolicy,
    Role,
    Started,
    Strategy,
    Terminated,
)
from cuelight.kernel.placement.wire import WINDOW
from cuelight.kernel.simulation.faults import Faults, SimulatedCrash
from cuelight.kernel.simulation.simulator import Simulation

CAST = (
    ("sink", InLoop()),
    ("store", InProcess()),
    ("relay", OnThread()),
    ("mixer", InProcess()),
    ("left", InLoop()),
    ("right", InLoop()),
)
NAMES = tuple(name for name, _ in CAST)
SOURCES = ("left", "right")
HOPS = 7


class Note(msgspec.Struct, frozen=True, tag=True):
    """The `number`-th message of this sender to this receiver in this lane."""

    sender: str
    number: int
    hops: int


class Urgent(Note, frozen=True, tag=True):
    """One that overtakes."""


class Own(msgspec.Struct, frozen=True, tag=True):
    """From a worker or timer of an actor's `life`."""

    life: int
    hops: int
    names: frozenset[str] = frozenset(NAMES)  # in another order in each interpreter


Messages: TypeAlias = Note | Urgent | Own | Terminated
Edge: TypeAlias = tuple[str, str, bool]
"""Sender, receiver, and whether in the urgent lane."""


@dataclass
class _Life:
    number: int
    told_before: dict[Edge, int]
    delivered: list[object] = field(default_factory=list)
    handled: list[object] = field(default_factory=list)


class Ledger:
    """What was told, posted, delivered and handled. Raises AssertionError where the promise is broken."""

    def __init__(self) -> None:
        self.told: Counter[Edge] = Counter()
        self.told_too_late: Counter[str] = Counter()
        self.arrived: Counter[Edge] = Counter()
        self.delivered: Counter[str] = Counter()
        self.posted: Counter[str] = Counter()
        self.lives: dict[str, _Life] = {}
        self.lives_before: Counter[str] = Counter()
        self.last_end: dict[str, Ended] = {}
        self.ended_at: dict[tuple[str, int], float] = {}
        self.timers: list[tuple[str, int, float]] = []
        self.watched: dict[str, dict[str, Ref[Messages]]] = defaultdict(dict)
        self.ends_to_hear: dict[tuple[str, str], deque[int]] = defaultdict(deque)
        self.kills: dict[Edge, list[tuple[int, int]]] = defaultdict(list)
        """The first number that a killed life told, and the first of the next life. The last of them may be lost."""
        self.refused = 0
        self.lost = 0
        self.lost_under_way: Counter[Edge] = Counter()

    def tell(self, sender: str, ref: Ref[Messages], kind: type[Note], hops: int) -> None:
        """Tell the next message of its edge. One that is refused was never told."""
        edge = (sender, ref.name, kind is Urgent)
        is_too_late = ref.is_stopped
        try:
            ref.tell(kind(sender, self.told[edge], hops))
        except MailboxFull:
            self.refused += 1
        else:
            self.told[edge] += not is_too_late
            self.told_too_late[ref.name] += is_too_late

    def handle(self, actor: str, message: object) -> None:
        self.lives[actor].handled.append(message)

    def post(self, actor: str, life: int) -> None:
        """A worker of this life has something for its actor."""
        if actor in self.lives and self.lives[actor].number == life:
            self.posted[actor] += 1

    def see(self, event: Event) -> None:
        """The tap."""
        match event:
            case Delivered():
                self._deliver(event)
            case Started(_, actor, number):
                assert actor not in self.lives, f"{actor} begins a life while another one lasts"
                assert number == self.lives_before[actor] + 1, f"{actor} begins life {number} out of turn"
                self.lives[actor] = _Life(number, {edge: self.told[edge] for edge in self.told if edge[0] == actor})
            case Ended():
                self._end(event)
            case _:
                assert_never(event)

    def _deliver(self, event: Delivered) -> None:
        actor, message = event.actor, event.message
        assert actor in self.lives, f"{actor} is given a message and does not live"
        self.lives[actor].delivered.append(message)
        self.delivered[actor] += 1
        if isinstance(message, Note):
            edge = (event.sender, actor, isinstance(message, Urgent))
            assert message.sender == event.sender, f"{message} is said to come from {event.sender}"
            self._pass_over(edge, message.number)
            expected = self.arrived[edge]
            assert message.number == expected, f"{edge} brings {message.number} where {expected} is due"
            assert expected < self.told[edge], f"{edge} brings {expected}, which was never told"
            self.arrived[edge] += 1
        elif isinstance(message, Terminated):
            watched = event.sender
            ends = self.ends_to_hear[watched, actor]
            assert ends, f"{actor} hears of an end of {watched} that never was, or hears twice"
            before = ends.popleft()
            self._pass_over((watched, actor, False), before)
            assert self.arrived[watched, actor, False] == before, f"{actor} hears of the end of {watched} out of turn"
        else:
            assert isinstance(message, Own) and event.sender == OWN
            assert message.life == self.lives[actor].number, f"{actor} hears from an earlier life of its own"

    def _pass_over(self, edge: Edge, number: int) -> None:
        """What may have been lost with its sender's process, if that explains why this number is next."""
        for first, end in self.kills[edge]:
            if first <= self.arrived[edge] < end <= number:
                self.lost_under_way[edge] += end - self.arrived[edge]
                self.arrived[edge] = end

    def _end(self, event: Ended) -> None:
        actor = event.actor
        life = self.lives.pop(actor)
        assert event.life == life.number
        self.lives_before[actor] = life.number
        self.ended_at[actor, life.number] = event.seconds
        self.last_end[actor] = event
        lost = len(life.delivered) - len(life.handled)
        assert all(a is b for a, b in zip(life.delivered, life.handled, strict=False)), f"{actor} handles what it likes"
        is_kill_of_process = event.cause is ExitCause.KILLED and isinstance(dict(CAST)[actor], InProcess)
        is_death = event.cause is ExitCause.SIGNALED or is_kill_of_process
        allowed = WINDOW if is_death else 1 if event.cause is ExitCause.CRASHED else 0
        assert 0 <= lost <= allowed, f"{lost} messages are lost with {actor}, which ended with {event.error!r}"
        self.lost += lost
        if is_death:
            for edge in self.told:
                if edge[0] == actor:
                    self.kills[edge].append((life.told_before.get(edge, 0), self.told[edge]))
        for watcher, ref in self.watched[actor].items():
            if not ref.is_stopped:
                self.posted[watcher] += 1
                self.ends_to_hear[actor, watcher].append(self.told[actor, watcher, False])

    def balance(self, simulation: Simulation, roles: dict[str, Role[Messages]], drained: Collection[str]) -> None:
        """At rest: every message is accounted for. Those `drained` lived when they were to stop in order."""
        for actor, life, due in self.timers:
            self.posted[actor] += self.ended_at.get((actor, life), due) >= due
        for name, figures in simulation.statistics().items():
            edges = [edge for edge in self.told if edge[1] == name]
            told = sum(self.told[edge] for edge in edges)
            lost_at_least = sum(self.lost_under_way[edge] for edge in edges)
            lost_at_most = lost_at_least + sum(
                max(0, end - max(first, self.arrived[edge])) for edge in edges for first, end in self.kills[edge]
            )
            for edge in edges:
                self._pass_over(edge, self.told[edge])
            missing = told - sum(self.arrived[edge] for edge in edges)
            is_stopped = simulation.find(roles[name]).is_stopped
            assert is_stopped or name in self.lives, f"{name} has neither a life nor come to its end"
            if not is_stopped or (name in drained and self.last_end[name].cause is ExitCause.STOPPED):
                assert not missing, f"{missing} messages to {name} have never come"
                unheard = sum(len(ends) for (_, who), ends in self.ends_to_hear.items() if who == name)
                assert not unheard, f"{unheard} ends have never come to the ears of {name}"
                lost_at_least = lost_at_most  # since nothing was dropped, the last ones must have been lost under way
            assert figures.delivered == self.delivered[name], f"{name} counts {figures.delivered} deliveries"
            accepted = told + self.told_too_late[name] + self.posted[name]
            accounted = figures.delivered + figures.dropped + figures.length
            assert lost_at_least <= accepted - accounted <= lost_at_most, (
                f"{accounted} of {accepted} messages to {name} are accounted for"
            )


class Passer(Actor[Messages]):
    """Passes messages on to others that it draws, at once, after a job, or after a while."""

    def __init__(self, name: str, ledger: Ledger, roles: dict[str, Role[Messages]], context: Context[Messages]) -> None:
        self.name = name
        self._ledger = ledger
        self._context = context
        self._life = ledger.lives[name].number
        self._others = [context.find(role) for other, role in roles.items() if other != name]
        self._worker = context.worker("work")
        if name in ("sink", "relay"):
            for watched in ("store", "mixer", "left"):
                context.watch(roles[watched])
                ledger.watched[watched][name] = context.ref

    def handle(self, message: Messages) -> None:
        self._ledger.handle(self.name, message)
        match message:
            case Note(hops=hops) | Urgent(hops=hops) | Own(hops=hops):
                if hops:
                    self._pass_on(hops - 1)
            case Terminated():
                pass
            case _:
                assert_never(message)

    def _pass_on(self, hops: int) -> None:
        draw = self._context.chance.random
        for _ in range(int(draw() * 3.1)):
            kind = Urgent if draw() < 0.3 else Note
            self._ledger.tell(self.name, self._others[int(draw() * len(self._others))], kind, hops)
        way = draw()
        if way < 0.1:
            self._worker.submit(lambda: hops, done=self._done, failed=lambda error: Own(self._life, 0))
        elif way < 0.2:
            seconds = draw()
            self._ledger.timers.append((self.name, self._life, self._context.clock.now() + seconds))
            self._context.after(seconds, Own(self._life, hops))

    def _done(self, hops: int) -> Own:
        self._ledger.post(self.name, self._life)
        return Own(self._life, hops)


def drawn_fate(chance: random.Random) -> RestartPolicy:
    backoff = chance.choice((0.0, 0.01, 0.5))
    return RestartPolicy(
        restarts_max=chance.choice((2, 100, 100, 100)),
        window_seconds=chance.choice((0.5, 60.0)),
        strategy=chance.choice(list(Strategy)),
        backoff_seconds=backoff,
        backoff_max_seconds=backoff * chance.choice((1, 8)),
    )


def drawn_faults(chance: random.Random) -> Faults:
    return Faults(
        crash=chance.choice((0.0, 0.01, 0.05)),
        kill=chance.choice((0.0, 0.02, 0.1)),
        delay_seconds_max=chance.choice((0.0, 0.001, 0.5)),
    )


def run_history(seed: int, *, record: bool = False) -> tuple[Simulation, Ledger]:
    """One history, drawn from the seed and checked."""
    chance = random.Random(f"history {seed}")
    ledger = Ledger()
    roles: dict[str, Role[Messages]] = {
        name: Role(name, Messages, capacity=chance.choice((8, 100)), urgent=(Urgent,)) for name in NAMES
    }
    parts = [
        ActorSpec(roles[name], partial(Passer, name, ledger, roles), drawn_fate(chance), placement)
        for name, placement in CAST
    ]
    simulation = Simulation(parts, seed, tap=ledger.see, faults=drawn_faults(chance), record=record)
    for _ in range(20):
        ref = simulation.find(roles[chance.choice(SOURCES)])
        kind = Urgent if chance.random() < 0.2 else Note
        simulation.at(chance.choice((0.0, chance.random(), 3.0)), partial(ledger.tell, "", ref, kind, HOPS))
    if chance.random() < 0.2:  # more than may be handed over at once
        for _ in range(2 * WINDOW):
            simulation.at(1.0, partial(ledger.tell, "", simulation.find(roles["store"]), Note, 0))
    for _ in range(chance.choice((0, 0, 1, 5))):
        name = chance.choice(NAMES)
        simulation.at(chance.random() * 3, partial(simulation.kill, roles[name], "as drawn"))
    drained: set[str] = set()
    if chance.random() < 0.4:
        simulation.run(until_seconds=chance.random() * 2)
        drop = chance.random() < 0.3
        drained |= set() if drop else ledger.lives.keys()
        simulation.stop(drop=drop)
    simulation.run()
    ledger.balance(simulation, roles, drained if simulation.failure is None else ())
    if simulation.failure is not None:
        is_planned = isinstance(simulation.failure.__cause__, SimulatedCrash) or "as drawn" in str(simulation.failure)
        assert is_planned, f"nobody planned {simulation.failure}"
    return simulation, ledger
