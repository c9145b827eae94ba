"""Actors on threads and in child processes: the promises of actors in the loop, and the cost of a process's death."""

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
    PLACED,
    SINK,
    Answer,
    Carry,
    Do,
    Greet,
    Hold,
    Inner,
    Note,
    Padded,
    PlacedActor,
    Protocol,
    Urgent,
    breaking,
    broken,
    build_placed,
    counting,
    descriptors,
    dying,
    gated,
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
"""Timeout of a test; no test waits for it."""

EVERYWHERE = [InLoop(), OnThread(), InProcess()]
ELSEWHERE = [OnThread(), InProcess()]
PATIENT = RestartPolicy(restarts_max=1000, backoff_seconds=0.0)


OTHERS: set[int] = set()


def children() -> set[int]:
    """Return the processes that this test has started, including zombies."""
    return _all_children() - OTHERS


def _all_children() -> set[int]:
    lists = Path("/proc/self/task").glob("*/children")
    return {int(child) for each in lists for child in each.read_text().split()}


@pytest.fixture(autouse=True)
def only_own_children() -> Iterator[None]:
    """Exclude earlier processes, such as the resource tracker of `multiprocessing`."""
    OTHERS.update(_all_children())
    yield
    OTHERS.clear()


def is_alive(pid: int) -> bool:
    """Whether the process runs and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def nothing_left() -> Iterator[list[str]]:
    """Check for left threads, processes and open files, and for errors of asyncio that the test did not take."""
    complaints: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: complaints.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("asyncio").addHandler(handler)
    uvloop.new_event_loop().close()  # the first loop opens files that the library keeps open
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


def on_asyncio_loop(test: Test) -> Callable[..., None]:
    """Run a test in a loop of its own, asyncio's by default, and check that it leaves no resources."""

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
    """As `on_asyncio_loop`, on asyncio's loop and on uvloop."""
    runs = on_asyncio_loop(test)
    signature = inspect.signature(runs)
    own = [inspect.Parameter("loop_factory", inspect.Parameter.POSITIONAL_OR_KEYWORD), *signature.parameters.values()]
    runs.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    factories = [asyncio.new_event_loop, uvloop.new_event_loop]
    marked: Callable[..., None] = pytest.mark.parametrize("loop_factory", factories, ids=["asyncio", "uvloop"])(runs)
    return marked


everywhere = pytest.mark.parametrize("place", EVERYWHERE, ids=lambda place: type(place).__name__)
elsewhere = pytest.mark.parametrize("place", ELSEWHERE, ids=lambda place: type(place).__name__)


async def until(condition: Callable[[], object]) -> None:
    """Run turns of the loop until the condition holds, and sleep between them."""
    while not condition():  # noqa: ASYNC110  # the condition is any state, not an event
        await asyncio.sleep(0.001)


class Sink(Actor[object]):
    """Records its messages."""

    def __init__(self, received: list[object], context: Context[Never], watched: tuple[Role[Never], ...] = ()) -> None:
        self.received = received
        for role in watched:
            context.watch(role)

    def handle(self, message: object) -> None:
        self.received.append(message)


class PlacementHarness:
    """A running system with a sink, and a placed actor that the test sends messages to."""

    def __init__(self, system: System, received: list[object]) -> None:
        self.system = system
        self.received = received
        self.ref: Ref[Protocol] = system.find(PLACED)

    def all(self, kind: type[M]) -> list[M]:
        """Return the sink's messages of this type."""
        return [message for message in self.received if isinstance(message, kind)]

    def numbers(self) -> list[int]:
        """Return the numbers of the sink's notes."""
        return [message.number for message in self.all(Note)]

    async def do(self, action: str, number: int = 0, text: str = "", to: Ref[Protocol] | None = None) -> Answer:
        """Send an action to the placed actor, and return the answer."""
        return await ask(to or self.ref, lambda reply_to: Do(action, number, text, reply_to), NET_SECONDS)

    def tell(self, action: str, number: int = 0, text: str = "") -> None:
        """Send an action that has no answer."""
        self.ref.tell(Do(action, number, text))

    async def ended(self, count: int = 1) -> Terminated:
        """Wait for the `count`-th end of a life that the sink watches, and return it."""
        await until(lambda: len(self.all(Terminated)) >= count)
        return self.all(Terminated)[count - 1]


@asynccontextmanager
async def placement_harness(
    place: Placement,
    *more: ActorSpec[Never],
    build: Callable[[Context[Protocol]], Actor[Protocol]] = build_placed,
    restart_policy: RestartPolicy = PATIENT,
    role: Role[Protocol] = PLACED,
    **options: object,
) -> AsyncIterator[PlacementHarness]:
    """Run the sink, which watches the placed actor; the `more` actors; and the placed actor at `place`."""
    received: list[object] = []
    sink = ActorSpec(SINK, lambda context: Sink(received, context, (PLACED,)))
    specs = [sink, *more, ActorSpec(role, build, restart_policy, place)]
    async with System(specs, **options) as system:  # type: ignore[arg-type]
        try:
            yield PlacementHarness(system, received)
        except BaseException:
            for gate in list(Gate.all):
                gate.abandon()
            raise


class Gate:
    """A named pipe at which an actor waits until the test opens it."""

    all: ClassVar[set[Gate]] = set()

    def __init__(self, path: Path) -> None:
        self.all.add(self)
        self.path = str(path)
        os.mkfifo(path)
        self._writer = -1

    def is_reached(self) -> bool:
        """Whether an actor waits."""
        with suppress(OSError):  # no reader yet
            self._writer = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        return self._writer >= 0

    def open(self) -> None:
        """Release the actors that wait."""
        os.close(self._writer)
        self._writer = -1

    def abandon(self) -> None:
        """Release any waiting actor, so that a failing test ends."""
        self.all.discard(self)
        if self._writer >= 0 or self.is_reached():
            self.open()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.abandon()


# Promises for every placement.


@everywhere
@on_each_loop
async def test_messages_cross_both_ways_in_order(place: Placement) -> None:
    async with placement_harness(place) as harness:
        for number in range(5000):
            harness.ref.tell(Note(number))
            if number % 500 == 0:
                await asyncio.sleep(0)
        await harness.do("flood", 5000)
        await until(lambda: len(harness.numbers()) == 10_000)
        assert harness.numbers() == [*range(5000), *range(5000)]
        statistics = harness.system.statistics()["placed"]
        assert (statistics.length, statistics.delivered, statistics.dropped) == (0, 5001, 0)
        assert statistics.peak > 400
        answer = await harness.do("who")
        assert (answer.number == os.getpid()) is not isinstance(place, InProcess)
        assert (answer.text == threading.current_thread().name) is not isinstance(place, OnThread)
    assert harness.all(Answer)[-1].text == "stopped"


