"""The near side of a placement: hands an actor's messages over to where it lives, and knows when that is no more."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio

from cuelight.kernel import elsewhere, wire
from cuelight.kernel.actor import InLoop, InProcess, Role
from cuelight.kernel.clock import Clock
from cuelight.kernel.codec import AddressId, reachable
from cuelight.kernel.errors import ActorCrashed, KernelError, NotSendable, RemoteError
from cuelight.kernel.events import Delivered
from cuelight.kernel.mailbox import OWN, Mailbox
from cuelight.kernel.stage import Seat
from cuelight.kernel.system import System

_LINGER_SECONDS = 5.0
"""For what a process does at its exit once its actor's life is over."""

_LAST_WORDS_SECONDS = 1.0
"""For what a process sent before it exited. Only a descendant of it that keeps the socket can make that take long."""

_CHILD = "import sys; sys.path[:] = {path!r}; from cuelight.kernel.elsewhere import main; main({descriptor})"


def prepare(system: System, seat: Seat) -> None:
    """Have messages to this seat's actor made ready at their senders.

    Raises NotSendable for a part that cannot live where it should, and KernelError where nobody may be started.
    """
    engagement = _engagement(system, seat, seed=0)
    if isinstance(seat.part.placement, InProcess):
        if elsewhere.preparing.is_set():
            guard = "if __name__ == '__main__':"
            raise KernelError(f"a child imports this main module, which starts a system: guard it: {guard}")
        if _needs_main(_pickled(engagement)) and not _main_module():
            raise NotSendable(f"{seat.name!r} was defined at a prompt; a process can only import what a file defines")
    reachable(role.accepts for role in engagement.cast)
    seat.mailbox.pack = wire.Packer(engagement.cast, engagement.bytes_max).pack


