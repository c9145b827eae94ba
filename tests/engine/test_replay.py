"""Replay: a recorded inbox gives the same messages again, or the first message whose handling differs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias, assert_never

import msgspec
import numpy as np
import pytest

from cuelight import Engine, errors
from cuelight.actors.cache.actor import CacheManager
from cuelight.actors.detokenizer.actor import Detokenizer
from cuelight.actors.executor.actor import Executor
from cuelight.actors.intake.actor import Intake
from cuelight.actors.scheduler.actor import Scheduler
from cuelight.actors.scheduler.request import Request
from cuelight.actors.scheduler.state import SchedulerState
from cuelight.cli import commands as cli
from cuelight.cli.replay import _report
from cuelight.cli.replay import replay as replay_engine
from cuelight.config import EngineConfig, EngineOptions
from cuelight.journal.origin import Origin, about
from cuelight.kernel import (
    OWN,
    Actor,
    ActorCrashed,
    ActorSpec,
    Context,
    Delivered,
    Ended,
    ExitCause,
    JournalError,
    NotAccepted,
    OnThread,
    Recipient,
    Ref,
    RestartPolicy,
    Role,
    Started,
    System,
    Terminated,
)
from cuelight.kernel.journal.records import Recorded, read_journal
from cuelight.kernel.journal.replay import Difference, Replay, replay
from cuelight.kernel.journal.writer import Journal
from cuelight.messages.cache import Reset
from cuelight.models.folder import ModelFacts
from cuelight.testing import crash, next_letter, stub_engine

NET_SECONDS = 120


class Roll(msgspec.Struct, frozen=True, tag=True):
    """Send what the dice say: at once, after a while, and from a thread; `client` is answered at the end."""

    number: int
    client: Recipient[Done]


class Break(msgspec.Struct, frozen=True, tag=True):
    """Crash."""


class Told(msgspec.Struct, frozen=True, tag=True):
    """The message to the sink: the number of the roll, the time, and the dice."""

    number: int
    seconds: float
    dice: float


class Hurry(msgspec.Struct, frozen=True, tag=True):
    """A priority message: overtakes the others."""

    number: int


class Done(msgspec.Struct, frozen=True, tag=True):
    number: int


class Ask(msgspec.Struct, frozen=True, tag=True):
    number: int
    client: Recipient[Done]
    reply_to: Recipient[Answer]


class Answer(msgspec.Struct, frozen=True, tag=True):
    number: int
    client: Recipient[Done]


class _Rung(msgspec.Struct, frozen=True, tag=True):
    number: int
    client: Recipient[Done]


class _Worked(msgspec.Struct, frozen=True, tag=True):
    number: int
    client: Recipient[Done]


DiceMessage: TypeAlias = Roll | Break | Answer | Terminated
DiceInbox: TypeAlias = DiceMessage | _Rung | _Worked
SinkMessage: TypeAlias = Told | Hurry | Ask

SINK = Role("sink", SinkMessage, capacity=1000, urgent=(Hurry,))
DICE = Role("dice", DiceMessage, capacity=1000)


class Sink(Actor[SinkMessage]):
    def __init__(self, _: object) -> None:
        self.heard = 0

    def handle(self, message: SinkMessage) -> None:
        self.heard += 1
        if isinstance(message, Ask):
            message.reply_to.tell(Answer(message.number, message.client))


class Dice(Actor[DiceInbox]):
    """Roll → timer → thread → the sink's answer → Done."""

    def __init__(self, context: Context[DiceInbox]) -> None:
        self.context = context
        self.sink = context.find(SINK)
        self.worker = context.worker("hand")
        self.rolls = 0
        self.sink.tell(Told(-1, 0, context.chance.random()))

    def started(self) -> None:
        self.context.watch(SINK)
        self.sink.tell(Told(-2, 0, self.context.chance.random()))

    def stopped(self) -> None:
        self.sink.tell(Told(-3, 0, self.context.chance.random()))

    def handle(self, message: DiceInbox) -> None:
        match message:
            case Roll(number, client):
                self.rolls += 1
                self.say(number)
                self.context.after(0.0, _Rung(number, client))
            case _Rung(number, client):
                self.sink.tell(Hurry(number))
                self.worker.submit(
                    lambda: number, done=lambda n: _Worked(n, client), failed=lambda _: _Worked(-1, client)
                )
            case _Worked(number, client):
                self.say(number)
                self.sink.tell(Ask(number, client, self.context.ref))
            case Answer(number, client):
                client.tell(Done(number))
            case Break():
                self.say(-4)
                raise RuntimeError("broken")
            case Terminated():
                pass
            case _:
                assert_never(message)

    def say(self, number: int) -> None:
        self.sink.tell(Told(number, self.context.clock.now(), self.context.chance.random()))