@everywhere
@on_asyncio_loop
async def test_addresses_in_messages_work_across_the_border(place: Placement) -> None:
    answers: list[asyncio.Future[Answer]] = [asyncio.get_running_loop().create_future() for _ in range(4)]

    class Once:
        def __init__(self, future: asyncio.Future[Answer]) -> None:
            self.tell = future.set_result

    async with placement_harness(place) as harness:
        addresses = tuple(map(Once, answers))
        harness.ref.tell(Greet(addresses[:2], Inner(addresses[2:])))
        assert [(await answer).number for answer in answers] == [0, 1, 2, 3]


@everywhere
@on_asyncio_loop
async def test_forwarded_address_works_from_every_placement(place: Placement) -> None:
    """Also on the way back: through two placed actors, and through an actor spawned here."""
    spawned: list[object] = []
    home: Role[Note | Carry] = Role("home", Note | Carry, 10)
    other = ActorSpec(OTHER, build_placed, placement=InProcess() if isinstance(place, OnThread) else place)
    async with placement_harness(place, other) as harness:
        late = harness.system.spawn(ActorSpec(home, lambda context: Sink(spawned, context)))
        there = harness.system.find(OTHER)
        harness.ref.tell(Carry(late, (there, harness.ref, there), 0))
        await until(lambda: spawned)
        assert spawned == [Note(3)]
        harness.tell("hold own", 4)  # sends its address to the other, which sends it a note
        harness.ref.tell(Carry(harness.ref, (there,), 6))  # receives its own address
        await until(lambda: len(harness.numbers()) == 2)
        assert sorted(harness.numbers()) == [4, 7]


@everywhere
@on_asyncio_loop
async def test_placed_actor_has_timers_workers_clock_and_rng(place: Placement) -> None:
    chances = []
    for _ in range(2):
        async with placement_harness(place, ActorSpec(OTHER, build_placed), chance=random.Random(7)) as harness:
            harness.tell("later", 1)
            await until(lambda: harness.numbers() == [1])
            harness.tell("work", 2)
            await until(lambda: harness.numbers() == [1, 4])
            assert (await harness.do("clock")).number == 1
            chances.append((await harness.do("chance")).text)
    assert chances[0] == chances[1] == repr(await _chance_at_home())


async def _chance_at_home() -> float:
    seeds: dict[str, int] = {}

    def tap(event: Event) -> None:
        if isinstance(event, Started):
            seeds[event.actor] = event.seed

    async with placement_harness(InLoop(), ActorSpec(OTHER, build_placed), chance=random.Random(7), tap=tap):
        return random.Random(seeds["placed"]).random()


@everywhere
@on_asyncio_loop
async def test_placed_actor_watches_and_is_watched(place: Placement) -> None:
    async with placement_harness(place, ActorSpec(OTHER, build_placed, PATIENT, place)) as harness:
        await harness.do("watch")
        harness.system.find(OTHER).tell(Do("raise", text="other"))
        await until(lambda: harness.all(Terminated))
        assert "other" in harness.all(Terminated)[0].error  # the actor was notified, and forwarded it
        harness.system.dismiss(OTHER)
        await until(lambda: len(harness.all(Terminated)) == 2)
        assert harness.all(Terminated)[1] == Terminated("other", "", is_restarting=False)
        harness.tell("raise", text="placed")
        await until(lambda: len(harness.all(Terminated)) == 3)
        assert harness.all(Terminated)[2].actor == "placed"
        await harness.do("who")
    assert harness.all(Terminated)[-1] == Terminated("placed", "", is_restarting=False)


@everywhere
@pytest.mark.parametrize("where", ["", "in a process"])
@on_asyncio_loop
async def test_placed_actor_spawns_another(place: Placement, where: str) -> None:
    async with placement_harness(place) as harness:
        harness.tell("spawn", 5, where)
        await until(lambda: harness.numbers() == [5])
        assert harness.all(Answer)[0].text == "<Ref child>"
        await harness.do("who")


@elsewhere
@on_asyncio_loop
async def test_crash_of_a_spawned_actor_crashes_its_parent_life(place: Placement) -> None:
    async with placement_harness(place) as harness:
        harness.tell("spawn and tell", text="raise")
        assert "ValueError('child')" in (await harness.ended()).error
        await harness.do("who")


@everywhere
@on_asyncio_loop
async def test_spawned_actors_address_works_for_others(place: Placement, gate: Gate) -> None:
    async with placement_harness(place) as harness:
        harness.tell("spawn and show")
        await until(lambda: harness.all(Carry))
        child = harness.all(Carry)[0].to
        child.tell(Note(3))
        await until(lambda: harness.numbers() == [3])
        if not isinstance(place, InLoop):  # in the loop the sender gets the error
            harness.tell("gate", text=gate.path)  # so that it receives all of them in one batch
            await until(gate.is_reached)
            for number in range(5000):
                child.tell(Note(number))
            gate.open()
            assert "crashed on placed:Note: RemoteError('MailboxFull" in (await harness.ended()).error.replace('"', "'")
            child.tell(Note(-1))  # to an ended life
            await harness.do("who")
            assert -1 not in harness.numbers()


@everywhere
@pytest.mark.parametrize("life", [InLoop(), OnThread()], ids=lambda place: type(place).__name__)
@on_asyncio_loop
async def test_spawned_actor_watches_actors_of_the_system(place: Placement, life: Placement) -> None:
    """The watch lasts until the spawned actor has stopped, or its parent's life has ended."""
    async with placement_harness(place, ActorSpec(OTHER, build_placed, PATIENT, life)) as harness:
        harness.tell("spawn and tell", text="watch")
        await until(lambda: "other" in _watchers(harness))
        harness.system.find(OTHER).tell(Do("raise", text="the first"))
        await until(lambda: harness.all(Terminated))
        assert "the first" in harness.all(Terminated)[0].error  # the child was notified, and forwarded it
        harness.tell("dismiss the child")
        await harness.do("who")
        harness.system.find(OTHER).tell(Do("raise", text="the second"))
        await harness.do("who", to=harness.system.find(OTHER))
        await harness.do("who")
        assert len(harness.all(Terminated)) == 1
        harness.tell("spawn and tell", text="watch")
        await until(lambda: "other" in _watchers(harness))
        if not isinstance(place, InLoop):
            harness.tell("raise", text="their home")
            await until(lambda: _watchers(harness) == {"placed": 1})
        harness.system.dismiss(OTHER)
        await until(lambda: "other" not in harness.system.statistics())
        await harness.do("who")
        await harness.do("who")
        received = [message for message in harness.all(Terminated) if message.actor == "other"]
        assert len(received) == (2 if isinstance(place, InLoop) else 1)


