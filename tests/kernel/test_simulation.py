"""The seeded driver: its clock, its faults, its promises for messages, and histories determined by their seeds."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

import histories
import msgspec
import pytest
from histories import run_history
from support import Recorder

from cuelight.kernel import (
    Actor,
    ActorCrashed,
    ActorSpec,
    Context,
    Delivered,
    Ended,
    Event,
    ExitCause,
    InLoop,
    InProcess,
    Mailbox,
    MailboxFull,
    MessageTooLarge,
    NotSendable,
    OnThread,
    Placement,
    RestartPolicy,
    Role,
    Started,
    Strategy,
    Terminated,
)
from cuelight.kernel.placement.wire import WINDOW
from cuelight.kernel.simulation.faults import FaultInjector, Faults, SimulatedCrash, SimulatedKill
from cuelight.kernel.simulation.simulator import Simulation, SimulationError, for_each_seed
from cuelight.kernel.simulation.virtual import VirtualMailbox, _Channel
from cuelight.messages.address import Address

HISTORIES = int(os.environ.get("CUELIGHT_HISTORIES", "200"))
MANY = RestartPolicy(restarts_max=1000, backoff_seconds=0.0, backoff_max_seconds=0.0)


class Note(msgspec.Struct, frozen=True, tag=True):
    number: int


class Urgent(Note, frozen=True, tag=True):
    pass


class Question(msgspec.Struct, frozen=True, tag=True):
    reply_to: Address[Note]


class Parcel(msgspec.Struct, frozen=True, tag=True):
    """A message whose content may be unsendable."""

    content: object


class Letter(msgspec.Struct, frozen=True, tag=True):
    text: str


Messages: TypeAlias = Note | Urgent | Question | Parcel | Letter | Terminated
Reaction: TypeAlias = Callable[["LoggingActor", object], None]


class LoggingActor(Actor[Messages]):
    """Logs its hooks and messages, and calls the test's reaction."""

    def __init__(self, name: str, log: list[str], react: Reaction | None, context: Context[Messages]) -> None:
        self.name, self.log, self.context, self.react = name, log, context, react
        log.append(f"{name} built")

    def started(self) -> None:
        self.log.append(f"{self.name} started")
        if self.react is not None:
            self.react(self, None)

    def handle(self, message: Messages) -> None:
        self.log.append(f"{self.name} {getattr(message, 'number', type(message).__name__)}")
        if self.react is not None:
            self.react(self, message)

    def stopped(self) -> None:
        self.log.append(f"{self.name} stopped")


def role(name: str, capacity: int = 1000) -> Role[Messages]:
    return Role(name, Messages, capacity, urgent=(Urgent,))


@dataclass
class SimulationHarness:
    """Specs of logging actors, and the log and events of their simulation."""

    log: list[str] = field(default_factory=list)
    parts: list[ActorSpec[Messages]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def add(
        self,
        name: str,
        react: Reaction | None = None,
        restart_policy: RestartPolicy | None = None,
        placement: Placement | None = None,
        capacity: int = 1000,
    ) -> SimulationHarness:
        self.parts.append(self.part(name, react, restart_policy or RestartPolicy(), placement or InLoop(), capacity))
        return self

    def part(
        self,
        name: str,
        react: Reaction | None = None,
        restart_policy: RestartPolicy = RestartPolicy(),  # noqa: B008  # frozen
        placement: Placement = InLoop(),  # noqa: B008  # frozen
        capacity: int = 1000,
    ) -> ActorSpec[Messages]:
        return ActorSpec(role(name, capacity), partial(LoggingActor, name, self.log, react), restart_policy, placement)

    def open(self, seed: int = 0, faults: Faults = Faults()) -> Simulation:  # noqa: B008  # frozen
        return Simulation(self.parts, seed, tap=self.events.append, faults=faults)

    def lines(self, name: str) -> list[str]:
        return [line.removeprefix(f"{name} ") for line in self.log if line.startswith(f"{name} ")]

    def numbers(self, name: str) -> list[int]:
        return [int(line) for line in self.lines(name) if line.isdigit()]


def tell_all(simulation: Simulation, name: str, count: int) -> None:
    for number in range(count):
        simulation.find(role(name)).tell(Note(number))


def crash_on(number: int) -> Reaction:
    def react(_player: LoggingActor, message: object) -> None:
        if isinstance(message, Note) and message.number == number:
            raise RuntimeError("as planned")

    return react


# One seed, one history.


def test_seed_determines_the_history() -> None:
    texts = [run_history(seed, record=True)[0].history for seed in (3, 3, 4)]
    assert len(texts[0]) > 1000
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_history_is_the_same_in_a_fresh_interpreter_with_other_hashes() -> None:
    def digest(seed: int) -> str:
        return hashlib.sha256(run_history(seed, record=True)[0].history).hexdigest()

    program = (
        "import hashlib, histories\n"
        "for seed in range(5):\n"
        "    print(hashlib.sha256(histories.run_history(seed, record=True)[0].history).hexdigest())"
    )
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(histories.__file__).parent)},
        )
        assert done.stdout.split() == [digest(seed) for seed in range(5)]


