"""Actors on threads and in child processes: the same promises as at home, and what the death of a process may cost."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import random
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import ClassVar, Never, TypeVar, cast

import msgspec
import pytest
import uvloop
from placed import (
    CHILD,
    CROWDED,
    OTHER,
    PLAYER,
    SINK,
    Answer,
    Carry,
    Do,
    Greet,
    Hold,
    Inner,
    Note,
    Padded,
    Player,
    Protocol,
    Urgent,
    breaking,
    broken,
    counting,
    descriptors,
    dying,
    gated,
    player,
)

from cuelight.kernel import (
    Actor,
    ActorCrashed,
    ActorSpec,
    AskTimeout,
    Context,
    Delivered,
    Event,
    ExitCause,
    InLoop,
    InProcess,
    MailboxFull,
    MessageTooLarge,
    NotAccepted,
    NotSendable,
    OnThread,
    Placement,
    Recipient,
    Ref,
    RemoteError,
    RestartPolicy,
    Role,
    Started,
    Strategy,
    System,
    Terminated,
    ask,
)
from cuelight.kernel.placement.remote import RemoteLife
from cuelight.kernel.placement.wire import WINDOW, RemoteRef, Wire

M = TypeVar("M")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

KILLS = int(os.environ.get("CUELIGHT_KILLS", "6"))

NET_SECONDS = 60 + 2 * KILLS
"""A safety net: no test waits for it."""

EVERYWHERE = [InLoop(), OnThread(), InProcess()]
ELSEWHERE = [OnThread(), InProcess()]
PATIENT = RestartPolicy(restarts_max=1000, backoff_seconds=0.0)


OTHERS: set[int] = set()


def children() -> set[int]:
    """The processes this test has started, dead ones that nobody has waited for included."""
    return _all_children() - OTHERS


def _all_children() -> set[int]:
    lists = Path("/proc/self/task").glob("*/children")
    return {int(child) for each in lists for child in each.read_text().split()}


@pytest.fixture(autouse=True)
def only_own_children() -> Iterator[None]:
    """Others may have been there before, such as one that keeps books for `multiprocessing`."""
    OTHERS.update(_all_children())
    yield
    OTHERS.clear()


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and not just what is left of one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def nothing_left() -> Iterator[list[str]]:
    """No thread, process or open file, and no complaint of asyncio but those that the test takes from the list."""
    complaints: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: complaints.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("asyncio").addHandler(handler)
    uvloop.new_event_loop().close()  # the first one opens what the library keeps
    threads, processes, files = set(threading.enumerate()), children(), descriptors()
    yield complaints
    logging.getLogger("asyncio").removeHandler(handler)
    gc.collect()
    for thread in set(threading.enumerate()) - threads:
        thread.join(NET_SECONDS)
        assert not thread.is_alive()
    assert children() <= processes
    assert descriptors().keys() <= files.keys()
    assert complaints == []


Test = Callable[..., Coroutine[object, object, None]]


def played(test: Test) -> Callable[..., None]:
    """Run a test in a loop of its own, asyncio's by default, and check that it leaves nothing behind."""

    def runs(loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None, **arguments: object) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(NET_SECONDS):
                await test(**arguments)

        with nothing_left() as complaints, asyncio.Runner(loop_factory=loop_factory) as runner:
            if "complaints" in inspect.signature(test).parameters:
                arguments["complaints"] = complaints
            runner.run(bounded())

    signature = inspect.signature(test)
    own = [each for each in signature.parameters.values() if each.name != "complaints"]
    runs.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    runs.__name__, runs.__doc__ = test.__name__, test.__doc__
    return runs


def on_each_loop(test: Test) -> Callable[..., None]:
    """The same, on asyncio's loop and on uvloop."""
    runs = played(test)
    signature = inspect.signature(runs)
    own = [inspect.Parameter("loop_factory", inspect.Parameter.POSITIONAL_OR_KEYWORD), *signature.parameters.values()]
    runs.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    factories = [asyncio.new_event_loop, uvloop.new_event_loop]
    marked: Callable[..., None] = pytest.mark.parametrize("loop_factory", factories, ids=["asyncio", "uvloop"])(runs)
    return marked


