"""The near side of a placement: hands an actor's messages over to where it lives, and knows when that is no more."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio

from cuelight.kernel import elsewhere
from cuelight.kernel.codec import reachable
from cuelight.kernel.elsewhere import Engagement, vocabulary
from cuelight.kernel.errors import ActorCrashed, KernelError, NotSendable, RemoteError
from cuelight.kernel.events import Delivered
from cuelight.kernel.mailbox import Entry
from cuelight.kernel.ref import Address
from cuelight.kernel.role import InLoop, InProcess
from cuelight.kernel.stage import Seat
from cuelight.kernel.system import Performer, System
from cuelight.kernel.wire import (
    WINDOW,
    Begun,
    Crashed,
    Frame,
    Packed,
    Packer,
    Ready,
    Slow,
    Stop,
    Stopped,
    Watch,
    Wire,
    framed,
)

_LINGER_SECONDS = 5.0
"""For what a process does at its exit once its actor's life is over."""

_LAST_WORDS_SECONDS = 1.0
"""For what a process sent before it exited. Only a descendant of it that keeps the socket can make that take long."""

CHILD = "import sys; sys.path[:] = {path!r}; from cuelight.kernel.elsewhere import main; main({descriptor})"


def packer(system: System, seat: Seat) -> Packer:
    """Makes messages ready for this seat's actor. Raises NotSendable for a part that cannot live where it should."""
    engagement = _engagement(system, seat, seed=0)
    if isinstance(seat.part.placement, InProcess):
        main = sys.modules["__main__"]
        is_file = main.__spec__ is not None or Path(getattr(main, "__file__", None) or "<none>").exists()
        if _needs_main(_pickled(engagement)) and not is_file and not elsewhere.preparing.is_set():
            raise NotSendable(f"{seat.name!r} was defined at a prompt; a process can only import what a file defines")
    reachable(role.accepts for role in engagement.cast)
    return Packer(*vocabulary(engagement), system.known, engagement.bytes_max)


