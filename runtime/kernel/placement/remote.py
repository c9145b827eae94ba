"""The local side of a placement: forwards messages to the actor's thread or process, and waits for its end."""

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

from cuelight.kernel.actor import ActorSpec, InProcess, Role
from cuelight.kernel.codec import AddressId, reachable
from cuelight.kernel.errors import ActorCrashed, KernelError, NotSendable, ProcessKilled, RemoteError
from cuelight.kernel.events import Delivered
from cuelight.kernel.placement import wire
from cuelight.kernel.supervision import Terminated
from cuelight.kernel.table import ActorSlot, ActorTable, Life

_LINGER_SECONDS = 5.0
"""Time for a process to exit once its actor's life has ended."""

_LAST_FRAMES_SECONDS = 1.0
"""Time for the last frames of an exited process to arrive. Only a descendant that keeps the socket can use it up."""

_CHILD_PROGRAM = "import sys; sys.path[:] = {path!r}; from cuelight.kernel.child import main; main({descriptor})"


class RemoteLifeSpec(NamedTuple):
    """The data from which the remote side runs one life."""

    part: ActorSpec[object]
    cast: tuple[Role[object], ...]
    seed: int
    slow_handler_seconds: float


def prepare_mailbox(table: ActorTable, slot: ActorSlot) -> None:
    """Have messages to this slot's actor encoded at their senders.

    Raises NotSendable for a spec that cannot be placed there, and KernelError while a child process imports the main
    module.
    """
    spec = RemoteLifeSpec(slot.part, tuple(table.roles()), 0, table.slow_handler_seconds)
    if isinstance(slot.part.placement, InProcess):
        _child_preamble(spec)
    reachable(role.accepts for role in spec.cast)
    slot.mailbox.convert = wire.MessageEncoder(spec.cast, slot.part.placement.message_bytes_max).encode