everywhere = pytest.mark.parametrize("place", EVERYWHERE, ids=lambda place: type(place).__name__)
elsewhere = pytest.mark.parametrize("place", ELSEWHERE, ids=lambda place: type(place).__name__)


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until the condition holds, and leave the processor to the others."""
    while not condition():  # noqa: ASYNC110  # what it waits for is any state, not an event
        await asyncio.sleep(0.001)


class Sink(Actor[object]):
    """Keeps all that it is told."""

    def __init__(self, heard: list[object], context: Context[Never], watched: tuple[Role[Never], ...] = ()) -> None:
        self.heard = heard
        for role in watched:
            context.watch(role)

    def handle(self, message: object) -> None:
        self.heard.append(message)


class Theatre:
    """A running system with a sink, whose players the test talks to."""

    def __init__(self, system: System, heard: list[object]) -> None:
        self.system = system
        self.heard = heard
        self.player: Ref[Protocol] = system.find(PLAYER)

    def all(self, kind: type[M]) -> list[M]:
        """What the sink has heard of this type."""
        return [message for message in self.heard if isinstance(message, kind)]

    def numbers(self) -> list[int]:
        """Those of the notes that the sink has heard."""
        return [message.number for message in self.all(Note)]

    async def do(self, action: str, number: int = 0, text: str = "", to: Ref[Protocol] | None = None) -> Answer:
        """Have the player do it, and wait for the answer."""
        return await ask(to or self.player, lambda reply_to: Do(action, number, text, reply_to), NET_SECONDS)

    def tell(self, action: str, number: int = 0, text: str = "") -> None:
        """Have the player do what has no answer."""
        self.player.tell(Do(action, number, text))

    async def ended(self, count: int = 1) -> Terminated:
        """Wait for the end of so many lives, of those whom the sink watches."""
        await until(lambda: len(self.all(Terminated)) >= count)
        return self.all(Terminated)[count - 1]


@asynccontextmanager
async def theatre(
    place: Placement,
    *more: ActorSpec[Never],
    build: Callable[[Context[Protocol]], Actor[Protocol]] = player,
    restart_policy: RestartPolicy = PATIENT,
    role: Role[Protocol] = PLAYER,
    **options: object,
) -> AsyncIterator[Theatre]:
    """The sink, who watches the player; the others; and the player where it is to live."""
    heard: list[object] = []
    sink = ActorSpec(SINK, lambda context: Sink(heard, context, (PLAYER,)))
    cast_ = [sink, *more, ActorSpec(role, build, restart_policy, place)]
    async with System(cast_, **options) as system:  # type: ignore[arg-type]
        try:
            yield Theatre(system, heard)
        except BaseException:
            for gate in list(Gate.all):
                gate.abandon()
            raise


class Gate:
    """A named pipe at which an actor waits until the test lets it through."""

    all: ClassVar[set[Gate]] = set()

    def __init__(self, path: Path) -> None:
        self.all.add(self)
        self.path = str(path)
        os.mkfifo(path)
        self._writer = -1

    def is_reached(self) -> bool:
        """Whether somebody waits."""
        with suppress(OSError):  # nobody has opened it to read
            self._writer = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        return self._writer >= 0

    def open(self) -> None:
        """Let them through."""
        os.close(self._writer)
        self._writer = -1

    def abandon(self) -> None:
        """Let through whoever waits, so that a test that fails does end."""
        self.all.discard(self)
        if self._writer >= 0 or self.is_reached():
            self.open()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.abandon()


# What holds wherever an actor lives.


@everywhere
@on_each_loop
async def test_messages_cross_both_ways_in_order(place: Placement) -> None:
    async with theatre(place) as stage:
        for number in range(5000):
            stage.player.tell(Note(number))
            if number % 500 == 0:
                await asyncio.sleep(0)
        await stage.do("flood", 5000)
        await until(lambda: len(stage.numbers()) == 10_000)
        assert stage.numbers() == [*range(5000), *range(5000)]
        statistics = stage.system.statistics()["player"]
        assert (statistics.length, statistics.delivered, statistics.dropped) == (0, 5001, 0)
        assert statistics.peak > 400
        answer = await stage.do("who")
        assert (answer.number == os.getpid()) is not isinstance(place, InProcess)
        assert (answer.text == threading.current_thread().name) is not isinstance(place, OnThread)
    assert stage.all(Answer)[-1].text == "stopped"


@everywhere
@played
async def test_addresses_within_messages_work_at_the_other_end(place: Placement) -> None:
    answers: list[asyncio.Future[Answer]] = [asyncio.get_running_loop().create_future() for _ in range(4)]

    class Once:
        def __init__(self, future: asyncio.Future[Answer]) -> None:
            self.tell = future.set_result

    async with theatre(place) as stage:
        addresses = tuple(map(Once, answers))
        stage.player.tell(Greet(addresses[:2], Inner(addresses[2:])))
        assert [(await answer).number for answer in answers] == [0, 1, 2, 3]


@everywhere
@played
async def test_an_address_works_wherever_it_is_carried(place: Placement) -> None:
    """The way home too: through an actor elsewhere, another one elsewhere, and an actor that was spawned here."""
    spawned: list[object] = []
    home: Role[Note | Carry] = Role("home", Note | Carry, 10)
    other = ActorSpec(OTHER, player, placement=InProcess() if isinstance(place, OnThread) else place)
    async with theatre(place, other) as stage:
        late = stage.system.spawn(ActorSpec(home, lambda context: Sink(spawned, context)))
        there = stage.system.find(OTHER)
        stage.player.tell(Carry(late, (there, stage.player, there), 0))
        await until(lambda: spawned)
        assert spawned == [Note(3)]
        stage.tell("hold own", 4)  # tells its own address to the other, who tells it a note
        stage.player.tell(Carry(stage.player, (there,), 6))  # told its own address
        await until(lambda: len(stage.numbers()) == 2)
        assert sorted(stage.numbers()) == [4, 7]


@everywhere
@played
async def test_an_actor_has_timers_threads_time_and_chance(place: Placement) -> None:
    chances = []
    for _ in range(2):
        async with theatre(place, ActorSpec(OTHER, player), chance=random.Random(7)) as stage:
            stage.tell("later", 1)
            await until(lambda: stage.numbers() == [1])
            stage.tell("work", 2)
            await until(lambda: stage.numbers() == [1, 4])
            assert (await stage.do("clock")).number == 1
            chances.append((await stage.do("chance")).text)
    assert chances[0] == chances[1] == repr(await _chance_at_home())


async def _chance_at_home() -> float:
    seeds: dict[str, int] = {}

    def tap(event: Event) -> None:
        if isinstance(event, Started):
            seeds[event.actor] = event.seed

    async with theatre(InLoop(), ActorSpec(OTHER, player), chance=random.Random(7), tap=tap):
        return random.Random(seeds["player"]).random()


@everywhere
@played
async def test_an_actor_watches_and_is_watched(place: Placement) -> None:
    async with theatre(place, ActorSpec(OTHER, player, PATIENT, place)) as stage:
        await stage.do("watch")
        stage.system.find(OTHER).tell(Do("raise", text="other"))
        await until(lambda: stage.all(Terminated))
        assert "other" in stage.all(Terminated)[0].error  # the player was told, and passed it on
        stage.system.dismiss(OTHER)
        await until(lambda: len(stage.all(Terminated)) == 2)
        assert stage.all(Terminated)[1] == Terminated("other", "", is_restarting=False)
        stage.tell("raise", text="player")
        await until(lambda: len(stage.all(Terminated)) == 3)
        assert stage.all(Terminated)[2].actor == "player"
        await stage.do("who")
    assert stage.all(Terminated)[-1] == Terminated("player", "", is_restarting=False)


@everywhere
@pytest.mark.parametrize("where", ["", "in a process"])
@played
async def test_an_actor_spawns_another(place: Placement, where: str) -> None:
    async with theatre(place) as stage:
        stage.tell("spawn", 5, where)
        await until(lambda: stage.numbers() == [5])
        assert stage.all(Answer)[0].text == "<Ref child>"
        await stage.do("who")


@elsewhere
@played
async def test_the_crash_of_a_spawned_actor_is_that_of_its_life(place: Placement) -> None:
    async with theatre(place) as stage:
        stage.tell("spawn and tell", text="raise")
        assert "ValueError('child')" in (await stage.ended()).error
        await stage.do("who")


@everywhere
@played
async def test_a_spawned_actors_address_is_good_for_others(place: Placement, gate: Gate) -> None:
    async with theatre(place) as stage:
        stage.tell("spawn and show")
        await until(lambda: stage.all(Carry))
        child = stage.all(Carry)[0].to
        child.tell(Note(3))
        await until(lambda: stage.numbers() == [3])
        if not isinstance(place, InLoop):  # where the sender is the one to hear of it
            stage.tell("gate", text=gate.path)  # so that it hears all of them in one go
            await until(gate.is_reached)
            for number in range(5000):
                child.tell(Note(number))
            gate.open()
            assert "crashed on placed:Note: RemoteError('MailboxFull" in (await stage.ended()).error.replace('"', "'")
            child.tell(Note(-1))  # to a life that is over
            await stage.do("who")
            assert -1 not in stage.numbers()


@everywhere
@pytest.mark.parametrize("life", [InLoop(), OnThread()], ids=lambda place: type(place).__name__)
@played
async def test_a_spawned_actor_watches_those_of_the_cast(place: Placement, life: Placement) -> None:
    """Until it has stopped, or the life that spawned it is over."""
    async with theatre(place, ActorSpec(OTHER, player, PATIENT, life)) as stage:
        stage.tell("spawn and tell", text="watch")
        await until(lambda: "other" in _watchers(stage))
        stage.system.find(OTHER).tell(Do("raise", text="the first"))
        await until(lambda: stage.all(Terminated))
        assert "the first" in stage.all(Terminated)[0].error  # the child was told, and passed it on
        stage.tell("dismiss the child")
        await stage.do("who")
        stage.system.find(OTHER).tell(Do("raise", text="the second"))
        await stage.do("who", to=stage.system.find(OTHER))
        await stage.do("who")
        assert len(stage.all(Terminated)) == 1
        stage.tell("spawn and tell", text="watch")
        await until(lambda: "other" in _watchers(stage))
        if not isinstance(place, InLoop):
            stage.tell("raise", text="their home")
            await until(lambda: _watchers(stage) == {"player": 1})
        stage.system.dismiss(OTHER)
        await until(lambda: "other" not in stage.system.statistics())
        await stage.do("who")
        await stage.do("who")
        heard = [message for message in stage.all(Terminated) if message.actor == "other"]
        assert len(heard) == (2 if isinstance(place, InLoop) else 1)


def _watchers(stage: Theatre) -> dict[str, int]:
    """How many watch each of those who are watched."""
    return {name: len(slot.watchers) for name, slot in stage.system._slots.items() if slot.watchers}


@everywhere
@pytest.mark.parametrize("action", ["dismiss", "spawn that it dismisses"])
@played
async def test_an_actor_dismisses_those_of_the_cast(place: Placement, action: str) -> None:
    async with theatre(place, ActorSpec(OTHER, player, PATIENT, place)) as stage:
        for number in range(100):
            stage.system.find(OTHER).tell(Note(number))
        stage.tell(action, text="other")
        await until(lambda: "other" not in stage.system.statistics())
        assert stage.numbers() == list(range(100))
        await stage.do("who")
        assert stage.all(Terminated) == []


@everywhere
@pytest.mark.parametrize("drop", [False, True])
@played
async def test_an_actor_dismisses_itself(place: Placement, drop: bool) -> None:
    async with theatre(place) as stage:
        stage.tell("dismiss", int(drop), "player")
        for number in range(100):
            stage.player.tell(Note(number))
        assert await stage.ended() == Terminated("player", "", is_restarting=False)
        await until(lambda: "player" not in stage.system.statistics())
        assert stage.numbers() == ([] if drop else list(range(100)))
        assert stage.player.is_stopped
        assert stage.all(Answer)[-1].text == "stopped"


@everywhere
@played
async def test_to_dismiss_nobody_is_a_mistake_and_to_dismiss_twice_is_none(place: Placement) -> None:
    async with theatre(place, ActorSpec(OTHER, player)) as stage:
        stage.tell("dismiss", text="other")
        stage.tell("dismiss", text="other")
        await stage.do("who")
        assert stage.all(Terminated) == []
        stage.tell("dismiss", text="child")
        assert "KeyError('child')" in (await stage.ended()).error


@played
async def test_who_has_joined_or_left_the_cast_since_is_watched_and_dismissed_too() -> None:
    async with theatre(OnThread()) as stage:
        stage.system.spawn(ActorSpec(OTHER, player))
        await stage.do("watch")
        stage.tell("dismiss", text="other")
        await until(lambda: stage.all(Terminated))
        await until(lambda: "other" not in stage.system.statistics())
        await stage.do("watch")
        await until(lambda: len(stage.all(Terminated)) == 2)
        assert stage.all(Terminated) == [Terminated("other", "", is_restarting=False)] * 2
        await stage.do("who")


@elsewhere
@played
async def test_what_is_dropped_and_has_not_begun_is_not_handled(place: Placement, gate: Gate) -> None:
    """Also of what was handed over, as much of it as the window holds."""
    async with theatre(place) as stage:
        stage.tell("gate", text=gate.path)
        await until(gate.is_reached)
        for number in range(200):
            stage.player.tell(Note(number))
        await until(lambda: stage.system.statistics()["player"].length == 201 - WINDOW)
        mailbox = stage.system._slots["player"].mailbox
        stage.system.dismiss(PLAYER, drop=True)
        await asyncio.sleep(0)
        gate.open()
        await stage.ended()
        assert stage.numbers() == []
        statistics = mailbox.statistics()
        assert (statistics.length, statistics.delivered, statistics.dropped) == (0, 1, 200)


@everywhere
@played
async def test_what_is_not_accepted_is_refused_at_the_sender(place: Placement) -> None:
    async with theatre(place) as stage:
        with pytest.raises(NotAccepted):
            stage.player.tell(Answer(1))  # type: ignore[arg-type]
        assert (await stage.do("send", text="unknown")).text == "NotAccepted"
        assert (await stage.do("find", text="nobody")).text == "KeyError"
        assert (await stage.do("find", text="sink")).text == ""
        assert stage.all(Terminated) == []


@everywhere
@played
async def test_urgent_messages_overtake_those_not_handed_over(place: Placement, gate: Gate) -> None:
    async with theatre(place) as stage:
        if isinstance(place, InLoop):
            stage.tell("later")
        else:
            stage.tell("gate", text=gate.path)
            await until(gate.is_reached)
        for number in range(200):
            stage.player.tell(Note(number))
        stage.player.tell(Urgent(1000))
        if not isinstance(place, InLoop):
            await asyncio.sleep(0)
            gate.open()
        await until(lambda: len(stage.numbers()) >= 200)
        order = [message.number for message in stage.heard if isinstance(message, Note | Urgent)]
        assert order.index(1000) <= WINDOW
        assert [number for number in order if number != 1000][:200] == sorted(range(200))[:200] or isinstance(
            place, InLoop
        )


@everywhere
@played
async def test_a_slow_handler_is_reported_by_the_actors_name(
    place: Placement, caplog: pytest.LogCaptureFixture
) -> None:
    async with theatre(place, slow_handler_seconds=0.0) as stage:
        stage.player.tell(Note(1))
        await until(lambda: "slow_handler" in caplog.text and "'Note'" in caplog.text)
    (report,) = [each for each in caplog.messages if "'Note'" in each and "'player'" in each]
    assert "seconds" in report


@everywhere
@on_each_loop
async def test_a_crash_costs_the_message_being_handled(place: Placement, caplog: pytest.LogCaptureFixture) -> None:
    """Those that wait, handed over or not, keep their order, and reach the next life."""
    async with theatre(place) as stage:
        for number in range(300):
            stage.player.tell(Note(number) if number % 100 != 50 else Do("raise", text="no such luck"))
        await stage.do("who")
        assert stage.numbers() == [number for number in range(300) if number % 100 != 50]
        statistics = stage.system.statistics()["player"]
        assert (statistics.length, statistics.delivered, statistics.dropped) == (0, 301, 0)
        assert len(stage.all(Terminated)) == 3
        assert stage.all(Terminated)[0].is_restarting
        assert "crashed on Do: " in stage.all(Terminated)[0].error
        assert "no such luck" in stage.all(Terminated)[0].error
    assert "placed.py" in caplog.text  # the traceback at the other end
    assert "raise ValueError(text)" in caplog.text


@everywhere
@played
async def test_a_constructor_that_raises_ends_the_start(place: Placement) -> None:
    with pytest.raises(ActorCrashed, match=r"'player' crashed on construction.*no such player") as caught:
        async with theatre(place, ActorSpec(OTHER, player, placement=place), build=broken):
            raise AssertionError("never started")
    if not isinstance(place, InLoop):
        assert isinstance(caught.value.__cause__, RemoteError)
        assert "placed.py" in caught.value.__cause__.trace


@everywhere
@played
async def test_a_constructor_that_raises_at_the_restart_is_another_crash(place: Placement, tmp_path: Path) -> None:
    build = partial(breaking, path=str(tmp_path / "life"))
    failures: list[ActorCrashed] = []
    with pytest.raises(ActorCrashed, match="there has been one"):
        async with theatre(
            place, build=build, restart_policy=RestartPolicy(2, backoff_seconds=0.0), on_failure=failures.append
        ) as stage:
            stage.tell("raise")
            await until(lambda: failures)
            await asyncio.sleep(NET_SECONDS)
    assert [each.is_restarting for each in stage.all(Terminated)] == [True, True, False]


@everywhere
@played
async def test_a_group_restarts_together(place: Placement, tmp_path: Path) -> None:
    restart_policy = RestartPolicy(restarts_max=5, backoff_seconds=0.0, strategy=Strategy.REST_FOR_ONE)
    other = ActorSpec(OTHER, partial(counting, path=str(tmp_path / "other")), restart_policy, place)
    async with theatre(place, other, build=partial(counting, path=str(tmp_path / "player"))) as stage:
        stage.system.find(OTHER).tell(Do("raise"))
        await until(lambda: [each.number for each in stage.all(Answer) if each.text == "born"] == [1, 1, 2, 2])
        await stage.do("who")
        await stage.do("who", to=stage.system.find(OTHER))
        assert sum(each.text == "stopped" for each in stage.all(Answer)) == 1  # the one that had not crashed


@everywhere
@played
async def test_several_actors_in_several_systems(place: Placement) -> None:
    async with theatre(place, ActorSpec(OTHER, player, placement=place)) as one, theatre(place) as two:
        whos = [await one.do("who"), await one.do("who", to=one.system.find(OTHER)), await two.do("who")]
        assert len(set(whos)) == (1 if isinstance(place, InLoop) else 2 if isinstance(place, OnThread) else 3)
        one.tell("raise")
        await one.do("who")
        assert two.all(Terminated) == []


# What holds at the border.


@elsewhere
@played
async def test_a_dropped_address_is_forgotten(place: Placement) -> None:
    kept = _wires(lambda wire: len(wire._exported))
    async with theatre(place) as stage:
        for number in range(2000):
            await stage.do("clock", number)
        await until(lambda: sum(kept()) < 50)
        held = asyncio.get_running_loop().create_future()

        class Holder:
            tell = held.set_result

        stage.player.tell(Hold(Holder()))
        gc.collect()
        await stage.do("answer held", 3)
        assert (await held) == Answer(3)
        await stage.do("drop")
        await until(lambda: sum(kept()) == 0)


@elsewhere
@played
async def test_an_address_of_a_life_that_is_over_keeps_nothing(place: Placement) -> None:
    async with theatre(place) as stage:
        stage.tell("spawn and show")
        await until(lambda: stage.all(Carry))
        stale = cast(RemoteRef, stage.all(Carry)[0].to)
        stage.tell("raise")
        await stage.ended()
        for _ in range(100):
            stale.wire.tell(0, (Hold,), Hold(Back()))
        assert stale.wire._exported == {}
        await stage.do("who")


class Back:
    """An address of no actor."""

    def tell(self, message: Answer) -> None:
        raise AssertionError("nobody answers")


@dataclass(frozen=True)
class BackOfData(Back):
    """One that msgpack takes for a value."""

    number: int = 0


class BackOfFields(msgspec.Struct, frozen=True):
    """The same as a struct."""

    number: int = 0
    tell = Back.tell


class BackOfNumber(IntEnum):
    """The same as a number, which could be that of another address."""

    ONE = 1

    def tell(self, message: Answer) -> None:
        raise AssertionError("nobody answers")


@elsewhere
@played
async def test_an_address_that_is_a_value_is_refused_at_the_sender(place: Placement) -> None:
    async with theatre(place) as stage:
        for address in (BackOfData(), BackOfFields(), BackOfNumber.ONE):
            with pytest.raises(NotSendable, match=r"Hold cannot be decoded: .*[aA]ddress"):
                stage.player.tell(Hold(address))
        assert (await stage.do("who")).text
        assert stage.all(Terminated) == []


def _wires(of: Callable[[Wire], M]) -> Callable[[], list[M]]:
    """What is true of each wire's near end that is in use."""

    def look() -> list[M]:
        return [of(each._wire) for each in gc.get_objects() if type(each) is RemoteLife and not each.exited.done()]

    return look