def _watchers(harness: PlacementHarness) -> dict[str, int]:
    """Return the number of watchers of each watched actor."""
    return {name: len(slot.watchers) for name, slot in harness.system._slots.items() if slot.watchers}


@everywhere
@pytest.mark.parametrize("action", ["dismiss", "spawn that it dismisses"])
@on_asyncio_loop
async def test_placed_actor_dismisses_actors_of_the_system(place: Placement, action: str) -> None:
    async with placement_harness(place, ActorSpec(OTHER, build_placed, PATIENT, place)) as harness:
        for number in range(100):
            harness.system.find(OTHER).tell(Note(number))
        harness.tell(action, text="other")
        await until(lambda: "other" not in harness.system.statistics())
        assert harness.numbers() == list(range(100))
        await harness.do("who")
        assert harness.all(Terminated) == []


@everywhere
@pytest.mark.parametrize("drop", [False, True])
@on_asyncio_loop
async def test_actor_dismisses_itself(place: Placement, drop: bool) -> None:
    async with placement_harness(place) as harness:
        harness.tell("dismiss", int(drop), "placed")
        for number in range(100):
            harness.ref.tell(Note(number))
        assert await harness.ended() == Terminated("placed", "", is_restarting=False)
        await until(lambda: "placed" not in harness.system.statistics())
        assert harness.numbers() == ([] if drop else list(range(100)))
        assert harness.ref.is_stopped
        assert harness.all(Answer)[-1].text == "stopped"


@everywhere
@on_asyncio_loop
async def test_dismissing_an_unknown_actor_raises_and_dismissing_twice_does_not(place: Placement) -> None:
    async with placement_harness(place, ActorSpec(OTHER, build_placed)) as harness:
        harness.tell("dismiss", text="other")
        harness.tell("dismiss", text="other")
        await harness.do("who")
        assert harness.all(Terminated) == []
        harness.tell("dismiss", text="child")
        assert "KeyError('child')" in (await harness.ended()).error


@on_asyncio_loop
async def test_actors_that_joined_or_left_later_are_watched_and_dismissed() -> None:
    async with placement_harness(OnThread()) as harness:
        harness.system.spawn(ActorSpec(OTHER, build_placed))
        await harness.do("watch")
        harness.tell("dismiss", text="other")
        await until(lambda: harness.all(Terminated))
        await until(lambda: "other" not in harness.system.statistics())
        await harness.do("watch")
        await until(lambda: len(harness.all(Terminated)) == 2)
        assert harness.all(Terminated) == [Terminated("other", "", is_restarting=False)] * 2
        await harness.do("who")


@elsewhere
@on_asyncio_loop
async def test_dropped_messages_are_not_handled(place: Placement, gate: Gate) -> None:
    """Messages handed over, up to a window, are not handled either."""
    async with placement_harness(place) as harness:
        harness.tell("gate", text=gate.path)
        await until(gate.is_reached)
        for number in range(200):
            harness.ref.tell(Note(number))
        await until(lambda: harness.system.statistics()["placed"].length == 201 - WINDOW)
        mailbox = harness.system._slots["placed"].mailbox
        harness.system.dismiss(PLACED, drop=True)
        await asyncio.sleep(0)
        gate.open()
        await harness.ended()
        assert harness.numbers() == []
        statistics = mailbox.statistics()
        assert (statistics.length, statistics.delivered, statistics.dropped) == (0, 1, 200)


@everywhere
@on_asyncio_loop
async def test_unaccepted_message_is_refused_at_the_sender(place: Placement) -> None:
    async with placement_harness(place) as harness:
        with pytest.raises(NotAccepted):
            harness.ref.tell(Answer(1))  # type: ignore[arg-type]
        assert (await harness.do("send", text="unknown")).text == "NotAccepted"
        assert (await harness.do("find", text="nobody")).text == "KeyError"
        assert (await harness.do("find", text="sink")).text == ""
        assert harness.all(Terminated) == []


@everywhere
@on_asyncio_loop
async def test_urgent_messages_overtake_messages_not_handed_over(place: Placement, gate: Gate) -> None:
    async with placement_harness(place) as harness:
        if isinstance(place, InLoop):
            harness.tell("later")
        else:
            harness.tell("gate", text=gate.path)
            await until(gate.is_reached)
        for number in range(200):
            harness.ref.tell(Note(number))
        harness.ref.tell(Urgent(1000))
        if not isinstance(place, InLoop):
            await asyncio.sleep(0)
            gate.open()
        await until(lambda: len(harness.numbers()) >= 200)
        order = [message.number for message in harness.received if isinstance(message, Note | Urgent)]
        assert order.index(1000) <= WINDOW
        assert [number for number in order if number != 1000][:200] == sorted(range(200))[:200] or isinstance(
            place, InLoop
        )


@everywhere
@on_asyncio_loop
async def test_slow_handler_is_reported_by_the_actors_name(place: Placement, caplog: pytest.LogCaptureFixture) -> None:
    async with placement_harness(place, slow_handler_seconds=0.0) as harness:
        harness.ref.tell(Note(1))
        await until(lambda: "slow_handler" in caplog.text and "'Note'" in caplog.text)
    (report,) = [each for each in caplog.messages if "'Note'" in each and "'placed'" in each]
    assert "seconds" in report


