"""The kernel alone: mailboxes, addresses, systems and workers, on asyncio and on uvloop."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import pickle
import random
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import anyio
import pytest
import structlog
import uvloop
from kernel_support import (
    NET_SECONDS,
    Do,
    ManualClock,
    ManualTimer,
    Note,
    Question,
    Troupe,
    Urgent,
    crash,
    on_each_loop,
    player,
    settle,
    until,
)
from support import Recorder

from cuelight.kernel import (
    OWN,
    Actor,
    ActorCrashed,
    ActorSpec,
    ActorStopped,
    AskTimeout,
    Context,
    Delivered,
    Event,
    InProcess,
    KernelError,
    Mailbox,
    MailboxFull,
    NotAccepted,
    NotSendable,
    OnThread,
    Ref,
    RemoteError,
    RestartPolicy,
    Role,
    Started,
    System,
    Timer,
    WorkerThread,
    ask,
    get_logger,
)
from cuelight.kernel.driver import TURN_MESSAGES
from cuelight.kernel.ref import AskDeadlines


@dataclass(frozen=True)
class SpecialNote(Note):
    """Not in any protocol, though its base is."""


NoteRole = Role[Note | Urgent | Question]


def role(name: str = "actor", capacity: int = 10_000) -> NoteRole:
    return Role(name, Note | Urgent | Question, capacity, urgent=(Urgent,))


class Diary(Actor[Note | Urgent | Question]):
    """Writes down all that happens to it, and does what the test wants done with a message."""

    def __init__(
        self, name: str, diary: list[str], react: Callable[[object], None] | None = None, hooks: tuple[str, ...] = ()
    ) -> None:
        self.name, self.diary, self.react, self.hooks = name, diary, react, hooks

    def started(self) -> None:
        self.diary.append(f"{self.name} started")
        if "started" in self.hooks:
            raise RuntimeError("no start")

    def handle(self, message: object) -> None:
        if self.react is not None:
            self.react(message)
        elif isinstance(message, Question):
            message.reply_to.tell(42)
        else:
            self.diary.append(f"{self.name} {message.number}")

    def stopped(self) -> None:
        self.diary.append(f"{self.name} stopped")
        if "stopped" in self.hooks:
            raise RuntimeError("no stop")


def part(
    playing: NoteRole,
    diary: list[str],
    react: Callable[[Context[object], object], None] | None = None,
    hooks: tuple[str, ...] = (),
) -> ActorSpec[Note | Urgent | Question]:
    def build(context: Context[object]) -> Diary:
        return Diary(playing.name, diary, None if react is None else lambda message: react(context, message), hooks)

    return ActorSpec(playing, build)


def mailbox(capacity: int = 4) -> tuple[Mailbox, ManualClock]:
    clock = ManualClock()
    return Mailbox(Role("box", Note | Urgent, capacity, urgent=(Urgent,)), clock), clock


# Mailboxes and addresses.


def test_a_mailbox_holds_its_capacity_and_no_more() -> None:
    box, _ = mailbox(capacity=3)
    box.put(Note(0))
    box.put(Urgent(1))
    box.put(Note(2))
    for message in (Note(3), Urgent(3)):
        with pytest.raises(MailboxFull, match="box already has 3"):
            box.put(message)
    assert box.take()[2] == Urgent(1)
    box.put(Note(3))
    assert [box.take()[2] for _ in range(3)] == [Note(0), Note(2), Note(3)]
    assert len(box) == 0


def test_what_an_actor_posts_to_itself_is_never_refused_and_counts_against_the_others() -> None:
    box, _ = mailbox(capacity=2)
    for posted in ("anything", 1, Urgent(2)):
        box.post(posted)
    with pytest.raises(MailboxFull, match="box already has 3"):
        box.put(Note(3))
    assert (box.statistics().length, box.statistics().peak, box.statistics().capacity) == (3, 3, 2)
    assert [box.take()[1:] for _ in range(3)] == [(OWN, Urgent(2)), (OWN, "anything"), (OWN, 1)]


def test_entries_that_come_back_are_first_in_their_lane_and_count_once() -> None:
    box, _ = mailbox(capacity=4)
    for message in (Note(0), Note(1), Urgent(2), Urgent(3)):
        box.put(message)
    urgent, ordinary = [box.take(), box.take()], [box.take()]
    box.put(Urgent(4))
    box.give_back(box.urgent, urgent, lost=False)
    box.give_back(box.ordinary, ordinary, lost=False)
    assert box.statistics().delivered == 0
    assert [box.take()[2] for _ in range(5)] == [Urgent(2), Urgent(3), Urgent(4), Note(0), Note(1)]


def test_a_new_life_finds_what_others_have_said() -> None:
    box, _ = mailbox(capacity=10)
    box.put(Note(0))
    box.post(Note(1))
    box.post(Urgent(2))
    box.post(Note(3), "kernel")
    box.put(Urgent(4))
    box.begin_life()
    assert box.statistics().dropped == 2
    assert [box.take()[2] for _ in range(3)] == [Urgent(4), Note(0), Note(3)]
    assert len(box) == 0


def test_urgent_messages_overtake_and_each_lane_keeps_its_order() -> None:
    chance = random.Random(17)
    box, _ = mailbox(capacity=50)
    urgent: deque[Urgent] = deque()
    ordinary: deque[Note] = deque()
    for number in range(2000):
        if len(box) < 50 and (len(box) == 0 or chance.random() < 0.5):
            message, lane = (Urgent(number), urgent) if chance.random() < 0.3 else (Note(number), ordinary)
            box.put(message)
            lane.append(message)
        else:
            assert box.take()[2] is (urgent or ordinary).popleft()


def test_a_mailbox_counts_on_the_clock_it_is_given() -> None:
    box, clock = mailbox()
    assert (box.statistics().oldest_age_seconds, box.statistics().peak, box.statistics().capacity) == (0.0, 0, 4)
    clock.seconds = 10.0
    box.put(Note(0))
    clock.seconds = 11.0
    box.put(Urgent(1))
    clock.seconds = 12.5
    assert box.statistics().oldest_age_seconds == 2.5
    box.take()[2]
    assert box.statistics().oldest_age_seconds == 2.5  # the ordinary one still waits
    box.take()[2]
    box.put(Urgent(2))
    clock.seconds = 13.0
    figures = box.statistics()
    assert (figures.length, figures.peak, figures.delivered, figures.dropped) == (1, 2, 2, 0)
    assert figures.oldest_age_seconds == 0.5


@pytest.mark.parametrize("drop", [False, True])
def test_a_closed_mailbox_counts_what_it_drops(drop: bool) -> None:
    box, _ = mailbox(capacity=2)
    box.put(Note(0))
    box.put(Urgent(1))
    box.close(drop=drop)
    assert box.closed
    assert len(box) == (0 if drop else 2)
    for _ in range(5):  # dropped without complaint, far beyond the capacity
        box.put(Note(2))
    box.post("late")
    assert box.statistics().dropped == (8 if drop else 6)
    with pytest.raises(NotAccepted):
        box.put("still the sender's mistake")  # type: ignore[arg-type]


def test_a_mailbox_is_made_with_sense() -> None:
    with pytest.raises(AssertionError, match="at least one message"):
        Role("none", Note, 0)
    with pytest.raises(TypeError, match="urgent must be"):
        Role("odd", Note, 1, urgent=(Urgent,))


@on_each_loop
async def test_one_reader_waits_at_a_time_and_may_give_up() -> None:
    box, _ = mailbox()
    first = asyncio.create_task(box.wait())
    await asyncio.sleep(0)
    with pytest.raises(AssertionError, match="one reader"):
        await box.wait()
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.create_task(box.wait())
    await asyncio.sleep(0)
    box.put(Note(0))
    box.put(Note(1))
    await second
    await box.wait()  # at once: there is something to take
    box.close(drop=True)
    await box.wait()  # at once: nothing will ever come


@on_each_loop
async def test_the_sender_hears_of_a_message_that_is_not_accepted() -> None:
    diary: list[str] = []
    playing = role()
    async with System([part(playing, diary)]) as system:
        ref = system.find(playing)
        for wrong in ("text", None, SpecialNote(1), Note):
            with pytest.raises(NotAccepted, match="actor does not accept") as caught:
                ref.tell(wrong)  # type: ignore[arg-type]
            assert isinstance(caught.value, TypeError)
            assert isinstance(caught.value, KernelError)
        ref.tell(Note(1))
        assert repr(ref) == "<Ref actor>"
    assert diary == ["actor started", "actor 1", "actor stopped"]


@on_each_loop
async def test_the_sender_hears_of_a_full_mailbox() -> None:
    diary: list[str] = []
    playing = role(capacity=2)
    async with System([part(playing, diary)]) as system:
        ref = system.find(playing)
        ref.tell(Note(0))
        ref.tell(Note(1))
        with pytest.raises(MailboxFull):
            ref.tell(Note(2))
        assert system.statistics()["actor"].length == 2
    assert diary == ["actor started", "actor 0", "actor 1", "actor stopped"]


@on_each_loop
async def test_ask_gets_the_one_answer_or_gives_up() -> None:
    kept: list[Question] = []
    playing, silent = role("answers"), role("keeps")
    cast = [part(playing, []), part(silent, [], lambda _, message: kept.append(message))]
    async with System(cast) as system:
        assert await ask(system.find(playing), Question, NET_SECONDS) == 42
        assert await ask(system.find(playing), Question, 0) == 42  # at the last moment, which is in time
        with pytest.raises(AskTimeout, match="keeps") as caught:
            await ask(system.find(silent), Question, 0)
        assert isinstance(caught.value, TimeoutError)
        asking = asyncio.create_task(ask(system.find(silent), Question, NET_SECONDS))
        await until(lambda: len(kept) == 2)
        kept[0].reply_to.tell(1)  # the one that timed out: too late, and harmless
        kept[1].reply_to.tell(2)
        kept[1].reply_to.tell(3)  # only the first counts
        assert await asking == 2
        gone = asyncio.create_task(ask(system.find(silent), Question, NET_SECONDS))
        await until(lambda: len(kept) == 3)
        gone.cancel()
        await asyncio.wait([gone])
        kept[2].reply_to.tell(4)
        assert gone.cancelled()
    assert system.find(playing).is_stopped
    with pytest.raises(ActorStopped, match="answers"):
        await ask(system.find(playing), Question, NET_SECONDS)
    assert system.statistics()["answers"].dropped == 0  # it was not even told


def test_all_that_wait_share_one_timer() -> None:
    clock, loop = ManualClock(), asyncio.new_event_loop()
    deadlines = AskDeadlines(loop, clock)
    answered = [loop.create_future() for _ in range(1000)]
    gone = [weakref.ref(future) for future in answered]
    silent: dict[float, asyncio.Future[object]] = {
        seconds: loop.create_future() for seconds in (7.0, 3.0, 60.0, 3.0005)
    }
    for seconds, future in silent.items():
        deadlines.add(future, seconds)
    while answered:
        deadlines.add(answered[-1], 60.0)
        del deadlines.due[answered.pop()]
    assert not [future for future in gone if future() is not None], "whoever waits for long keeps no others"
    assert clock.pending == 1
    late = {}
    for _ in range(9000):
        clock.advance(0.001)
        for seconds in [seconds for seconds, future in silent.items() if future.done()]:
            late[seconds] = clock.seconds - seconds
            with pytest.raises(AskTimeout):
                silent[seconds].result()
            del deadlines.due[silent.pop(seconds)]
        assert clock.pending == 1
    assert list(late) == [3.0, 3.0005, 7.0]
    assert all(0 <= seconds < 0.005 for seconds in late.values())
    deadlines.close()
    assert clock.pending == 1  # the last one still waits
    deadlines.add(loop.create_future(), math.inf)
    clock.advance(60.0)
    assert isinstance(silent[60.0].exception(), AskTimeout)
    assert clock.pending == 0  # whoever waits forever needs no timer
    loop.close()


def test_whoever_waits_no_longer_leaves_no_timer_behind() -> None:
    clock, loop = ManualClock(), asyncio.new_event_loop()
    deadlines, future = AskDeadlines(loop, clock), loop.create_future()
    deadlines.add(future, 1.0)
    del deadlines.due[future]
    assert clock.pending == 1
    deadlines.close()
    assert clock.pending == 0
    loop.close()


def test_many_that_wait_in_vain_are_not_looked_at_all_the_time() -> None:
    clock, loop = ManualClock(), asyncio.new_event_loop()
    deadlines, looks, call_later = AskDeadlines(loop, clock), list[float](), clock.call_later
    waiting = [loop.create_future() for _ in range(1000)]
    for number, future in enumerate(waiting):
        deadlines.add(future, 1 + number / 1e5)

    def count(delay: float, callback: Callable[[], object], /) -> ManualTimer:
        looks.append(delay)
        return call_later(delay, callback)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "call_later", count)
        clock.advance(2.0)
    assert all(isinstance(future.exception(), AskTimeout) for future in waiting)
    assert 1 <= len(looks) <= 6  # within 10 ms
    loop.close()


@on_each_loop
async def test_asks_time_out_each_in_its_own_time() -> None:
    kept: list[Question] = []
    silent = role("keeps")
    async with System([part(silent, [], lambda _, message: kept.append(message))]) as system:
        ref = system.find(silent)
        patient = asyncio.create_task(ask(ref, Question, NET_SECONDS))
        await until(lambda: len(kept) == 1)
        for timeout in (0.02, 0.001, 0.0, 0.01):
            with pytest.raises(AskTimeout, match=f"within {timeout} s"):
                await ask(ref, Question, timeout)
        assert not patient.done()
        kept[0].reply_to.tell(42)
        assert await patient == 42
        late = asyncio.create_task(ask(ref, Question, 0.05))
        await until(lambda: len(kept) == 6)
    with pytest.raises(AskTimeout):  # also when the system has ended meanwhile
        await late


@on_each_loop
async def test_whoever_has_no_system_here_can_be_asked_too() -> None:
    """Such as an actor at the other end of a wire, or one that belongs to another loop."""
    other = asyncio.new_event_loop()
    clock = ManualClock()
    heard: list[Question] = []
    for deadlines in (None, AskDeadlines(other, clock)):
        ref = Ref("far", heard.append)
        ref.deadlines = deadlines
        with pytest.raises(AskTimeout, match="far"):
            await ask(ref, Question, 0)
        asking = asyncio.create_task(ask(ref, Question, NET_SECONDS))
        await settle()
        heard[-1].reply_to.tell(42)
        assert await asking == 42
        assert clock.pending == 0
    other.close()


# Fairness.


@on_each_loop
async def test_an_actor_that_feeds_itself_starves_nobody() -> None:
    busy, other = role("busy"), role("other")
    handled = {"busy": 0, "other": 0}

    def feed(context: Context[object], message: object) -> None:
        handled["busy"] += 1
        context.ref.tell(message)

    def count(_: Context[object], message: object) -> None:
        handled["other"] += 1

    system = System([part(other, [], count), part(busy, [], feed)])
    await system.start()
    for number in range(3 * TURN_MESSAGES):
        system.find(busy).tell(Note(number))
    for turn in range(1, 50):  # the host's own task
        before = dict(handled)
        system.find(other).tell(Note(turn))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert 0 < handled["busy"] - before["busy"] <= 2 * TURN_MESSAGES
        assert handled["other"] == turn
    await system.stop(drop=True)


# Systems.


@on_each_loop
async def test_the_cast_starts_at_the_sink_and_stops_at_the_source_with_nothing_lost() -> None:
    diary: list[str] = []
    sink, middle, source = role("sink"), role("middle"), role("source")

    def forward(to: NoteRole) -> Callable[[Context[object], object], None]:
        return lambda context, message: context.find(to).tell(message)

    system = System([part(sink, diary), part(middle, diary, forward(sink)), part(source, diary, forward(middle))])
    async with system:
        assert diary == ["sink started", "middle started", "source started"]
        for number in range(200):
            system.find(source).tell(Note(number))
    notes = [f"sink {number}" for number in range(200)]
    assert [line for line in diary if line in notes] == notes
    assert [line for line in diary if line.endswith("stopped")] == ["source stopped", "middle stopped", "sink stopped"]
    system.find(source).tell(Note(0))
    assert system.statistics()["source"].dropped == 1


@on_each_loop
async def test_drop_forgets_what_waits() -> None:
    diary: list[str] = []
    playing = role()
    system = System([part(playing, diary)])
    await system.start()
    for number in range(1000):
        system.find(playing).tell(Note(number))
    await system.stop(drop=True)
    handled = len(diary) - 2
    assert handled < 1000
    assert handled + system.statistics()["actor"].dropped == 1000
    assert diary[-1] == "actor stopped"


@on_each_loop
async def test_an_error_in_the_body_drops_and_stops() -> None:
    diary: list[str] = []
    playing = role()
    with pytest.raises(ZeroDivisionError):
        async with System([part(playing, diary)]) as system:
            for number in range(1000):
                system.find(playing).tell(Note(number))
            raise ZeroDivisionError
    assert len(diary) < 1000
    assert diary[-1] == "actor stopped"


@on_each_loop
async def test_stop_is_harmless_before_the_start_and_twice() -> None:
    system = System([part(role(), [])])
    await system.stop()
    await system.start()
    await asyncio.gather(system.stop(), system.stop(drop=True))
    await system.stop()
    with pytest.raises(AssertionError):
        await system.start()


@on_each_loop
async def test_a_system_is_started_in_one_task_and_stopped_in_another() -> None:
    diary: list[str] = []
    system = System([part(role(), diary)])
    await asyncio.create_task(system.start())
    system.find(role()).tell(Note(1))
    await asyncio.create_task(system.stop())
    assert diary == ["actor started", "actor 1", "actor stopped"]
    assert asyncio.all_tasks() == {asyncio.current_task()}


@on_each_loop
async def test_several_systems_know_nothing_of_each_other() -> None:
    diaries: list[list[str]] = [[], [], []]
    playing = role()
    systems = [System([part(playing, diary)]) for diary in diaries]
    for system in systems:
        await system.start()
    for number, system in enumerate(systems):
        system.find(playing).tell(Note(number))
    await systems[1].stop()
    systems[0].find(playing).tell(Note(7))
    await systems[0].stop()
    await systems[2].stop()
    assert diaries == [
        ["actor started", "actor 0", "actor 7", "actor stopped"],
        ["actor started", "actor 1", "actor stopped"],
        ["actor started", "actor 2", "actor stopped"],
    ]


@on_each_loop
async def test_a_cast_has_each_role_once_and_no_others() -> None:
    async with System([part(role("one"), [])]) as system:
        with pytest.raises(KeyError):
            system.find(role("two"))
    with pytest.raises(AssertionError, match="two actor specs have the role 'one'"):
        await System([part(role("one"), []), part(role("one"), [])]).start()


@on_each_loop
async def test_the_tap_sees_every_delivery_before_the_actor_does() -> None:
    events: list[object] = []
    sink, source = role("sink"), role("source")

    def forward(context: Context[object], message: object) -> None:
        events.append(("source handles", message))
        context.find(sink).tell(message)

    cast = [
        part(sink, [], lambda _, message: events.append(("sink handles", message))),
        part(source, [], forward),
    ]

    def tap(event: Event) -> None:
        if isinstance(event, Delivered):
            events.append((f"to {event.actor}", event.message))

    async with System(cast, tap=tap) as system:
        for number in range(100):
            system.find(source).tell(Note(number))
    for name in ("sink", "source"):
        mine = [event for event in events if name in event[0]]
        expected = [(what, Note(number)) for number in range(100) for what in (f"to {name}", f"{name} handles")]
        assert mine == expected


@on_each_loop
async def test_time_and_chance_are_injected() -> None:
    async def draws(seed: int) -> list[float]:
        seen: list[float] = []

        def draw(context: Context[object], message: object) -> None:
            seen.append(context.clock.now())
            seen.append(context.chance.random())

        clock = ManualClock()
        clock.seconds = 5.0
        one, two = role("one"), role("two")
        async with System([part(one, [], draw), part(two, [], draw)], clock=clock, chance=random.Random(seed)) as cast:
            cast.find(one).tell(Note(0))
            cast.find(two).tell(Note(0))
        return seen

    first, again, other = await draws(1), await draws(1), await draws(2)
    assert first == again
    assert first[0] == first[2] == 5.0
    assert len({first[1], first[3], other[1], other[3]}) == 4


# Failure.


class _Exit(SystemExit):
    """What ends a program, and is no crash of an actor."""


class _Panic(BaseException):
    """What is no Exception, and a crash all the same."""


@pytest.mark.parametrize("error", [ValueError("bad actor"), _Exit("bad actor"), _Panic("bad actor")])
@on_each_loop
async def test_a_constructor_that_raises_leaves_nothing(error: BaseException) -> None:
    ran: list[str] = []

    def hires(context: Context[object]) -> Diary:
        worker = context.worker("w")
        worker.submit(lambda: ran.append("work"), done=lambda _: Note(0), failed=lambda _: Note(0))
        return Diary("first", [])

    def raises(context: Context[object]) -> Diary:
        context.worker("idle")
        raise error

    threads = set(threading.enumerate())
    with pytest.raises(_Exit if isinstance(error, _Exit) else ActorCrashed) as caught:
        await System([ActorSpec(role("first"), hires), ActorSpec(role("second"), raises)]).start()
    if isinstance(caught.value, ActorCrashed):
        assert (caught.value.actor, caught.value.message_type) == ("second", "construction")
        assert caught.value.__cause__ is error
    assert set(threading.enumerate()) == threads
    assert asyncio.all_tasks() == {asyncio.current_task()}


@on_each_loop
async def test_a_handler_that_raises_stops_every_actor_and_is_told_once() -> None:
    diary: list[str] = []
    failures: list[ActorCrashed] = []
    good, one, two = role("good"), role("one"), role("two")

    def fail(_: Context[object], message: object) -> None:
        raise ValueError(message)

    system = System([part(good, diary), part(one, diary, fail), part(two, diary, fail)], on_failure=failures.append)
    await system.start()
    for number in range(3):
        system.find(one).tell(Note(number))
        system.find(two).tell(Note(number))
    await until(lambda: "good stopped" in diary)
    assert [(crash.actor, crash.message_type) for crash in failures] == [("one", "Note")]
    assert isinstance(failures[0].__cause__, ValueError)
    assert failures[0].__cause__.args == (Note(0),)
    system.find(one).tell(Note(9))  # dropped
    await system.stop()
    assert diary == ["good started", "one started", "two started", "good stopped"]
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("hook", ["started", "stopped"])
@on_each_loop
async def test_a_hook_that_raises_is_a_crash(hook: str) -> None:
    diary: list[str] = []
    failures: list[ActorCrashed] = []
    cast = [part(role("good"), diary), part(role("bad"), diary, hooks=(hook,))]
    with pytest.raises(ActorCrashed) as caught:
        async with System(cast, on_failure=failures.append):
            pass
    assert failures == [caught.value]
    assert (caught.value.actor, caught.value.message_type) == ("bad", hook)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "good stopped" in diary


@pytest.mark.parametrize("error", [_Panic(), asyncio.CancelledError(), GeneratorExit()], ids=repr)
@on_each_loop
async def test_whatever_a_handler_raises_is_a_crash(error: BaseException) -> None:
    """Such as the result of a future that was cancelled: it is not this task that was."""

    def fail(_: Context[object], message: object) -> None:
        raise error

    with pytest.raises(ActorCrashed) as caught:
        async with System([part(role(), [], fail)]) as system:
            system.find(role()).tell(Note(0))
            await asyncio.Event().wait()
    assert caught.value.__cause__ is error
    assert caught.value.message_type == "Note"


@on_each_loop
async def test_an_error_nobody_listens_to_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Context[object], message: object) -> None:
        raise ValueError("broken actor")

    diary: list[str] = []
    system = System([part(role(), diary, fail)])
    await system.start()
    system.find(role()).tell(Note(0))
    await until(lambda: system.statistics()["actor"].delivered == 1)
    await system.stop()
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("cuelight.kernel", logging.ERROR)
    assert "actor_crashed" in record.getMessage()
    assert record.exc_info is not None and "broken actor" in str(record.exc_info[1])


@on_each_loop
async def test_an_observer_that_raises_is_heard_by_whoever_stops() -> None:
    def fail(_: object) -> None:
        raise LookupError("whom to tell?")

    diary: list[str] = []
    cast = [part(role("good"), diary), part(role(), diary, lambda _, message: 1 / 0)]
    system = System(cast, on_failure=fail)
    await system.start()
    system.find(role()).tell(Note(0))
    for _ in range(2):
        with pytest.raises(ExceptionGroup) as caught:
            await system.stop()
        assert isinstance(caught.value.exceptions[0], LookupError)
    with pytest.raises(ExceptionGroup):
        async with System(cast, on_failure=fail) as system:
            system.find(role()).tell(Note(0))
            await asyncio.Event().wait()
    assert asyncio.current_task().cancelling() == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("error", [ActorCrashed("a", "Note", ValueError(3)), RemoteError("far", "the trace")])
def test_errors_cross_to_another_process(error: KernelError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert repr(copy.__cause__) == repr(error.__cause__)
    assert {name: str(value) for name, value in vars(copy).items()} == {
        name: str(value) for name, value in vars(error).items()
    }


# Whoever opens a system may be cancelled at any moment.


def _cast_with_workers(diary: list[str]) -> list[ActorSpec[Note | Urgent | Question]]:
    def hire(name: str) -> Callable[[Context[object]], Diary]:
        def build(context: Context[object]) -> Diary:
            context.worker("w")
            return Diary(name, diary)

        return build

    return [ActorSpec(role(name), hire(name)) for name in ("sink", "source")]


@pytest.mark.parametrize("cancels", [1, 2])
@on_each_loop
async def test_the_opener_may_be_cancelled_at_any_moment(cancels: int) -> None:
    threads = set(threading.enumerate())
    unhandled: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    outcomes = set()
    for turns in range(40):
        diary: list[str] = []

        async def use(diary: list[str]) -> None:
            async with System(_cast_with_workers(diary)) as system:
                for number in range(5):
                    system.find(role("source")).tell(Note(number))
                    await asyncio.sleep(0)

        opener = asyncio.create_task(use(diary))
        for _ in range(turns):
            await asyncio.sleep(0)
        for _ in range(cancels):
            opener.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([opener])
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
        assert set(threading.enumerate()) == threads
        assert diary.count("sink started") == diary.count("sink stopped")
        outcomes.add((opener.cancelled(), "source started" in diary))
    assert outcomes >= {(True, False), (True, True), (False, True)}
    assert not unhandled


@on_each_loop
async def test_a_system_stops_before_a_cancelled_scope_around_it_is_left() -> None:
    diary: list[str] = []
    threads = set(threading.enumerate())
    with anyio.CancelScope() as scope:
        async with System(_cast_with_workers(diary)):
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert diary[-2:] == ["source stopped", "sink stopped"]
    assert set(threading.enumerate()) == threads


@on_each_loop
async def test_a_system_that_nobody_stops_ends_with_its_loop() -> None:
    await System(_cast_with_workers([])).start()  # the check is in `on_each_loop`


# What an actor is given: timers, time, and who told it.


@on_each_loop
async def test_a_timer_posts_once_unless_it_is_cancelled() -> None:
    troupe = Troupe(a=RestartPolicy())
    timers: list[Timer] = []

    def act(context: Context[object]) -> None:
        for seconds, message in ((2.0, Note(2)), (1.0, Note(1)), (1.0, Urgent(3)), (3.0, Note(4))):
            timers.append(context.after(seconds, message))

    async with troupe.system:
        troupe.tell("a", Do(act))
        assert await troupe.pass_time(0.9) == ["a.1 built", "a.1 started"]
        assert await troupe.pass_time(0.1) == ["a.1 Urgent 3", "a.1 Note 1"]
        timers[3].cancel()
        timers[3].cancel()  # harmless, as for one that has fired
        timers[1].cancel()
        assert await troupe.pass_time(10.0) == ["a.1 Note 2"]
        senders = [event.sender for event in troupe.events if isinstance(event, Delivered)]
        assert senders == ["", OWN, OWN, OWN]
        troupe.tell("a", Do(lambda context: context.after(1.0, Note(5))))
        await settle()
    assert troupe.clock.pending == 0
    troupe.clock.advance(10.0)
    assert troupe.news() == ["a.1 stopped"]


@on_each_loop
async def test_a_timer_of_the_loops_own_clock() -> None:
    diary: list[str] = []

    def act(context: Context[object], message: object) -> None:
        if message == Note(0):
            context.after(0.001, Note(1))
        else:
            diary.append(f"{message}")

    async with System([part(role(), [], act)]) as system:
        system.find(role()).tell(Note(0))
        await until(lambda: bool(diary))


@on_each_loop
async def test_a_timer_is_posted_to_a_full_mailbox_too() -> None:
    clock, diary = ManualClock(), []
    playing = role(capacity=1)

    def act(context: Context[object], message: object) -> None:
        if message == Note(0):
            context.after(1.0, Note(1))
            context.ref.tell(Note(2))
            clock.advance(1.0)
        else:
            diary.append(message)

    async with System([part(playing, [], act)], clock=clock) as system:
        system.find(playing).tell(Note(0))
        await settle()
    assert diary == [Note(2), Note(1)]
    assert system.statistics()["actor"].peak == 2


@on_each_loop
async def test_time_stands_still_while_a_handler_runs() -> None:
    troupe = Troupe(a=RestartPolicy())
    seen: list[float] = []

    def act(context: Context[object]) -> None:
        seen.append(context.clock.now())
        troupe.clock.advance(1.0)
        context.spawn(troupe.part(f"child of {len(seen)}"))  # born at a time of its own
        seen.append(context.clock.now())

    async with troupe.system:
        troupe.tell("a", Do(act), Do(act))
        await settle()
    assert seen == [0.0, 0.0, 1.0, 1.0]
    deliveries = [event.seconds for event in troupe.events if isinstance(event, Delivered)]
    assert deliveries == [0.0, 1.0]


@on_each_loop
async def test_an_actors_hooks_see_the_time_that_the_tap_is_told() -> None:
    clock, events, seen = ManualClock(), [], []

    class Watch(Actor[Note]):
        def __init__(self, context: Context[object]) -> None:
            self.look = lambda: seen.append(context.clock.now())
            self.look()
            clock.advance(1.0)

        def started(self) -> None:
            self.look()

        def handle(self, message: Note) -> None:
            raise NotImplementedError

        def stopped(self) -> None:
            self.look()
            clock.advance(1.0)

    async with System([ActorSpec(Role("watch", Note, 1), Watch)], clock=clock, tap=events.append):
        await settle()
        clock.advance(1.0)
    started, ended = events
    assert seen == [0.0, 0.0, 2.0]
    assert (started.seconds, ended.seconds) == (0.0, 2.0)


@on_each_loop
async def test_a_delivery_says_who_told() -> None:
    troupe = Troupe(a=RestartPolicy(), b=RestartPolicy())

    def act(context: Context[object]) -> None:
        context.find(player("a")).tell(Note(1))
        context.ref.tell(Note(2))
        worker = context.worker("w")
        worker.submit(lambda: 3, done=Note, failed=lambda _: Note(-1))
        context.after(0.0, Note(4))

    for name, hook in (("b started", 5), ("b stopped", 6), ("b built", 7)):
        troupe.hooks[name] = lambda context, hook=hook: context.find(player("a")).tell(Note(hook))
    async with troupe.system as system:
        troupe.tell("b", Do(act))
        await troupe.pass_time(0)
        await until(lambda: system.statistics()["b"].delivered == 4)
        troupe.tell("a", Note(8))
    told = {
        event.message.number: (event.sender, event.actor)
        for event in troupe.events
        if isinstance(event, Delivered) and isinstance(event.message, Note)
    }
    assert told == {
        **dict.fromkeys((1, 5, 6, 7), ("b", "a")),
        2: ("b", "b"),
        3: (OWN, "b"),
        4: (OWN, "b"),
        8: ("", "a"),
    }


@on_each_loop
async def test_a_tap_that_raises_is_logged_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    diary: list[str] = []
    seen: list[Event] = []

    def tap(event: Event) -> None:
        seen.append(event)
        if isinstance(event, Delivered):
            raise OSError("no ink")

    async with System([part(role(), diary)], tap=tap) as system:
        for number in range(3):
            system.find(role()).tell(Note(number))
    assert diary == ["actor started", "actor 0", "actor 1", "actor 2", "actor stopped"]
    assert [type(event) for event in seen] == [Started, Delivered]
    (record,) = caplog.records
    assert "tap_failed" in record.getMessage()
    assert record.exc_info is not None and "no ink" in str(record.exc_info[1])


@on_each_loop
async def test_a_slow_handler_is_reported_with_actor_message_and_time(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()

    def act(_: Context[object], message: object) -> None:
        clock.advance(message.number / 1000)

    async with System([part(role(), [], act)], clock=clock, slow_handler_seconds=0.5) as system:
        for message in (Note(500), Urgent(501), Note(1234), Note(10)):
            system.find(role()).tell(message)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    for record, kind, seconds in zip(caplog.records, ("Urgent", "Note"), (0.501, 1.234), strict=True):
        for fact in ("slow_handler", "actor='actor'", f"message_type='{kind}'", f"seconds={seconds}"):
            assert fact in record.getMessage()


# A cast that changes.


@on_each_loop
async def test_a_spawned_actor_is_the_last_of_the_cast_and_leaves_it_when_dismissed() -> None:
    troupe = Troupe(a=RestartPolicy())
    async with troupe.system as system:
        await troupe.pass_time(0)
        ref = system.spawn(troupe.part("b"))
        ref.tell(Note(1))
        assert system.find(player("b")) is ref
        assert [each.name for each in system.roles()] == ["a", "b"]
        with pytest.raises(AssertionError, match="two actor specs have the role 'b'"):
            system.spawn(troupe.part("b"))
        troupe.news()
        assert await troupe.pass_time(0) == ["b.1 started", "b.1 Note 1"]
        for number in range(100):
            ref.tell(Note(number))
        system.dismiss(player("b"))
        ref.tell(Note(-1))
        assert ref.is_stopped
        assert await troupe.pass_time(0) == [*[f"b.1 Note {number}" for number in range(100)], "b.1 stopped"]
        with pytest.raises(KeyError):
            system.find(player("b"))
        with pytest.raises(KeyError):
            system.dismiss(player("b"))
        again = system.spawn(troupe.part("b"))
        ref.tell(Note(-1))  # the address of the one before, and it stays that
        again.tell(Note(2))
        assert await troupe.pass_time(0) == ["b.2 built", "b.2 started", "b.2 Note 2"]
        assert not again.is_stopped
    assert troupe.news() == ["b.2 stopped", "a.1 stopped"]


@on_each_loop
async def test_dismissed_with_drop_it_handles_nothing_more() -> None:
    troupe = Troupe(a=RestartPolicy(), b=RestartPolicy())
    async with troupe.system as system:
        await troupe.pass_time(0)
        troupe.news()
        for number in range(100):
            troupe.tell("b", Note(number))
        system.dismiss(player("b"), drop=True)
        assert await troupe.pass_time(0) == ["b.1 stopped"]
        assert list(system.statistics()) == ["a"]


@on_each_loop
async def test_actors_spawn_and_dismiss() -> None:
    troupe = Troupe(a=RestartPolicy())

    def act(context: Context[object]) -> None:
        context.spawn(troupe.part("b")).tell(Do(lambda context: context.dismiss(player("a"))))
        context.spawn(troupe.part("c")).tell(Do(lambda context: context.dismiss(context.ref, drop=True)))
        context.find(player("c")).tell(Note(1))

    async with troupe.system as system:
        await troupe.pass_time(0)
        troupe.news()
        troupe.tell("a", Do(act))
        lines = await troupe.pass_time(0)
        assert lines[:2] == ["b.1 built", "c.1 built"]
        assert sorted(lines[2:]) == ["a.1 stopped", "b.1 started", "c.1 started", "c.1 stopped"]
        assert list(system.statistics()) == ["b"]
    spawned = [event.sender for event in troupe.events if isinstance(event, Delivered) and event.actor != "a"]
    assert spawned == ["a", "a"]


@pytest.mark.parametrize("error", [ValueError("broken"), _Exit("broken"), _Panic("broken")])
@on_each_loop
async def test_whoever_spawns_hears_of_a_constructor_that_raises(error: BaseException) -> None:
    troupe = Troupe(a=RestartPolicy())

    def fail(context: Context[object]) -> None:
        context.worker("w")
        context.after(1.0, Note(1))
        raise error

    def act(context: Context[object]) -> None:
        with pytest.raises(ActorCrashed):
            context.spawn(troupe.part("b"))
        context.find(player("a")).tell(Note(1))

    async with troupe.system as system:
        troupe.hooks["b built"] = fail
        with pytest.raises(_Exit if isinstance(error, _Exit) else ActorCrashed) as caught:
            system.spawn(troupe.part("b"))
        if isinstance(caught.value, ActorCrashed):
            assert (caught.value.actor, caught.value.message_type) == ("b", "construction")
            assert caught.value.__cause__ is error
            troupe.tell("a", Do(act))
            await settle()
            assert troupe.news()[-1] == "a.1 Note 1"
        assert troupe.clock.pending == 0
        await until(lambda: "cuelight b w" not in {thread.name for thread in threading.enumerate()})
        assert list(system.statistics()) == ["a"]
        del troupe.hooks["b built"]
        system.spawn(troupe.part("b"))
    assert not troupe.failures


@on_each_loop
async def test_a_part_that_cannot_live_where_it_should_is_not_added() -> None:
    troupe = Troupe(a=RestartPolicy())
    local = ActorSpec(role("b"), lambda _: Diary("b", []), placement=InProcess())
    async with troupe.system as system:
        with pytest.raises(NotSendable):
            system.spawn(local)
        assert list(system.statistics()) == ["a"]
    with pytest.raises(NotSendable):
        await System([part(role("a"), []), local]).start()


@on_each_loop
async def test_what_is_spawned_while_the_system_closes_never_lives() -> None:
    troupe = Troupe(a=RestartPolicy(), b=RestartPolicy())
    refs: list[Ref[object]] = []
    troupe.hooks["b stopped"] = lambda context: refs.append(context.spawn(troupe.part("late")))
    async with troupe.system as system:
        pass
    refs.append(system.spawn(troupe.part("later")))
    for ref in refs:
        ref.tell(Note(1))
        assert ref.is_stopped
    assert troupe.lives == {"a": 1, "b": 1}
    assert [system.statistics()[name].dropped for name in ("late", "later")] == [1, 1]


@pytest.mark.parametrize("names", ["", "a"])
@on_each_loop
async def test_a_system_that_was_cancelled_takes_no_more_actors(names: str) -> None:
    troupe = Troupe(**dict.fromkeys(names, RestartPolicy()))
    system = troupe.system
    await system.start()
    (host,) = [task for task in asyncio.all_tasks() if task.get_name() == "cuelight system"]
    host.cancel()
    await asyncio.wait([host])
    assert system.spawn(troupe.part("b")).is_stopped
    await system.stop()


@on_each_loop
async def test_ten_thousand_spawned_actors_answer() -> None:
    async with System([]) as system:
        refs = [system.spawn(part(role(f"actor {number}", capacity=1), [])) for number in range(10_000)]
        answers = await asyncio.gather(*(ask(ref, Question, NET_SECONDS) for ref in refs))
        assert answers == [42] * 10_000
        for number in range(0, 10_000, 2):
            system.dismiss(role(f"actor {number}"))
        await until(lambda: len(system.statistics()) == 5000)
        assert [ref.is_stopped for ref in refs] == [True, False] * 5000
    assert all(ref.is_stopped for ref in refs)


# An end in time.


@pytest.mark.parametrize("is_lazy", [False, True])
@on_each_loop
async def test_an_orderly_stop_gives_up_on_work_that_does_not_return(is_lazy: bool) -> None:
    """It may be doing its last piece of work, or have others before it."""
    troupe = Troupe(a=RestartPolicy(), b=RestartPolicy())
    begun, may_end, ran = threading.Event(), threading.Event(), threading.Event()

    def work() -> int:
        begun.set()
        may_end.wait(NET_SECONDS)
        return 1

    def act(context: Context[object]) -> None:
        worker = context.worker("w")
        worker.submit(work, done=Note, failed=lambda _: Note(-1))
        if is_lazy:
            worker.submit(lambda: ran.set() or 2, done=Note, failed=lambda _: Note(-1))

    system = troupe.system
    await system.start()
    troupe.tell("a", Do(act))
    await until(begun.is_set)
    stopping = asyncio.create_task(system.stop(timeout_seconds=2.0))
    await troupe.pass_time(1.9)
    assert not stopping.done()
    await troupe.pass_time(0.1)
    assert stopping.done()
    assert await stopping is None
    await system.stop(timeout_seconds=1.0)  # harmless
    assert troupe.clock.pending == 0
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "cuelight a w"]
    may_end.set()
    await until(lambda: not thread.is_alive())
    await settle()
    assert not ran.is_set()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@on_each_loop
async def test_an_orderly_stop_drops_what_is_still_left_when_its_time_is_over() -> None:
    troupe = Troupe(a=RestartPolicy(), b=RestartPolicy())
    system = troupe.system
    await system.start()
    for number in range(5000):
        troupe.tell("a", Note(number))
    blocked = threading.Event()

    class Slow(Actor[Note]):
        def __init__(self, context: Context[object]) -> None:
            self._context = context

        def handle(self, message: Note) -> None:
            if message.number == 0:
                troupe.clock.advance(2.0)
                blocked.set()

    slow = system.spawn(ActorSpec(Role("slow", Note, capacity=5000), Slow))
    for number in range(5000):
        slow.tell(Note(number - 100))
    with pytest.raises(MailboxFull):
        slow.tell(Note(0))
    await system.stop(timeout_seconds=1.0)
    assert blocked.is_set()
    dropped = system.statistics()["slow"].dropped
    assert 0 < dropped < 5000
    assert dropped + system.statistics()["slow"].delivered == 5000
    assert {"a.1 stopped", "b.1 stopped"} <= set(troupe.news())
    assert system.failure is None
    assert troupe.clock.pending == 0


@on_each_loop
async def test_an_orderly_stop_that_is_in_time_leaves_no_timer() -> None:
    troupe = Troupe(a=RestartPolicy())
    await troupe.system.start()
    troupe.tell("a", *[Note(number) for number in range(500)])
    await troupe.system.stop(timeout_seconds=1000.0)
    assert troupe.system.statistics()["a"].delivered == 500
    assert troupe.clock.pending == 0


@on_each_loop
async def test_an_orderly_stop_gives_up_on_an_actor_that_is_not_yet_there() -> None:
    """Its constructor keeps its thread."""
    troupe = Troupe(a=RestartPolicy())
    begun, may_end = threading.Event(), threading.Event()

    def build(_: Context[object]) -> Diary:
        begun.set()
        may_end.wait(NET_SECONDS)
        return Diary("far", [])

    system = troupe.system
    await system.start()
    system.spawn(ActorSpec(Role("far", Note, 10), build, placement=OnThread()))
    await until(begun.is_set)
    stopping = asyncio.create_task(system.stop(timeout_seconds=1.0))
    await troupe.pass_time(1.0)
    await until(stopping.done)
    assert stopping.exception() is None
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "cuelight far"]
    may_end.set()
    await until(lambda: not thread.is_alive())
    await settle()


@pytest.mark.parametrize("how", ["start", "cancel"])
@on_each_loop
async def test_a_life_that_is_cut_short_leaves_no_timer(how: str) -> None:
    troupe = Troupe(a=RestartPolicy(), b=RestartPolicy())
    troupe.hooks["a built"] = lambda context: context.after(1000.0, Note(1))
    if how == "start":
        troupe.hooks["b built"] = crash
        with pytest.raises(ActorCrashed):
            await troupe.system.start()
    else:
        await troupe.system.start()
        (host,) = [task for task in asyncio.all_tasks() if task.get_name() == "cuelight system"]
        host.cancel()
        await asyncio.wait([host])
    assert troupe.clock.pending == 0


# Hosts.


def test_a_system_in_a_loop_of_a_threads_own() -> None:
    diaries: dict[str, list[str]] = {}

    async def use(name: str) -> None:
        async with System([part(role(), diaries.setdefault(name, []))]) as system:
            system.find(role()).tell(Note(1))
            assert await ask(system.find(role()), Question, NET_SECONDS) == 42

    threads = [threading.Thread(target=lambda n=number: asyncio.run(use(f"{n}"))) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(NET_SECONDS)
    assert list(diaries.values()) == [["actor started", "actor 1", "actor stopped"]] * 3


PROGRAM = """
import asyncio, sys, threading
import uvloop
from cuelight.kernel import Actor, ActorSpec, RestartPolicy, Role, System