@everywhere
@played
async def test_an_answer_after_the_asker_has_gone_is_harmless(place: Placement, gate: Gate) -> None:
    async with theatre(place) as stage:
        asked = asyncio.ensure_future(stage.do("later" if isinstance(place, InLoop) else "gate", text=gate.path))
        await asyncio.sleep(0)
        asked.cancel()
        if not isinstance(place, InLoop):
            await until(gate.is_reached)
            with pytest.raises(AskTimeout):
                await ask(stage.player, lambda reply_to: Do("who", reply_to=cast(Recipient[Answer], reply_to)), 0.0)
            gate.open()
        await stage.do("who")
        assert stage.all(Terminated) == []


@elsewhere
@on_each_loop
async def test_at_most_a_window_is_handed_over(place: Placement, gate: Gate) -> None:
    taps: list[Event] = []
    async with theatre(place, role=Role("player", Protocol, 4, urgent=(Urgent,)), tap=taps.append) as stage:
        stage.tell("gate", text=gate.path)
        await until(gate.is_reached)
        await until(lambda: stage.system.statistics()["player"].length == 0)
        with pytest.raises(MailboxFull):  # at once, at the sender: nothing is handed over meanwhile
            for number in range(5):
                stage.player.tell(Note(number))
        for number in range(4, WINDOW - 1):  # the one that is being handled counts
            await until(lambda: stage.system.statistics()["player"].length == 0)
            stage.player.tell(Note(number))
        for _ in range(3):
            await asyncio.sleep(0)
        for number in range(WINDOW - 1, WINDOW + 3):
            stage.player.tell(Note(number))
        statistics = stage.system.statistics()["player"]
        assert (statistics.length, statistics.peak, statistics.capacity, statistics.delivered) == (4, 4, 4, WINDOW)
        assert statistics.oldest_age_seconds > 0
        with pytest.raises(MailboxFull):
            stage.player.tell(Note(-1))
        gate.open()
        await until(lambda: stage.numbers() == list(range(WINDOW + 3)))
        assert stage.system.statistics()["player"].delivered == WINDOW + 4
    delivered = [event for event in taps if isinstance(event, Delivered)]
    assert [each.message for each in delivered if each.actor == "player"][1:] == [
        Note(number) for number in range(WINDOW + 3)
    ]
    assert {each.sender for each in delivered if each.actor == "sink"} == {"player"}