class Placed:
    """One life of an actor that lives on a thread or in a process of its own."""

    def __init__(self, system: System, seat: Seat, seed: int) -> None:
        self._system = system
        self._seat = seat
        self._engagement = engagement = _engagement(system, seat, seed)
        packer = wire.Packer(engagement.cast, engagement.bytes_max)  # others may have joined
        seat.mailbox.pack = packer.pack
        self._wire = wire.Wire(packer, system.known, self)
        self._guests = Seat(seat.part, _Onward(seat, system.clock, self._wire))
        """Those whom this life has spawned, as they watch others."""
        self._guests.name = f"those with {seat.name}"
        self._handed_over = deque[tuple[float, str, wire.Packed]](), deque[tuple[float, str, wire.Packed]]()
        """What has not been begun, ordinary and urgent."""
        self._opened = asyncio.Event()
        """It is ready, or will not be."""
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """How the thread or process has ended."""
        self._crash: ActorCrashed | None = None
        self._is_orderly = False
        """What has not been begun is known."""
        self._is_expected = False
        """The end of the thread or process is no crash."""
        self._kill: Callable[[], object] = lambda: None

    async def open(self) -> None:
        """Begin the life. Raises ActorCrashed; nothing is left running then, nor when this is cancelled."""
        try:
            near, introduction = self._launch()
        except (OSError, RuntimeError, KernelError) as error:  # no descriptor, process or thread is to be had
            self.ended("it was not begun")
            raise ActorCrashed(self._seat.name, "construction", error) from error
        try:
            await self._wire.connect(near)
            self._wire.write(introduction)
            await self._opened.wait()
            if self._wire.over.is_set() or self.end.done():
                await self._see_out()
            if self._crash is not None:
                raise self._crash
        except BaseException:
            self.kill()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([self.end])
            raise

    def _launch(self) -> tuple[socket.socket, bytes]:
        """Start the thread or process. Gives this end of the connection, and what to send first."""
        near, far = socket.socketpair()
        wait: Callable[[], str | None] = partial(elsewhere.live, far, self._engagement)
        introduction = b""
        try:
            if isinstance(self._seat.part.placement, InProcess):
                child, introduction = _started(far, self._engagement)
                self._kill, wait = child.kill, partial(_death, child)
            name = f"cuelight {self._seat.name}"
            threading.Thread(target=self._watch, args=(wait,), name=name, daemon=True).start()
        except BaseException:
            near.close()
            far.close()
            raise
        return near, introduction

    def _watch(self, wait: Callable[[], str | None]) -> None:
        how = None
        try:
            how = wait()
        finally:
            with suppress(RuntimeError):  # the loop was closed without stopping the system
                self.end.get_loop().call_soon_threadsafe(self.ended, how or "its thread ended")

    async def perform(self) -> None:
        """Hand messages over until the mailbox is closed and empty, or the seat is to be left. Raises ActorCrashed."""
        mailbox = self._seat.mailbox
        while not self._wire.over.is_set() and not self.end.done():
            if self._seat.is_leaving or (mailbox.closed and not len(mailbox)):
                self._wire.call("stop", mailbox.is_dropped)
            elif len(mailbox) and sum(map(len, self._handed_over)) < wire.WINDOW:
                self._hand_over()
                continue
            await mailbox.wait(for_more=True)
        await self._see_out()
        # What was handed over and never begun goes back after a crash in order; else nobody knows, and it is lost.
        for lane, entries in zip((mailbox.ordinary, mailbox.urgent), self._handed_over, strict=True):
            mailbox.give_back(lane, entries, lost=not self._is_orderly)
        if self._crash is not None:
            raise self._crash

    def _hand_over(self) -> None:
        mailbox = self._seat.mailbox
        arrived, sender, message = mailbox.take()
        # What the kernel itself posts has not been packed by a sender.
        packed = message if isinstance(message, wire.Packed) else self._wire.packer.pack(message)
        self._handed_over[mailbox.is_urgent(type(packed.message))].append((arrived, sender, packed))
        self._wire.say(self._seat.name, sender, packed)

    async def _see_out(self) -> None:
        """Wait until the thread or process is no more, and what it has sent is heard."""
        if not self.end.done():  # but the connection is over, so whatever still lives there must not for long
            await asyncio.wait([self.end], timeout=_LINGER_SECONDS)
            if not self.end.done():
                self._kill()
            await asyncio.wait([self.end])
        if not self._is_expected:
            with anyio.move_on_after(_LAST_WORDS_SECONDS):
                await self._wire.over.wait()
        if not self._is_expected:  # as it may have said by now
            self._fail(ActorCrashed(self._seat.name, "", RemoteError(self.end.result())))
        self._wire.close()

    def hear_ready(self) -> None:
        """The actor has been built."""
        self._opened.set()

    def hear_begun(self, *counts: int) -> None:
        """So many of the messages that were handed over, by lane, have been begun since the last time."""
        for lane, count in zip(self._handed_over, counts, strict=True):
            for _ in range(count):
                _, sender, packed = lane.popleft()
                if self._system.tap is not None:
                    self._system.tap(Delivered(self._system.clock.now(), sender, self._seat.name, packed.message))
        self._seat.mailbox.wake()

    def hear_watch(self, name: str, is_own: bool) -> None:
        """The actor watches this one, or somebody whom it has spawned does."""
        self._system.watch(self._seat if is_own else self._guests, name)

    def hear_dismiss(self, name: str, drop: bool) -> None:
        """The actor wants this one to stop, itself or another."""
        if self._system.known(name) is not None:  # else it has gone meanwhile
            self._system.dismiss(Role(name, object, 1), drop=drop)

    def hear_slow(self, actor: str, message_type: str, seconds: float) -> None:
        """A handler, the actor's own or that of one it has spawned, took that long."""
        self._system.report_slow(actor, message_type, seconds)

    def hear_crashed(self, message_type: str, error: str, trace: str) -> None:
        """The actor raised, and its life is over."""
        self._is_orderly = self._crash is None
        self._fail(ActorCrashed(self._seat.name, message_type, RemoteError(error, trace)))

    def hear_stopped(self) -> None:
        """The actor has stopped in order, and its life is over."""
        self._is_expected = True

    def told(self, to: AddressId, _sender: str, message: object, /) -> None:
        """The actor tells somebody here something."""
        self._system.moment.acting = self._seat.name
        try:
            self._wire.address(to).tell(message)
        finally:
            self._system.moment.acting = ""

    def failed(self, message_type: str, error: Exception, /) -> None:
        """What the actor said could not be handed on: that is its crash, as at home."""
        self._fail(ActorCrashed(self._seat.name, message_type, error))
        self.kill()

    def _fail(self, crash: ActorCrashed) -> None:
        self._crash = self._crash or crash
        self._opened.set()

    def lost(self) -> None:
        """The connection is over."""
        while self._guests.watched:
            del self._guests.watched.pop().watchers[self._guests.name]
        self._opened.set()
        self._seat.mailbox.wake()

    def ended(self, how: str) -> None:
        """The thread or process is no more, or is to be waited for no longer."""
        if not self.end.done():
            self.end.set_result(how)
        self._opened.set()
        self._seat.mailbox.wake()

    def kill(self) -> None:
        """End a process at once, and a thread when its handler returns. This is no crash."""
        self._is_expected = True
        self._wire.close()
        self._kill()