@everywhere
@on_each_loop
async def test_crash_loses_only_the_message_being_handled(place: Placement, caplog: pytest.LogCaptureFixture) -> None:
    """Waiting messages, handed over or not, keep their order and reach the next life."""
    async with placement_harness(place) as harness:
        for number in range(300):
            harness.ref.tell(Note(number) if number % 100 != 50 else Do("raise", text="no such luck"))
        await harness.do("who")
        assert harness.numbers() == [number for number in range(300) if number % 100 != 50]
        statistics = harness.system.statistics()["placed"]
        assert (statistics.length, statistics.delivered, statistics.dropped) == (0, 301, 0)
        assert len(harness.all(Terminated)) == 3
        assert harness.all(Terminated)[0].is_restarting
        assert "crashed on Do: " in harness.all(Terminated)[0].error
        assert "no such luck" in harness.all(Terminated)[0].error
    assert "placed.py" in caplog.text  # the traceback in the placed life
    assert "raise ValueError(text)" in caplog.text


@everywhere
@on_asyncio_loop
async def test_raising_constructor_ends_the_start(place: Placement) -> None:
    with pytest.raises(ActorCrashed, match=r"'placed' crashed on construction.*cannot be built") as caught:
        async with placement_harness(place, ActorSpec(OTHER, build_placed, placement=place), build=broken):
            raise AssertionError("never started")
    if not isinstance(place, InLoop):
        assert isinstance(caught.value.__cause__, RemoteError)
        assert "placed.py" in caught.value.__cause__.trace


@everywhere
@on_asyncio_loop
async def test_raising_constructor_at_a_restart_is_another_crash(place: Placement, tmp_path: Path) -> None:
    build = partial(breaking, path=str(tmp_path / "life"))
    failures: list[ActorCrashed] = []
    with pytest.raises(ActorCrashed, match="built once already"):
        async with placement_harness(
            place, build=build, restart_policy=RestartPolicy(2, backoff_seconds=0.0), on_failure=failures.append
        ) as harness:
            harness.tell("raise")
            await until(lambda: failures)
            await asyncio.sleep(NET_SECONDS)
    assert [each.is_restarting for each in harness.all(Terminated)] == [True, True, False]


@everywhere
@on_asyncio_loop
async def test_a_group_restarts_together(place: Placement, tmp_path: Path) -> None:
    restart_policy = RestartPolicy(restarts_max=5, backoff_seconds=0.0, strategy=Strategy.REST_FOR_ONE)
    other = ActorSpec(OTHER, partial(counting, path=str(tmp_path / "other")), restart_policy, place)
    async with placement_harness(place, other, build=partial(counting, path=str(tmp_path / "placed"))) as harness:
        harness.system.find(OTHER).tell(Do("raise"))
        await until(lambda: [each.number for each in harness.all(Answer) if each.text == "born"] == [1, 1, 2, 2])
        await harness.do("who")
        await harness.do("who", to=harness.system.find(OTHER))
        assert sum(each.text == "stopped" for each in harness.all(Answer)) == 1  # the actor that had not crashed


@everywhere
@on_asyncio_loop
async def test_placed_actors_of_several_systems_are_independent(place: Placement) -> None:
    async with (
        placement_harness(place, ActorSpec(OTHER, build_placed, placement=place)) as one,
        placement_harness(place) as two,
    ):
        whos = [await one.do("who"), await one.do("who", to=one.system.find(OTHER)), await two.do("who")]
        assert len(set(whos)) == (1 if isinstance(place, InLoop) else 2 if isinstance(place, OnThread) else 3)
        one.tell("raise")
        await one.do("who")
        assert two.all(Terminated) == []


# Messages that cross between placements.


@elsewhere
@on_asyncio_loop
async def test_dropped_address_is_released(place: Placement) -> None:
    kept = _wires(lambda wire: len(wire._exported))
    async with placement_harness(place) as harness:
        for number in range(2000):
            await harness.do("clock", number)
        await until(lambda: sum(kept()) < 50)
        held = asyncio.get_running_loop().create_future()

        class Holder:
            tell = held.set_result

        harness.ref.tell(Hold(Holder()))
        gc.collect()
        await harness.do("answer held", 3)
        assert (await held) == Answer(3)
        await harness.do("drop")
        await until(lambda: sum(kept()) == 0)


@elsewhere
@on_asyncio_loop
async def test_address_held_by_an_ended_life_is_released(place: Placement) -> None:
    async with placement_harness(place) as harness:
        harness.tell("spawn and show")
        await until(lambda: harness.all(Carry))
        stale = cast(RemoteRef, harness.all(Carry)[0].to)
        harness.tell("raise")
        await harness.ended()
        for _ in range(100):
            stale.wire.tell(0, (Hold,), Hold(Back()))
        assert stale.wire._exported == {}
        await harness.do("who")


class Back:
    """An address without an actor."""

    def tell(self, message: Answer) -> None:
        raise AssertionError("no answer is expected")


@dataclass(frozen=True)
class BackOfData(Back):
    """An address that msgpack encodes as a value."""

    number: int = 0


class BackOfFields(msgspec.Struct, frozen=True):
    """An address that is a struct."""

    number: int = 0
    tell = Back.tell


class BackOfNumber(IntEnum):
    """An address that is a number, and so may equal the id of another address."""

    ONE = 1

    def tell(self, message: Answer) -> None:
        raise AssertionError("no answer is expected")


@elsewhere
@on_asyncio_loop
async def test_address_that_is_also_a_value_is_refused_at_the_sender(place: Placement) -> None:
    async with placement_harness(place) as harness:
        for address in (BackOfData(), BackOfFields(), BackOfNumber.ONE):
            with pytest.raises(NotSendable, match=r"Hold cannot be decoded: .*[aA]ddress"):
                harness.ref.tell(Hold(address))
        assert (await harness.do("who")).text
        assert harness.all(Terminated) == []


def _wires(of: Callable[[Wire], M]) -> Callable[[], list[M]]:
    """Return a function that evaluates `of` for each wire in use, at its near end."""

    def look() -> list[M]:
        return [of(each._wire) for each in gc.get_objects() if type(each) is RemoteLife and not each.exited.done()]

    return look


@everywhere
@on_asyncio_loop
async def test_answer_to_an_ended_asker_is_ignored(place: Placement, gate: Gate) -> None:
    async with placement_harness(place) as harness:
        asked = asyncio.ensure_future(harness.do("later" if isinstance(place, InLoop) else "gate", text=gate.path))
        await asyncio.sleep(0)
        asked.cancel()
        if not isinstance(place, InLoop):
            await until(gate.is_reached)
            with pytest.raises(AskTimeout):
                await ask(harness.ref, lambda reply_to: Do("who", reply_to=cast(Recipient[Answer], reply_to)), 0.0)
            gate.open()
        await harness.do("who")
        assert harness.all(Terminated) == []