class Client:
    """Receives rolls that are done; a roll undone by a crash is not waited for."""

    def __init__(self) -> None:
        self.done: asyncio.Queue[Done] = asyncio.Queue()

    def tell(self, message: Done, /) -> None:
        self.done.put_nowait(message)


RESTART_POLICY = RestartPolicy(restarts_max=5, backoff_seconds=0.0)
PARTS = (ActorSpec(SINK, Sink, RESTART_POLICY), ActorSpec(DICE, Dice, RESTART_POLICY))


async def play(path: Path, script: Sequence[int | None]) -> None:
    """Record these rolls; None is a crash and the wait for the next life."""
    client = Client()
    with Journal(path) as journal:
        async with asyncio.timeout(NET_SECONDS), System(PARTS, chance=random.Random(7), tap=journal) as system:
            for number in script:
                system.find(DICE).tell(Break() if number is None else Roll(number, client))
                if number is not None:
                    await client.done.get()


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "dice.journal"
    asyncio.run(play(path, [1, 2, None, 3, 4, None, 5]))
    return path


def again(path: Path, dice: type[Dice] = Dice) -> Replay:
    return replay(read_journal(path), ActorSpec(DICE, dice, RESTART_POLICY), [DiceInbox])


def inbox(path: Path, actor: str) -> list[Recorded]:
    return [r for r in read_journal(path) if isinstance(r, Recorded) and r.actor == actor]


def test_same_actor_sends_the_same_in_all_its_lives(recording: Path) -> None:
    outcome = again(recording)
    assert outcome.difference is None
    assert outcome.stopped == ""
    assert outcome.lives == 3
    assert outcome.handled == len(inbox(recording, "dice")) == 5 * 4 + 2
    assert outcome.compared == sum(record.sender == "dice" for record in inbox(recording, "sink"))
    assert outcome.compared >= 5 * 4 + 2 + 3 * 2
    assert replay(read_journal(recording), PARTS[0], roles=[DICE]).difference is None


def altered(change: Callable[[Dice, int, DiceInbox], bool]) -> type[Dice]:
    """Dice with `change` called first at each message, with its number over all lives; True replaces the handler."""
    handled = 0

    class Altered(Dice):
        def handle(self, message: DiceInbox) -> None:
            nonlocal handled
            handled += 1
            if not change(self, handled, message):
                super().handle(message)

    return Altered


def rolls(path: Path) -> list[int]:
    """The inbox indices of the rolls."""
    return [index for index, r in enumerate(inbox(path, "dice"), start=1) if r.type_name.endswith(":Roll")]


@pytest.mark.parametrize("which", range(5))
def test_changed_message_shows_at_the_message_that_caused_it(recording: Path, which: int) -> None:
    at = rolls(recording)[which]

    def change(dice: Dice, index: int, message: DiceInbox) -> bool:
        if index == at:
            dice.sink.tell(Told(99, dice.context.clock.now(), dice.context.chance.random()))
        return index == at

    found = again(recording, altered(change)).difference
    assert found is not None
    assert found.index == at
    assert found.handling.startswith(f"Roll(number={which + 1}, ")
    assert found.receiver == "sink"
    assert found.expected.startswith(f"Told(number={which + 1}, ")
    assert found.got.startswith("Told(number=99, ")