@elsewhere
@played
async def test_flooding_somebody_is_the_flooders_crash(place: Placement) -> None:
    quiet: list[object] = []

    async with theatre(place, ActorSpec(OTHER, player, placement=place), _crowded(quiet)) as stage:
        stage.tell("crowd", 5000)
        stage.player.tell(Note(1))
        assert "crashed on placed:Note: MailboxFull" in (await stage.ended()).error
        await stage.do("who")
        await stage.do("who", to=stage.system.find(OTHER))
        assert quiet == [Note(number) for number in range(len(quiet))]
        assert len(quiet) >= 10
        assert len(stage.all(Terminated)) == 1


def _crowded(heard: list[object]) -> ActorSpec[Note]:
    return ActorSpec(CROWDED, lambda context: Sink(heard, context))


@elsewhere
@played
async def test_what_cannot_be_sent_is_refused_at_the_sender(place: OnThread | InProcess) -> None:
    async with theatre(replace(place, message_bytes_max=1000)) as stage:
        stage.player.tell(Padded(bytes(900)))
        with pytest.raises(MessageTooLarge, match=r"Padded has 1\d\d\d bytes; 1000 may cross"):
            stage.player.tell(Padded(bytes(1000 - 7)))
        with pytest.raises(NotSendable, match="placed:Note cannot be decoded"):
            stage.player.tell(Note(cast(int, "three")))
        with pytest.raises(NotSendable, match="Note cannot cross: a object cannot be encoded"):
            stage.player.tell(Note(cast(int, object())))
        with pytest.raises(NotSendable, match="Do cannot cross"):
            stage.tell("lone surrogate \udc80")
        assert (await stage.do("send", text="wrong field")).text == "NotSendable"
        assert (await stage.do("send", text="unencodable")).text == "NotSendable"
        assert (await stage.do("send", text="large")).text == "MessageTooLarge"
        assert stage.heard == [Padded(bytes(900))]
        statistics = stage.system.statistics()["player"]
        assert (statistics.delivered, statistics.dropped, statistics.length) == (4, 0, 0)
        assert stage.all(Terminated) == []