@elsewhere
@on_each_loop
async def test_at_most_a_window_of_messages_is_handed_over(place: Placement, gate: Gate) -> None:
    taps: list[Event] = []
    async with placement_harness(place, role=Role("placed", Protocol, 4, urgent=(Urgent,)), tap=taps.append) as harness:
        harness.tell("gate", text=gate.path)
        await until(gate.is_reached)
        await until(lambda: harness.system.statistics()["placed"].length == 0)
        with pytest.raises(MailboxFull):  # at once, at the sender: no message is handed over meanwhile
            for number in range(5):
                harness.ref.tell(Note(number))
        for number in range(4, WINDOW - 1):  # the message being handled counts
            await until(lambda: harness.system.statistics()["placed"].length == 0)
            harness.ref.tell(Note(number))
        for _ in range(3):
            await asyncio.sleep(0)
        for number in range(WINDOW - 1, WINDOW + 3):
            harness.ref.tell(Note(number))
        statistics = harness.system.statistics()["placed"]
        assert (statistics.length, statistics.peak, statistics.capacity, statistics.delivered) == (4, 4, 4, WINDOW)
        assert statistics.oldest_age_seconds > 0
        with pytest.raises(MailboxFull):
            harness.ref.tell(Note(-1))
        gate.open()
        await until(lambda: harness.numbers() == list(range(WINDOW + 3)))
        assert harness.system.statistics()["placed"].delivered == WINDOW + 4
    delivered = [event for event in taps if isinstance(event, Delivered)]
    assert [each.message for each in delivered if each.actor == "placed"][1:] == [
        Note(number) for number in range(WINDOW + 3)
    ]
    assert {each.sender for each in delivered if each.actor == "sink"} == {"placed"}


@elsewhere
@on_asyncio_loop
async def test_flooding_a_full_mailbox_crashes_the_sender(place: Placement) -> None:
    quiet: list[object] = []

    async with placement_harness(place, ActorSpec(OTHER, build_placed, placement=place), _crowded(quiet)) as harness:
        harness.tell("crowd", 5000)
        harness.ref.tell(Note(1))
        assert "crashed on placed:Note: MailboxFull" in (await harness.ended()).error
        await harness.do("who")
        await harness.do("who", to=harness.system.find(OTHER))
        assert quiet == [Note(number) for number in range(len(quiet))]
        assert len(quiet) >= 10
        assert len(harness.all(Terminated)) == 1


def _crowded(received: list[object]) -> ActorSpec[Note]:
    return ActorSpec(CROWDED, lambda context: Sink(received, context))


@elsewhere
@on_asyncio_loop
async def test_unsendable_message_is_refused_at_the_sender(place: OnThread | InProcess) -> None:
    async with placement_harness(replace(place, message_bytes_max=1000)) as harness:
        harness.ref.tell(Padded(bytes(900)))
        with pytest.raises(MessageTooLarge, match=r"Padded has 1\d\d\d bytes; 1000 may cross"):
            harness.ref.tell(Padded(bytes(1000 - 7)))
        with pytest.raises(NotSendable, match="placed:Note cannot be decoded"):
            harness.ref.tell(Note(cast(int, "three")))
        with pytest.raises(NotSendable, match="Note cannot cross: a object cannot be encoded"):
            harness.ref.tell(Note(cast(int, object())))
        with pytest.raises(NotSendable, match="Do cannot cross"):
            harness.tell("lone surrogate \udc80")
        assert (await harness.do("send", text="wrong field")).text == "NotSendable"
        assert (await harness.do("send", text="unencodable")).text == "NotSendable"
        assert (await harness.do("send", text="large")).text == "MessageTooLarge"
        assert harness.received == [Padded(bytes(900))]
        statistics = harness.system.statistics()["placed"]
        assert (statistics.delivered, statistics.dropped, statistics.length) == (4, 0, 0)
        assert harness.all(Terminated) == []


@elsewhere
@on_asyncio_loop
async def test_kernel_messages_are_never_too_large(place: OnThread | InProcess) -> None:
    async with placement_harness(
        replace(place, message_bytes_max=300), ActorSpec(OTHER, build_placed, PATIENT, InLoop())
    ) as harness:
        await harness.do("watch")
        harness.system.find(OTHER).tell(Do("raise", text="x" * 1000))
        await until(lambda: harness.all(Terminated))
        assert len(harness.all(Terminated)[0].error) > 1000


class Unresolved(msgspec.Struct, frozen=True, tag=True):
    """A message with unresolvable annotations."""

    field: Nothing  # type: ignore[name-defined]  # noqa: F821


@elsewhere
@on_asyncio_loop
async def test_unresolvable_protocol_ends_the_start(place: Placement) -> None:
    role: Role[Never] = Role("unreadable", Unresolved, 1)
    with pytest.raises(NotSendable, match="Unresolved cannot be resolved"):
        async with placement_harness(place, ActorSpec(role, build_placed)):
            raise AssertionError("never started")


_NAMELESS = eval("lambda context: PlacedActor(context)", {"PlacedActor": PlacedActor})


@pytest.mark.parametrize("build", [_NAMELESS, partial(_NAMELESS)])
@on_asyncio_loop
async def test_build_that_cannot_be_imported_ends_the_start(build: Callable[[Context[Protocol]], PlacedActor]) -> None:
    with pytest.raises(NotSendable, match="'placed' cannot be imported"):
        async with placement_harness(InProcess(), build=build):
            raise AssertionError("never started")
    async with placement_harness(OnThread(), build=build) as harness:
        await harness.do("who")


@elsewhere
@on_asyncio_loop
async def test_error_text_is_bounded_and_encodable(place: Placement) -> None:
    async with placement_harness(place) as harness:
        harness.tell("surrogates", 1_000_000)
        assert 30_000 < len((await harness.ended()).error) < 40_000
        await harness.do("who")


# The cost of a process's death.


