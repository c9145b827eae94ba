"""The near side of a placement: hands an actor's messages over to where it lives, and knows when that is no more."""

import asyncio
import fcntl
import os
import pickle
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.process import current_process
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import NamedTuple

import anyio

from cuelight.kernel import wire
from cuelight.kernel.actor import ActorSpec, InProcess, Role
from cuelight.kernel.codec import AddressId, reachable
from cuelight.kernel.errors import ActorCrashed, KernelError, NotSendable, ProcessKilled, RemoteError
from cuelight.kernel.events import Delivered
from cuelight.kernel.stage import Life, Seat, Stage
from cuelight.kernel.supervision import Terminated

_LINGER_SECONDS = 5.0
"""For what a process does at its exit once its actor's life is over."""

_LAST_WORDS_SECONDS = 1.0
"""For what a process sent before it exited. Only a descendant of it that keeps the socket can make that take long."""

_CHILD = "import sys; sys.path[:] = {path!r}; from cuelight.kernel.elsewhere import main; main({descriptor})"


class Engagement(NamedTuple):
    """All that the far side must know of one life."""

    part: ActorSpec[object]
    cast: tuple[Role[object], ...]
    seed: int
    slow_handler_seconds: float


def prepare(stage: Stage, seat: Seat) -> None:
    """Have messages to this seat's actor made ready at their senders.

    Raises NotSendable for a part that cannot live where it should, and KernelError where nobody may be started.
    """
    engagement = Engagement(seat.part, tuple(stage.roles()), 0, stage.slow_handler_seconds)
    if isinstance(seat.part.placement, InProcess):
        _introduction(engagement)
    reachable(role.accepts for role in engagement.cast)
    seat.mailbox.pack = wire.Packer(engagement.cast, seat.part.placement.message_bytes_max).pack