def test_history_holds_encodable_messages_and_the_types_of_others() -> None:
    stranger: Recorder[Note] = Recorder()
    simulation = SimulationHarness().add("actor").open()
    for message in (Question(stranger), Question(simulation.find(role("actor"))), Parcel(object()), Parcel(2**100)):
        simulation.find(role("actor")).tell(message)
    simulation.run()
    decoder = msgspec.msgpack.Decoder()
    events = [decoder.decode(each) for each in simulation._history._data]  # type: ignore[union-attr]  # the encoded events
    names = [event[3].split(":")[-1] for event in events[1:]]
    assert names == ["Question", "Question", "Parcel", "Parcel"]
    assert [event[4:] for event in events[1:]] == [
        [{"type": "Question", "reply_to": 0}],
        [{"type": "Question", "reply_to": "actor"}],
        [{"type": "Parcel", "content": "builtins:object"}],
        [],
    ]


def test_history_contains_no_memory_addresses() -> None:
    objects: list[object] = []  # kept alive, so that addresses are unique

    def place() -> str:
        objects.append(object())
        return repr(objects[-1])

    def break_down(_player: LoggingActor, message: object) -> None:
        if isinstance(message, Note):
            raise LookupError(f"no {place()}, nor {place()}")

    def watch(actor: LoggingActor, message: object) -> None:
        if message is None:
            actor.context.watch(role("actor"))

    def history() -> bytes:
        simulation = SimulationHarness().add("actor", break_down, MANY).add("watcher", watch).open()
        simulation.run()
        simulation.find(role("actor")).tell(Note(0))
        for told in (Letter(place()), Parcel({place(): {place()}})):
            simulation.find(role("watcher")).tell(told)
        simulation.run()
        return simulation.history

    first, second = history(), history()
    assert len(set(map(repr, objects))) == len(objects) == 10
    assert first == second
    assert first.count(b"no <object object at 0x>, nor <object object at 0x>") == 2  # in its end and in `Terminated`
    assert first.count(b"<object object at 0x>") == 7


def test_nothing_is_recorded_without_record() -> None:
    simulation = Simulation(SimulationHarness().add("actor").parts, 0, record=False)
    tell_all(simulation, "actor", 3)
    simulation.run()
    assert simulation.history == b""
    assert simulation.statistics()["actor"].delivered == 3


# Histories.


def test_histories_lose_no_more_than_promised() -> None:
    for_each_seed(range(HISTORIES), run_history)


def test_histories_contain_every_kind_of_event() -> None:
    """A condition for `test_histories_lose_no_more_than_promised` to cover the promises."""
    kinds: set[str] = set()
    lost = refused = failures = 0
    for seed in range(100):
        simulation, ledger = run_history(seed)
        lost, refused = lost + ledger.lost, refused + ledger.refused
        failures += simulation.failure is not None
        kinds |= {"kill"} if any(end.cause is ExitCause.SIGNALED for end in ledger.last_end.values()) else set()
        kinds |= {"construction"} if any("construction" in end.error for end in ledger.last_end.values()) else set()
        kinds |= {"restart"} if max(ledger.lives_before.values(), default=0) > 3 else set()
    assert kinds == {"kill", "construction", "restart"}
    assert min(lost, refused, failures) > 0


TAKE, POST, ARRIVE, ENDED = Mailbox.take, Mailbox.post, VirtualMailbox._arrive_now, VirtualMailbox.sender_ended