DEATHS = {
    "exit": (Do("exit at once", 4), "exited with status 4", ExitCause.EXITED, ""),
    "exit in order": (Do("exit at once", 0), "exited with status 0", ExitCause.EXITED, ""),
    "kill": (Do("signal", signal.SIGKILL), "was killed by SIGKILL", ExitCause.SIGNALED, "SIGKILL"),
    "fault": (Do("signal", signal.SIGSEGV), "was killed by SIGSEGV", ExitCause.SIGNALED, "SIGSEGV"),
    "terminate": (Do("signal", signal.SIGTERM), "was killed by SIGTERM", ExitCause.SIGNALED, "SIGTERM"),
    "abort": (Do("abort"), "was killed by SIGABRT", ExitCause.SIGNALED, "SIGABRT"),
}


@on_asyncio_loop
async def test_the_death_of_a_process_is_a_crash() -> None:
    async with placement_harness(InProcess()) as harness:
        dropped = 0
        for death, (fatal, words, cause, killed_by) in enumerate(DEATHS.values(), 1):
            harness.received[:] = harness.all(Terminated)
            for number in range(10):
                harness.ref.tell(Note(number))
            await harness.do("who")
            harness.ref.tell(fatal)
            for number in range(10, 500):
                harness.ref.tell(Note(number))
            ended = await harness.ended(death)
            assert ended == Terminated("placed", f"actor 'placed' died: its process {words}", True, cause, killed_by)
            await harness.do("who")
            received = harness.numbers()
            assert received == [*range(10), *range(510 - len(received), 500)]
            lost = 500 - len(received)
            assert lost <= WINDOW
            statistics = harness.system.statistics()["placed"]
            assert lost <= statistics.dropped - dropped <= WINDOW  # the messages that the process had begun are unknown
            dropped = statistics.dropped


KILLED = "it was killed: no longer wanted"


@everywhere
@on_each_loop
async def test_killed_placed_actor_has_crashed(place: Placement) -> None:
    async with placement_harness(place) as harness:
        for number in range(10):
            harness.ref.tell(Note(number))
        await harness.do("who")
        harness.system.kill(PLACED, "no longer wanted")
        ended = await harness.ended()
        assert ended == Terminated("placed", f"actor 'placed' died: {KILLED}", True, ExitCause.KILLED)
        await harness.do("who")
        assert harness.numbers() == list(range(10))
        assert harness.all(Answer) == [], "a killed actor does not stop in order"


