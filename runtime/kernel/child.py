"""The far side of a placement: one actor in an event loop of its own, which knows the others only through a wire.

Runs on a thread, or as the whole of a child process, which knows nothing but what its parent sends it first.
"""

import asyncio
import ctypes
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import spawn
from multiprocessing.process import current_process
from typing import Final, Never

import uvloop

from cuelight.kernel.actor import InLoop, Role
from cuelight.kernel.codec import AddressId
from cuelight.kernel.driver import AsyncioDriver
from cuelight.kernel.errors import ActorCrashed, describe
from cuelight.kernel.events import Delivered, Event
from cuelight.kernel.placement import wire
from cuelight.kernel.placement.remote import RemoteLifeSpec
from cuelight.kernel.ref import Ref
from cuelight.kernel.supervision import RestartPolicy
from cuelight.kernel.table import ActorSlot

_REPORT_CHARS_MAX: Final = 32_000
"""Of an error and of its traceback, in characters."""


class _RemoteSender(str):
    """The sender of a message that was handed over, not one that was told here."""

    __slots__ = ()


class _RemoteDriver(AsyncioDriver):
    """A system of one, whose other actors are at the end of a wire."""

    interrupts = ()
    """There is no program to end here."""

    def __init__(self, spec: RemoteLifeSpec, on_lost: Callable[[], None]) -> None:
        self._role = role = spec.part.role
        # A crash goes to the supervision at the other end; what is handed over comes on top of what is its own.
        here = replace(role, capacity=role.capacity + wire.WINDOW)
        part = replace(spec.part, role=here, restart_policy=RestartPolicy(), placement=InLoop())
        super().__init__([part], tap=self._count, slow_handler_seconds=spec.slow_handler_seconds)
        encoder = wire.MessageEncoder(spec.cast, spec.part.placement.message_bytes_max)
        self._spec = spec
        self._on_lost = on_lost
        self._begun = [0, 0]
        self._watchers: dict[str, set[ActorSlot]] = {}
        """Of those who were spawned here, who watches whom at the other end."""
        self.wire = wire.Wire(encoder, self.find_by_name, self)
        self._remote_refs: dict[str, Ref[object]] = {}
        for each in spec.cast:
            if each.name != self._role.name:
                self._remote_refs[each.name] = Ref(each.name, partial(self.wire.tell, each.name, each.message_types()))

    def run_remote_life(self, connection: socket.socket, spec: RemoteLifeSpec) -> None:
        """Run one life of an actor that was spawned here and is placed on a thread of its own."""
        run_life(connection, spec)

    def find_by_name(self, name: str) -> Ref[object] | None:
        """The address of the actor of this name, here or at the other end."""
        return self._remote_refs.get(name) or super().find_by_name(name)

    def roles(self) -> list[Role[object]]:
        """Those at the other end too: whoever is spawned here and lives elsewhere is to know them."""
        return list({role.name: role for role in (*super().roles(), *self._spec.cast)}.values())

    def watch(self, watcher: ActorSlot, name: str) -> None:
        """Here or at the other end, which for the actor itself delivers `Terminated` like any message."""
        if name in self._slots:
            super().watch(watcher, name)
        else:
            if not (is_own := watcher.name == self._role.name):
                self._watchers[name] = {each for each in self._watchers.get(name, ()) if not each.is_over} | {watcher}
            self.wire.call("watch", name, is_own)

    def dismiss(self, role: Role[Never], *, drop: bool = False) -> None:
        """Here or at the other end, where the actor's own slot is too."""
        if role.name in self._slots and role.name != self._role.name:
            super().dismiss(role, drop=drop)
        else:
            self.wire.call("dismiss", role.name, drop)
            if drop and role.name == self._role.name:
                self.on_stop(drop=True)

    def kill_for(self, killed_by: str, role: Role[Never], reason: str) -> None:
        """Here or at the other end, but for the actor itself at both."""
        if role.name == self._role.name or role.name not in self._slots:
            self.wire.call("kill", role.name, reason, killed_by)
        super().kill_for(killed_by, role, reason)

    def report_slow(self, actor: str, message_type: str, seconds: float) -> None:
        """Reported where the system's opener sees it."""
        self.wire.call("slow", actor, message_type, seconds)

    def _report_crash(self, crash: ActorCrashed) -> None:
        if crash.actor != self._role.name:
            super()._report_crash(crash)

    def seed_of(self, slot: ActorSlot) -> int:
        """The actor's was drawn at the other end."""
        return self._spec.seed if slot.name == self._role.name else super().seed_of(slot)

    def _count(self, event: Event) -> None:
        """A message that was handed over is begun, so there is room for another one."""
        if isinstance(event, Delivered) and isinstance(event.sender, _RemoteSender):
            if not any(self._begun):
                asyncio.get_running_loop().call_soon(self._acknowledge)
            self._begun[type(event.message) in self._role.urgent] += 1

    def _acknowledge(self) -> None:
        if any(self._begun):
            self.wire.call("begun", *self._begun)
            self._begun = [0, 0]

    def on_stop(self, drop: bool) -> None:
        """The actor is to stop, when all that was handed over is handled (with `drop`, at once)."""
        self._closing.set()
        if drop:
            self._abort(self._slots[self._role.name])

    def on_abort(self) -> None:
        """This life must end as a crash, when the present handler has returned."""
        super().kill_for("", self._role, "")

    def on_message(self, to: AddressId, sender: str, message: object, /) -> None:
        """The other end has a message for the actor, news for those who watch, or an answer."""
        if to == self._role.name:
            self._slots[self._role.name].mailbox.post(message, _RemoteSender(sender))
        elif isinstance(to, str):
            for watcher in self._watchers.get(to, ()):
                watcher.mailbox.post(message, sender)
        else:
            self.wire.address(to).tell(message)

    def on_error(self, message_type: str, error: Exception, /) -> None:
        """A spawned actor, or an answer's address, refused what it was told: its sender is at the other end."""
        self._fail(self._slots[self._role.name], ActorCrashed(self._role.name, message_type, error))

    def on_disconnect(self) -> None:
        """The other end is gone, or has given this life up."""
        self._on_lost()
        self.on_stop(drop=True)

    async def run(self, connection: socket.socket) -> None:
        """This life, from the first frame to the last."""
        await self.wire.connect(connection)
        end: tuple[str, ...] = ("stopped",)
        try:
            async with self:
                self.wire.call("begun", 0, 0)
                await self._closing.wait()
        except ActorCrashed as crash:
            assert crash.__cause__ is not None
            end = _crash_report(crash.message_type, crash.__cause__)
        self._acknowledge()
        self.wire.call(*end)
        self._on_lost = lambda: None
        await self.wire.finish()