def _swaps(self: Mailbox) -> object:
    lane = self.urgent or self.ordinary
    if len(lane) > 3:
        lane.rotate(1)
    return TAKE(self)


def _duplicates(self: Mailbox, message: object, sender: str) -> None:
    POST(self, message, sender)
    if len(self) == 5:
        POST(self, message, sender)


def _loses(self: Mailbox) -> object:
    if len(self) > 4:
        TAKE(self)
    return TAKE(self)


def _forgets(self: Mailbox) -> None:
    self._dropped += len(self)
    self.urgent.clear()
    self.ordinary.clear()


def _remembers(self: Mailbox) -> None:
    pass


def _overtakes(self: VirtualMailbox, edge: _Channel) -> None:
    edge.in_transit.rotate(1)
    ARRIVE(self, edge)


def _gives_up(self: VirtualMailbox, sender: str, *, is_killed: bool) -> None:
    ENDED(self, sender, is_killed=True)


def _hastens(self: VirtualMailbox, message: object, sender: str = "(own)") -> None:
    POST(self, message, sender)


def _drops(self: VirtualMailbox, *, drop: bool) -> None:
    Mailbox.close(self, drop=True)


def _hands_over_all(self: FaultInjector, seat: object) -> int:
    return len(seat.mailbox)  # type: ignore[attr-defined]  # a seat