class Busy(Actor[int]):
    def __init__(self, context):
        self.context = context
        self.worker = context.worker("w")
    def handle(self, message):
        if message == 1:
            print("ready", flush=True)
        if message == 2:
            raise ValueError("broken")
        if message == 4:
            sys.exit(5)
        self.context.ref.tell(message and 3)
    def stopped(self):
        print("stopped", flush=True)

ROLE = Role("busy", int, 10)

async def main():
    async with System([ActorSpec(ROLE, Busy, RestartPolicy(restarts_max=5, backoff_seconds=0.0))]) as system:
        for message in {messages}:
            system.find(ROLE).tell(message)
        await asyncio.Event().wait()

try:
    {runner}.run(main())
except KeyboardInterrupt:
    assert threading.enumerate() == [threading.main_thread()]
    print("interrupted")
"""


def run_program(runner: str, messages: tuple[int, ...]) -> subprocess.Popen[str]:
    program = PROGRAM.replace("{messages}", repr(messages)).replace("{runner}", runner)
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(sys.platform == "win32", reason="interrupts a process as a terminal does")
@pytest.mark.parametrize("messages", [(1,), (2, 1)], ids=["busy", "restarted"])
@pytest.mark.parametrize("runner", ["asyncio", "uvloop"])
def test_an_interrupt_ends_a_program_in_order(runner: str, messages: tuple[int, ...]) -> None:
    with run_program(runner, messages) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            child.send_signal(signal.SIGINT)
            out, errors = child.communicate(timeout=NET_SECONDS)
        finally:
            child.kill()
    assert out == "stopped\ninterrupted\n"
    assert child.returncode == 0
    assert "Traceback" not in errors or 2 in messages  # then that of the crash is logged
    assert "KeyboardInterrupt" not in errors
    assert "never retrieved" not in errors


@pytest.mark.parametrize("runner", ["asyncio", "uvloop"])
def test_an_actor_may_end_the_program(runner: str) -> None:
    with run_program(runner, (4,)) as child:
        try:
            _, errors = child.communicate(timeout=NET_SECONDS)
        finally:
            child.kill()
    assert child.returncode == 5
    assert "actor_crashed" not in errors


# Workers.


def _worker(loop: asyncio.AbstractEventLoop) -> tuple[WorkerThread[object], Recorder[object]]:
    heard: Recorder[object] = Recorder()
    return WorkerThread("test worker", heard.tell, loop), heard


@on_each_loop
async def test_a_worker_keeps_the_order_and_posts_from_the_loop() -> None:
    threads: list[tuple[int, int]] = []
    heard: list[object] = []
    loop_thread = threading.get_ident()

    def post(message: object) -> None:
        heard.append(message)
        threads[-1] = (threads[-1][0], threading.get_ident())

    worker: WorkerThread[object] = WorkerThread("test worker", post, asyncio.get_running_loop())

    def work(number: int) -> int:
        threads.append((threading.get_ident(), 0))
        if number % 3 == 0:
            raise ValueError(number)
        return number

    for number in range(50):
        worker.submit(lambda number=number: work(number), done=lambda n: n, failed=lambda error: error.args)
    worker.close()
    await worker.ended()
    assert heard == [(number,) if number % 3 == 0 else number for number in range(50)]
    assert len({thread for thread, _ in threads}) == 1
    assert threads[0][0] != loop_thread
    assert threads[-1][1] == loop_thread


@on_each_loop
async def test_every_failure_of_work_is_a_message() -> None:
    worker, heard = _worker(asyncio.get_running_loop())

    def give_up() -> None:
        raise SystemExit(3)

    def fail_to_say(_: object) -> object:
        raise LookupError("no word for it")

    worker.submit(give_up, done=lambda _: "done", failed=repr)
    worker.submit(lambda: 1, done=fail_to_say, failed=repr)
    worker.submit(lambda: 2, done=lambda n: n, failed=repr)
    worker.close()
    await worker.ended()
    assert "SystemExit(3)" in heard.messages[0]
    assert heard.messages[1:] == ["LookupError('no word for it')", 2]


@pytest.mark.parametrize("drop", [False, True])
@on_each_loop
async def test_a_closed_worker_ends_after_its_queue_or_after_its_work(drop: bool) -> None:
    worker, heard = _worker(asyncio.get_running_loop())
    begun, may_end, ran = threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        may_end.wait(NET_SECONDS)
        ran.append("first")

    worker.submit(first, done=lambda _: "first", failed=repr)
    worker.submit(lambda: ran.append("second"), done=lambda _: "second", failed=repr)
    await until(begun.is_set)
    worker.close(drop=drop)
    may_end.set()
    await worker.ended()
    await worker.ended()  # harmless
    assert ran == ["first"] if drop else ["first", "second"]
    assert heard.messages == ran
    assert not [thread for thread in threading.enumerate() if thread.name == "test worker"]


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_worker_whose_loop_is_closed_under_it_ends_in_silence(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    loop = loop_factory()
    begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(NET_SECONDS)

    async def hire() -> Recorder[object]:
        worker, heard = _worker(loop)
        worker.submit(work, done=lambda _: "done", failed=repr)
        return heard

    heard = loop.run_until_complete(hire())
    begun.wait(NET_SECONDS)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "test worker"]
    loop.close()
    may_end.set()
    thread.join(NET_SECONDS)
    assert not thread.is_alive()
    assert heard.messages == []


@on_each_loop
async def test_a_systems_workers_post_to_their_actor_and_end_with_it() -> None:
    @dataclass(frozen=True)
    class _Worked:  # private: not in the protocol
        value: int

    class Doubler(Actor[object]):
        def __init__(self, context: Context[object]) -> None:
            self.worker = context.worker("double")
            self.heard: list[object] = []

        def handle(self, message: object) -> None:
            if isinstance(message, Note):
                self.worker.submit(lambda: 2 * message.number, done=_Worked, failed=repr)
            else:
                self.heard.append(message)

    actors: list[Doubler] = []

    def build(context: Context[object]) -> Doubler:
        actors.append(Doubler(context))
        return actors[0]

    async with System([ActorSpec(role(), build)]) as system:
        assert "cuelight actor double" in {thread.name for thread in threading.enumerate()}
        for number in range(10):
            system.find(role()).tell(Note(number))
        await until(lambda: len(actors[0].heard) == 10)
        with pytest.raises(NotAccepted):
            system.find(role()).tell(_Worked(1))  # type: ignore[arg-type]
    assert actors[0].heard == [_Worked(2 * number) for number in range(10)]


@on_each_loop
async def test_an_idle_actor_keeps_nothing_alive() -> None:
    async with System([part(role(), [])]) as system:
        notes = [Note(number) for number in range(100)]
        alive = [weakref.ref(note) for note in notes]
        while notes:
            system.find(role()).tell(notes.pop())
        await until(lambda: system.statistics()["actor"].delivered == 100)
        await asyncio.sleep(0)
        gc.collect()
        assert not [note for note in alive if note() is not None]


# Casts that cannot be.


def test_a_part_is_told_what_it_should_have_been_given() -> None:
    with pytest.raises(TypeError, match="restart policy of 'actor' must be a RestartPolicy, not InProcess"):
        ActorSpec(role(), lambda _: Diary("actor", []), InProcess())  # type: ignore[arg-type]
    for wrong in (InProcess, "thread"):
        with pytest.raises(TypeError, match="the placement of 'actor' must be InLoop"):
            ActorSpec(role(), lambda _: Diary("actor", []), placement=wrong)  # type: ignore[arg-type]


def test_a_role_accepts_classes_and_hurries_some_of_them() -> None:
    for accepts in ((Note, Urgent), "Note"):
        with pytest.raises(TypeError, match="must accept a class or a union"):
            Role("odd", accepts, 1)  # type: ignore[arg-type]
    for urgent in (Note, (Urgent,), [Note]):
        with pytest.raises(TypeError, match="urgent must be a tuple of types that 'odd' accepts"):
            Role("odd", Note, 1, urgent=urgent)  # type: ignore[arg-type]


def test_a_handler_that_would_have_to_be_awaited_is_none() -> None:
    with pytest.raises(TypeError, match=r"Waiter\.handle must be synchronous"):

        class Waiter(Actor[Note]):
            async def handle(self, message: Note) -> None:  # type: ignore[override]
                pass


@on_each_loop
async def test_whoever_looks_for_a_stranger_is_told_who_there_is() -> None:
    with pytest.raises(KeyError, match="there are none"):
        System([part(role(), [])]).find(role())
    async with System([part(role(), [])]) as system:
        with pytest.raises(KeyError, match="no actor 'other' is in the cast that runs; there are actor"):
            system.find(role("other"))


# Logging.


@pytest.mark.parametrize(
    "wrapper",
    [structlog.BoundLogger, structlog.stdlib.BoundLogger, structlog.make_filtering_bound_logger(logging.INFO)],
)
def test_events_go_wherever_the_host_has_structlog_send_them(wrapper: type[object]) -> None:
    seen: list[dict[str, object]] = []

    def keep(_: object, method: str, event: dict[str, object]) -> dict[str, object]:
        seen.append({"method": method, **event})
        raise structlog.DropEvent

    log = get_logger("cuelight.test")
    structlog.configure(wrapper_class=wrapper, processors=[keep])
    try:
        for method in ("info", "warning", "error"):
            getattr(log, method)("happened", number=1)
    finally:
        structlog.reset_defaults()
    assert seen == [{"method": method, "event": "happened", "number": 1} for method in ("info", "warning", "error")]


def test_a_level_may_have_another_name_at_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "getLevelName", lambda level: f"[{level}]")
    structlog.configure()
    try:
        with structlog.testing.capture_logs() as events:
            get_logger("cuelight.test").error("happened")
    finally:
        structlog.reset_defaults()
    assert events == [{"event": "happened", "log_level": "error"}]


@pytest.mark.parametrize("is_structlog", [False, True])
def test_a_host_whose_logging_fails_does_not_hear_of_it_from_us(
    is_structlog: bool, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> bool:
        raise OSError("the log is full")

    if is_structlog:
        structlog.configure(processors=[fail])
    standard = logging.getLogger("cuelight.test.full")
    standard.addFilter(fail)
    try:
        get_logger("cuelight.test.full").error("happened")
    finally:
        structlog.reset_defaults()
        standard.removeFilter(fail)
    assert "the log is full" in capsys.readouterr().err


@on_each_loop
async def test_a_crash_is_heard_of_where_facts_become_fields_of_log_records(caplog: pytest.LogCaptureFixture) -> None:
    """Such records refuse the names of their own fields."""

    def fail(_: Context[object], message: object) -> None:
        raise ValueError("broken actor")

    failures: list[ActorCrashed] = []
    structlog.configure(
        processors=[structlog.stdlib.render_to_log_kwargs],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    try:
        with pytest.raises(ActorCrashed):
            async with System([part(role(), [], fail)], on_failure=failures.append) as system:
                system.find(role()).tell(Note(0))
                await asyncio.Event().wait()
    finally:
        structlog.reset_defaults()
    (record,) = caplog.records
    assert record.__dict__["actor"] == failures[0].actor == "actor"


@pytest.mark.parametrize("whom", ["cuelight actor", "cuelight system"])
@on_each_loop
async def test_a_task_cancelled_from_outside_ends_the_system(whom: str) -> None:
    ends: list[str] = []
    others = [part(role(name), []) for name in ("sink", "source")]
    system = System([others[0], part(role(), []), others[1]], on_end=lambda: ends.append("end"))
    await system.start()
    (task,) = [task for task in asyncio.all_tasks() if task.get_name() == whom]
    task.cancel()
    await until(lambda: bool(ends))
    await system.stop()
    assert ends == ["end"]
    assert system.failure is None  # nobody has crashed
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_results_of_a_worker_with_a_queue_come_in_order_and_leave_no_thread() -> None:
    """While work waits, another thread wakes the loop; what came before and after that is still in order."""
    worker, heard = _worker(asyncio.get_running_loop())
    for number in range(200):
        worker.submit(lambda number=number: number, done=str, failed=repr)
        if number % 50 == 0:
            await asyncio.sleep(0)
    worker.close()
    await worker.ended()
    assert heard.messages == [str(number) for number in range(200)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test worker")]