def test_other_random_draw_or_time_is_a_difference(recording: Path) -> None:
    at = rolls(recording)[2]

    def draw(dice: Dice, index: int, message: DiceInbox) -> bool:
        if index == at:
            dice.context.chance.random()
        return False

    found = again(recording, altered(draw)).difference
    assert found is not None
    assert found.index == at

    class Slow(Dice):
        def say(self, number: int) -> None:
            self.sink.tell(Told(number, self.context.clock.now() + 1e-9, self.context.chance.random()))

    found = again(recording, Slow).difference
    assert found is not None
    assert found.index == rolls(recording)[0]


def test_additional_message_shows_where_it_was_sent(recording: Path) -> None:
    at = rolls(recording)[1]

    def change(dice: Dice, index: int, message: DiceInbox) -> bool:
        if index == at:
            dice.sink.tell(Told(99, 0, 0))
        return False

    found = again(recording, altered(change)).difference
    assert found is not None
    assert (found.index, found.got) == (at, "Told(number=99, seconds=0.0, dice=0.0)")


def test_missing_message_shows_where_it_was_expected(recording: Path) -> None:
    at = rolls(recording)[3] + 1  # a _Rung, whose Hurry is the only message in its lane

    def change(dice: Dice, index: int, message: DiceInbox) -> bool:
        return index == at

    found = again(recording, altered(change)).difference
    assert found is not None
    assert (found.expected, found.got) == ("Hurry(number=4)", "nothing")
    assert at <= found.index <= at + 1


def test_only_order_within_a_lane_is_compared(recording: Path) -> None:
    class Swapped(Dice):
        def handle(self, message: DiceInbox) -> None:
            if isinstance(message, _Worked):
                self.sink.tell(Ask(message.number, message.client, self.context.ref))
                self.say(message.number)
            else:
                super().handle(message)

    class Overtaken(Dice):
        def handle(self, message: DiceInbox) -> None:
            super().handle(message)
            if isinstance(message, _Rung):
                self.hurried = message.number

    found = again(recording, Swapped).difference
    assert found is not None, "both are in one lane"
    assert found.handling.startswith("_Worked(number=1, ")
    assert again(recording, Overtaken).difference is None


def test_new_exception_is_a_difference(recording: Path) -> None:
    at = rolls(recording)[2]

    def change(dice: Dice, index: int, message: DiceInbox) -> bool:
        if index == at:
            dice.say(3)
            raise KeyError("new")
        return False

    found = again(recording, altered(change)).difference
    assert found is not None
    assert (found.index, found.receiver, found.expected) == (at, "dice", "no error")
    assert found.got == "KeyError('new') was raised"


def test_first_difference_counts_even_where_a_later_one_is_delivered_sooner(tmp_path: Path) -> None:
    """Messages to a slow receiver are compared late."""
    path = tmp_path / "made.journal"
    other = Role("other", Told, capacity=10)

    class Two(Dice):
        def handle(self, message: DiceInbox) -> None:
            if isinstance(message, Roll):
                to = self.sink if message.number == 1 else self.context.find(other)
                to.tell(Told(10 * message.number, 0, 0))

    with Journal(path) as journal:
        make(journal, "dice", [Roll(1, Client()), Roll(2, Client())])
        journal(Delivered(3, "dice", "other", Told(2, 0, 0)))
        journal(Delivered(4, "dice", "sink", Told(1, 0, 0)))
        journal(Ended(5, "dice", 1, "", ExitCause.STOPPED))
    found = again(path, mute(Two)).difference
    assert found is not None
    assert (found.index, found.receiver) == (1, "sink")


def make(journal: Journal, actor: str, messages: Sequence[object], life: int = 1) -> None:
    journal(Started(0, actor, life, 1))
    for message in messages:
        journal(Delivered(1, "", actor, message))


def mute(dice: type[Dice]) -> type[Dice]:
    """`dice` without its messages at start and stop."""

    class Mute(dice):  # type: ignore[valid-type, misc]
        def __init__(self, context: Context[DiceInbox]) -> None:
            self.context, self.sink = context, context.find(SINK)

        def started(self) -> None: ...

        def stopped(self) -> None: ...

    return Mute


class Echo(Dice):
    """Sends the number of each roll to the sink."""

    def handle(self, message: DiceInbox) -> None:
        if isinstance(message, Roll):
            self.sink.tell(Told(message.number, 0, 0))
        elif isinstance(message, Break):
            self.sink.tell(Told(-1, 0, 0))
            self.sink.tell(Told(-2, 0, 0))


