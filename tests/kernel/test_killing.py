"""Lives that others end, as crashes; and what the opener of a system is told of every crash."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import weakref
from functools import partial

import msgspec
import placed
import pytest
from kernel_support import on_each_loop, until

from cuelight.kernel import (
    Actor,
    ActorCrashed,
    ActorSpec,
    Context,
    ExitCause,
    InLoop,
    InProcess,
    OnThread,
    Placement,
    RestartPolicy,
    Role,
    Simulation,
    System,
    ask,
)

AGAIN = RestartPolicy(restarts_max=10, backoff_seconds=0.0)
PLACES = pytest.mark.parametrize("place", [InLoop(), OnThread(), InProcess()], ids=["loop", "thread", "process"])


class Heard:
    """The sink of the placed players, in the loop."""

    def __init__(self) -> None:
        self.notes: list[int] = []

    def part(self) -> ActorSpec[placed.Heard]:
        return ActorSpec(placed.SINK, lambda _: self._actor())

    def _actor(self) -> Actor[placed.Heard]:
        notes = self.notes

        class Sink(Actor[placed.Heard]):
            def handle(self, message: placed.Heard) -> None:
                if isinstance(message, placed.Note):
                    notes.append(message.number)

        return Sink()


@PLACES
@on_each_loop
async def test_a_killed_life_is_a_crash_like_any_other_and_refs_stay_valid(place: Placement) -> None:
    heard = Heard()
    crashes: list[ActorCrashed] = []
    cast = [heard.part(), ActorSpec(placed.PLAYER, placed.player, AGAIN, place)]
    async with System(cast, on_crash=crashes.append) as system:
        ref = system.find(placed.PLAYER)
        ref.tell(placed.Note(1))
        await until(lambda: heard.notes == [1])
        system.kill(placed.PLAYER, "the test says so")
        system.kill(placed.PLAYER, "twice is no more than once")
        await until(lambda: len(crashes) == 1)
        ref.tell(placed.Note(2))
        await until(lambda: heard.notes == [1, 2])
    assert [crash.actor for crash in crashes] == ["player"]
    assert "it was killed: the test says so" in str(crashes[0])
    assert (crashes[0].cause, crashes[0].killed_by) == (ExitCause.KILLED, "")
    assert crashes[0].message is None


@on_each_loop
async def test_a_process_whose_handler_never_returns_is_killed() -> None:
    heard = Heard()
    crashes: list[ActorCrashed] = []
    cast = [heard.part(), ActorSpec(placed.PLAYER, placed.player, AGAIN, InProcess())]
    async with System(cast, on_crash=crashes.append) as system:
        ref = system.find(placed.PLAYER)
        answer = await ask(ref, partial(placed.Do, "who", 0, ""), 30)
        os.kill(answer.number, signal.SIGSTOP)
        ref.tell(placed.Note(1))
        system.kill(placed.PLAYER, "it does not answer")
        await until(lambda: len(crashes) == 1)
        ref.tell(placed.Note(2))
        await until(lambda: 2 in heard.notes)
    assert "it does not answer" in str(crashes[0])


@on_each_loop
async def test_who_is_not_alive_cannot_be_killed_nor_who_is_not_there() -> None:
    heard = Heard()
    slow = RestartPolicy(restarts_max=1, backoff_seconds=60.0, backoff_max_seconds=60.0)
    crashes: list[ActorCrashed] = []
    async with System([heard.part(), ActorSpec(placed.PLAYER, placed.player, slow)], on_crash=crashes.append) as system:
        system.kill(placed.PLAYER, "once")
        await until(lambda: len(crashes) == 1)
        system.kill(placed.PLAYER, "between two lives")
        system.kill(placed.OTHER, "nobody")
        await asyncio.sleep(0)
    assert len(crashes) == 1


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Kill the other one, and yourself."""


KILLER: Role[Kill] = Role("killer", Kill, 10)


class Killer(Actor[Kill]):
    def __init__(self, context: Context[Kill]) -> None:
        self._context = context

    def handle(self, message: Kill) -> None:
        self._context.kill(placed.PLAYER, "by the killer")
        self._context.kill(KILLER, "by itself")


@on_each_loop
async def test_an_actor_kills_another_and_itself() -> None:
    heard = Heard()
    crashes: list[ActorCrashed] = []
    cast = [heard.part(), ActorSpec(placed.PLAYER, placed.player, AGAIN), ActorSpec(KILLER, Killer, AGAIN)]
    async with System(cast, on_crash=crashes.append) as system:
        system.find(KILLER).tell(Kill())
        await until(lambda: len(crashes) == 2)
    assert sorted(crash.actor for crash in crashes) == ["killer", "player"]


def test_in_a_simulation_too() -> None:
    crashes: list[ActorCrashed] = []
    heard = Heard()
    cast = [heard.part(), ActorSpec(placed.PLAYER, placed.player, AGAIN), ActorSpec(KILLER, Killer, AGAIN)]
    simulation = Simulation(cast, 1, on_crash=crashes.append)
    simulation.find(KILLER).tell(Kill())
    simulation.run()
    simulation.find(placed.PLAYER).tell(placed.Note(3))
    simulation.run()
    assert sorted(crash.actor for crash in crashes) == ["killer", "player"]
    assert heard.notes == [3]


@PLACES
@on_each_loop
async def test_a_crash_is_told_with_the_message_in_hand(place: Placement) -> None:
    heard = Heard()
    crashes: list[ActorCrashed] = []
    cast = [heard.part(), ActorSpec(placed.PLAYER, placed.player, AGAIN, place)]
    async with System(cast, on_crash=crashes.append) as system:
        ref = system.find(placed.PLAYER)
        ref.tell(placed.Note(1))
        bad = placed.Do("raise", text="a bad message")
        ref.tell(bad)
        ref.tell(placed.Note(2))
        await until(lambda: heard.notes == [1, 2])
    assert [(crash.actor, crash.message_type, crash.message) for crash in crashes] == [("player", "Do", bad)]


def test_a_simulation_tells_the_message_in_hand() -> None:
    crashes: list[ActorCrashed] = []
    simulation = Simulation(
        [Heard().part(), ActorSpec(placed.PLAYER, placed.player, AGAIN)], 1, on_crash=crashes.append
    )
    bad = placed.Do("raise", text="a bad message")
    simulation.find(placed.PLAYER).tell(bad)
    simulation.run()
    assert [crash.message for crash in crashes] == [bad]


class Holder(Actor[placed.Note]):
    """Holds a lot."""

    def __init__(self, held: list[weakref.ref[Holder]]) -> None:
        held.append(weakref.ref(self))

    def handle(self, message: placed.Note) -> None:
        if message.number < 0:
            raise ValueError


@on_each_loop
async def test_what_a_crashed_actor_held_is_free_before_the_next_life_begins() -> None:
    held: list[weakref.ref[Holder]] = []
    alive: list[int] = []

    def build(_: Context[object]) -> Holder:
        alive.append(sum(each() is not None for each in held))
        return Holder(held)

    role = Role("holder", placed.Note, 10)
    gc.collect()
    gc.disable()
    logging.disable(logging.ERROR)  # records that pytest keeps have tracebacks
    try:
        async with System([ActorSpec(role, build, AGAIN)]) as system:
            system.kill(role, "the test says so")
            await until(lambda: len(alive) == 2)
            system.find(role).tell(placed.Note(-1))
            await until(lambda: len(alive) == 3)
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)
    assert alive == [0, 0, 0]
