"""Attacks that once broke something: odd ends of threads and processes, forks of the host, floods from outside."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import types
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Never, NewType, assert_never

import placed
import pytest
from kernel_support import NET_SECONDS, on_each_loop, until

from cuelight import errors
from cuelight.kernel import (
    Actor,
    ActorSpec,
    Context,
    InLoop,
    InProcess,
    OnThread,
    Placement,
    Recipient,
    RestartPolicy,
    Role,
    System,
    Timer,
    ask,
)
from cuelight.kernel.journal.writer import Journal
from cuelight.testing import stub_engine

SOON = NET_SECONDS / 6
"""A smaller net: what has failed must also end."""

RESTARTED = RestartPolicy(restarts_max=3, backoff_seconds=0.0)

Number = NewType("Number", int)


@dataclass(frozen=True)
class Do:
    """Do one of the tricks of `Player`."""

    trick: str


@dataclass(frozen=True)
class Echo:
    """Answered once: with the number."""

    number: int
    reply_to: Recipient[int]


@dataclass(frozen=True)
class EchoNumber:
    """The same, for an address of a more special kind."""

    number: int
    reply_to: Recipient[Number]


@dataclass(frozen=True)
class Unresolvable:
    """A message whose annotations only a type checker can resolve."""

    what: Nowhere  # type: ignore[name-defined]  # noqa: F821  # on purpose


Message = Do | Echo | EchoNumber
PLAYER: Role[Message] = Role("player", Message, 1000)


class Unspeakable(Exception):
    """An error that cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")

    __str__ = __repr__


class Player(Actor[Message]):
    """Does tricks."""

    gate: threading.Event
    handled: int

    def __init__(self, context: Context[Message]) -> None:
        self._context = context

    def handle(self, message: Message) -> None:
        match message:
            case Do("leave"):
                self._context.dismiss(PLAYER)
            case Do("raise the unspeakable"):
                raise Unspeakable
            case Do("raise"):
                raise ValueError("broken")
            case Do("work in vain"):
                self._context.worker("vain").submit(_fail, lambda _: Do(""), lambda _: _fail())
            case Do("wait"):
                self.gate.wait(NET_SECONDS)
            case Do():
                type(self).handled += 1
            case Echo(number, reply_to):
                reply_to.tell(number)
            case EchoNumber(number, to_special):
                to_special.tell(Number(number))
            case _:
                assert_never(message)


def _fail() -> Never:
    raise ValueError("in vain")


class Deaf(Actor[object]):
    """Says nothing to anything."""

    def handle(self, message: object) -> None:
        pass


@asynccontextmanager
async def playing(place: Placement, restart_policy: RestartPolicy = RESTARTED) -> AsyncIterator[System]:
    """A system with a player. It is ended in any case, also where it does not answer any more."""
    system = System([ActorSpec(PLAYER, Player, restart_policy, place)])
    await system.start()
    try:
        yield system
    finally:
        await system.stop(drop=True, timeout_seconds=SOON)