@everywhere
@on_asyncio_loop
async def test_kill_loses_only_messages_handed_to_the_process(place: Placement, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    async with placement_harness(place) as harness:
        if isinstance(place, InLoop):
            harness.tell("kill", text="placed")
        else:
            harness.tell("gate", text=str(gate))
            await until(lambda: harness.system.statistics()["placed"].length == 0)
        for number in range(500):
            harness.ref.tell(Note(number))
        if not isinstance(place, InLoop):
            await until(lambda: harness.system.statistics()["placed"].length < 500)
            harness.system.kill(PLACED, "no longer wanted")
            if isinstance(place, OnThread):
                gate.write_text("")
        assert KILLED in (await harness.ended()).error
        await harness.do("who")
        lost = 500 - len(harness.numbers())
        assert harness.numbers() == list(range(lost, 500))
        assert 0 < lost <= WINDOW if isinstance(place, InProcess) else lost == 0
        assert harness.system.statistics()["placed"].dropped == lost + isinstance(place, InProcess)


@on_asyncio_loop
async def test_process_is_killed_where_its_handler_hangs_in_native_code(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    async with placement_harness(InProcess()) as harness:
        harness.tell("hang", text=str(file))
        await until(lambda: file.exists() and file.read_text())
        pid = int(file.read_text())
        harness.system.kill(PLACED, "no longer wanted")
        assert KILLED in (await harness.ended()).error
        assert not is_alive(pid)
        assert (await harness.do("who")).number != pid


@on_asyncio_loop
async def test_process_is_killed_while_its_constructor_waits(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    async with placement_harness(InLoop()) as harness:
        role = Role("gated", Protocol, 10)
        ref = harness.system.spawn(
            ActorSpec(role, partial(gated, path=str(gate)), RestartPolicy(restarts_max=1), InProcess())
        )
        slot = harness.system._slots["gated"]
        await until(lambda: slot.life)
        harness.system.kill(role, "no longer wanted")
        await until(lambda: slot.lives == 2)
        await asyncio.to_thread(gate.write_text, "")
        assert (await harness.do("who", to=ref)).number != os.getpid()


def killed(actor: str) -> Terminated:
    return Terminated(actor, f"actor {actor!r} died: {KILLED}", True, ExitCause.KILLED, "placed")


@everywhere
@pytest.mark.parametrize("where", ELSEWHERE, ids=lambda place: type(place).__name__)
@on_asyncio_loop
async def test_a_placed_actor_kills_others_and_itself(place: Placement, where: Placement) -> None:
    async with placement_harness(where, ActorSpec(OTHER, build_placed, PATIENT, place)) as harness:
        await harness.do("watch")
        await harness.do("kill", text="other")
        await until(lambda: harness.all(Terminated))  # the actor was notified, and forwarded it
        assert harness.all(Terminated) == [killed("other")]
        await harness.do("who", to=harness.system.find(OTHER))
        harness.tell("kill", text="placed")
        assert await harness.ended(2) == killed("placed")
        harness.tell("kill", text="child")  # a role without an actor
        await harness.do("who")
        assert len(harness.all(Terminated)) == 2


@elsewhere
@on_asyncio_loop
async def test_placed_actor_kills_an_actor_that_it_spawned(place: Placement) -> None:
    async with placement_harness(place) as harness:
        harness.tell("spawn", 5)
        harness.tell("kill", text="child")
        assert KILLED in (await harness.ended()).error


@elsewhere
@on_each_loop
async def test_actor_that_exits_has_crashed(place: Placement) -> None:
    async with placement_harness(place) as harness:
        for life, number in enumerate((0, 3), 1):
            harness.tell("exit", number)
            harness.ref.tell(Note(number))
            error = (await harness.ended(life)).error
            assert error == f"actor 'placed' crashed on Do: RemoteError('SystemExit({number})')"
        await until(lambda: harness.numbers() == [0, 3])


@elsewhere
@on_asyncio_loop
async def test_constructor_that_exits_is_a_crash(place: Placement) -> None:
    with pytest.raises(ActorCrashed, match=r"crashed on construction: RemoteError\('SystemExit\(3\)'\)"):
        async with placement_harness(place, build=partial(dying, action="exit", number=3)):
            raise AssertionError("never started")


@pytest.mark.parametrize("action", ["signal", "exit at once"])
@on_asyncio_loop
async def test_death_while_draining_is_not_taken_for_a_stop(action: str, gate: Gate) -> None:
    with pytest.raises(ActorCrashed, match="its process"):
        async with placement_harness(InProcess(), restart_policy=RestartPolicy()) as harness:
            harness.tell("gate", text=gate.path)
            harness.tell(action, signal.SIGKILL if action == "signal" else 0)
            harness.ref.tell(Note(1))
            await until(gate.is_reached)
            stopping = asyncio.ensure_future(harness.system.stop())
            await until(lambda: harness.system.statistics()["placed"].length == 0)
            gate.open()
            await stopping
    assert harness.numbers() == []


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
@on_asyncio_loop
async def test_death_while_starting_ends_the_start(
    build: Callable[[Context[Protocol]], PlacedActor], words: str
) -> None:
    with pytest.raises(ActorCrashed, match=f"died: its process {words}"):
        async with placement_harness(InProcess(), build=build):
            raise AssertionError("never started")


@pytest.mark.parametrize("program", ["exit 7", "kill -9 $$"])
@on_each_loop
async def test_interpreter_that_does_not_start_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str
) -> None:
    (tmp_path / "python").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ActorCrashed, match=r"its process (exited with status 7|was killed by SIGKILL)"):
        async with placement_harness(InProcess()):
            raise AssertionError("never started")


@on_asyncio_loop
async def test_missing_interpreter_ends_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with placement_harness(InProcess(), restart_policy=RestartPolicy(1000, backoff_max_seconds=0.05)) as harness:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
        harness.tell("raise")
        await harness.ended(2)
        assert "crashed on construction: FileNotFoundError" in harness.all(Terminated)[1].error
        monkeypatch.undo()
        await harness.do("who")


@on_asyncio_loop
async def test_lack_of_descriptors_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> Never:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", none_left)
    with pytest.raises(ActorCrashed, match="Too many open files"):
        async with placement_harness(OnThread()):
            raise AssertionError("never started")


@on_each_loop
async def test_undecodable_bytes_from_a_process_are_its_crash() -> None:
    async with placement_harness(InProcess()) as harness:
        for crash, data in enumerate(("0000000130", "ffffffff00", "000000029206"), 1):
            harness.tell("garbage", text=data)
            harness.ref.tell(Note(1))
            assert "actor 'placed' " in (await harness.ended(crash)).error
            await harness.do("who")
            assert len(harness.all(Terminated)) == crash


@on_asyncio_loop
async def test_descendant_that_keeps_the_socket_delays_the_stop_only_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuelight.kernel.placement.remote._LAST_FRAMES_SECONDS", 0.01)
    async with placement_harness(InProcess()) as harness:
        pid = (await harness.do("who")).number
        harness.tell("leave a descendant")
        await harness.do("who")
        (descendant,) = _descendants(pid)
        os.kill(pid, signal.SIGKILL)
        await harness.ended()
        os.kill(descendant, signal.SIGKILL)
        await harness.do("who")


def _descendants(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for each in lists for child in each.read_text().split()]


@on_each_loop
async def test_repeated_kills_amid_traffic_lose_only_a_window_each() -> None:
    """Every death is reported; messages keep their order, arrive at most once, and few are lost."""
    chance = random.Random(KILLS)
    sent = 0
    async with placement_harness(InProcess()) as harness:
        for kill in range(KILLS):
            pid = (await harness.do("who")).number
            kill_after = chance.randrange(400)
            for number in range(400):
                harness.ref.tell(Note(sent))
                sent += 1
                if number == kill_after:
                    os.kill(pid, signal.SIGKILL)
                if number % chance.choice((1, 10, 100)) == 0:
                    await asyncio.sleep(0)
            ended = await harness.ended(kill + 1)
            assert (ended.cause, ended.killed_by) == (ExitCause.SIGNALED, "SIGKILL")
            assert ended.is_restarting
        await harness.do("who")
        received = harness.numbers()
        assert received == sorted(set(received))
        # A window handed over and not begun, and another whose notes were still under way to the sink.
        assert sent - len(received) <= KILLS * 3 * WINDOW
        assert len(harness.all(Terminated)) == KILLS
        assert harness.system.statistics()["placed"].length == 0


# Inheritance and the end of processes.


@on_asyncio_loop
async def test_process_inherits_nothing_but_output_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUELIGHT_TEST_WORD", "inherited")
    files = [os.open("/dev/zero", os.O_RDONLY) for _ in range(20)]
    for file in files[::2]:
        os.set_inheritable(file, True)
    try:
        async with placement_harness(InProcess()) as harness:
            there = dict(each.split("=", 1) for each in (await harness.do("descriptors")).text.splitlines())
            assert "/dev/zero" not in there.values()
            assert there.pop("0") == "/dev/null"
            its_own = ("anon_inode:", "pipe:", "socket:", "/dev/null")
            inherited = {name: to for name, to in there.items() if not to.startswith(its_own)}
            assert inherited.keys() <= {"1", "2"}, inherited
            assert (await harness.do("inheritable")).number == 0
            assert (await harness.do("environment", text="CUELIGHT_TEST_WORD")).text == "inherited"
    finally:
        for file in files:
            os.close(file)


@elsewhere
@on_asyncio_loop
async def test_stop_with_a_timeout_does_not_wait_for_a_handler_that_never_returns(place: Placement, gate: Gate) -> None:
    async with placement_harness(place) as harness:
        pid = (await harness.do("who")).number
        harness.tell("gate", text=gate.path)
        for number in range(50):
            harness.ref.tell(Note(number))
        await until(gate.is_reached)
        await harness.system.stop(timeout_seconds=0.0)
        assert harness.system.statistics()["placed"].dropped == 51  # the outcome of the first message is unknown
        assert harness.numbers() == []
        gate.open()
        await until(lambda: pid == os.getpid() or not is_alive(pid))


@elsewhere
@on_asyncio_loop
async def test_stop_with_a_timeout_does_not_wait_for_a_constructor(place: Placement, gate: Gate) -> None:
    async with placement_harness(InLoop()) as harness:
        harness.system.spawn(ActorSpec(CHILD, partial(gated, path=gate.path), placement=place))
        await until(gate.is_reached)
        await harness.system.stop(timeout_seconds=0.0)
        gate.open()


@elsewhere
@on_asyncio_loop
async def test_cancelled_host_ends_its_placed_actors(place: Placement, gate: Gate) -> None:
    async def host() -> None:
        async with placement_harness(place) as harness:
            harness.tell("gate", text=gate.path)
            await asyncio.sleep(NET_SECONDS)

    hosting = asyncio.ensure_future(host())
    await until(gate.is_reached)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hosting  # opens the gate at which a thread still waited


@elsewhere
@pytest.mark.parametrize("turns", [1, 3, 6])
@on_each_loop
async def test_start_cancelled_at_any_turn_leaves_nothing(place: Placement, turns: int, tmp_path: Path) -> None:
    system = System([_sink_part([]), ActorSpec(PLACED, build_placed, PATIENT, place)])
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


def _sink_part(received: list[object]) -> ActorSpec[Never]:
    return cast(ActorSpec[Never], ActorSpec(SINK, lambda context: Sink(received, context)))


@elsewhere
@on_asyncio_loop
async def test_start_cancelled_while_a_constructor_runs_leaves_nothing(place: Placement, gate: Gate) -> None:
    system = System([_sink_part([]), ActorSpec(PLACED, partial(gated, path=gate.path), PATIENT, place)])
    starting = asyncio.ensure_future(system.start())
    await until(gate.is_reached)
    starting.cancel()
    await asyncio.sleep(0)
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await starting


@elsewhere
@on_asyncio_loop
async def test_stop_while_a_restart_is_under_way_leaves_nothing(place: Placement, gate: Gate, tmp_path: Path) -> None:
    async with placement_harness(place, restart_policy=PATIENT) as harness:
        slot = harness.system._slots["placed"]
        slot.part = replace(slot.part, build=partial(gated, path=gate.path))  # type: ignore[arg-type]  # of any protocol
        harness.tell("raise")
        await until(gate.is_reached)
        stopping = asyncio.ensure_future(harness.system.stop())
        await asyncio.sleep(0)
        gate.open()
        await stopping


@elsewhere
@on_asyncio_loop
async def test_placed_actor_is_spawned_and_dismissed_from_outside(place: Placement) -> None:
    async with placement_harness(InLoop()) as harness:
        child = harness.system.spawn(ActorSpec(CHILD, build_placed, placement=place))
        for number in range(100):
            child.tell(Note(number))
        harness.system.dismiss(CHILD)
        await until(lambda: harness.numbers() == list(range(100)))
        await until(lambda: "child" not in harness.system.statistics())
        child = harness.system.spawn(ActorSpec(CHILD, build_placed, placement=place))
        assert (await harness.do("clock", to=child)).number == 1


@elsewhere
@on_asyncio_loop
async def test_spawned_actor_that_cannot_be_built_has_crashed(place: Placement) -> None:
    with pytest.raises(ActorCrashed, match="cannot be built"):
        async with placement_harness(InLoop()) as harness:
            harness.system.spawn(ActorSpec(OTHER, broken, placement=place))
            await asyncio.Event().wait()


@elsewhere
def test_a_system_in_a_loop_of_its_own_thread(place: Placement) -> None:
    results: list[object] = []

    async def main() -> None:
        async with placement_harness(place) as harness:
            harness.tell("raise")
            results.append(await harness.do("clock"))

    with nothing_left():
        thread = threading.Thread(target=lambda: asyncio.run(main()))
        thread.start()
        thread.join(NET_SECONDS)
    assert results == [Answer(1)]


@on_asyncio_loop
async def test_exit_handlers_of_a_process_run(capfd: pytest.CaptureFixture[str]) -> None:
    async with placement_harness(InProcess()) as harness:
        await harness.do("print at exit", text="to be or not to be")
        harness.tell("raise")
        await harness.do("print at exit", text="that is the question")
    assert capfd.readouterr().out == "to be or not to be\nthat is the question\n"


# Programs: actors of the main module in a process, and its end with the parent.


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
    """Return a program's result. Waits for all its descendants too, since they keep its output open."""
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=NET_SECONDS, check=False)