@pytest.mark.parametrize(
    ("owner", "name", "bug", "complaint"),
    [
        (Mailbox, "take", _swaps, "is due|out of turn"),
        (Mailbox, "take", _loses, "is due|out of turn|counts"),
        (Mailbox, "post", _duplicates, "is due|out of turn"),
        (Mailbox, "begin_life", _forgets, "is due|out of turn|never delivered"),
        (Mailbox, "begin_life", _remembers, "an earlier life"),
        (VirtualMailbox, "_arrive_now", _overtakes, "is due|out of turn"),
        (VirtualMailbox, "post", _hastens, "out of turn"),
        (VirtualMailbox, "close", _drops, "never delivered"),
        (VirtualMailbox, "sender_ended", _gives_up, "is due|out of turn|never delivered"),
        (FaultInjector, "lost_count", _hands_over_all, "messages are lost"),
    ],
)
def test_histories_find_a_planted_bug(
    owner: type, name: str, bug: object, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises(SimulationError, match=rf"seed \d+: AssertionError: .*({complaint})"):
        for_each_seed(range(200), run_history)


def test_a_failing_trial_names_its_seed() -> None:
    def trial(seed: int) -> None:
        assert seed != 17, "seventeen"

    for_each_seed(range(17), trial)
    with pytest.raises(SimulationError, match=r"^seed 17: AssertionError: seventeen") as caught:
        for_each_seed(range(15, 20), trial)
    assert isinstance(caught.value.__cause__, AssertionError)


# Time.


def test_virtual_time_stops_in_handlers_and_jumps_to_the_next_timer() -> None:
    seen: list[tuple[float, object]] = []

    def react(actor: LoggingActor, message: object) -> None:
        seen.append((actor.context.clock.now(), message))
        if message is None:
            actor.context.after(2.5, Note(2))
            actor.context.after(0.5, Note(1))
            actor.context.after(1.0, Note(0)).cancel()

    simulation = SimulationHarness().add("actor", react).open()
    simulation.at(7.0, partial(simulation.find(role("actor")).tell, Note(4)))
    simulation.at(7.0, partial(simulation.find(role("actor")).tell, Note(5)))
    simulation.run(until_seconds=7.0 - 1e-9)
    assert seen == [(0.0, None), (0.5, Note(1)), (2.5, Note(2))]
    simulation.run()
    assert seen[3:] == [(7.0, Note(4)), (7.0, Note(5))]
    simulation.at(1.0, partial(simulation.find(role("actor")).tell, Note(6)))
    simulation.run()
    assert seen[5:] == [(7.0, Note(6))], "what is late is done now"


def test_timers_end_with_the_life_that_set_them() -> None:
    def react(actor: LoggingActor, message: object) -> None:
        if message is None and actor.log.count("actor built") == 1:
            actor.context.after(5.0, Note(9))
        crash_on(0)(actor, message)

    harness = SimulationHarness().add("actor", react, MANY)
    simulation = harness.open()
    tell_all(simulation, "actor", 2)
    simulation.run()
    assert harness.lines("actor") == ["built", "started", "0", "built", "started", "1"]


def test_actor_that_never_rests_is_reported() -> None:
    def react(actor: LoggingActor, message: object) -> None:
        actor.context.after(1.0, Note(0))

    simulation = SimulationHarness().add("actor", react).open()
    with pytest.raises(SimulationError, match="not at rest after 1000 steps"):
        simulation.run(steps_max=1000)
    simulation.stop()
    assert simulation.find(role("actor")).is_stopped


# Workers.


def _working(actor: LoggingActor, message: object) -> None:
    worker = actor.context.worker("work")

    def work(number: int) -> int:
        actor.log.append(f"work {number}")
        if number == 2:
            raise ValueError
        return number

    if message is None:
        for number in range(4):
            worker.submit(partial(work, number), done=lambda n: Note(10 + n), failed=lambda _: Note(99))


def test_worker_runs_jobs_in_order_at_drawn_times() -> None:
    orders = set()
    for seed in range(10):
        harness = SimulationHarness().add("actor", _working)
        simulation = harness.open(seed)
        tell_all(simulation, "actor", 1)
        simulation.run()
        assert harness.lines("work") == ["0", "1", "2", "3"]
        assert [n for n in harness.numbers("actor") if n >= 10] == [10, 11, 99, 13]
        orders.add(tuple(harness.log))
    assert len(orders) > 3


def test_worker_that_outlives_its_actor_posts_nothing() -> None:
    def react(actor: LoggingActor, message: object) -> None:
        _working(actor, message)
        crash_on(0)(actor, message)

    counts = set()
    for seed in range(30):
        harness = SimulationHarness().add("actor", react, MANY)
        simulation = harness.open(seed)
        tell_all(simulation, "actor", 1)
        simulation.run()
        crash = harness.lines("actor").index("0")
        # The second life receives no post of the first life's workers.
        assert [n for n in map(int, filter(str.isdigit, harness.lines("actor")[crash + 1 :])) if n >= 10] == [
            10,
            11,
            99,
            13,
        ]
        counts.add(len(harness.lines("work")))
    assert min(counts) == 4
    assert max(counts) > 5, "some jobs were done for the first life"


# Supervision.


@pytest.mark.parametrize(
    ("strategy", "leaving", "built"),
    [
        (Strategy.ONE_FOR_ONE, [], ["b"]),
        (Strategy.REST_FOR_ONE, ["d", "c"], ["b", "c", "d"]),
        (Strategy.ONE_FOR_ALL, ["d", "c", "a"], ["a", "b", "c", "d"]),
    ],
)
@pytest.mark.parametrize("placement", [InLoop(), OnThread(), InProcess()])
def test_strategy_selects_the_actors_that_restart(
    strategy: Strategy, leaving: list[str], built: list[str], placement: Placement
) -> None:
    for seed in range(10):
        harness = SimulationHarness()
        for name in "abcd":
            restart_policy = (
                RestartPolicy(5, strategy=strategy, backoff_seconds=1.0) if name == "b" else RestartPolicy()
            )
            harness.add(name, crash_on(1), restart_policy, placement)
        simulation = harness.open(seed)
        simulation.run()
        del harness.log[:], harness.events[:]
        tell_all(simulation, "b", 4)
        simulation.run()
        assert simulation.failure is None
        assert harness.numbers("b") == [0, 1, 2, 3], "what waits survives"
        assert [line[0] for line in harness.log if line.endswith("stopped")] == leaving
        assert [line[0] for line in harness.log if line.endswith("built")] == built
        ended = [event for event in harness.events if isinstance(event, Ended)]
        assert [event.actor for event in ended] == ["b", *leaving]
        begun = [event for event in harness.events if isinstance(event, Started)]
        assert [event.actor for event in begun] == built
        assert 0.5 <= begun[0].seconds - ended[0].seconds <= 1.0, "after the back-off"


def test_a_crash_beyond_the_restart_policy_ends_everything() -> None:
    harness = (
        SimulationHarness()
        .add("sink")
        .add("actor", crash_on(2), RestartPolicy(restarts_max=1, backoff_seconds=0.0))
        .add("source")
    )
    simulation = harness.open()
    for number in (0, 2, 1, 2, 3):
        simulation.find(role("actor")).tell(Note(number))
    simulation.run()
    assert isinstance(simulation.failure, ActorCrashed)
    assert simulation.failure.actor == "actor"
    assert str(simulation.failure.__cause__) == "as planned"
    assert harness.numbers("actor") == [0, 2, 1, 2]
    assert [line for line in harness.log if line.endswith("stopped")] == ["source stopped", "sink stopped"]
    assert simulation.statistics()["actor"].dropped == 1
    simulation.find(role("sink")).tell(Note(0))
    simulation.run()
    assert simulation.statistics()["sink"].dropped == 1


def test_constructor_that_crashes_again_restarts_the_whole_group() -> None:
    """The group restarts with the sink, also when the sink's second constructor fails before the others are built."""
    built: list[str] = []

    class Fragile(LoggingActor):
        def __init__(self, name: str, context: Context[Messages]) -> None:
            super().__init__(name, [], crash_on(0), context)
            built.append(name)
            if built.count("sink") == 2 and name == "sink":
                raise RuntimeError("not yet")

    restart_policy = RestartPolicy(5, strategy=Strategy.ONE_FOR_ALL, backoff_seconds=0.0)
    parts = [ActorSpec(role(name), partial(Fragile, name), restart_policy) for name in ("sink", "source")]
    for seed in range(10):
        built.clear()
        simulation = Simulation(parts, seed)
        tell_all(simulation, "source", 1)
        simulation.run()
        assert built == ["sink", "source", "sink", "sink", "source"]


def test_watcher_receives_terminated_after_all_earlier_messages() -> None:
    def react(actor: LoggingActor, message: object) -> None:
        sink = actor.context.find(role("sink"))
        if isinstance(message, Note):
            for number in range(5):
                sink.tell(Note(10 * message.number + number))
            raise RuntimeError

    for seed in range(20):
        received: list[object] = []

        def listen(actor: LoggingActor, message: object, received: list[object] = received) -> None:
            received.append(message)
            if message is None:
                actor.context.watch(role("actor"))

        harness = SimulationHarness().add("sink", listen).add("actor", react, MANY)
        simulation = harness.open(seed, Faults(delay_seconds_max=1.0))
        simulation.run()
        tell_all(simulation, "actor", 2)
        simulation.run()
        ends = [message for message in received if isinstance(message, Terminated)]
        assert [(end.actor, end.is_restarting) for end in ends] == [("actor", True)] * 2
        notes = [Note(number) for number in range(5)], [Note(10 + number) for number in range(5)]
        assert received == [None, *notes[0], ends[0], *notes[1], ends[1]]


def test_watching_takes_a_protocol() -> None:
    def build(context: Context[Note]) -> Actor[Note]:
        context.watch(role("sink"))
        raise AssertionError("not reached")

    with pytest.raises(ActorCrashed, match="its protocol needs Terminated"):
        Simulation([*SimulationHarness().add("sink").parts, ActorSpec(Role("actor", Note, 1), build)], 0)


def test_stopping_drains_sources_first() -> None:
    def relay(actor: LoggingActor, message: object) -> None:
        if isinstance(message, Note):
            actor.context.find(role("sink")).tell(message)

    for seed in range(10):
        harness = SimulationHarness().add("sink").add("relay", relay).add("source")
        simulation = harness.open(seed, Faults(delay_seconds_max=1.0))
        tell_all(simulation, "relay", 20)
        simulation.at(0.0, simulation.stop)
        simulation.run()
        assert harness.numbers("sink") == list(range(20))
        assert [line for line in harness.log if line.endswith("stopped")] == [
            "source stopped",
            "relay stopped",
            "sink stopped",
        ]


def test_actors_are_spawned_and_dismissed() -> None:
    harness = SimulationHarness()

    def react(actor: LoggingActor, message: object) -> None:
        if message == Note(1):
            actor.context.spawn(harness.part("guest")).tell(Note(5))
        elif message == Note(2):
            actor.context.dismiss(role("guest"))
            actor.context.find(role("guest")).tell(Note(6))

    simulation = harness.add("host", react).open()
    for number in (1, 2):
        simulation.find(role("host")).tell(Note(number))
        simulation.run()
    assert harness.lines("guest") == ["built", "started", "5", "stopped"]
    with pytest.raises(KeyError):
        simulation.find(role("guest"))
    simulation.spawn(harness.part("guest", placement=InProcess())).tell(Note(7))
    simulation.run()
    assert harness.lines("guest")[4:] == ["built", "started", "7"]
    simulation.stop()
    assert simulation.spawn(harness.part("late")).is_stopped


def test_actor_whose_build_raises_is_not_spawned() -> None:
    def build(_context: Context[Messages]) -> Actor[Messages]:
        raise RuntimeError("no")

    simulation = SimulationHarness().add("host").open()
    with pytest.raises(ActorCrashed):
        simulation.spawn(ActorSpec(role("guest"), build))
    with pytest.raises(KeyError):
        simulation.find(role("guest"))
    simulation.spawn(ActorSpec(role("guest"), build, placement=OnThread()))
    assert simulation.failure is None
    simulation.run()
    assert simulation.failure is not None, "where it lives elsewhere, it crashes later"


def test_actor_with_an_unsendable_protocol_is_not_spawned() -> None:
    simulation = SimulationHarness().add("host").open()
    unresolvable = type("Unresolvable", (), {"__annotations__": {"field": "Nowhere"}})
    with pytest.raises(NotSendable, match="Nowhere"):
        simulation.spawn(
            ActorSpec(Role("guest", unresolvable, 1), partial(LoggingActor, "guest", [], None), placement=OnThread())
        )
    with pytest.raises(KeyError):
        simulation.find(role("guest"))
    tell_all(simulation, "host", 1)
    simulation.run()
    assert simulation.statistics()["host"].delivered == 1


def test_a_dismissed_actor_does_not_come_back() -> None:
    harness = SimulationHarness().add("actor", crash_on(0), RestartPolicy(3, backoff_seconds=1.0))
    simulation = harness.open()
    tell_all(simulation, "actor", 2)
    simulation.at(0.25, partial(simulation.dismiss, role("actor")))
    simulation.run()
    assert harness.lines("actor") == ["built", "started", "0"]
    with pytest.raises(KeyError):
        simulation.find(role("actor"))


# Messages on their way.


def test_delays_keep_only_each_senders_order() -> None:
    def react(actor: LoggingActor, message: object) -> None:
        if message is None:
            for number in range(10):
                kind = Urgent if number % 3 == 0 else Note
                actor.context.find(role("sink")).tell(kind(number + (100 if actor.name == "a" else 0)))

    mixtures = set()
    for seed in range(20):
        harness = SimulationHarness().add("sink").add("a", react).add("b", react)
        simulation = harness.open(seed, Faults(delay_seconds_max=1.0))
        simulation.run()
        numbers = harness.numbers("sink")
        for offset in (0, 100):
            mine = [number - offset for number in numbers if number // 100 == offset // 100]
            assert [number for number in mine if number % 3 == 0] == [0, 3, 6, 9]
            assert [number for number in mine if number % 3] == [1, 2, 4, 5, 7, 8]
        mixtures.add(tuple(numbers))
        times = {event.seconds for event in harness.events if isinstance(event, Delivered)}
        assert len(times) > 1
        assert max(times) <= 1.0
    assert len(mixtures) == 20


def test_delayed_messages_count_against_the_capacity() -> None:
    for seed in range(10):
        simulation = SimulationHarness().add("actor", capacity=5).open(seed, Faults(delay_seconds_max=1.0))
        tell_all(simulation, "actor", 5)
        with pytest.raises(MailboxFull):
            simulation.find(role("actor")).tell(Note(5))
        simulation.run()
        tell_all(simulation, "actor", 5)


@pytest.mark.parametrize("placement", [OnThread(), InProcess()])
def test_unsendable_message_is_refused_at_the_sender(placement: Placement) -> None:
    def react(actor: LoggingActor, message: object) -> None:
        if isinstance(message, Parcel):
            actor.context.find(role("away")).tell(message)

    harness = SimulationHarness().add("away", placement=placement).add("home", react)
    simulation = harness.open()
    with pytest.raises(NotSendable, match="object cannot be encoded"):
        simulation.find(role("away")).tell(Parcel(object()))
    simulation.find(role("home")).tell(Parcel(object()))
    simulation.run()
    assert harness.numbers("away") == []
    assert simulation.failure is not None
    assert simulation.failure.actor == "home"
    assert isinstance(simulation.failure.__cause__, NotSendable)


def test_unsendable_message_of_a_placed_actor_is_refused() -> None:
    def react(actor: LoggingActor, message: object) -> None:
        if message is not None:
            actor.context.find(role("home")).tell(Parcel(object()))

    simulation = SimulationHarness().add("home").add("away", react, placement=InProcess()).open()
    tell_all(simulation, "away", 1)
    simulation.run()
    assert simulation.failure is not None
    assert isinstance(simulation.failure.__cause__, NotSendable)


def test_a_message_too_large_is_refused() -> None:
    simulation = SimulationHarness().add("away", placement=OnThread(message_bytes_max=100)).open()
    simulation.find(role("away")).tell(Letter("x" * 50))
    with pytest.raises(MessageTooLarge):
        simulation.find(role("away")).tell(Letter("x" * 100))


def test_addresses_cross_and_copies_arrive() -> None:
    questions: list[Question] = []

    def react(actor: LoggingActor, message: object) -> None:
        if isinstance(message, Question):
            questions.append(message)
            message.reply_to.tell(Note(7))
            if len(questions) == 2:
                message.reply_to.tell(Urgent(8))

    stranger: Recorder[Note] = Recorder()
    harness = SimulationHarness().add("home").add("away", react, placement=InProcess())
    simulation = harness.open()
    asked = [Question(simulation.find(role("home"))), Question(stranger)]
    for question in asked:
        simulation.find(role("away")).tell(question)
    simulation.run()
    assert harness.numbers("home") == [7]
    assert stranger.messages == [Note(7)]
    assert not any(question is copy for question, copy in zip(asked, questions, strict=True))
    assert "does not accept Urgent" in str(simulation.failure), "its type says that it takes notes"


def test_messages_of_a_placed_actor_to_itself_end_with_its_life() -> None:
    def react(actor: LoggingActor, message: object) -> None:
        if message == Note(0):
            actor.context.ref.tell(Note(10))
            raise RuntimeError

    for placement, numbers in ((InLoop(), [0, 1, 10]), (InProcess(), [0, 1])):
        harness = SimulationHarness().add("actor", react, MANY, placement)
        simulation = harness.open()
        tell_all(simulation, "actor", 2)
        simulation.run()
        assert harness.numbers("actor") == numbers


# Faults.


def test_injected_crash_comes_before_within_or_after_a_handler() -> None:
    def react(actor: LoggingActor, message: object) -> None:
        if isinstance(message, Note):
            for number in range(3):
                actor.context.find(role("sink")).tell(Note(number))
            actor.log.append("actor done")

    stories = set()
    for seed in range(60):
        harness = SimulationHarness().add("sink").add("actor", react)
        simulation = harness.open(seed, Faults(crash=0.5))
        tell_all(simulation, "actor", 1)
        simulation.run()
        if simulation.failure is not None and simulation.failure.actor == "actor":
            assert isinstance(simulation.failure.__cause__, SimulatedCrash)
            told = sum(isinstance(event, Delivered) and event.actor == "sink" for event in harness.events)
            stories.add(
                (told if simulation.statistics()["sink"].dropped == 0 else -1, tuple(harness.lines("actor"))[2:])
            )
    lines = {story for _, story in stories}
    assert lines == {(), ("0",), ("0", "done")}


def test_handler_cannot_suppress_an_injected_crash() -> None:
    def react(actor: LoggingActor, message: object) -> None:
        if isinstance(message, Note):
            for _ in range(10):
                with suppress(Exception):  # like careless code
                    actor.context.find(role("sink")).tell(Note(0))

    simulation = SimulationHarness().add("sink").add("actor", react).open(0, Faults(crash=1.0))
    tell_all(simulation, "actor", 1)
    simulation.run()
    assert simulation.failure is not None
    assert isinstance(simulation.failure.__cause__, SimulatedCrash)


def test_kill_loses_only_messages_handed_over() -> None:
    counts = set()
    for seed in range(40):
        harness = SimulationHarness().add("away", None, MANY, InProcess()).add("home")
        simulation = harness.open(seed, Faults(kill=0.1))
        tell_all(simulation, "away", 200)
        tell_all(simulation, "home", 200)
        simulation.run()
        assert harness.numbers("home") == list(range(200)), "only processes are killed"
        numbers = harness.numbers("away")
        assert numbers == sorted(set(numbers))
        gaps = [after - before - 1 for before, after in zip([-1, *numbers], [*numbers, 200], strict=True)]
        kills = [event for event in harness.events if isinstance(event, Ended)]
        assert all((event.cause, event.killed_by) == (ExitCause.SIGNALED, "SIGKILL") for event in kills)
        assert sum(gaps) <= WINDOW * len(kills)
        counts.update(gaps)
    assert max(counts) > WINDOW // 2


def test_one_kill_loses_at_most_a_window() -> None:
    losses = set()
    for seed in range(200):
        harness = SimulationHarness().add("away", None, RestartPolicy(), InProcess())
        simulation = harness.open(seed, Faults(kill=1.0))
        tell_all(simulation, "away", 100)
        simulation.run()
        assert simulation.failure is not None
        assert isinstance(simulation.failure.__cause__, SimulatedKill)
        losses.add(simulation.statistics()["away"].delivered)
    assert (min(losses), max(losses)) == (1, WINDOW)


def test_kill_may_lose_the_last_messages_under_way() -> None:
    def react(actor: LoggingActor, message: object) -> None:
        if isinstance(message, Note):
            for number in range(10):
                actor.context.find(role("sink")).tell(Note(number))

    told = set()
    for seed in range(60):
        harness = SimulationHarness().add("sink").add("away", react, MANY, InProcess())
        simulation = harness.open(seed, Faults(kill=1.0, delay_seconds_max=1.0))
        tell_all(simulation, "away", 1)
        simulation.run()
        arrived = harness.numbers("sink")
        assert arrived == list(range(len(arrived)))
        told.add(len(arrived))
    assert {0, 1, 2, 3} < told, "killed early or later, with something under way or nothing"


@pytest.mark.parametrize("placement", [InLoop(), OnThread(), InProcess()])
def test_kill_ends_a_life_as_a_crash(placement: Placement) -> None:
    def react(actor: LoggingActor, message: object) -> None:
        if message == Note(50):
            actor.context.kill(role("other"), "as planned")

    losses, ends = set(), set()
    for seed in range(40):
        harness = SimulationHarness().add("other", None, MANY, placement).add("actor", react)
        simulation = harness.open(seed)
        tell_all(simulation, "actor", 100)
        tell_all(simulation, "other", 100)
        simulation.run()
        simulation.kill(role("nobody"), "there is none")
        simulation.stop()
        assert simulation.failure is None
        numbers = harness.numbers("other")
        assert numbers == sorted(set(numbers))
        losses.add(100 - len(numbers))
        ends.update((event.error, event.cause, event.killed_by) for event in harness.events if isinstance(event, Ended))
        assert harness.lines("other").count("built") == 2
        assert harness.lines("other").count("stopped") == 1, "who is killed does not stop in order"
    killed = ("actor 'other' died: it was killed: as planned", ExitCause.KILLED, "actor")
    assert ends == {killed, ("", ExitCause.STOPPED, "")}
    if isinstance(placement, InProcess):
        assert WINDOW // 2 < max(losses) <= WINDOW
    else:
        assert losses == {0}


def test_a_kill_beyond_the_restart_policy_ends_everything() -> None:
    harness = SimulationHarness().add("actor", lambda actor, message: actor.context.kill(role("actor"), "as planned"))
    simulation = harness.open()
    simulation.run()
    assert str(simulation.failure) == "actor 'actor' died: it was killed: as planned"
    assert harness.lines("actor") == ["built", "started"]


def test_error_of_the_tap_is_raised() -> None:
    def tap(event: Event) -> None:
        assert not isinstance(event, Delivered), "seen"

    simulation = Simulation(SimulationHarness().add("actor").parts, 0, tap=tap)
    tell_all(simulation, "actor", 1)
    with pytest.raises(AssertionError, match="seen"):
        simulation.run()