def test_message_sent_and_never_delivered_is_no_difference(tmp_path: Path) -> None:
    path = tmp_path / "made.journal"
    with Journal(path) as journal:
        make(journal, "dice", [Roll(1, Client()), Roll(2, Client())])
        journal(Delivered(3, "dice", "sink", Told(1, 0, 0)))
    outcome = again(path, mute(Echo))
    assert (outcome.difference, outcome.handled, outcome.compared) == (None, 2, 1)


def test_messages_cut_off_by_a_crash_are_no_difference(tmp_path: Path) -> None:
    """A full mailbox, for example, raises at its sender, which a replay cannot reproduce."""
    path = tmp_path / "made.journal"
    with Journal(path) as journal:
        make(journal, "dice", [Roll(1, Client()), Break()])
        journal(Ended(2, "dice", 1, "actor 'dice' crashed", ExitCause.CRASHED))
        make(journal, "dice", [Roll(3, Client())], life=2)
        for number in (1, -1, 3):
            journal(Delivered(3, "dice", "sink", Told(number, 0, 0)))
    outcome = again(path, mute(Echo))
    assert (outcome.difference, outcome.lives, outcome.compared) == (None, 2, 3)


@pytest.mark.parametrize(
    ("end", "is_difference", "stopped"),
    [
        (ExitCause.CRASHED, False, ""),
        (ExitCause.STOPPED, True, ""),
        (None, False, "the actor raised RuntimeError('broken')"),
    ],
)
def test_exception_on_the_last_message(
    tmp_path: Path, end: ExitCause | None, is_difference: bool, stopped: str
) -> None:
    path = tmp_path / "made.journal"
    with Journal(path) as journal:
        make(journal, "dice", [Break()])
        if end is not None:
            journal(Ended(2, "dice", 1, str(end), end))
    outcome = again(path, mute(Dice))
    assert outcome.stopped.startswith(stopped)
    assert bool(outcome.stopped) is bool(stopped)
    assert (outcome.difference is not None) is is_difference
    if outcome.difference is not None:
        assert (outcome.difference.index, outcome.difference.handling) == (1, "Break()")


@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError])
async def test_crash_while_stopping_is_replayed(tmp_path: Path, error: type[BaseException]) -> None:
    class Last(mute(Echo)):  # type: ignore[misc]
        def stopped(self) -> None:
            self.sink.tell(Told(9, 0, 0))
            raise error

    path = tmp_path / "last.journal"
    with Journal(path) as journal:
        async with asyncio.timeout(NET_SECONDS):
            with pytest.raises(ActorCrashed):
                async with System((PARTS[0], ActorSpec(DICE, Last)), tap=journal) as system:
                    system.find(DICE).tell(Roll(1, Client()))
    assert len(inbox(path, "sink")) >= 1
    outcome = again(path, Last)
    assert (outcome.difference, outcome.handled) == (None, 1)
    assert outcome.compared == len(inbox(path, "sink"))


def test_message_undelivered_when_its_receiver_stopped_is_not_expected_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "made.journal"
    with Journal(path) as journal:
        make(journal, "sink", [])
        make(journal, "dice", [Roll(1, Client()), Roll(2, Client())])
        journal(Delivered(3, "dice", "sink", Told(1, 0, 0)))
        journal(Ended(4, "sink", 1, "", ExitCause.STOPPED))
        make(journal, "sink", [])
        journal(Delivered(4, "", "dice", Roll(3, Client())))
        journal(Delivered(5, "dice", "sink", Told(3, 0, 0)))
    outcome = again(path, mute(Echo))
    assert (outcome.difference, outcome.compared) == (None, 2)