@elsewhere
@played
async def test_what_the_kernel_says_is_never_too_large(place: OnThread | InProcess) -> None:
    async with theatre(replace(place, message_bytes_max=300), ActorSpec(OTHER, player, PATIENT, InLoop())) as stage:
        await stage.do("watch")
        stage.system.find(OTHER).tell(Do("raise", text="x" * 1000))
        await until(lambda: stage.all(Terminated))
        assert len(stage.all(Terminated)[0].error) > 1000


class Unresolved(msgspec.Struct, frozen=True, tag=True):
    """A message whose annotations mean nothing."""

    field: Nothing  # type: ignore[name-defined]  # noqa: F821


@elsewhere
@played
async def test_a_protocol_that_cannot_be_read_ends_the_start(place: Placement) -> None:
    role: Role[Never] = Role("unreadable", Unresolved, 1)
    with pytest.raises(NotSendable, match="Unresolved cannot be resolved"):
        async with theatre(place, ActorSpec(role, player)):
            raise AssertionError("never started")


_NAMELESS = eval("lambda context: Player(context)", {"Player": Player})


@pytest.mark.parametrize("build", [_NAMELESS, partial(_NAMELESS)])
@played
async def test_a_build_that_nobody_can_import_ends_the_start(build: Callable[[Context[Protocol]], Player]) -> None:
    with pytest.raises(NotSendable, match="'player' cannot be imported"):
        async with theatre(InProcess(), build=build):
            raise AssertionError("never started")
    async with theatre(OnThread(), build=build) as stage:
        await stage.do("who")


@elsewhere
@played
async def test_the_words_of_an_error_are_bounded_and_plain(place: Placement) -> None:
    async with theatre(place) as stage:
        stage.tell("surrogates", 1_000_000)
        assert 30_000 < len((await stage.ended()).error) < 40_000
        await stage.do("who")


# What the death of a process costs.


DEATHS = {
    "exit": (Do("exit at once", 4), "exited with status 4", ExitCause.EXITED, ""),
    "exit in order": (Do("exit at once", 0), "exited with status 0", ExitCause.EXITED, ""),
    "kill": (Do("signal", signal.SIGKILL), "was killed by SIGKILL", ExitCause.SIGNALED, "SIGKILL"),
    "fault": (Do("signal", signal.SIGSEGV), "was killed by SIGSEGV", ExitCause.SIGNALED, "SIGSEGV"),
    "terminate": (Do("signal", signal.SIGTERM), "was killed by SIGTERM", ExitCause.SIGNALED, "SIGTERM"),
    "abort": (Do("abort"), "was killed by SIGABRT", ExitCause.SIGNALED, "SIGABRT"),
}


@played
async def test_the_death_of_a_process_is_a_crash() -> None:
    async with theatre(InProcess()) as stage:
        dropped = 0
        for death, (fatal, words, cause, killed_by) in enumerate(DEATHS.values(), 1):
            stage.heard[:] = stage.all(Terminated)
            for number in range(10):
                stage.player.tell(Note(number))
            await stage.do("who")
            stage.player.tell(fatal)
            for number in range(10, 500):
                stage.player.tell(Note(number))
            ended = await stage.ended(death)
            assert ended == Terminated("player", f"actor 'player' died: its process {words}", True, cause, killed_by)
            await stage.do("who")
            heard = stage.numbers()
            assert heard == [*range(10), *range(510 - len(heard), 500)]
            lost = 500 - len(heard)
            assert lost <= WINDOW
            statistics = stage.system.statistics()["player"]
            assert lost <= statistics.dropped - dropped <= WINDOW  # nobody knows what the process had begun
            dropped = statistics.dropped


KILLED = "it was killed: no longer wanted"


@everywhere
@on_each_loop
async def test_a_killed_actor_has_crashed(place: Placement) -> None:
    async with theatre(place) as stage:
        for number in range(10):
            stage.player.tell(Note(number))
        await stage.do("who")
        stage.system.kill(PLAYER, "no longer wanted")
        ended = await stage.ended()
        assert ended == Terminated("player", f"actor 'player' died: {KILLED}", True, ExitCause.KILLED)
        await stage.do("who")
        assert stage.numbers() == list(range(10))
        assert stage.all(Answer) == [], "whoever is killed does not stop in order"