def _crash_report(message_type: str, error: BaseException) -> tuple[str, ...]:
    trace = ""
    with suppress(Exception):  # of an error that cannot be shown
        trace = "".join(traceback.format_exception(error)).rstrip().encode(errors="backslashreplace").decode()
    return "crashed", message_type, describe(error)[:_REPORT_CHARS_MAX], trace[-_REPORT_CHARS_MAX:]


def run_life(connection: socket.socket, spec: RemoteLifeSpec, on_lost: Callable[[], None] = lambda: None) -> None:
    """One life, in a new event loop of this thread."""
    with connection, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_RemoteDriver(spec, on_lost).run(connection))


def main(descriptor: int) -> None:
    """A child process: what it is sent first says how to be like its parent, and what to play."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to act upon
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    try:
        with connection.makefile("rb") as preamble:
            _exit_with_parent(pickle.load(preamble))
            current_process()._inheriting = True  # type: ignore[attr-defined]  # as `multiprocessing` marks its own
            spawn.prepare(pickle.load(preamble))
            current_process()._inheriting = False  # type: ignore[attr-defined]
            spec = pickle.load(preamble)
    except BaseException as error:
        with suppress(OSError):  # the parent is gone
            connection.sendall(wire.encode_frame(*_crash_report("construction", error)))
        sys.exit(1)
    run_life(connection, spec, on_lost=lambda: os._exit(1))


def _exit_with_parent(parent: int) -> None:
    """Be killed when the parent dies, even if this process is too busy to notice that the connection is lost."""
    with suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
