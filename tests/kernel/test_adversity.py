"""Regressions of unusual faults: ends of threads and processes, forks of the host, floods from outside."""

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
"""Timeout of a single wait, below that of the test."""

RESTARTED = RestartPolicy(restarts_max=3, backoff_seconds=0.0)

Number = NewType("Number", int)


@dataclass(frozen=True)
class Do:
    """Run one of the actions of `CommandActor`."""

    trick: str


@dataclass(frozen=True)
class Echo:
    """Request one answer: the number."""

    number: int
    reply_to: Recipient[int]


@dataclass(frozen=True)
class EchoNumber:
    """As `Echo`, with an address for a more special type."""

    number: int
    reply_to: Recipient[Number]


@dataclass(frozen=True)
class Unresolvable:
    """A message whose annotations only a type checker can resolve."""

    what: Nowhere  # type: ignore[name-defined]  # noqa: F821  # on purpose


Message = Do | Echo | EchoNumber
ACTOR: Role[Message] = Role("actor", Message, 1000)


class UnprintableError(Exception):
    """An error whose `repr` raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")

    __str__ = __repr__


class CommandActor(Actor[Message]):
    """Runs the actions of `Do`."""

    gate: threading.Event
    handled: int

    def __init__(self, context: Context[Message]) -> None:
        self._context = context

    def handle(self, message: Message) -> None:
        match message:
            case Do("leave"):
                self._context.dismiss(ACTOR)
            case Do("raise the unspeakable"):
                raise UnprintableError
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


class SilentActor(Actor[object]):
    """Ignores every message."""

    def handle(self, message: object) -> None:
        pass


@asynccontextmanager
async def running_system(place: Placement, restart_policy: RestartPolicy = RESTARTED) -> AsyncIterator[System]:
    """Run a system with a `CommandActor`, and stop it in any case, also where the actor no longer answers."""
    system = System([ActorSpec(ACTOR, CommandActor, restart_policy, place)])
    await system.start()
    try:
        yield system
    finally:
        await system.stop(drop=True, timeout_seconds=SOON)


@contextmanager
def forked() -> Iterator[None]:
    """Within, a fork of this process exists, with all its open files."""
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
    return await ask(system.find(ACTOR), lambda to: Echo(7, to), SOON)


@on_each_loop
async def test_death_by_an_unnamed_signal_is_a_crash() -> None:
    system = System(
        [
            ActorSpec(placed.SINK, lambda _: SilentActor()),
            ActorSpec(placed.PLACED, placed.build_placed, RESTARTED, InProcess()),
        ]
    )
    await system.start()
    try:
        system.find(placed.PLACED).tell(placed.Do("signal", 37))
        await until(lambda: system.statistics()["placed"].dropped == 1)  # the message was lost with the process
        answer: placed.Answer = await ask(
            system.find(placed.PLACED), lambda to: placed.Do("environment", 0, "", to), SOON
        )
        assert answer.number == 0
    finally:
        await system.stop(drop=True, timeout_seconds=SOON)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@on_each_loop
async def test_worker_error_without_a_message_does_not_delay_the_stop() -> None:
    async with running_system(InLoop(), RestartPolicy()) as system:
        system.find(ACTOR).tell(Do("work in vain"))
        stopping = asyncio.ensure_future(system.stop())
        await asyncio.wait([stopping], timeout=SOON)
        assert stopping.done()


@on_each_loop
async def test_placed_actor_dismisses_itself() -> None:
    async with running_system(OnThread()) as system, asyncio.timeout(SOON):
        system.find(ACTOR).tell(Do("leave"))
        await until(lambda: "actor" not in system.statistics())


@pytest.mark.parametrize("place", [InLoop(), OnThread()], ids=["loop", "thread"])
@on_each_loop
async def test_error_whose_repr_raises_is_a_crash(place: Placement) -> None:
    outcome: object = None
    try:
        async with running_system(place) as system:
            system.find(ACTOR).tell(Do("raise the unspeakable"))
            outcome = await echo(system)
    except Exception as error:
        outcome = type(error)  # pytest can show the type
    gc.collect()  # log unretrieved errors here, not within pytest's report
    assert outcome == 7


@on_each_loop
async def test_indirect_messages_to_itself_release_their_capacity() -> None:
    class Detour:
        """Turns each message into one to the actor."""

        def tell(self, number: int, /) -> None:
            system.find(ACTOR).tell(Do("count"))

    CommandActor.handled = 0
    async with running_system(OnThread()) as system:
        for _ in range(3):
            for number in range(20):
                system.find(ACTOR).tell(Echo(number, Detour()))
            assert await echo(system) == 7


@on_each_loop
async def test_address_of_a_forward_referenced_type_works() -> None:
    async with running_system(OnThread()) as system:
        answer: Number = await ask(system.find(ACTOR), lambda to: EchoNumber(3, to), SOON)
        assert answer == 3


@on_each_loop
async def test_spawned_actor_does_not_prevent_restarts() -> None:
    async with running_system(OnThread()) as system:
        system.spawn(ActorSpec(Role("late", Unresolvable, 10), lambda _: SilentActor()))
        system.find(ACTOR).tell(Do("raise"))
        assert await echo(system) == 7


@on_each_loop
async def test_fork_of_the_host_does_not_delay_the_stop() -> None:
    async with running_system(OnThread()) as system:
        assert await echo(system) == 7
        with forked():
            stopping = asyncio.ensure_future(system.stop())
            await asyncio.wait([stopping], timeout=SOON)
            has_stopped = stopping.done()
        await asyncio.wait([stopping], timeout=SOON)
    assert has_stopped


def test_fork_of_the_host_does_not_keep_the_journal_locked(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    with forked():
        journal.close()
        Journal(tmp_path / "journal").close()


@on_each_loop
async def test_cancelled_timer_is_released() -> None:
    timers: list[weakref.ref[Timer]] = []

    class Clock:
        """A clock that does not store its timers."""

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

    async with System([ActorSpec(ACTOR, Hasty)], clock=Clock()):
        gc.collect()
        assert timers[0]() is None


class _Timer:
    def cancel(self) -> None:
        pass


@on_each_loop
async def test_refused_explain_calls_do_not_break_the_engine() -> None:
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
async def test_many_set_policy_calls_in_a_row_do_not_break_the_engine() -> None:
    async with stub_engine(queue_limit=8) as engine:
        for number in range(500):
            with suppress(errors.EngineError):  # refused
                engine.set_policy("fair", tenant_weights={"a": 1.0 + number})
        assert (await engine.generate("hello", max_tokens=3, tenant="a")).token_ids


class Interrupt(BaseException):
    """Like Ctrl-C at any point, without ending the loop."""


@pytest.mark.parametrize("where", ["RemoteLifeSpec", "socket.socketpair"])
async def test_interrupt_while_a_placed_actor_starts_leaves_a_stoppable_system(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupt

    monkeypatch.setattr(f"cuelight.kernel.placement.remote.{where}", interrupt)
    system = System([ActorSpec(ACTOR, lambda _: SilentActor(), placement=OnThread())])
    async with asyncio.timeout(SOON):
        with pytest.raises(Interrupt):
            await system.start()
        await system.stop()


async def test_replaced_main_module_does_not_count_as_being_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tool that runs a program, such as coverage, replaces its own main module by the program's."""
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    monkeypatch.setitem(sys.modules, "__mp_main__", types.ModuleType("__main__"))
    system = System(
        [
            ActorSpec(placed.SINK, lambda _: SilentActor()),
            ActorSpec(placed.PLACED, placed.build_placed, RESTARTED, InProcess()),
        ]
    )
    await system.start()
    await system.stop(drop=True, timeout_seconds=SOON)