def test_actor_of_a_guarded_script_starts(tmp_path: Path) -> None:
    done = outcome(program(tmp_path, "script.py", ACTORS, GUARDED), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[::2] == ["hello", "__mp_main__"]


def test_unguarded_script_fails_with_an_explanation(tmp_path: Path) -> None:
    done = outcome(program(tmp_path, "script.py", ACTORS, "asyncio.run(show('hello'))\n"), cwd=tmp_path)
    assert done.returncode == 1
    assert "which starts a system: guard it" in done.stderr
    assert done.stdout == ""


def test_script_with_actors_in_a_module_needs_no_guard(tmp_path: Path) -> None:
    program(tmp_path, "actors.py", ACTORS)
    done = outcome(program(tmp_path, "script.py", "import actors\nactors.asyncio.run(actors.show('a'))"), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[::2] == ["a", "actors"]


def test_actor_of_a_module_run_as_a_program_starts(tmp_path: Path) -> None:
    program(tmp_path, "package/__init__.py", "")
    program(tmp_path, "package/module.py", ACTORS, GUARDED)
    done = outcome("-m", "package.module", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[::2] == ["hello", "__mp_main__"]


def test_actor_defined_on_the_command_line_is_refused(tmp_path: Path) -> None:
    program(tmp_path, "actors.py", ACTORS)
    done = outcome("-c", "import actors\nactors.asyncio.run(actors.show('a'))", cwd=tmp_path)
    assert (done.returncode, done.stderr, done.stdout.split()[::2]) == (0, "", ["a", "actors"])
    done = outcome("-c", textwrap.dedent(ACTORS + GUARDED), cwd=tmp_path)
    assert done.returncode == 1
    assert "'show' was defined at a prompt; a process can only import what a file defines" in done.stderr


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_parent_without_outputs_or_directory_starts_processes(tmp_path: Path, closed: tuple[int, ...]) -> None:
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
def test_interrupt_is_handled_by_the_parent_alone(tmp_path: Path, runner: str) -> None:
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
    """Interrupt at several times from the start of the process on."""
    program(tmp_path, "actors.py", ACTORS)
    script = program(tmp_path, "script.py", "import actors\nactors.asyncio.run(actors.show('hello', forever=True))")
    with running(script, cwd=tmp_path) as process:
        while not (found := _descendants(process.pid)):
            assert process.poll() is None
        os.kill(found[0], signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("hello")