class Placed(Performer):
    """One life of an actor that lives on a thread or in a process of its own."""

    def __init__(self, system: System, seat: Seat, packer: Packer, seed: int) -> None:
        self._system = system
        self._seat = seat
        self._engagement = _engagement(system, seat, seed)
        types, packer.names = vocabulary(self._engagement)  # others may have joined the cast
        packer.types.update(types)
        self._wire = Wire(packer, self)
        self._handed_over: tuple[deque[Entry], deque[Entry]] = (deque(), deque())
        self._room = asyncio.Event()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gone = asyncio.Event()
        self._crash: ActorCrashed | None = None
        self._is_orderly = False
        """What has not been begun is known."""
        self._is_expected = False
        """The end of the thread or process is no crash."""
        self._is_told_to_stop = False
        self._end: Callable[[], object] = self._wire.close

    async def open(self) -> None:
        """Begin the life. Raises ActorCrashed; nothing is left running then, nor when this is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            near, introduction = self._launch(loop)
        except (OSError, RuntimeError, KernelError) as error:  # no descriptor, process or thread is to be had
            raise ActorCrashed(self._seat.name, "construction", error) from error
        try:
            # Copies of the socket in processes forked from this one must not keep the other end waiting.
            self._wire.hang_up = partial(_shut_down, near)
            await loop.create_unix_connection(lambda: self._wire, sock=near)
            self._wire.write(introduction)
            await self._ready
        except BaseException:
            self.kill()
            with anyio.CancelScope(shield=True):
                await self.gone()
            raise

    def _launch(self, loop: asyncio.AbstractEventLoop) -> tuple[socket.socket, bytes]:
        launch = _launch_process if isinstance(self._seat.part.placement, InProcess) else _launch_thread
        near, far = socket.socketpair()
        with far:
            try:
                self._end, introduction = launch(far, self._engagement, self._exited_from(loop))
            except BaseException:
                near.close()
                raise
        return near, introduction

    async def perform(self) -> None:
        """Hand messages over until the mailbox is closed and empty, or the seat is to be left. Raises ActorCrashed."""
        mailbox = self._seat.mailbox
        try:
            while not self._gone.is_set():
                is_last = mailbox.closed and not len(mailbox)
                if self._seat.is_leaving or self._wire.over.is_set() or is_last:
                    self._stop()
                    await self._gone.wait()
                elif not len(mailbox):
                    await mailbox.wait()
                elif sum(map(len, self._handed_over)) < WINDOW:
                    self._hand_over()
                else:
                    self._room.clear()
                    await self._room.wait()
        finally:
            if not self._gone.is_set():
                self.kill()
                with anyio.CancelScope(shield=True):
                    await self.gone()
        self._settle()

    def _hand_over(self) -> None:
        mailbox = self._seat.mailbox
        arrived, sender, message = mailbox.take()
        # What the kernel itself posts has not been packed by a sender.
        packed = message if isinstance(message, Packed) else self._wire.packer.pack(message)
        self._handed_over[mailbox.is_urgent(type(packed.message))].append((arrived, sender, packed))
        self._wire.deliver(packed, sender)

    def _stop(self) -> None:
        if not self._is_told_to_stop:
            self._is_told_to_stop = True
            self._wire.send(Stop(drop=self._system.is_dropping or self._seat.mailbox.is_dropped))

    def _settle(self) -> None:
        """What was handed over and never begun goes back after a crash in order; else nobody knows, and it is lost."""
        ordinary, urgent = self._handed_over
        mailbox = self._seat.mailbox
        if self._is_orderly and not mailbox.closed:
            mailbox.put_back(ordinary, urgent=False)
            mailbox.put_back(urgent, urgent=True)
        else:
            mailbox.lose(len(ordinary) + len(urgent))
        if self._crash is not None:
            raise self._crash

    def heard(self, frame: Frame, /) -> None:
        """What the actor's side says."""
        name = self._seat.name
        match frame:
            case Begun(urgent, ordinary):
                for lane, count in zip(self._handed_over, (ordinary, urgent), strict=True):
                    self._begun(lane.popleft() for _ in range(count))
                self._room.set()
            case Watch(watched):
                self._system.watch(self._seat, watched)
            case Slow(message_type, seconds):
                self._system.report_slow(name, message_type, seconds)
            case Crashed(message_type, error, trace):
                self._is_orderly = self._crash is None
                self._fail(ActorCrashed(name, message_type, RemoteError(error, trace)))
            case Stopped():
                self._is_expected = True
                if not self._is_told_to_stop:  # it has dismissed itself
                    self._seat.mailbox.close(drop=True)
            case Ready():
                if not self._ready.done():
                    self._ready.set_result(None)
            case _:
                raise AssertionError(f"an actor does not say {type(frame).__name__}")

    def _begun(self, entries: Iterable[Entry]) -> None:
        for _, sender, packed in entries:
            assert isinstance(packed, Packed)
            if self._system.tap is not None:
                self._system.tap(Delivered(self._system.clock.now(), sender, self._seat.name, packed.message))

    def told(self, address: Address[object], message: object, /) -> None:
        """The actor tells somebody here something."""
        moment = self._system.moment
        moment.acting, outer = self._seat.name, moment.acting
        try:
            address.tell(message)
        finally:
            moment.acting = outer

    def failed(self, message_type: str, error: Exception, /) -> None:
        """What the actor said could not be handed on: that is its crash, as at home."""
        self._fail(ActorCrashed(self._seat.name, message_type, error))
        self.kill()

    def _fail(self, crash: ActorCrashed) -> None:
        self._crash = self._crash or crash
        if not self._ready.done():
            self._ready.set_exception(crash)
            self._ready.exception()  # whoever waited may have been cancelled

    def lost(self) -> None:
        """The connection is over: whatever still lives there must not for long."""
        asyncio.get_running_loop().call_later(_LINGER_SECONDS, self._end)

    def _exited_from(self, loop: asyncio.AbstractEventLoop) -> Callable[[str], None]:
        def exited(how: str) -> None:
            with suppress(RuntimeError):  # the loop was closed without stopping the system
                loop.call_soon_threadsafe(self._see_off, how)

        return exited

    def _see_off(self, how: str) -> None:
        self._farewell = asyncio.ensure_future(self._exited(how))

    async def _exited(self, how: str) -> None:
        """The thread or process is no more. What it sent before is still heard."""
        with anyio.move_on_after(_LAST_WORDS_SECONDS):
            await self._wire.over.wait()
        self._wire.close()
        if not self._is_expected:
            self._fail(ActorCrashed(self._seat.name, "", RemoteError(how)))
        self._gone.set()
        self.nudge()

    def nudge(self) -> None:
        """The seat has changed: look."""
        self._room.set()
        self._seat.mailbox.wake()

    def kill(self) -> None:
        """End a process at once, and a thread when its handler returns. This is no crash."""
        self._is_expected = True
        self._wire.close()
        self._end()

    async def gone(self) -> None:
        """Wait until the thread or process is no more."""
        await self._gone.wait()

    def abandon(self) -> None:
        """Wait for it no longer."""
        if not self._ready.done():
            self._ready.cancel()
        self._gone.set()
        self.nudge()