@everywhere
@played
async def test_a_kill_loses_what_a_process_was_given_and_nothing_else(place: Placement, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    async with theatre(place) as stage:
        if isinstance(place, InLoop):
            stage.tell("kill", text="player")
        else:
            stage.tell("gate", text=str(gate))
            await until(lambda: stage.system.statistics()["player"].length == 0)
        for number in range(500):
            stage.player.tell(Note(number))
        if not isinstance(place, InLoop):
            await until(lambda: stage.system.statistics()["player"].length < 500)
            stage.system.kill(PLAYER, "no longer wanted")
            if isinstance(place, OnThread):
                gate.write_text("")
        assert KILLED in (await stage.ended()).error
        await stage.do("who")
        lost = 500 - len(stage.numbers())
        assert stage.numbers() == list(range(lost, 500))
        assert 0 < lost <= WINDOW if isinstance(place, InProcess) else lost == 0
        assert stage.system.statistics()["player"].dropped == lost + isinstance(place, InProcess)


@played
async def test_a_process_is_killed_even_where_its_handler_hangs_in_native_code(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    async with theatre(InProcess()) as stage:
        stage.tell("hang", text=str(file))
        await until(lambda: file.exists() and file.read_text())
        pid = int(file.read_text())
        stage.system.kill(PLAYER, "no longer wanted")
        assert KILLED in (await stage.ended()).error
        assert not is_alive(pid)
        assert (await stage.do("who")).number != pid


@played
async def test_a_process_is_killed_while_its_constructor_waits(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    async with theatre(InLoop()) as stage:
        role = Role("gated", Protocol, 10)
        ref = stage.system.spawn(
            ActorSpec(role, partial(gated, path=str(gate)), RestartPolicy(restarts_max=1), InProcess())
        )
        slot = stage.system._slots["gated"]
        await until(lambda: slot.life)
        stage.system.kill(role, "no longer wanted")
        await until(lambda: slot.lives == 2)
        await asyncio.to_thread(gate.write_text, "")
        assert (await stage.do("who", to=ref)).number != os.getpid()


def killed(actor: str) -> Terminated:
    return Terminated(actor, f"actor {actor!r} died: {KILLED}", True, ExitCause.KILLED, "player")


@everywhere
@pytest.mark.parametrize("where", ELSEWHERE, ids=lambda place: type(place).__name__)
@played
async def test_a_placed_actor_kills_others_and_itself(place: Placement, where: Placement) -> None:
    async with theatre(where, ActorSpec(OTHER, player, PATIENT, place)) as stage:
        await stage.do("watch")
        await stage.do("kill", text="other")
        await until(lambda: stage.all(Terminated))  # the player was told, and passed it on
        assert stage.all(Terminated) == [killed("other")]
        await stage.do("who", to=stage.system.find(OTHER))
        stage.tell("kill", text="player")
        assert await stage.ended(2) == killed("player")
        stage.tell("kill", text="child")  # whom nobody plays
        await stage.do("who")
        assert len(stage.all(Terminated)) == 2


@elsewhere
@played
async def test_an_actor_kills_one_that_it_has_spawned_there(place: Placement) -> None:
    async with theatre(place) as stage:
        stage.tell("spawn", 5)
        stage.tell("kill", text="child")
        assert KILLED in (await stage.ended()).error


@elsewhere
@on_each_loop
async def test_an_actor_that_exits_has_crashed(place: Placement) -> None:
    async with theatre(place) as stage:
        for life, number in enumerate((0, 3), 1):
            stage.tell("exit", number)
            stage.player.tell(Note(number))
            error = (await stage.ended(life)).error
            assert error == f"actor 'player' crashed on Do: RemoteError('SystemExit({number})')"
        await until(lambda: stage.numbers() == [0, 3])


@elsewhere
@played
async def test_a_constructor_that_exits_has_crashed(place: Placement) -> None:
    with pytest.raises(ActorCrashed, match=r"crashed on construction: RemoteError\('SystemExit\(3\)'\)"):
        async with theatre(place, build=partial(dying, action="exit", number=3)):
            raise AssertionError("never started")


@pytest.mark.parametrize("action", ["signal", "exit at once"])
@played
async def test_a_death_while_the_rest_is_handled_is_not_taken_for_a_stop(action: str, gate: Gate) -> None:
    with pytest.raises(ActorCrashed, match="its process"):
        async with theatre(InProcess(), restart_policy=RestartPolicy()) as stage:
            stage.tell("gate", text=gate.path)
            stage.tell(action, signal.SIGKILL if action == "signal" else 0)
            stage.player.tell(Note(1))
            await until(gate.is_reached)
            stopping = asyncio.ensure_future(stage.system.stop())
            await until(lambda: stage.system.statistics()["player"].length == 0)
            gate.open()
            await stopping
    assert stage.numbers() == []


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (partial(dying, action="exit at once", number=3), "exited with status 3"),
        (partial(dying, action="exit at once"), "exited with status 0"),
        (partial(dying, action="signal", number=signal.SIGKILL), "was killed by SIGKILL"),
        (partial(dying, action="abort"), "was killed by SIGABRT"),
    ],
    ids=["exit", "exit in order", "kill", "abort"],
)
@played
async def test_a_death_while_starting(build: Callable[[Context[Protocol]], Player], words: str) -> None:
    with pytest.raises(ActorCrashed, match=f"died: its process {words}"):
        async with theatre(InProcess(), build=build):
            raise AssertionError("never started")


@pytest.mark.parametrize("program", ["exit 7", "kill -9 $$"])
@on_each_loop
async def test_an_interpreter_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str
) -> None:
    (tmp_path / "python").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ActorCrashed, match=r"its process (exited with status 7|was killed by SIGKILL)"):
        async with theatre(InProcess()):
            raise AssertionError("never started")


@played
async def test_no_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with theatre(InProcess(), restart_policy=RestartPolicy(1000, backoff_max_seconds=0.05)) as stage:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
        stage.tell("raise")
        await stage.ended(2)
        assert "crashed on construction: FileNotFoundError" in stage.all(Terminated)[1].error
        monkeypatch.undo()
        await stage.do("who")


@played
async def test_no_descriptor_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> Never:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", none_left)
    with pytest.raises(ActorCrashed, match="Too many open files"):
        async with theatre(OnThread()):
            raise AssertionError("never started")


@on_each_loop
async def test_garbage_from_a_process_is_its_crash() -> None:
    async with theatre(InProcess()) as stage:
        for crash, data in enumerate(("0000000130", "ffffffff00", "000000029206"), 1):
            stage.tell("garbage", text=data)
            stage.player.tell(Note(1))
            assert "actor 'player' " in (await stage.ended(crash)).error
            await stage.do("who")
            assert len(stage.all(Terminated)) == crash


