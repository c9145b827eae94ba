"""The far side of a placement: one actor in an event loop of its own, which knows the others only through a wire.

Runs on a thread, or as the whole of a child process, which knows nothing but what its parent sends it first.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import spawn
from typing import Final

from cuelight.kernel.actor import Actor
from cuelight.kernel.codec import Name, reachable
from cuelight.kernel.errors import ActorCrashed, NotSendable, shown
from cuelight.kernel.events import Delivered, Event
from cuelight.kernel.ref import Address, Ref
from cuelight.kernel.role import InLoop, Part, Role
from cuelight.kernel.stage import Seat
from cuelight.kernel.supervision import Fate
from cuelight.kernel.system import Performer, System
from cuelight.kernel.wire import (
    WINDOW,
    Begun,
    Crashed,
    Deliver,
    Frame,
    Packer,
    Ready,
    Slow,
    Stop,
    Stopped,
    Watch,
    Wire,
    encoded,
)

_DIE_WITH_PARENT: Final = 1  # PR_SET_PDEATHSIG, prctl(2)

_WORDS_MAX: Final = 32_000
"""Of an error and of its traceback, in characters."""

preparing = threading.Event()
"""Set while this child imports its parent's main module: nothing may be started from there."""


@dataclass(frozen=True)
class Engagement:
    """All that the far side must know of one life."""

    part: Part[object]
    cast: tuple[Role[object], ...]
    life: int
    seed: int
    bytes_max: int
    slow_handler_seconds: float


def vocabulary(engagement: Engagement) -> tuple[dict[Name, type], set[str]]:
    """The messages that may cross, and the actors known by name at the other end. Raises NotSendable."""
    protocols = [engagement.part.role.accepts]
    for role in engagement.cast:
        with suppress(NotSendable):  # then nothing can be told to that one from elsewhere
            reachable([role.accepts])
            protocols.append(role.accepts)
    return reachable(protocols), {role.name for role in engagement.cast}


class _Afar(str):
    """The sender of a message that was handed over, not one that was told here."""

    __slots__ = ()