@pytest.mark.parametrize("restarts", [False, True])
def test_message_may_be_delivered_late(tmp_path: Path, restarts: bool) -> None:
    """By a mailbox that outlives a crash, and behind a message that overtook it."""

    class Two(Echo):
        def handle(self, message: DiceInbox) -> None:
            super().handle(message)
            self.sink.tell(Hurry(1))

    path = tmp_path / "made.journal"
    with Journal(path) as journal:
        make(journal, "sink", [])
        make(journal, "dice", [Roll(1, Client()), Roll(2, Client())])
        journal(Delivered(2, "dice", "sink", Hurry(1)))
        if restarts:
            journal(Ended(2, "sink", 1, "crashed", ExitCause.CRASHED))
            make(journal, "sink", [], life=2)
        for message in (Told(1, 0, 0), Hurry(1), Told(2, 0, 0)):
            journal(Delivered(3, "dice", "sink", message))
    outcome = again(path, mute(Two))
    assert (outcome.difference, outcome.compared) == (None, 4)


def test_numbers_that_decode_alike_are_no_difference(tmp_path: Path) -> None:
    path = tmp_path / "made.journal"
    with Journal(path) as journal:
        make(journal, "dice", [Roll(1, Client())])
        journal(Delivered(3, "dice", "sink", Told(1, 0.0, 0.0)))  # the replay sends integers
    assert again(path, mute(Echo)).compared == 1


@pytest.mark.parametrize("is_opaque", [True, False])
def test_unreadable_message_ends_the_replay_there(tmp_path: Path, is_opaque: bool) -> None:
    path = tmp_path / "made.journal"
    with Journal(path) as journal:
        make(journal, "dice", [Roll(1, Client()), Roll("x" if is_opaque else 2, object() if is_opaque else "?")])  # type: ignore[arg-type]
        make(journal, "sink", [])
        journal(Delivered(3, "dice", "sink", Told(1, 0, 0)))
        journal(Delivered(3, "dice", "sink", Told(2, 0, 0)))
        if not is_opaque:
            journal(Delivered(3, "", "dice", Reset(1, 1)))
    outcome = again(path, mute(Echo))
    assert outcome.difference is None
    assert outcome.handled == (1 if is_opaque else 2)
    assert ("without its contents: Roll(number='x'" if is_opaque else "message 3 cannot be read") in outcome.stopped


def test_opaque_sent_message_is_compared_by_its_type(tmp_path: Path) -> None:
    path = tmp_path / "made.journal"
    with Journal(path, record_bytes_max=60) as journal:
        make(journal, "dice", [Roll(2, Client()), Roll(3, Client())])
        journal(Delivered(3, "dice", "sink", Told(2, "x" * 99, 0)))  # type: ignore[arg-type]
        journal(Delivered(3, "dice", "sink", Hurry("x" * 99)))  # type: ignore[arg-type]
    found = again(path, mute(Echo)).difference
    assert found is not None
    assert found.expected.startswith("<Hurry of ")


def test_message_that_can_no_longer_be_encoded_is_a_difference(tmp_path: Path) -> None:
    class Odd(Echo):
        def handle(self, message: DiceInbox) -> None:
            self.sink.tell(Told(1, object(), 0))  # type: ignore[arg-type]

    path = tmp_path / "made.journal"
    with Journal(path) as journal:
        make(journal, "dice", [Roll(1, Client())])
        journal(Delivered(3, "dice", "sink", Told(1, 0, 0)))
    found = again(path, mute(Odd)).difference
    assert found is not None
    assert found.got == f"a {__name__}:Told that cannot be encoded"


def test_address_made_by_the_actor_matches_any_address(tmp_path: Path) -> None:
    class Fresh(Dice):
        def handle(self, message: DiceInbox) -> None:
            self.sink.tell(Ask(1, Client(), self.context.ref))

    path = tmp_path / "made.journal"
    for reply_to, is_same in ((Ref("dice", print), True), (Ref("sink", print), False)):
        with Journal(path) as journal:
            make(journal, "dice", [Break()])
            journal(Delivered(3, "dice", "sink", Ask(1, Client(), reply_to)))
        assert (again(path, mute(Fresh)).difference is None) is is_same


def test_messages_of_the_kernel_in_an_actors_name_are_not_expected_of_it(tmp_path: Path) -> None:
    path = tmp_path / "made.journal"
    with Journal(path) as journal:
        make(journal, "dice", [])
        journal(Delivered(3, "dice", "sink", Terminated("dice", "", is_restarting=False)))
    assert again(path, mute(Echo)).difference is None