class Placed(Life):
    """One life of an actor that lives on a thread or in a process of its own."""

    def __init__(self, stage: Stage, seat: Seat, run_on_thread: Callable[[socket.socket, Engagement], None]) -> None:
        super().__init__(stage, seat)
        self._run_on_thread = run_on_thread
        self._engagement = Engagement(seat.part, tuple(stage.roles()), self.seed, stage.slow_handler_seconds)
        packer = wire.Packer(self._engagement.cast, seat.part.placement.message_bytes_max)  # others may have joined
        seat.mailbox.pack = packer.pack
        self._wire = wire.Wire(packer, stage.known, self)
        self._guests = _Guests(seat, self._wire)
        self._mailbox = seat.mailbox
        self._handed_over = deque[tuple[float, str, wire.Packed]](), deque[tuple[float, str, wire.Packed]]()
        """What has not been begun, ordinary and urgent."""
        self._begun: object = None
        """The message that was begun last."""
        self.gone: asyncio.Future[RemoteError] = asyncio.get_running_loop().create_future()
        """How the thread or process has ended."""
        self.hear_slow = stage.report_slow
        self._is_ready = False
        self._is_parted = False
        """Its last word has come, or is not waited for: what has not been begun is known, and its end is no crash."""
        self._kill: Callable[[], object] = lambda: None

    async def open(self) -> "Placed":
        """Begin the life. Raises ActorCrashed."""
        try:
            await self._launch()
        except (OSError, RuntimeError, KernelError) as error:  # no descriptor, process or thread is to be had
            raise ActorCrashed(self._seat.name, "construction", error) from error
        while not self._is_ready and not self._is_ending():
            await self._mailbox.wait(for_more=True)
        if self._is_ending():
            await self._see_out()
        return self

    async def _launch(self) -> None:
        """Start the thread or process, with a connection to it."""
        with ExitStack() as undo:
            undo.callback(self.ended, RemoteError("it was not begun"))
            near, far = socket.socketpair()
            undo.enter_context(far)
            await self._wire.connect(near)
            wait: Callable[[], RemoteError | None] = partial(self._run_on_thread, far, self._engagement)
            if isinstance(self._seat.part.placement, InProcess):
                self._wire.write(_introduction(self._engagement))
                child = _started(far)
                self._kill, wait = child.kill, partial(_death, child)
            threading.Thread(target=self._watch, args=(wait,), name=f"cuelight {self._seat.name}", daemon=True).start()
            undo.pop_all()

    def _watch(self, wait: Callable[[], RemoteError | None]) -> None:
        how = None
        try:
            how = wait()
        finally:
            with suppress(RuntimeError):  # the loop was closed without stopping the system
                self.gone.get_loop().call_soon_threadsafe(self.ended, how or RemoteError("its thread ended"))

    async def perform(self) -> None:
        """Hand messages over until the mailbox is closed and empty, or the seat is to be left. Raises ActorCrashed."""
        while not self._is_ending():
            if self.is_leaving or (self._mailbox.closed and not len(self._mailbox)):
                self._wire.call("stop", self._mailbox.is_dropped)
            elif len(self._mailbox) and sum(map(len, self._handed_over)) < wire.WINDOW:
                arrived, sender, message = self._mailbox.take()
                # What the kernel itself posts has not been packed by a sender.
                packed = message if isinstance(message, wire.Packed) else self._wire.packer.pack(message)
                self._handed_over[type(packed.message) in self._seat.part.role.urgent].append((arrived, sender, packed))
                self._wire.say(self._seat.name, sender, packed)
                continue
            await self._mailbox.wait(for_more=True)
        await self._see_out()

    def _is_ending(self) -> bool:
        return self.crash is not None or self._wire.over.is_set() or self.gone.done()

    async def _see_out(self) -> None:
        """Wait until the thread or process is no more, and what it has sent is heard. Raises ActorCrashed."""
        if self.crash is not None and not self._is_parted:
            self._wire.call("strike")  # a thread hears it between two turns of its loop
            self._kill()
        # Else its last word has come or the connection is over, so whatever still lives there must not for long.
        await asyncio.wait([self.gone], timeout=_LINGER_SECONDS)
        self._kill()
        await asyncio.wait([self.gone])
        if not self._is_parted:
            with anyio.move_on_after(_LAST_WORDS_SECONDS):
                await self._wire.over.wait()
        # What was handed over and never begun goes back after a crash in order; else nobody knows, and it is lost.
        for lane, entries in zip((self._mailbox.ordinary, self._mailbox.urgent), self._handed_over, strict=True):
            self._mailbox.give_back(lane, entries, lost=not self._is_parted)
        if not self._is_parted:
            self.strike(ActorCrashed(self._seat.name, "", self.gone.result()))
        if self.crash is not None:
            raise self.crash

    def end(self, *, drop: bool) -> None:
        """End a process at once, and a thread when its handler returns."""
        self._wire.close()
        self._kill()

    def ended(self, how: RemoteError) -> None:
        """The thread or process is no more, or is to be waited for no longer."""
        if not self.gone.done():
            self.gone.set_result(how)
        self._mailbox.wake()

    def hear_begun(self, *counts: int) -> None:
        """The actor is there, and has begun so many more of the messages that were handed over, by lane."""
        self._is_ready = True
        for lane, count in zip(self._handed_over, counts, strict=True):
            for _ in range(count):
                _, sender, packed = lane.popleft()
                self._begun = packed.message
                if self._stage.tap is not None:
                    self._stage.tap(Delivered(self._stage.clock.now(), sender, self._seat.name, packed.message))
        self._mailbox.wake()

    def hear_watch(self, name: str, is_own: bool) -> None:
        """The actor watches this one, or somebody whom it has spawned does."""
        watcher = self._seat if is_own else self._guests
        try:
            self._stage.watch(watcher, name)
        except KeyError:  # it has gone meanwhile
            watcher.hear(Terminated(name, "", is_restarting=False))

    def hear_dismiss(self, name: str, drop: bool) -> None:
        """The actor wants this one to stop, itself or another."""
        if self._stage.known(name) is not None or name not in self._wire.packer.names:  # else it has gone meanwhile
            self._stage.dismiss(Role(name, object, 1), drop=drop)

    def hear_kill(self, name: str, reason: str, killed_by: str) -> None:
        """Kill the actor of this name, as the remote side asks."""
        self._stage.kill_for(killed_by, Role(name, object, 1), reason)

    def hear_crashed(self, message_type: str, error: str, trace: str) -> None:
        """The actor raised, and its life is over."""
        self._is_parted = True
        message = self._begun if type(self._begun).__qualname__ == message_type else None
        self.strike(ActorCrashed(self._seat.name, message_type, RemoteError(error, trace), message))

    def hear_stopped(self) -> None:
        """The actor has stopped in order, and its life is over."""
        self._is_parted = True

    def told(self, to: AddressId, _sender: str, message: object, /) -> None:
        """The actor tells somebody here something."""
        self._stage.moment.acting = self._seat.name
        try:
            self._wire.address(to).tell(message)
        finally:
            self._stage.moment.acting = ""

    def failed(self, message_type: str, error: Exception, /) -> None:
        """What the actor said could not be handed on: that is its crash, as at home."""
        self.strike(ActorCrashed(self._seat.name, message_type, error))
        self._wire.close()

    def lost(self) -> None:
        """The connection is over."""
        self._guests.forget()
        self._mailbox.wake()