class _Elsewhere(System):
    """A system of one, whose other actors are at the end of a wire."""

    def __init__(self, engagement: Engagement, on_lost: Callable[[], None]) -> None:
        role = engagement.part.role
        # A crash goes to the supervision at the other end; what is handed over comes on top of what is its own.
        here = replace(role, capacity=role.capacity + WINDOW)
        part = replace(engagement.part, role=here, fate=Fate(), placement=InLoop())
        slow = engagement.slow_handler_seconds
        super().__init__([part], tap=self._count, on_failure=self._crashed, slow_handler_seconds=slow)
        self._name = role.name
        self._engagement = engagement
        self._on_lost = on_lost
        self._begun = Begun(0, 0)
        self._far = {each.name: each for each in engagement.cast}
        self._far_refs: dict[str, Ref[object]] = {}
        types, _ = vocabulary(engagement)
        packer = Packer(types, set(self._far), self._known, engagement.bytes_max, first_id=engagement.life << 32)
        self.wire = Wire(packer, self)

    def _known(self, name: str) -> Ref[object] | None:
        if name in self._seats and name == self._name:
            return self._seats[name].ref
        if name not in self._far_refs and name in self._far:
            accepts = self._far[name].message_types()
            self._far_refs[name] = Ref(name, lambda message: self.wire.tell(name, accepts, message))
        return self._far_refs.get(name)

    def known(self, name: str) -> Ref[object] | None:
        """The address of the actor of this name, here or at the other end."""
        return super().known(name) or self._known(name)

    def _find_name(self, name: str) -> Ref[object]:
        if (ref := self.known(name)) is None:
            raise KeyError(name)
        return ref

    def parts(self) -> list[Part[object]]:
        """Those at the other end too: whoever is spawned here and lives elsewhere is to know them."""
        far = [Part(role, self._engagement.part.build) for role in self._far.values() if role.name not in self._seats]
        return [*far, *super().parts()]

    def watch(self, watcher: Seat, name: str) -> None:
        """Here or, for the actor itself, at the other end, which then delivers `Terminated` like any message."""
        if name in self._seats or name not in self._far or watcher.name != self._name:
            super().watch(watcher, name)
        else:
            self.wire.send(Watch(name))

    def report_slow(self, actor: str, message_type: str, seconds: float) -> None:
        """Reported where the system's opener sees it."""
        self.wire.send(Slow(message_type, seconds))

    def _leave_cast(self, seat: Seat) -> None:
        super()._leave_cast(seat)
        if seat.name == self._name:  # it has dismissed itself
            self._closing.set()

    def _report_crash(self, crash: ActorCrashed) -> None:
        if crash.actor != self._name:
            super()._report_crash(crash)

    def _build(self, seat: Seat) -> Actor[object]:
        try:
            return super()._build(seat)
        except SystemExit as error:  # there is no program to end here
            raise ActorCrashed(seat.name, "construction", error) from error

    async def _live(self, seat: Seat, performer: Performer | None) -> None:
        try:
            await super()._live(seat, performer)
        except SystemExit as error:
            self._end(seat, ActorCrashed(seat.name, "", error))

    def _begin_life(self, seat: Seat) -> int:
        seed = super()._begin_life(seat)
        return self._engagement.seed if seat.name == self._name else seed

    def _count(self, event: Event) -> None:
        """A message that was handed over is begun, so there is room for another one."""
        if not isinstance(event, Delivered) or event.actor != self._name or not isinstance(event.sender, _Afar):
            return
        if self._begun == Begun(0, 0):
            asyncio.get_running_loop().call_soon(self._acknowledge)
        urgent = self._seats[self._name].mailbox.is_urgent(type(event.message))
        self._begun = Begun(self._begun.urgent + urgent, self._begun.ordinary + (not urgent))

    def _acknowledge(self) -> None:
        if self._begun != Begun(0, 0):
            self.wire.send(self._begun)
            self._begun = Begun(0, 0)

    def _crashed(self, crash: ActorCrashed) -> None:
        self._acknowledge()
        assert crash.__cause__ is not None
        self.wire.send(_last_words(crash.message_type, crash.__cause__))

    def heard(self, frame: Frame, /) -> None:
        """What the other end says to the actor."""
        match frame:
            case Deliver(sender, name, body):
                if (seat := self._seats.get(self._name)) is not None:  # it may have dismissed itself
                    seat.mailbox.post(self.wire.decode(name, body), _Afar(sender))
            case Stop(drop):
                self._drop = self._drop or drop
                self._closing.set()
                if drop and self._name in self._seats:
                    self._seats[self._name].mailbox.close(drop=True)
            case _:
                raise AssertionError(f"{type(frame).__name__} is not said to an actor")

    def told(self, address: Address[object], message: object, /) -> None:
        """The other end has an answer, or a word for an actor that was spawned here."""
        address.tell(message)

    def failed(self, message_type: str, error: Exception, /) -> None:
        """A spawned actor, or an answer's address, refused what it was told: its sender is at the other end."""
        self._fail(ActorCrashed(self._name, message_type, error))

    def lost(self) -> None:
        """The other end is gone, or has given this life up."""
        self._on_lost()
        self._drop = True
        self._closing.set()

    async def play(self, connection: socket.socket) -> None:
        """This life, from the first frame to the last."""
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self.wire, sock=connection)
        try:
            await self.start()
        except ActorCrashed as crash:
            self._crashed(crash)
        else:
            self.wire.send(Ready())
            assert self._host is not None
            await asyncio.wait([self._host])
            self._acknowledge()
            if not self._host.cancelled() and (error := self._host.exception()) is not None:
                self.wire.send(_last_words("", error))
            elif self.failure is None:
                self.wire.send(Stopped())
        self._on_lost = _nothing
        await self.wire.finish()


def _nothing() -> None:
    pass


def _last_words(message_type: str, error: BaseException) -> Crashed:
    try:
        trace = "".join(traceback.format_exception(error)).rstrip()
    except Exception:
        trace = ""
    return Crashed(message_type, shown(error)[:_WORDS_MAX], _sendable(trace[-_WORDS_MAX:]))


def _sendable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def live(connection: socket.socket, engagement: Engagement, on_lost: Callable[[], None] = _nothing) -> None:
    """One life, in a new event loop of this thread."""

    async def play() -> None:
        await _Elsewhere(engagement, on_lost).play(connection)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(play())


def main(descriptor: int) -> None:
    """A child process: its first two messages say how to be like its parent, and what to play."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to act upon
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    try:
        parent, preparation, engagement = (_receive(connection) for _ in range(3))
        _die_with(int(parent))
        _prepare(preparation)
        life = pickle.loads(engagement)
    except BaseException as error:
        with suppress(OSError):  # the parent is gone
            connection.sendall(encoded(_last_words("construction", error)))
        sys.exit(1)
    live(connection, life, on_lost=lambda: os._exit(1))


def _receive(connection: socket.socket) -> bytes:
    length = int.from_bytes(_read(connection, 4), "big")
    return _read(connection, length)


def _read(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            raise EOFError("the parent is gone")
        data += piece
    return bytes(data)


def _prepare(preparation: bytes) -> None:
    """Take on the parent's import path and, where the actor comes from there, its main module."""
    preparing.set()
    try:
        spawn.prepare(pickle.loads(preparation))
    finally:
        preparing.clear()


def _die_with(parent: int) -> None:
    """Be killed when the parent dies, even if this process is too busy to notice that the connection is lost."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