class RemoteLife(Life):
    """One life of an actor on its own thread or in its own process, seen from the actor's system."""

    def __init__(
        self, table: ActorTable, slot: ActorSlot, run_on_thread: Callable[[socket.socket, RemoteLifeSpec], None]
    ) -> None:
        super().__init__(table, slot)
        self._run_on_thread = run_on_thread
        self._spec = RemoteLifeSpec(slot.part, tuple(table.roles()), self.seed, table.slow_handler_seconds)
        encoder = wire.MessageEncoder(self._spec.cast, slot.part.placement.message_bytes_max)  # others may have joined
        slot.mailbox.convert = encoder.encode
        self._wire = wire.Wire(encoder, table.find_by_name, self)
        self._remote_watchers = _RemoteWatchers(slot, self._wire)
        self._mailbox = slot.mailbox
        self._unacknowledged = (
            deque[tuple[float, str, wire.EncodedMessage]](),
            deque[tuple[float, str, wire.EncodedMessage]](),
        )
        """The ordinary and the urgent messages that were sent to the actor and whose handling has not begun."""
        self._last_begun: object = None
        """The message whose handling began last."""
        self.exited: asyncio.Future[RemoteError] = asyncio.get_running_loop().create_future()
        """Resolved at the end of the thread or process, with the reason."""
        self.on_slow = table.report_slow
        self._is_ready = False
        self._is_end_reported = False
        """Whether the remote side has reported the life's end, or its report is not awaited.

        The messages not begun are known then, and the end of the thread or process is no crash.
        """
        self._kill: Callable[[], object] = lambda: None

    async def open(self) -> "RemoteLife":
        """Start the thread or process and wait until the actor is built. Raises ActorCrashed."""
        try:
            await self._launch()
        except (OSError, RuntimeError, KernelError) as error:  # such as no free descriptor, process or thread
            raise ActorCrashed(self._slot.name, "construction", error) from error
        while not self._is_ready and not self._is_ending():
            await self._mailbox.wait(for_more=True)
        if self._is_ending():
            await self._wait_until_gone()
        return self

    async def _launch(self) -> None:
        """Start the thread or process, and connect to it."""
        with ExitStack() as undo:
            undo.callback(self.set_exited, RemoteError("it was not started"))
            near, far = socket.socketpair()
            undo.enter_context(far)
            await self._wire.connect(near)
            wait: Callable[[], RemoteError | None] = partial(self._run_on_thread, far, self._spec)
            if isinstance(self._slot.part.placement, InProcess):
                self._wire.write(_child_preamble(self._spec))
                child = _start_child(far)
                self._kill, wait = child.kill, partial(_wait_for_exit, child)
            threading.Thread(target=self._watch, args=(wait,), name=f"cuelight {self._slot.name}", daemon=True).start()
            undo.pop_all()

    def _watch(self, wait: Callable[[], RemoteError | None]) -> None:
        how = None
        try:
            how = wait()
        finally:
            with suppress(RuntimeError):  # the loop was closed without stopping the system
                error = how or RemoteError("its thread ended")
                loop = self.exited.get_loop()
                loop.call_soon_threadsafe(self._join_and_set_exited, threading.current_thread(), error)

    def _join_and_set_exited(self, watcher: threading.Thread, how: RemoteError) -> None:
        """Join the watching thread, which has just made its last call, so that no thread outlives the system."""
        watcher.join()
        self.set_exited(how)

    async def forward_messages(self) -> None:
        """Forward messages until the life ends; stop it when the mailbox is closed and empty. Raises ActorCrashed."""
        while not self._is_ending():
            if self.is_stop_requested or (self._mailbox.closed and not len(self._mailbox)):
                self._wire.call("stop", self._mailbox.is_dropped)
            elif len(self._mailbox) and sum(map(len, self._unacknowledged)) < wire.WINDOW:
                arrived, sender, message = self._mailbox.take()
                # Messages that the kernel posts were not encoded by a sender.
                encoded = message if isinstance(message, wire.EncodedMessage) else self._wire.encoder.encode(message)
                self._unacknowledged[type(encoded.message) in self._slot.part.role.urgent].append(
                    (arrived, sender, encoded)
                )
                self._wire.send(self._slot.name, sender, encoded)
                continue
            await self._mailbox.wait(for_more=True)
        await self._wait_until_gone()

    def _is_ending(self) -> bool:
        return self.crash is not None or self._wire.over.is_set() or self.exited.done()

    async def _wait_until_gone(self) -> None:
        """Wait until the thread or process has ended and its last frames are handled. Raises ActorCrashed."""
        if self.crash is not None and not self._is_end_reported:
            self._wire.call("abort")  # a thread handles it between two turns of its loop
            self._kill()
        # The life has ended or was aborted, so its process may only linger for its exit handlers.
        await asyncio.wait([self.exited], timeout=_LINGER_SECONDS)
        self._kill()
        await asyncio.wait([self.exited])
        if not self._is_end_reported:
            with anyio.move_on_after(_LAST_FRAMES_SECONDS):
                await self._wire.over.wait()
        # After a reported end, messages not begun return to the mailbox; otherwise they are unknown, and lost.
        for lane, entries in zip((self._mailbox.ordinary, self._mailbox.urgent), self._unacknowledged, strict=True):
            self._mailbox.give_back(lane, entries, lost=not self._is_end_reported)
        if not self._is_end_reported:
            self.crash_with(ActorCrashed(self._slot.name, "", self.exited.result()))
        if self.crash is not None:
            raise self.crash

    def end(self, *, drop: bool) -> None:
        """End a process at once, and a thread when its handler returns."""
        self._wire.close()
        self._kill()

    def set_exited(self, how: RemoteError) -> None:
        """Note that the thread or process has ended, or is no longer waited for."""
        if not self.exited.done():
            self.exited.set_result(how)
        self._mailbox.wake()

    def on_begun(self, *counts: int) -> None:
        """Note that the actor is built, and has begun `counts` more of its messages: ordinary, urgent."""
        self._is_ready = True
        for lane, count in zip(self._unacknowledged, counts, strict=True):
            for _ in range(count):
                _, sender, encoded = lane.popleft()
                self._last_begun = encoded.message
                if self._table.tap is not None:
                    self._table.tap(Delivered(self._table.clock.now(), sender, self._slot.name, encoded.message))
        self._mailbox.wake()

    def on_watch(self, name: str, is_own: bool) -> None:
        """Watch the actor of this name, for the remote actor itself or for one that it has spawned."""
        watcher = self._slot if is_own else self._remote_watchers
        try:
            self._table.watch(watcher, name)
        except KeyError:  # the watched actor has left the cast
            watcher.notify(Terminated(name, "", is_restarting=False))

    def on_dismiss(self, name: str, drop: bool) -> None:
        """Dismiss the actor of this name, the remote actor itself or another one."""
        if (
            self._table.find_by_name(name) is not None or name not in self._wire.encoder.names
        ):  # else the actor has left the cast
            self._table.dismiss(Role(name, object, 1), drop=drop)

    def on_kill(self, name: str, reason: str, killed_by: str) -> None:
        """Kill the actor of this name."""
        self._table.kill_for(killed_by, Role(name, object, 1), reason)

    def on_crashed(self, message_type: str, error: str, trace: str) -> None:
        """Note that the actor raised and its life has ended."""
        self._is_end_reported = True
        message = self._last_begun if type(self._last_begun).__qualname__ == message_type else None
        self.crash_with(ActorCrashed(self._slot.name, message_type, RemoteError(error, trace), message))

    def on_stopped(self) -> None:
        """Note that the actor has stopped in order."""
        self._is_end_reported = True

    def on_message(self, to: AddressId, _sender: str, message: object, /) -> None:
        """Send a message of the actor to an address on this side."""
        self._table.actor_clock.acting = self._slot.name
        try:
            self._wire.address(to).tell(message)
        finally:
            self._table.actor_clock.acting = ""

    def on_error(self, message_type: str, error: Exception, /) -> None:
        """Crash the actor: its message was refused here, as `tell` would have raised in the loop."""
        self.crash_with(ActorCrashed(self._slot.name, message_type, error))
        self._wire.close()

    def on_disconnect(self) -> None:
        """End the watches of actors spawned by the remote actor."""
        self._remote_watchers.unwatch_all()
        self._mailbox.wake()