@played
async def test_a_descendant_that_keeps_the_socket_delays_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuelight.kernel.placement.remote._LAST_FRAMES_SECONDS", 0.01)
    async with theatre(InProcess()) as stage:
        pid = (await stage.do("who")).number
        stage.tell("leave a descendant")
        await stage.do("who")
        (descendant,) = _descendants(pid)
        os.kill(pid, signal.SIGKILL)
        await stage.ended()
        os.kill(descendant, signal.SIGKILL)
        await stage.do("who")


def _descendants(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for each in lists for child in each.read_text().split()]


@on_each_loop
async def test_killed_amid_traffic_again_and_again() -> None:
    """Every death is noticed; what is heard keeps its order, nothing is heard twice, and little is lost."""
    chance = random.Random(KILLS)
    sent = 0
    async with theatre(InProcess()) as stage:
        for kill in range(KILLS):
            pid = (await stage.do("who")).number
            kill_after = chance.randrange(400)
            for number in range(400):
                stage.player.tell(Note(sent))
                sent += 1
                if number == kill_after:
                    os.kill(pid, signal.SIGKILL)
                if number % chance.choice((1, 10, 100)) == 0:
                    await asyncio.sleep(0)
            ended = await stage.ended(kill + 1)
            assert (ended.cause, ended.killed_by) == (ExitCause.SIGNALED, "SIGKILL")
            assert ended.is_restarting
        await stage.do("who")
        heard = stage.numbers()
        assert heard == sorted(set(heard))
        # Handed over and not begun, and as many whose note was still on its way back.
        assert sent - len(heard) <= KILLS * 3 * WINDOW
        assert len(stage.all(Terminated)) == KILLS
        assert stage.system.statistics()["player"].length == 0


# What a process is given, and when it ends.


@played
async def test_a_process_inherits_nothing_but_output_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUELIGHT_TEST_WORD", "inherited")
    files = [os.open("/dev/zero", os.O_RDONLY) for _ in range(20)]
    for file in files[::2]:
        os.set_inheritable(file, True)
    try:
        async with theatre(InProcess()) as stage:
            there = dict(each.split("=", 1) for each in (await stage.do("descriptors")).text.splitlines())
            assert "/dev/zero" not in there.values()
            assert there.pop("0") == "/dev/null"
            its_own = ("anon_inode:", "pipe:", "socket:", "/dev/null")
            inherited = {name: to for name, to in there.items() if not to.startswith(its_own)}
            assert inherited.keys() <= {"1", "2"}, inherited
            assert (await stage.do("inheritable")).number == 0
            assert (await stage.do("environment", text="CUELIGHT_TEST_WORD")).text == "inherited"
    finally:
        for file in files:
            os.close(file)


@elsewhere
@played
async def test_stop_with_a_timeout_does_not_wait_for_a_handler_that_never_returns(place: Placement, gate: Gate) -> None:
    async with theatre(place) as stage:
        pid = (await stage.do("who")).number
        stage.tell("gate", text=gate.path)
        for number in range(50):
            stage.player.tell(Note(number))
        await until(gate.is_reached)
        await stage.system.stop(timeout_seconds=0.0)
        assert stage.system.statistics()["player"].dropped == 51  # nobody knows what has become of the first
        assert stage.numbers() == []
        gate.open()
        await until(lambda: pid == os.getpid() or not is_alive(pid))


@elsewhere
@played
async def test_stop_with_a_timeout_does_not_wait_for_a_constructor(place: Placement, gate: Gate) -> None:
    async with theatre(InLoop()) as stage:
        stage.system.spawn(ActorSpec(CHILD, partial(gated, path=gate.path), placement=place))
        await until(gate.is_reached)
        await stage.system.stop(timeout_seconds=0.0)
        gate.open()


@elsewhere
@played
async def test_a_cancelled_host_ends_what_it_has_placed(place: Placement, gate: Gate) -> None:
    async def host() -> None:
        async with theatre(place) as stage:
            stage.tell("gate", text=gate.path)
            await asyncio.sleep(NET_SECONDS)

    hosting = asyncio.ensure_future(host())
    await until(gate.is_reached)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hosting  # where it has opened the gate, for which a thread still waited


@elsewhere
@pytest.mark.parametrize("turns", [1, 3, 6])
@on_each_loop
async def test_cancelled_while_starting(place: Placement, turns: int, tmp_path: Path) -> None:
    system = System([_sink_part([]), ActorSpec(PLAYER, player, PATIENT, place)])
    starting = asyncio.ensure_future(system.start())
    for _ in range(turns):
        await asyncio.sleep(0)
    starting.cancel()
    if starting.done() and not starting.cancelled():
        await system.stop()
        return
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert children() == set()


def _sink_part(heard: list[object]) -> ActorSpec[Never]:
    return cast(ActorSpec[Never], ActorSpec(SINK, lambda context: Sink(heard, context)))


@elsewhere
@played
async def test_cancelled_while_a_constructor_runs(place: Placement, gate: Gate) -> None:
    system = System([_sink_part([]), ActorSpec(PLAYER, partial(gated, path=gate.path), PATIENT, place)])
    starting = asyncio.ensure_future(system.start())
    await until(gate.is_reached)
    starting.cancel()
    await asyncio.sleep(0)
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await starting


@elsewhere
@played
async def test_stopped_while_a_restart_is_under_way(place: Placement, gate: Gate, tmp_path: Path) -> None:
    async with theatre(place, restart_policy=PATIENT) as stage:
        slot = stage.system._slots["player"]
        slot.part = replace(slot.part, build=partial(gated, path=gate.path))  # type: ignore[arg-type]  # of whatever protocol
        stage.tell("raise")
        await until(gate.is_reached)
        stopping = asyncio.ensure_future(stage.system.stop())
        await asyncio.sleep(0)
        gate.open()
        await stopping


@elsewhere
@played
async def test_spawned_and_dismissed_from_outside(place: Placement) -> None:
    async with theatre(InLoop()) as stage:
        child = stage.system.spawn(ActorSpec(CHILD, player, placement=place))
        for number in range(100):
            child.tell(Note(number))
        stage.system.dismiss(CHILD)
        await until(lambda: stage.numbers() == list(range(100)))
        await until(lambda: "child" not in stage.system.statistics())
        child = stage.system.spawn(ActorSpec(CHILD, player, placement=place))
        assert (await stage.do("clock", to=child)).number == 1


@elsewhere
@played
async def test_a_spawned_actor_that_cannot_be_built_has_crashed(place: Placement) -> None:
    with pytest.raises(ActorCrashed, match="no such player"):
        async with theatre(InLoop()) as stage:
            stage.system.spawn(ActorSpec(OTHER, broken, placement=place))
            await asyncio.Event().wait()