class Parent(Echo):
    """Spawns a child that receives the number of each roll, a new child after each break."""

    child: Ref[Told] | None = None

    def handle(self, message: DiceInbox) -> None:
        if isinstance(message, Break):
            self.context.dismiss(CHILD)
            self.child = None
        elif isinstance(message, Roll):
            if self.child is None:
                self.child = self.context.spawn(ActorSpec(CHILD, Child))
            try:
                self.child.tell(Hurry(message.number))  # type: ignore[arg-type]
            except NotAccepted:
                self.child.tell(Told(message.number, 0, 0))
            message.client.tell(Done(message.number))


class Child(Actor[Told]):
    def __init__(self, _: object) -> None: ...

    def handle(self, message: Told) -> None: ...


CHILD = Role("child", Told, capacity=10)


async def test_spawning_and_dismissing_are_replayed(tmp_path: Path) -> None:
    path, client = tmp_path / "parent.journal", Client()
    parts = (PARTS[0], ActorSpec(DICE, mute(Parent)))
    with Journal(path) as journal:
        async with asyncio.timeout(NET_SECONDS), System(parts, tap=journal) as system:
            for number in range(3):
                system.find(DICE).tell(Roll(number, client))
                await client.done.get()
                system.find(DICE).tell(Break())
                while "child" in system.statistics():  # noqa: ASYNC110  # waits for a state
                    await asyncio.sleep(0)
    assert again(path, mute(Parent)) == Replay(handled=6, compared=3, lives=1)


def test_actor_outside_the_loop_is_not_replayed(recording: Path) -> None:
    with pytest.raises(JournalError, match="outside the loop"):
        replay(read_journal(recording), ActorSpec(DICE, Dice, placement=OnThread()))


def test_journal_without_the_actor_is_refused(recording: Path) -> None:
    with pytest.raises(JournalError, match="has no actor 'cat'"):
        replay(read_journal(recording), ActorSpec(Role("cat", Roll, capacity=1), Dice))