class _Guests(Seat):
    """Those whom a life elsewhere has spawned there, as they watch others."""

    def __init__(self, host: Seat, to: wire.Wire) -> None:
        super().__init__(host.part, host.mailbox)
        self.name = f"those with {host.name}"
        self._wire = to

    def hear(self, news: Terminated) -> None:
        self._wire.say(news.actor, news.actor, self._wire.packer.pack(news))


def _introduction(engagement: Engagement) -> bytes:
    """What a child process is sent first. Raises NotSendable for a part that no other process can import."""
    name = engagement.part.role.name
    if getattr(current_process(), "_inheriting", False):  # this is a child, which imports the main module just now
        raise KernelError("a child imports this main module, which starts a system: guard it by __name__ == '__main__'")
    try:
        payload = pickle.dumps(engagement)
    except Exception as error:  # pickle lets through whatever the objects raise
        reason = f"the part of {name!r} cannot be imported by another process: {error}"
        raise NotSendable(f"{reason}; build must be a function at the top of a module, or a partial of one") from error
    preparation: dict[str, object] = {"name": f"cuelight {name}", "sys_argv": sys.argv}
    if b"__main__" in payload or b"__mp_main__" in payload:  # else its code is not to run again
        preparation |= _main_module(name)
    return b"".join(map(pickle.dumps, (os.getpid(), preparation))) + payload


def _main_module(name: str) -> dict[str, object]:
    """Where `multiprocessing.spawn.prepare` is to find this program's main module. Raises NotSendable."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return {"init_main_from_name": main.__spec__.name}
    path = getattr(main, "__file__", None)
    if path is None or not Path(path).exists():
        raise NotSendable(f"{name!r} was defined at a prompt; a process can only import what a file defines")
    return {"init_main_from_path": path}


def _started(far: socket.socket) -> Popen[bytes]:
    """A fresh interpreter that inherits one socket, output and errors, and no input."""
    path = [each for each in sys.path if isinstance(each, str)]  # the import system passes over anything else
    # Above those that are to be its output and errors, which this process may have closed.
    with far, socket.socket(fileno=fcntl.fcntl(far, fcntl.F_DUPFD_CLOEXEC, 3)) as connection:
        descriptor = connection.fileno()
        command = [sys.executable, "-c", _CHILD.format(path=path, descriptor=descriptor)]
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until it can ignore an interrupt
        try:
            return Popen(command, stdin=DEVNULL, stdout=_inherited(1), stderr=_inherited(2), pass_fds=[descriptor])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _inherited(descriptor: int) -> int | None:
    """An output as `subprocess` is to be told of it: nowhere, where this process has closed its own."""
    with suppress(OSError):
        if os.get_inheritable(descriptor):  # else it is something else by now
            return None
    return DEVNULL


def _death(child: Popen[bytes]) -> RemoteError:
    """Wait for the end of a child process, and return what ended it."""
    if (status := child.wait()) >= 0:
        return RemoteError(f"its process exited with status {status}")
    names = {each.value: each.name for each in signal.Signals}  # a real-time signal has none
    name = names.get(-status, f"signal {-status}")
    return ProcessKilled(f"its process was killed by {name}", name)
