"""The seeded driver: its clock, its faults, what it promises of messages, and that a seed is all of a history."""

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
    """May hold what cannot be sent."""

    content: object


class Letter(msgspec.Struct, frozen=True, tag=True):
    text: str


Messages: TypeAlias = Note | Urgent | Question | Parcel | Letter | Terminated
Play: TypeAlias = Callable[["Player", object], None]


class Player(Actor[Messages]):
    """Writes down all that happens to it, and does what the test wants done."""

    def __init__(self, name: str, diary: list[str], play: Play | None, context: Context[Messages]) -> None:
        self.name, self.diary, self.context, self.play = name, diary, context, play
        diary.append(f"{name} built")

    def started(self) -> None:
        self.diary.append(f"{self.name} started")
        if self.play is not None:
            self.play(self, None)

    def handle(self, message: Messages) -> None:
        self.diary.append(f"{self.name} {getattr(message, 'number', type(message).__name__)}")
        if self.play is not None:
            self.play(self, message)

    def stopped(self) -> None:
        self.diary.append(f"{self.name} stopped")


def role(name: str, capacity: int = 1000) -> Role[Messages]:
    return Role(name, Messages, capacity, urgent=(Urgent,))


@dataclass
class Troupe:
    """Parts in the making, and what becomes of them."""

    diary: list[str] = field(default_factory=list)
    parts: list[ActorSpec[Messages]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def add(
        self,
        name: str,
        play: Play | None = None,
        restart_policy: RestartPolicy | None = None,
        placement: Placement | None = None,
        capacity: int = 1000,
    ) -> Troupe:
        self.parts.append(self.part(name, play, restart_policy or RestartPolicy(), placement or InLoop(), capacity))
        return self

    def part(
        self,
        name: str,
        play: Play | None = None,
        restart_policy: RestartPolicy = RestartPolicy(),  # noqa: B008  # frozen
        placement: Placement = InLoop(),  # noqa: B008  # frozen
        capacity: int = 1000,
    ) -> ActorSpec[Messages]:
        return ActorSpec(role(name, capacity), partial(Player, name, self.diary, play), restart_policy, placement)

    def open(self, seed: int = 0, faults: Faults = Faults()) -> Simulation:  # noqa: B008  # frozen
        return Simulation(self.parts, seed, tap=self.events.append, faults=faults)

    def lines(self, name: str) -> list[str]:
        return [line.removeprefix(f"{name} ") for line in self.diary if line.startswith(f"{name} ")]

    def numbers(self, name: str) -> list[int]:
        return [int(line) for line in self.lines(name) if line.isdigit()]


def tell_all(simulation: Simulation, name: str, count: int) -> None:
    for number in range(count):
        simulation.find(role(name)).tell(Note(number))


def crash_on(number: int) -> Play:
    def play(_player: Player, message: object) -> None:
        if isinstance(message, Note) and message.number == number:
            raise RuntimeError("as planned")

    return play


# One seed, one history.


def test_a_seed_gives_one_history_and_another_seed_another() -> None:
    texts = [run_history(seed, record=True)[0].history for seed in (3, 3, 4)]
    assert len(texts[0]) > 1000
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_a_history_is_the_same_in_a_fresh_interpreter_with_other_hashes() -> None:
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


def test_a_history_holds_what_can_be_encoded_and_the_type_of_all_else() -> None:
    stranger: Recorder[Note] = Recorder()
    simulation = Troupe().add("actor").open()
    for message in (Question(stranger), Question(simulation.find(role("actor"))), Parcel(object()), Parcel(2**100)):
        simulation.find(role("actor")).tell(message)
    simulation.run()
    decoder = msgspec.msgpack.Decoder()
    events = [decoder.decode(each) for each in simulation._history._data]  # type: ignore[union-attr]  # by its parts
    names = [event[3].split(":")[-1] for event in events[1:]]
    assert names == ["Question", "Question", "Parcel", "Parcel"]
    assert [event[4:] for event in events[1:]] == [
        [{"type": "Question", "reply_to": 0}],
        [{"type": "Question", "reply_to": "actor"}],
        [{"type": "Parcel", "content": "builtins:object"}],
        [],
    ]


def test_a_history_does_not_say_where_in_memory_anything_was() -> None:
    objects: list[object] = []  # all stay alive, so that each has a place of its own

    def place() -> str:
        objects.append(object())
        return repr(objects[-1])

    def break_down(_player: Player, message: object) -> None:
        if isinstance(message, Note):
            raise LookupError(f"no {place()}, nor {place()}")

    def watch(player: Player, message: object) -> None:
        if message is None:
            player.context.watch(role("actor"))

    def history() -> bytes:
        simulation = Troupe().add("actor", break_down, MANY).add("watcher", watch).open()
        simulation.run()
        simulation.find(role("actor")).tell(Note(0))
        for told in (Letter(place()), Parcel({place(): {place()}})):
            simulation.find(role("watcher")).tell(told)
        simulation.run()
        return simulation.history

    first, second = history(), history()
    assert len(set(map(repr, objects))) == len(objects) == 10
    assert first == second
    assert first.count(b"no <object object at 0x>, nor <object object at 0x>") == 2  # its end, and `Terminated`
    assert first.count(b"<object object at 0x>") == 7


def test_nothing_is_recorded_where_nobody_wants_it() -> None:
    simulation = Simulation(Troupe().add("actor").parts, 0, record=False)
    tell_all(simulation, "actor", 3)
    simulation.run()
    assert simulation.history == b""
    assert simulation.statistics()["actor"].delivered == 3


# The histories.


def test_histories_lose_no_more_than_promised() -> None:
    for_each_seed(range(HISTORIES), run_history)


def test_histories_have_all_that_can_happen() -> None:
    """Else the one above would say little."""
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
        (Mailbox, "begin_life", _forgets, "is due|out of turn|never come"),
        (Mailbox, "begin_life", _remembers, "an earlier life"),
        (VirtualMailbox, "_arrive_now", _overtakes, "is due|out of turn"),
        (VirtualMailbox, "post", _hastens, "out of turn"),
        (VirtualMailbox, "close", _drops, "never come"),
        (VirtualMailbox, "sender_ended", _gives_up, "is due|out of turn|never come"),
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


def test_time_stands_still_and_jumps() -> None:
    seen: list[tuple[float, object]] = []

    def play(player: Player, message: object) -> None:
        seen.append((player.context.clock.now(), message))
        if message is None:
            player.context.after(2.5, Note(2))
            player.context.after(0.5, Note(1))
            player.context.after(1.0, Note(0)).cancel()

    simulation = Troupe().add("actor", play).open()
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
    def play(player: Player, message: object) -> None:
        if message is None and player.diary.count("actor built") == 1:
            player.context.after(5.0, Note(9))
        crash_on(0)(player, message)

    troupe = Troupe().add("actor", play, MANY)
    simulation = troupe.open()
    tell_all(simulation, "actor", 2)
    simulation.run()
    assert troupe.lines("actor") == ["built", "started", "0", "built", "started", "1"]


def test_whoever_never_rests_is_told_so() -> None:
    def play(player: Player, message: object) -> None:
        player.context.after(1.0, Note(0))

    simulation = Troupe().add("actor", play).open()
    with pytest.raises(SimulationError, match="not at rest after 1000 steps"):
        simulation.run(steps_max=1000)
    simulation.stop()
    assert simulation.find(role("actor")).is_stopped


# Workers.


def _working(player: Player, message: object) -> None:
    worker = player.context.worker("work")

    def work(number: int) -> int:
        player.diary.append(f"work {number}")
        if number == 2:
            raise ValueError
        return number

    if message is None:
        for number in range(4):
            worker.submit(partial(work, number), done=lambda n: Note(10 + n), failed=lambda _: Note(99))


def test_a_worker_does_its_jobs_in_order_at_drawn_moments() -> None:
    orders = set()
    for seed in range(10):
        troupe = Troupe().add("actor", _working)
        simulation = troupe.open(seed)
        tell_all(simulation, "actor", 1)
        simulation.run()
        assert troupe.lines("work") == ["0", "1", "2", "3"]
        assert [n for n in troupe.numbers("actor") if n >= 10] == [10, 11, 99, 13]
        orders.add(tuple(troupe.diary))
    assert len(orders) > 3


def test_a_worker_that_outlives_its_actor_tells_nobody() -> None:
    def play(player: Player, message: object) -> None:
        _working(player, message)
        crash_on(0)(player, message)

    counts = set()
    for seed in range(30):
        troupe = Troupe().add("actor", play, MANY)
        simulation = troupe.open(seed)
        tell_all(simulation, "actor", 1)
        simulation.run()
        crash = troupe.lines("actor").index("0")
        # Whatever the first life posted and did not hear itself, the second never hears.
        assert [n for n in map(int, filter(str.isdigit, troupe.lines("actor")[crash + 1 :])) if n >= 10] == [
            10,
            11,
            99,
            13,
        ]
        counts.add(len(troupe.lines("work")))
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
def test_who_restarts_with_whom(strategy: Strategy, leaving: list[str], built: list[str], placement: Placement) -> None:
    for seed in range(10):
        troupe = Troupe()
        for name in "abcd":
            restart_policy = (
                RestartPolicy(5, strategy=strategy, backoff_seconds=1.0) if name == "b" else RestartPolicy()
            )
            troupe.add(name, crash_on(1), restart_policy, placement)
        simulation = troupe.open(seed)
        simulation.run()
        del troupe.diary[:], troupe.events[:]
        tell_all(simulation, "b", 4)
        simulation.run()
        assert simulation.failure is None
        assert troupe.numbers("b") == [0, 1, 2, 3], "what waits survives"
        assert [line[0] for line in troupe.diary if line.endswith("stopped")] == leaving
        assert [line[0] for line in troupe.diary if line.endswith("built")] == built
        ended = [event for event in troupe.events if isinstance(event, Ended)]
        assert [event.actor for event in ended] == ["b", *leaving]
        begun = [event for event in troupe.events if isinstance(event, Started)]
        assert [event.actor for event in begun] == built
        assert 0.5 <= begun[0].seconds - ended[0].seconds <= 1.0, "after the back-off"


def test_a_crash_beyond_the_restart_policy_ends_everything() -> None:
    troupe = (
        Troupe().add("sink").add("actor", crash_on(2), RestartPolicy(restarts_max=1, backoff_seconds=0.0)).add("source")
    )
    simulation = troupe.open()
    for number in (0, 2, 1, 2, 3):
        simulation.find(role("actor")).tell(Note(number))
    simulation.run()
    assert isinstance(simulation.failure, ActorCrashed)
    assert simulation.failure.actor == "actor"
    assert str(simulation.failure.__cause__) == "as planned"
    assert troupe.numbers("actor") == [0, 2, 1, 2]
    assert [line for line in troupe.diary if line.endswith("stopped")] == ["source stopped", "sink stopped"]
    assert simulation.statistics()["actor"].dropped == 1
    simulation.find(role("sink")).tell(Note(0))
    simulation.run()
    assert simulation.statistics()["sink"].dropped == 1


def test_a_constructor_that_crashes_again_claims_those_not_yet_built() -> None:
    """Everybody restarts with the sink, also when the sink's second life fails while the others wait for theirs."""
    built: list[str] = []

    class Fragile(Player):
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


def test_who_watches_hears_the_end_after_all_that_came_before() -> None:
    def play(player: Player, message: object) -> None:
        sink = player.context.find(role("sink"))
        if isinstance(message, Note):
            for number in range(5):
                sink.tell(Note(10 * message.number + number))
            raise RuntimeError

    for seed in range(20):
        heard: list[object] = []

        def listen(player: Player, message: object, heard: list[object] = heard) -> None:
            heard.append(message)
            if message is None:
                player.context.watch(role("actor"))

        troupe = Troupe().add("sink", listen).add("actor", play, MANY)
        simulation = troupe.open(seed, Faults(delay_seconds_max=1.0))
        simulation.run()
        tell_all(simulation, "actor", 2)
        simulation.run()
        ends = [message for message in heard if isinstance(message, Terminated)]
        assert [(end.actor, end.is_restarting) for end in ends] == [("actor", True)] * 2
        notes = [Note(number) for number in range(5)], [Note(10 + number) for number in range(5)]
        assert heard == [None, *notes[0], ends[0], *notes[1], ends[1]]


def test_watching_takes_a_protocol() -> None:
    def build(context: Context[Note]) -> Actor[Note]:
        context.watch(role("sink"))
        raise AssertionError("not reached")

    with pytest.raises(ActorCrashed, match="its protocol needs Terminated"):
        Simulation([*Troupe().add("sink").parts, ActorSpec(Role("actor", Note, 1), build)], 0)


def test_stopping_drains_sources_first() -> None:
    def relay(player: Player, message: object) -> None:
        if isinstance(message, Note):
            player.context.find(role("sink")).tell(message)

    for seed in range(10):
        troupe = Troupe().add("sink").add("relay", relay).add("source")
        simulation = troupe.open(seed, Faults(delay_seconds_max=1.0))
        tell_all(simulation, "relay", 20)
        simulation.at(0.0, simulation.stop)
        simulation.run()
        assert troupe.numbers("sink") == list(range(20))
        assert [line for line in troupe.diary if line.endswith("stopped")] == [
            "source stopped",
            "relay stopped",
            "sink stopped",
        ]


def test_actors_come_and_go() -> None:
    troupe = Troupe()

    def play(player: Player, message: object) -> None:
        if message == Note(1):
            player.context.spawn(troupe.part("guest")).tell(Note(5))
        elif message == Note(2):
            player.context.dismiss(role("guest"))
            player.context.find(role("guest")).tell(Note(6))

    simulation = troupe.add("host", play).open()
    for number in (1, 2):
        simulation.find(role("host")).tell(Note(number))
        simulation.run()
    assert troupe.lines("guest") == ["built", "started", "5", "stopped"]
    with pytest.raises(KeyError):
        simulation.find(role("guest"))
    simulation.spawn(troupe.part("guest", placement=InProcess())).tell(Note(7))
    simulation.run()
    assert troupe.lines("guest")[4:] == ["built", "started", "7"]
    simulation.stop()
    assert simulation.spawn(troupe.part("late")).is_stopped


def test_who_cannot_be_built_is_not_spawned() -> None:
    def build(_context: Context[Messages]) -> Actor[Messages]:
        raise RuntimeError("no")

    simulation = Troupe().add("host").open()
    with pytest.raises(ActorCrashed):
        simulation.spawn(ActorSpec(role("guest"), build))
    with pytest.raises(KeyError):
        simulation.find(role("guest"))
    simulation.spawn(ActorSpec(role("guest"), build, placement=OnThread()))
    assert simulation.failure is None
    simulation.run()
    assert simulation.failure is not None, "where it lives elsewhere, it crashes later"


def test_who_cannot_be_sent_anything_is_not_spawned() -> None:
    simulation = Troupe().add("host").open()
    unresolvable = type("Unresolvable", (), {"__annotations__": {"field": "Nowhere"}})
    with pytest.raises(NotSendable, match="Nowhere"):
        simulation.spawn(
            ActorSpec(Role("guest", unresolvable, 1), partial(Player, "guest", [], None), placement=OnThread())
        )
    with pytest.raises(KeyError):
        simulation.find(role("guest"))
    tell_all(simulation, "host", 1)
    simulation.run()
    assert simulation.statistics()["host"].delivered == 1


def test_a_dismissed_actor_does_not_come_back() -> None:
    troupe = Troupe().add("actor", crash_on(0), RestartPolicy(3, backoff_seconds=1.0))
    simulation = troupe.open()
    tell_all(simulation, "actor", 2)
    simulation.at(0.25, partial(simulation.dismiss, role("actor")))
    simulation.run()
    assert troupe.lines("actor") == ["built", "started", "0"]
    with pytest.raises(KeyError):
        simulation.find(role("actor"))


# Messages on their way.


def test_delays_keep_each_senders_order_and_nothing_more() -> None:
    def play(player: Player, message: object) -> None:
        if message is None:
            for number in range(10):
                kind = Urgent if number % 3 == 0 else Note
                player.context.find(role("sink")).tell(kind(number + (100 if player.name == "a" else 0)))

    mixtures = set()
    for seed in range(20):
        troupe = Troupe().add("sink").add("a", play).add("b", play)
        simulation = troupe.open(seed, Faults(delay_seconds_max=1.0))
        simulation.run()
        numbers = troupe.numbers("sink")
        for offset in (0, 100):
            mine = [number - offset for number in numbers if number // 100 == offset // 100]
            assert [number for number in mine if number % 3 == 0] == [0, 3, 6, 9]
            assert [number for number in mine if number % 3] == [1, 2, 4, 5, 7, 8]
        mixtures.add(tuple(numbers))
        times = {event.seconds for event in troupe.events if isinstance(event, Delivered)}
        assert len(times) > 1
        assert max(times) <= 1.0
    assert len(mixtures) == 20


def test_what_is_under_way_counts_against_the_capacity() -> None:
    for seed in range(10):
        simulation = Troupe().add("actor", capacity=5).open(seed, Faults(delay_seconds_max=1.0))
        tell_all(simulation, "actor", 5)
        with pytest.raises(MailboxFull):
            simulation.find(role("actor")).tell(Note(5))
        simulation.run()
        tell_all(simulation, "actor", 5)


@pytest.mark.parametrize("placement", [OnThread(), InProcess()])
def test_what_cannot_be_sent_is_refused_at_the_sender(placement: Placement) -> None:
    def play(player: Player, message: object) -> None:
        if isinstance(message, Parcel):
            player.context.find(role("away")).tell(message)

    troupe = Troupe().add("away", placement=placement).add("home", play)
    simulation = troupe.open()
    with pytest.raises(NotSendable, match="object cannot be encoded"):
        simulation.find(role("away")).tell(Parcel(object()))
    simulation.find(role("home")).tell(Parcel(object()))
    simulation.run()
    assert troupe.numbers("away") == []
    assert simulation.failure is not None
    assert simulation.failure.actor == "home"
    assert isinstance(simulation.failure.__cause__, NotSendable)


def test_what_an_actor_elsewhere_tells_must_be_sendable_too() -> None:
    def play(player: Player, message: object) -> None:
        if message is not None:
            player.context.find(role("home")).tell(Parcel(object()))

    simulation = Troupe().add("home").add("away", play, placement=InProcess()).open()
    tell_all(simulation, "away", 1)
    simulation.run()
    assert simulation.failure is not None
    assert isinstance(simulation.failure.__cause__, NotSendable)


def test_a_message_too_large_is_refused() -> None:
    simulation = Troupe().add("away", placement=OnThread(message_bytes_max=100)).open()
    simulation.find(role("away")).tell(Letter("x" * 50))
    with pytest.raises(MessageTooLarge):
        simulation.find(role("away")).tell(Letter("x" * 100))


def test_addresses_cross_and_copies_arrive() -> None:
    questions: list[Question] = []

    def play(player: Player, message: object) -> None:
        if isinstance(message, Question):
            questions.append(message)
            message.reply_to.tell(Note(7))
            if len(questions) == 2:
                message.reply_to.tell(Urgent(8))

    stranger: Recorder[Note] = Recorder()
    troupe = Troupe().add("home").add("away", play, placement=InProcess())
    simulation = troupe.open()
    asked = [Question(simulation.find(role("home"))), Question(stranger)]
    for question in asked:
        simulation.find(role("away")).tell(question)
    simulation.run()
    assert troupe.numbers("home") == [7]
    assert stranger.messages == [Note(7)]
    assert not any(question is copy for question, copy in zip(asked, questions, strict=True))
    assert "does not accept Urgent" in str(simulation.failure), "its type says that it takes notes"


def test_what_an_actor_elsewhere_tells_itself_dies_with_it() -> None:
    def play(player: Player, message: object) -> None:
        if message == Note(0):
            player.context.ref.tell(Note(10))
            raise RuntimeError

    for placement, numbers in ((InLoop(), [0, 1, 10]), (InProcess(), [0, 1])):
        troupe = Troupe().add("actor", play, MANY, placement)
        simulation = troupe.open()
        tell_all(simulation, "actor", 2)
        simulation.run()
        assert troupe.numbers("actor") == numbers


# Faults.


def test_a_crash_strikes_before_within_or_after_a_handler() -> None:
    def play(player: Player, message: object) -> None:
        if isinstance(message, Note):
            for number in range(3):
                player.context.find(role("sink")).tell(Note(number))
            player.diary.append("actor done")

    stories = set()
    for seed in range(60):
        troupe = Troupe().add("sink").add("actor", play)
        simulation = troupe.open(seed, Faults(crash=0.5))
        tell_all(simulation, "actor", 1)
        simulation.run()
        if simulation.failure is not None and simulation.failure.actor == "actor":
            assert isinstance(simulation.failure.__cause__, SimulatedCrash)
            told = sum(isinstance(event, Delivered) and event.actor == "sink" for event in troupe.events)
            stories.add(
                (told if simulation.statistics()["sink"].dropped == 0 else -1, tuple(troupe.lines("actor"))[2:])
            )
    lines = {story for _, story in stories}
    assert lines == {(), ("0",), ("0", "done")}


def test_a_handler_cannot_go_on_after_a_crash() -> None:
    def play(player: Player, message: object) -> None:
        if isinstance(message, Note):
            for _ in range(10):
                with suppress(Exception):  # as careless code does
                    player.context.find(role("sink")).tell(Note(0))

    simulation = Troupe().add("sink").add("actor", play).open(0, Faults(crash=1.0))
    tell_all(simulation, "actor", 1)
    simulation.run()
    assert simulation.failure is not None
    assert isinstance(simulation.failure.__cause__, SimulatedCrash)


def test_a_kill_takes_along_what_was_handed_over_and_no_more() -> None:
    counts = set()
    for seed in range(40):
        troupe = Troupe().add("away", None, MANY, InProcess()).add("home")
        simulation = troupe.open(seed, Faults(kill=0.1))
        tell_all(simulation, "away", 200)
        tell_all(simulation, "home", 200)
        simulation.run()
        assert troupe.numbers("home") == list(range(200)), "only processes are killed"
        numbers = troupe.numbers("away")
        assert numbers == sorted(set(numbers))
        gaps = [after - before - 1 for before, after in zip([-1, *numbers], [*numbers, 200], strict=True)]
        kills = [event for event in troupe.events if isinstance(event, Ended)]
        assert all((event.cause, event.killed_by) == (ExitCause.SIGNALED, "SIGKILL") for event in kills)
        assert sum(gaps) <= WINDOW * len(kills)
        counts.update(gaps)
    assert max(counts) > WINDOW // 2


def test_a_process_that_is_killed_once_loses_no_more_than_the_window() -> None:
    losses = set()
    for seed in range(200):
        troupe = Troupe().add("away", None, RestartPolicy(), InProcess())
        simulation = troupe.open(seed, Faults(kill=1.0))
        tell_all(simulation, "away", 100)
        simulation.run()
        assert simulation.failure is not None
        assert isinstance(simulation.failure.__cause__, SimulatedKill)
        losses.add(simulation.statistics()["away"].delivered)
    assert (min(losses), max(losses)) == (1, WINDOW)


def test_a_kill_may_take_the_last_that_was_told_and_is_still_under_way() -> None:
    def play(player: Player, message: object) -> None:
        if isinstance(message, Note):
            for number in range(10):
                player.context.find(role("sink")).tell(Note(number))

    told = set()
    for seed in range(60):
        troupe = Troupe().add("sink").add("away", play, MANY, InProcess())
        simulation = troupe.open(seed, Faults(kill=1.0, delay_seconds_max=1.0))
        tell_all(simulation, "away", 1)
        simulation.run()
        arrived = troupe.numbers("sink")
        assert arrived == list(range(len(arrived)))
        told.add(len(arrived))
    assert {0, 1, 2, 3} < told, "killed early or later, with something under way or nothing"


@pytest.mark.parametrize("placement", [InLoop(), OnThread(), InProcess()])
def test_a_kill_ends_a_life_as_a_crash(placement: Placement) -> None:
    def play(player: Player, message: object) -> None:
        if message == Note(50):
            player.context.kill(role("other"), "as planned")

    losses, ends = set(), set()
    for seed in range(40):
        troupe = Troupe().add("other", None, MANY, placement).add("actor", play)
        simulation = troupe.open(seed)
        tell_all(simulation, "actor", 100)
        tell_all(simulation, "other", 100)
        simulation.run()
        simulation.kill(role("nobody"), "there is none")
        simulation.stop()
        assert simulation.failure is None
        numbers = troupe.numbers("other")
        assert numbers == sorted(set(numbers))
        losses.add(100 - len(numbers))
        ends.update((event.error, event.cause, event.killed_by) for event in troupe.events if isinstance(event, Ended))
        assert troupe.lines("other").count("built") == 2
        assert troupe.lines("other").count("stopped") == 1, "who is killed does not stop in order"
    killed = ("actor 'other' died: it was killed: as planned", ExitCause.KILLED, "actor")
    assert ends == {killed, ("", ExitCause.STOPPED, "")}
    if isinstance(placement, InProcess):
        assert WINDOW // 2 < max(losses) <= WINDOW
    else:
        assert losses == {0}


def test_a_kill_beyond_the_restart_policy_ends_everything() -> None:
    troupe = Troupe().add("actor", lambda player, message: player.context.kill(role("actor"), "as planned"))
    simulation = troupe.open()
    simulation.run()
    assert str(simulation.failure) == "actor 'actor' died: it was killed: as planned"
    assert troupe.lines("actor") == ["built", "started"]


def test_what_the_tap_raises_comes_out() -> None:
    def tap(event: Event) -> None:
        assert not isinstance(event, Delivered), "seen"

    simulation = Simulation(Troupe().add("actor").parts, 0, tap=tap)
    tell_all(simulation, "actor", 1)
    with pytest.raises(AssertionError, match="seen"):
        simulation.run()