def _engagement(system: System, seat: Seat, seed: int) -> Engagement:
    placement = seat.part.placement
    assert not isinstance(placement, InLoop)
    cast = tuple(part.role for part in system.parts())
    return Engagement(seat.part, cast, seat.lives, seed, placement.message_bytes_max, system.slow_handler_seconds)


def _needs_main(payload: bytes) -> bool:
    return b"__main__" in payload or b"__mp_main__" in payload


def _pickled(engagement: Engagement) -> bytes:
    try:
        return pickle.dumps(engagement)
    except Exception as error:  # pickle lets through whatever the objects raise
        name = engagement.part.role.name
        reason = f"the part of {name!r} cannot be imported by another process: {error}"
        raise NotSendable(f"{reason}; build must be a function at the top of a module, or a partial of one") from error


def _launch_thread(
    far: socket.socket, engagement: Engagement, exited: Callable[[str], None]
) -> tuple[Callable[[], object], bytes]:
    connection = far.dup()

    def run() -> None:
        try:
            elsewhere.live(connection, engagement)
        finally:
            connection.close()
            exited("its thread ended")

    threading.Thread(target=run, name=f"cuelight {engagement.part.role.name}", daemon=True).start()
    return _nothing, b""


def _launch_process(
    far: socket.socket, engagement: Engagement, exited: Callable[[str], None]
) -> tuple[Callable[[], object], bytes]:
    """A fresh interpreter that inherits one socket, output and errors, no input; and a thread that awaits its end."""
    name = f"cuelight {engagement.part.role.name}"
    if elsewhere.preparing.is_set():
        raise KernelError(
            "a child imports this main module, which starts a system: guard it: if __name__ == '__main__':"
        )
    payload = _pickled(engagement)
    # Importing the parent's main module runs its code again: only where the actor comes from there.
    preparation = pickle.dumps(_preparation(name, needs_main=_needs_main(payload)))
    # Until it can ignore an interrupt, none reaches it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD.format(path=_import_path(), descriptor=far.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[far.fileno()],
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def watch() -> None:
        status = child.wait()
        try:
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        except ValueError:  # a real-time signal has no name
            how = f"was killed by signal {-status}"
        exited(f"its process {how}")

    threading.Thread(target=watch, name=f"{name} process", daemon=True).start()
    return child.kill, b"".join(map(framed, (str(os.getpid()).encode(), preparation, payload)))


def _preparation(name: str, *, needs_main: bool) -> dict[str, object]:
    """What `multiprocessing.spawn.prepare` is to make of the child."""
    preparation: dict[str, object] = {
        "name": name,
        "sys_path": _import_path(),
        "sys_argv": sys.argv,
        "dir": str(Path.cwd()),
    }
    module = sys.modules["__main__"]
    if needs_main and (spec := getattr(module, "__spec__", None)) is not None:
        preparation["init_main_from_name"] = spec.name
    elif needs_main and (path := getattr(module, "__file__", None)) is not None:
        preparation["init_main_from_path"] = str(Path(path).absolute())
    return preparation


def _import_path() -> list[str]:
    return [each for each in sys.path if isinstance(each, str)]  # the import system passes over anything else


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _nothing() -> None:
    pass