@elsewhere
def test_a_system_in_a_loop_of_its_own_thread(place: Placement) -> None:
    results: list[object] = []

    async def main() -> None:
        async with theatre(place) as stage:
            stage.tell("raise")
            results.append(await stage.do("clock"))

    with nothing_left():
        thread = threading.Thread(target=lambda: asyncio.run(main()))
        thread.start()
        thread.join(NET_SECONDS)
    assert results == [Answer(1)]


@played
async def test_what_runs_at_the_exit_of_a_process_is_run(capfd: pytest.CaptureFixture[str]) -> None:
    async with theatre(InProcess()) as stage:
        await stage.do("print at exit", text="to be or not to be")
        stage.tell("raise")
        await stage.do("print at exit", text="that is the question")
    assert capfd.readouterr().out == "to be or not to be\nthat is the question\n"


# Programs: how a process comes to know the actors of the main module, and that it ends with its parent.


ACTORS = """
    import asyncio, os, signal, sys, time
    from cuelight.kernel import *

    class Show(Actor[str]):
        def __init__(self, context):
            pass

        def handle(self, message):
            if message == "spin":
                os.write(1, b"spinning\\n")
                while True:
                    pass
            os.write(1, f"{message} {os.getpid()} {__name__}\\n".encode())

    SHOW = Role("show", str, 10)

    async def show(*messages, forever=False):
        async with System([ActorSpec(SHOW, Show, placement=InProcess())]) as system:
            for message in messages:
                system.find(SHOW).tell(message)
            if forever:
                await asyncio.Event().wait()
"""
GUARDED = """
    if __name__ == "__main__":
        asyncio.run(show("hello"))
"""


def program(folder: Path, name: str, *parts: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(map(textwrap.dedent, parts)))
    return path


def outcome(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """What becomes of a program. Also waits for all its descendants, since they keep its output open."""
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=NET_SECONDS, check=False)


def test_an_actor_of_a_script_that_is_guarded(tmp_path: Path) -> None:
    done = outcome(program(tmp_path, "script.py", ACTORS, GUARDED), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[::2] == ["hello", "__mp_main__"]


def test_a_script_that_is_not_guarded_is_told_so(tmp_path: Path) -> None:
    done = outcome(program(tmp_path, "script.py", ACTORS, "asyncio.run(show('hello'))\n"), cwd=tmp_path)
    assert done.returncode == 1
    assert "which starts a system: guard it" in done.stderr
    assert done.stdout == ""


def test_a_script_whose_actors_live_in_a_module_needs_no_guard(tmp_path: Path) -> None:
    program(tmp_path, "actors.py", ACTORS)
    done = outcome(program(tmp_path, "script.py", "import actors\nactors.asyncio.run(actors.show('a'))"), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[::2] == ["a", "actors"]


def test_a_module_that_is_run(tmp_path: Path) -> None:
    program(tmp_path, "package/__init__.py", "")
    program(tmp_path, "package/module.py", ACTORS, GUARDED)
    done = outcome("-m", "package.module", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[::2] == ["hello", "__mp_main__"]


def test_a_program_on_the_command_line(tmp_path: Path) -> None:
    program(tmp_path, "actors.py", ACTORS)
    done = outcome("-c", "import actors\nactors.asyncio.run(actors.show('a'))", cwd=tmp_path)
    assert (done.returncode, done.stderr, done.stdout.split()[::2]) == (0, "", ["a", "actors"])
    done = outcome("-c", textwrap.dedent(ACTORS + GUARDED), cwd=tmp_path)
    assert done.returncode == 1
    assert "'show' was defined at a prompt; a process can only import what a file defines" in done.stderr


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_a_parent_without_outputs_or_directory_has_children_all_the_same(
    tmp_path: Path, closed: tuple[int, ...]
) -> None:
    script = """
        import asyncio, os
        from cuelight.kernel import *

        PROOF = Role("proof", str, 1)

        class Proof(Actor[str]):
            def handle(self, message):
                open(message, "w").write(" ".join(os.readlink(f"/proc/self/fd/{{each}}") for each in {closed}))

        async def prove():
            async with System([ActorSpec(PROOF, build, placement=InProcess())]) as system:
                system.find(PROOF).tell({folder!r} + "/proof")

        def build(context):
            return Proof()

        if __name__ == "__main__":
            os.mkdir("gone")
            os.chdir("gone")
            os.rmdir("../gone")
            for each in {closed}:
                os.close(each)
            asyncio.run(prove())
    """
    done = outcome(program(tmp_path, "script.py", script.format(folder=str(tmp_path), closed=closed)), cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert set((tmp_path / "proof").read_text().split()) == {"/dev/null"}


@contextmanager
def running(*arguments: object, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """A program in a process group of its own."""
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    with subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("message", ["hello", "spin"])
def test_processes_die_with_their_parent(tmp_path: Path, message: str) -> None:
    program(tmp_path, "actors.py", ACTORS)
    script = program(
        tmp_path, "script.py", f"import actors\nactors.asyncio.run(actors.show('{message}', forever=True))"
    )
    with running(script, cwd=tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (child,) = _descendants(process.pid)
        end = os.pidfd_open(child)
        process.kill()
        assert select.select([end], [], [], NET_SECONDS)[0]
        os.close(end)


def test_processes_end_with_a_parent_that_does_not_stop_them(tmp_path: Path) -> None:
    program(tmp_path, "actors.py", ACTORS)
    script = """
        import actors
        loop = actors.asyncio.new_event_loop()
        system = actors.System([actors.ActorSpec(actors.SHOW, actors.Show, placement=actors.InProcess())])
        loop.run_until_complete(system.start())
        {}
    """
    for number, ending in enumerate(
        ("", "actors.sys.exit(0)", "actors.os._exit(0)", "system.find(actors.SHOW).tell('spin')")
    ):
        done = outcome("-W", "ignore", program(tmp_path, f"script{number}.py", script.format(ending)), cwd=tmp_path)
        assert done.returncode == 0


@pytest.mark.parametrize("runner", ["asyncio", "uvloop"])
def test_an_interrupt_is_the_parents_to_act_upon(tmp_path: Path, runner: str) -> None:
    program(tmp_path, "actors.py", ACTORS)
    script = program(
        tmp_path, "script.py", f"import actors, {runner}\n{runner}.run(actors.show('hello', forever=True))"
    )
    with running(script, cwd=tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=NET_SECONDS)
    assert output == ""
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert errors.count("Traceback") <= 2  # the program's own
    assert "ActorCrashed" not in errors
    assert process.returncode != 0


def test_an_interrupt_while_a_process_starts_does_not_reach_it(tmp_path: Path) -> None:
    """All of that time is tried out: the interrupt comes as soon as there is a process."""
    program(tmp_path, "actors.py", ACTORS)
    script = program(tmp_path, "script.py", "import actors\nactors.asyncio.run(actors.show('hello', forever=True))")
    with running(script, cwd=tmp_path) as process:
        while not (found := _descendants(process.pid)):
            assert process.poll() is None
        os.kill(found[0], signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("hello")