class _Onward(Mailbox):
    """Passes on what the kernel tells those who watch from elsewhere."""

    def __init__(self, seat: Seat, clock: Clock, to: wire.Wire) -> None:
        super().__init__(seat.part.role, clock)
        self._wire = to

    def post(self, message: object, sender: str = OWN) -> None:
        self._wire.say(sender, sender, self._wire.packer.pack(message))


def _engagement(system: System, seat: Seat, seed: int) -> elsewhere.Engagement:
    placement = seat.part.placement
    assert not isinstance(placement, InLoop)
    slow = system.slow_handler_seconds
    return elsewhere.Engagement(seat.part, tuple(system.roles()), seed, placement.message_bytes_max, slow)


def _needs_main(payload: bytes) -> bool:
    return b"__main__" in payload or b"__mp_main__" in payload


def _pickled(engagement: elsewhere.Engagement) -> bytes:
    try:
        return pickle.dumps(engagement)
    except Exception as error:  # pickle lets through whatever the objects raise
        reason = f"the part of {engagement.part.role.name!r} cannot be imported by another process: {error}"
        raise NotSendable(f"{reason}; build must be a function at the top of a module, or a partial of one") from error


def _started(far: socket.socket, engagement: elsewhere.Engagement) -> tuple[subprocess.Popen[bytes], bytes]:
    """A fresh interpreter that inherits one socket, output and errors, and no input; and what to send it first."""
    payload = _pickled(engagement)
    preparation: dict[str, object] = {"name": f"cuelight {engagement.part.role.name}", "sys_argv": sys.argv}
    if _needs_main(payload):  # importing it runs its code again: only where the actor comes from there
        preparation |= _main_module()
    path = [each for each in sys.path if isinstance(each, str)]  # the import system passes over anything else
    # Above those that are to be its output and errors, which this process may have closed.
    with far, socket.socket(fileno=fcntl.fcntl(far, fcntl.F_DUPFD_CLOEXEC, 3)) as connection:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until it can ignore an interrupt
        try:
            child = subprocess.Popen(
                [sys.executable, "-c", _CHILD.format(path=path, descriptor=connection.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=_inherited(1),
                stderr=_inherited(2),
                pass_fds=[connection.fileno()],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return child, b"".join(map(pickle.dumps, (os.getpid(), preparation))) + payload


def _death(child: subprocess.Popen[bytes]) -> str:
    """Wait for it."""
    if (status := child.wait()) >= 0:
        return f"its process exited with status {status}"
    names = {each.value: each.name for each in signal.Signals}  # a real-time signal has none
    return f"its process was killed by {names.get(-status, f'signal {-status}')}"


def _inherited(descriptor: int) -> int | None:
    """An output as `subprocess` is to be told of it: nowhere, where this process has closed its own."""
    with suppress(OSError):
        if os.get_inheritable(descriptor):  # else it is something else by now
            return None
    return subprocess.DEVNULL


def _main_module() -> dict[str, object]:
    """Where `multiprocessing.spawn.prepare` is to find this program's main module; empty where no file defines it."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return {"init_main_from_name": main.__spec__.name}
    path = getattr(main, "__file__", None)
    return {"init_main_from_path": path} if path is not None and Path(path).exists() else {}