def test_truncated_journal_replays_up_to_the_cut(recording: Path, tmp_path: Path) -> None:
    data, path = recording.read_bytes(), tmp_path / "cut.journal"
    handled = set()
    for length in range(len(data) // 3, len(data), len(data) // 40):
        path.write_bytes(data[:length])
        outcome = again(path)
        assert outcome.difference is None
        handled.add(outcome.handled)
    assert len(handled) > 10


# An engine's journal.

TINY = EngineOptions(seed=3, block_count=14, block_size=4, running_max=8, queue_limit=40)
ACTORS = {
    "detokenizer": Detokenizer,
    "executor": Executor,
    "cache": CacheManager,
    "scheduler": Scheduler,
    "intake": Intake,
}


def breaking(token_ids: Sequence[int]) -> int:
    if token_ids[:3] == list(b"bad"):
        raise RuntimeError("a bad prompt")
    return next_letter(token_ids)


async def serve(engine: Engine) -> None:
    """Preemptions, sampled requests with and without seeds, stop strings, refusals, failures, clients that leave."""
    async with asyncio.timeout(NET_SECONDS), engine:
        streams = [
            engine.stream(f"hello {n}", max_tokens=20, temperature=0.5, seed=None if n % 2 else n, stop=["e", "th"])
            for n in range(8)
        ]
        streams += [engine.stream([1, 2, 3], max_tokens=30) for _ in range(6)]
        streams.append(engine.stream("bad", max_tokens=3))
        streams.append(engine.stream([{"role": "user", "content": "x" * 1500}], max_tokens=1))
        leaving = engine.stream("goes", max_tokens=40)
        async for _ in leaving:
            await leaving.aclose()
            break
        failures = 0
        for stream in streams:
            try:
                await stream.result()
            except (errors.RequestRejected, errors.RequestFailed):
                failures += 1
        assert failures == 2
        assert engine.stats().preemptions > 0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "engine.journal"
    asyncio.run(serve(stub_engine(next_token=breaking, journal=path, **TINY)))
    return path


@pytest.mark.parametrize("actor", ACTORS)
def test_actors_of_an_engine_are_replayed_without_a_difference(
    served: Path, actor: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", str(served), "--actor", actor]) == 0
    count = len(inbox(served, actor))
    assert count > 15
    assert capsys.readouterr() == (f"{count} messages replayed, no difference\n", "")


def test_every_message_to_the_actors_of_an_engine_is_recorded_whole(served: Path) -> None:
    reader = read_journal(served)
    assert not reader.is_truncated
    assert [record for record in reader if isinstance(record, Recorded) and record.opaque] == []
    assert {record.sender for record in reader if isinstance(record, Recorded)} == {"", OWN, *ACTORS}


@pytest.mark.parametrize("actor", ACTORS)
def test_actor_that_raises_or_is_silent_differs(
    served: Path, actor: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, calls = ACTORS[actor], 0
    handle = kind.handle

    def fails(self: Actor[object], message: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise RuntimeError("too many")
        handle(self, message)

    monkeypatch.setattr(kind, "handle", fails)
    assert cli.main(["replay", str(served), "--actor", actor]) == 1
    out = capsys.readouterr().out
    assert out.startswith("12 messages replayed, and at message 12 a difference\nhandling: ")
    assert "RuntimeError('too many') was raised" in out

    monkeypatch.setattr(kind, "handle", lambda self, message: None)
    assert replay_engine(str(served), actor) == 1
    assert "nothing" in capsys.readouterr().out


def test_scheduler_that_plans_differently_differs_at_the_message_it_planned_at(
    served: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    preempting = []
    preempt = SchedulerState.preempt

    def remember(self: SchedulerState, request: Request, why: str) -> None:
        preempting.append(request.request_id)
        preempt(self, request, why)
        if len(preempting) == 3:
            request.preemptions += 1

    monkeypatch.setattr(SchedulerState, "preempt", remember)
    assert replay_engine(str(served), "scheduler") == 1
    out = capsys.readouterr().out
    lines = dict(line.split(": ", 1) for line in out.splitlines()[1:])
    assert len(preempting) >= 3
    assert lines["receiver"] == "detokenizer"
    for text in (lines["expected"], lines["got"]):
        assert "preemptions=" in text, "both are shown from shortly before the difference"


@pytest.mark.parametrize("is_crash", [True, False])
async def test_engine_that_crashes_leaves_a_journal(
    tmp_path: Path, is_crash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cuelight.core.parts.RESTART_POLICY", RestartPolicy())
    path = tmp_path / "engine.journal"
    engine = stub_engine(journal=str(path))
    async with asyncio.timeout(NET_SECONDS):
        await engine.start()
        await engine.generate("hello", max_tokens=3)
        if is_crash:
            crash(engine, "intake")
            with pytest.raises(errors.EngineBroken):
                while True:
                    await engine.generate("again", max_tokens=1)
        await engine.stop()
    reader = read_journal(path)
    ends = [record for record in reader if isinstance(record, Ended)]
    assert len(ends) == 5
    assert sum(record.cause is not ExitCause.STOPPED for record in ends) == is_crash
    assert not reader.is_truncated
    for actor in ACTORS:
        assert replay_engine(str(path), actor) == 0


async def test_engine_that_recovers_can_be_replayed(tmp_path: Path) -> None:
    """Each life is replayed from its start, also those that were cut short."""
    path = tmp_path / "engine.journal"
    async with asyncio.timeout(NET_SECONDS), stub_engine(journal=path) as engine:
        alone = await engine.generate("hello", max_tokens=40)
        for actor in ACTORS:
            stream = engine.stream("hello", max_tokens=40)
            await anext(stream)
            crash(engine, actor)
            assert (await stream.result()).text == alone.text
    ends = [record for record in read_journal(path) if isinstance(record, Ended)]
    assert sum(record.cause is not ExitCause.STOPPED for record in ends) == len(ACTORS)
    for actor in ACTORS:
        assert replay_engine(str(path), actor) == 0


async def test_cancelling_all_tasks_of_the_host_leaves_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "engine.journal"
    engine = stub_engine(journal=path)
    await engine.start()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    async with asyncio.timeout(NET_SECONDS):
        await asyncio.wait(tasks)
    assert not read_journal(path).is_truncated
    for actor in ACTORS:
        assert replay_engine(str(path), actor) == 0


async def test_journal_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "notes"
    foreign.write_text("precious")
    for path in (foreign, tmp_path, tmp_path / "no" / "folder", ""):
        engine = stub_engine(journal=path)
        with pytest.raises(errors.ConfigError):
            await engine.start()
    assert foreign.read_text() == "precious"
    for path in (5, b"bytes", True):
        with pytest.raises(errors.ConfigError, match="journal must be the path"):
            stub_engine(journal=path)  # type: ignore[arg-type]


async def test_numpy_options_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "engine.journal"
    async with asyncio.timeout(NET_SECONDS), stub_engine(journal=path, watermark_fraction=np.float64(0.25)) as engine:
        await engine.generate("hello", max_tokens=2)
    assert replay_engine(str(path), "cache") == 0
    assert read_journal(path).about["config"]["watermark_fraction"] == 0.25  # type: ignore[index]


def refusal(path: Path, actor: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["replay", str(path), "--actor", actor]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("cuelight: ")
    assert len(err.splitlines()) == 1
    return err


def test_replay_that_cannot_run_is_a_one_line_error(
    served: Path, recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no actor 'planner': it has detokenizer, executor, cache, scheduler, intake" in refusal(
        served, "planner", capsys
    )
    assert "cannot be read" in refusal(tmp_path / "nothing", "cache", capsys)
    assert "not the journal of an engine" in refusal(recording, "cache", capsys)
    path = tmp_path / "foreign"
    path.write_text("notes")
    assert "is no journal" in refusal(path, "cache", capsys)


def of_a_model(path: Path, folder: Path | None) -> Path:
    facts = ModelFacts(257, 100, ())
    with Journal(path, about=about(Origin("mine", folder, EngineConfig(), facts))) as journal:
        for actor in ACTORS:
            make(journal, actor, [])
    return path


@pytest.mark.parametrize("folder", [None, "gone"])
def test_only_intake_and_detokenizer_need_the_models_folder(
    tmp_path: Path, folder: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = of_a_model(tmp_path / "engine.journal", None if folder is None else tmp_path / folder)
    words = "names no model folder" if folder is None else f"the folder {tmp_path / folder} does not exist"
    for actor in ("intake", "detokenizer"):
        assert words in refusal(path, actor, capsys)
    for actor in ("cache", "scheduler", "executor"):
        assert cli.main(["replay", str(path), "--actor", actor]) == 0


def test_replay_that_ends_early_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = of_a_model(tmp_path / "engine.journal", None)
    with Journal(path, about=about(Origin("mine", None, EngineConfig(), ModelFacts(257, 100, ())))) as journal:
        make(journal, "cache", [Reset(10, 4), object()])
    assert cli.main(["replay", str(path), "--actor", "cache"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "1 messages replayed, no difference"
    assert second.startswith("stopped there: message 2 was recorded without its contents: <object object")


def test_long_messages_are_shown_from_shortly_before_the_difference() -> None:
    same, others = "x" * 5000, "o" * 5000
    outcome = Replay(3, 2, 1, Difference(2, same, "sink", f"{same}A{others}", f"{same}B"))
    first, *shown = _report(outcome).splitlines()
    assert first == "3 messages replayed, and at message 2 a difference"
    handling, receiver, expected, got = (line.split(": ", 1)[1].strip() for line in shown)
    assert handling == "x" * 400 + "…"
    assert receiver == "sink"
    assert expected == "…" + "x" * 200 + "A" + "o" * 199 + "…"
    assert got == "…" + "x" * 200 + "B"


@pytest.mark.model
async def test_engine_with_a_model_is_replayed(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "engine.journal"
    async with asyncio.timeout(NET_SECONDS), Engine(model_folder, journal=path, dtype="float32") as engine:
        await engine.generate([{"role": "user", "content": "Say hello."}], max_tokens=6)
        await engine.generate("word " * 200, max_tokens=3, stop=["\n"])
    for actor in ACTORS:
        assert replay_engine(str(path), actor) == 0