class _RemoteWatchers(ActorSlot):
    """The watcher of actors here on behalf of those that a remote actor has spawned: forwards `Terminated` to them."""

    def __init__(self, host: ActorSlot, to: wire.Wire) -> None:
        super().__init__(host.part, host.mailbox)
        self.name = f"spawned by {host.name}"
        self._wire = to

    def notify(self, news: Terminated) -> None:
        self._wire.send(news.actor, news.actor, self._wire.encoder.encode(news))


def _child_preamble(spec: RemoteLifeSpec) -> bytes:
    """Return the first bytes for a child process: its parent, preparation and spec.

    Raises NotSendable for a spec that no other process can import, and KernelError in a child that still imports the
    main module.
    """
    name = spec.part.role.name
    if getattr(current_process(), "_inheriting", False):
        raise KernelError("a child imports this main module, which starts a system: guard it by __name__ == '__main__'")
    try:
        payload = pickle.dumps(spec)
    except Exception as error:  # the objects' own methods can raise anything
        reason = f"the spec of {name!r} cannot be imported by another process: {error}"
        raise NotSendable(f"{reason}; build must be a function at the top of a module, or a partial of one") from error
    preparation: dict[str, object] = {"name": f"cuelight {name}", "sys_argv": sys.argv}
    if b"__main__" in payload or b"__mp_main__" in payload:  # otherwise the main module's code must not run again
        preparation |= _main_module(name)
    return b"".join(map(pickle.dumps, (os.getpid(), preparation))) + payload


def _main_module(name: str) -> dict[str, object]:
    """Return the entry by which `multiprocessing.spawn.prepare` finds the main module. Raises NotSendable."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return {"init_main_from_name": main.__spec__.name}
    path = getattr(main, "__file__", None)
    if path is None or not Path(path).exists():
        raise NotSendable(f"{name!r} was defined at a prompt; a process can only import what a file defines")
    return {"init_main_from_path": path}


def _start_child(far: socket.socket) -> Popen[bytes]:
    """Start a fresh interpreter that inherits one socket, standard output and standard error, and no input."""
    path = [each for each in sys.path if isinstance(each, str)]  # the import system ignores other entries
    # Above the descriptors of standard output and error, which this process may have closed.
    with far, socket.socket(fileno=fcntl.fcntl(far, fcntl.F_DUPFD_CLOEXEC, 3)) as connection:
        descriptor = connection.fileno()
        command = [sys.executable, "-c", _CHILD_PROGRAM.format(path=path, descriptor=descriptor)]
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the child ignores interrupts
        try:
            return Popen(command, stdin=DEVNULL, stdout=_inherited(1), stderr=_inherited(2), pass_fds=[descriptor])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _inherited(descriptor: int) -> int | None:
    """Return the value for `Popen`: None to inherit an output, `DEVNULL` where this process has closed its own."""
    with suppress(OSError):
        if os.get_inheritable(descriptor):  # otherwise the number was reused for another file
            return None
    return DEVNULL


def _wait_for_exit(child: Popen[bytes]) -> RemoteError:
    """Wait for the end of a child process, and return its reason."""
    if (status := child.wait()) >= 0:
        return RemoteError(f"its process exited with status {status}")
    names = {each.value: each.name for each in signal.Signals}  # a real-time signal has none
    name = names.get(-status, f"signal {-status}")
    return ProcessKilled(f"its process was killed by {name}", name)