@contextmanager
def forked() -> Iterator[None]:
    """While the block runs there is a fork of this process, with everything that it has open."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    try:
        yield
    finally:
        os.close(writing)
        os.waitpid(child, 0)


async def echo(system: System) -> int:
    return await ask(system.find(PLAYER), lambda to: Echo(7, to), SOON)


@on_each_loop
async def test_a_signal_that_has_no_name_is_a_death_like_any_other() -> None:
    system = System(
        [
            ActorSpec(placed.SINK, lambda _: Deaf()),
            ActorSpec(placed.PLAYER, placed.player, RESTARTED, InProcess()),
        ]
    )
    await system.start()
    try:
        system.find(placed.PLAYER).tell(placed.Do("signal", 37))
        await until(lambda: system.statistics()["player"].dropped == 1)  # it was lost with the process
        answer: placed.Answer = await ask(
            system.find(placed.PLAYER), lambda to: placed.Do("environment", 0, "", to), SOON
        )
        assert answer.number == 0
    finally:
        await system.stop(drop=True, timeout_seconds=SOON)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@on_each_loop
async def test_a_worker_whose_error_has_no_message_does_not_hold_up_the_stop() -> None:
    async with playing(InLoop(), RestartPolicy()) as system:
        system.find(PLAYER).tell(Do("work in vain"))
        stopping = asyncio.ensure_future(system.stop())
        await asyncio.wait([stopping], timeout=SOON)
        assert stopping.done()


@on_each_loop
async def test_an_actor_elsewhere_can_dismiss_itself() -> None:
    async with playing(OnThread()) as system, asyncio.timeout(SOON):
        system.find(PLAYER).tell(Do("leave"))
        await until(lambda: "player" not in system.statistics())


@pytest.mark.parametrize("place", [InLoop(), OnThread()], ids=["loop", "thread"])
@on_each_loop
async def test_an_error_that_cannot_be_shown_is_a_crash(place: Placement) -> None:
    outcome: object = None
    try:
        async with playing(place) as system:
            system.find(PLAYER).tell(Do("raise the unspeakable"))
            outcome = await echo(system)
    except Exception as error:
        outcome = type(error)  # which pytest can show
    gc.collect()  # what nobody has looked at is logged here, not while pytest shows something
    assert outcome == 7


@on_each_loop
async def test_what_an_actor_hears_from_itself_by_a_detour_takes_no_room_for_ever() -> None:
    class Detour:
        """Whatever it is told becomes a message to the player."""

        def tell(self, number: int, /) -> None:
            system.find(PLAYER).tell(Do("count"))

    Player.handled = 0
    async with playing(OnThread()) as system:
        for _ in range(3):
            for number in range(20):
                system.find(PLAYER).tell(Echo(number, Detour()))
            assert await echo(system) == 7


@on_each_loop
async def test_an_address_may_take_a_type_that_is_only_a_name() -> None:
    async with playing(OnThread()) as system:
        answer: Number = await ask(system.find(PLAYER), lambda to: EchoNumber(3, to), SOON)
        assert answer == 3


@on_each_loop
async def test_who_joins_later_does_not_keep_others_from_restarting() -> None:
    async with playing(OnThread()) as system:
        system.spawn(ActorSpec(Role("late", Unresolvable, 10), lambda _: Deaf()))
        system.find(PLAYER).tell(Do("raise"))
        assert await echo(system) == 7


@on_each_loop
async def test_a_fork_of_the_host_does_not_hold_up_the_stop() -> None:
    async with playing(OnThread()) as system:
        assert await echo(system) == 7
        with forked():
            stopping = asyncio.ensure_future(system.stop())
            await asyncio.wait([stopping], timeout=SOON)
            has_stopped = stopping.done()
        await asyncio.wait([stopping], timeout=SOON)
    assert has_stopped


def test_a_fork_of_the_host_does_not_keep_the_journal_locked(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    with forked():
        journal.close()
        Journal(tmp_path / "journal").close()


@on_each_loop
async def test_a_cancelled_timer_is_forgotten() -> None:
    timers: list[weakref.ref[Timer]] = []

    class Clock:
        """Keeps no timer."""

        def now(self) -> float:
            return 0.0

        def call_later(self, delay: float, callback: Callable[[], object], /) -> Timer:
            return _Timer()

    class Hasty(Actor[Message]):
        def __init__(self, context: Context[Message]) -> None:
            timer = context.after(3600.0, Do("count"))
            timer.cancel()
            timers.append(weakref.ref(timer))

        def handle(self, message: Message) -> None:
            pass

    async with System([ActorSpec(PLAYER, Hasty)], clock=Clock()):
        gc.collect()
        assert timers[0]() is None


class _Timer:
    def cancel(self) -> None:
        pass


@on_each_loop
async def test_a_host_that_asks_too_much_does_not_break_the_engine() -> None:
    async with stub_engine(queue_limit=8) as engine:

        async def explain() -> None:
            try:
                await engine.explain(1)
            except errors.EngineUnavailable:
                raise
            except errors.EngineError:
                pass  # refused

        working = [asyncio.ensure_future(engine.generate("hello", max_tokens=200)) for _ in range(6)]
        for _ in range(20):
            await asyncio.gather(*[explain() for _ in range(400)])
        for result in await asyncio.gather(*working):
            assert len(result.token_ids) == 200


@on_each_loop
async def test_a_policy_can_be_set_many_times_at_once() -> None:
    async with stub_engine(queue_limit=8) as engine:
        for number in range(500):
            with suppress(errors.EngineError):  # refused
                engine.set_policy("fair", tenant_weights={"a": 1.0 + number})
        assert (await engine.generate("hello", max_tokens=3, tenant="a")).token_ids


class Interrupt(BaseException):
    """As Ctrl-C in the middle of anything, but for the loop."""


@pytest.mark.parametrize("where", ["RemoteLifeSpec", "socket.socketpair"])
async def test_an_interrupt_while_a_placed_actor_begins_leaves_a_system_that_can_be_stopped(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupt

    monkeypatch.setattr(f"cuelight.kernel.placement.remote.{where}", interrupt)
    system = System([ActorSpec(PLAYER, lambda _: Deaf(), placement=OnThread())])
    async with asyncio.timeout(SOON):
        with pytest.raises(Interrupt):
            await system.start()
        await system.stop()


async def test_a_main_module_that_was_exchanged_is_not_one_that_is_being_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever runs a program to measure it, such as coverage, puts the program's main module in place of its own."""
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    monkeypatch.setitem(sys.modules, "__mp_main__", types.ModuleType("__main__"))
    system = System(
        [ActorSpec(placed.SINK, lambda _: Deaf()), ActorSpec(placed.PLAYER, placed.player, RESTARTED, InProcess())]
    )
    await system.start()
    await system.stop(drop=True, timeout_seconds=SOON)
