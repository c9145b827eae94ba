"""The remote side of a placement: one actor in its own event loop, connected to the others by a wire.

Runs on a thread, or as the main program of a child process, which receives its `RemoteLifeSpec` from its parent.
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
"""Characters of an error, and of its traceback, that a crash report holds at most."""


class _RemoteSender(str):
    """The sender of a message that came over the wire, as opposed to one that was sent here."""

    __slots__ = ()


class _RemoteDriver(AsyncioDriver):
    """A system of one actor and those it spawns; the other actors are at the other end of a wire."""

    interrupts = ()
    """Empty: KeyboardInterrupt and SystemExit are crashes of the actor, reported like any other."""

    def __init__(self, spec: RemoteLifeSpec, on_lost: Callable[[], None]) -> None:
        self._role = role = spec.part.role
        # The other end supervises, so a crash ends this driver. Messages in the window come on top of local ones.
        here = replace(role, capacity=role.capacity + wire.WINDOW)
        part = replace(spec.part, role=here, restart_policy=RestartPolicy(), placement=InLoop())
        super().__init__([part], tap=self._count, slow_handler_seconds=spec.slow_handler_seconds)
        encoder = wire.MessageEncoder(spec.cast, spec.part.placement.message_bytes_max)
        self._spec = spec
        self._on_lost = on_lost
        self._begun = [0, 0]
        self._watchers: dict[str, set[ActorSlot]] = {}
        """Actors spawned here, by the name of the actor at the other end that they watch."""
        self.wire = wire.Wire(encoder, self.find_by_name, self)
        self._remote_refs: dict[str, Ref[object]] = {}
        for each in spec.cast:
            if each.name != self._role.name:
                self._remote_refs[each.name] = Ref(each.name, partial(self.wire.tell, each.name, each.message_types()))

    def run_remote_life(self, connection: socket.socket, spec: RemoteLifeSpec) -> None:
        """Run one life of an actor that was spawned here with the placement `OnThread`."""
        run_life(connection, spec)

    def find_by_name(self, name: str) -> Ref[object] | None:
        """Return the address of the actor of this name, here or at the other end."""
        return self._remote_refs.get(name) or super().find_by_name(name)

    def roles(self) -> list[Role[object]]:
        """Return the roles here and at the other end: actors spawned here with a placement can address both."""
        return list({role.name: role for role in (*super().roles(), *self._spec.cast)}.values())

    def watch(self, watcher: ActorSlot, name: str) -> None:
        """Watch an actor here or at the other end, which sends `Terminated` to this actor like any message."""
        if name in self._slots:
            super().watch(watcher, name)
        else:
            if not (is_own := watcher.name == self._role.name):
                self._watchers[name] = {each for each in self._watchers.get(name, ()) if not each.is_over} | {watcher}
            self.wire.call("watch", name, is_own)

    def dismiss(self, role: Role[Never], *, drop: bool = False) -> None:
        """Dismiss an actor here or at the other end, where this actor's own slot is, too."""
        if role.name in self._slots and role.name != self._role.name:
            super().dismiss(role, drop=drop)
        else:
            self.wire.call("dismiss", role.name, drop)
            if drop and role.name == self._role.name:
                self.on_stop(drop=True)

    def kill_for(self, killed_by: str, role: Role[Never], reason: str) -> None:
        """Kill an actor here or at the other end; this actor itself at both."""
        if role.name == self._role.name or role.name not in self._slots:
            self.wire.call("kill", role.name, reason, killed_by)
        super().kill_for(killed_by, role, reason)

    def report_slow(self, actor: str, message_type: str, seconds: float) -> None:
        """Report a slow handler at the other end, where the host program logs."""
        self.wire.call("slow", actor, message_type, seconds)

    def _report_crash(self, crash: ActorCrashed) -> None:
        if crash.actor != self._role.name:
            super()._report_crash(crash)

    def seed_of(self, slot: ActorSlot) -> int:
        """Return the seed of a life; this actor's was drawn at the other end."""
        return self._spec.seed if slot.name == self._role.name else super().seed_of(slot)

    def _count(self, event: Event) -> None:
        """Count a message from the other end whose handling begins, to be acknowledged in the next turn of the loop."""
        if isinstance(event, Delivered) and isinstance(event.sender, _RemoteSender):
            if not any(self._begun):
                asyncio.get_running_loop().call_soon(self._acknowledge)
            self._begun[type(event.message) in self._role.urgent] += 1

    def _acknowledge(self) -> None:
        if any(self._begun):
            self.wire.call("begun", *self._begun)
            self._begun = [0, 0]

    def on_stop(self, drop: bool) -> None:
        """Stop the actor when all messages received are handled (with `drop`, at once)."""
        self._closing.set()
        if drop:
            self._abort(self._slots[self._role.name])

    def on_abort(self) -> None:
        """End this life as a crash when the present handler has returned."""
        super().kill_for("", self._role, "")

    def on_message(self, to: AddressId, sender: str, message: object, /) -> None:
        """Deliver a message for the actor, a `Terminated` for watchers spawned here, or an answer to an address."""
        if to == self._role.name:
            self._slots[self._role.name].mailbox.post(message, _RemoteSender(sender))
        elif isinstance(to, str):
            for watcher in self._watchers.get(to, ()):
                watcher.mailbox.post(message, sender)
        else:
            self.wire.address(to).tell(message)

    def on_error(self, message_type: str, error: Exception, /) -> None:
        """Crash this life: a message from the other end was refused here, and its sender is at the other end."""
        self._fail(self._slots[self._role.name], ActorCrashed(self._role.name, message_type, error))

    def on_disconnect(self) -> None:
        """Drop this life: the other end has ended, or has closed the connection."""
        self._on_lost()
        self.on_stop(drop=True)

    async def run(self, connection: socket.socket) -> None:
        """Run this life, from the first frame to the last."""
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
    with suppress(Exception):  # formatting a foreign error can raise anything
        trace = "".join(traceback.format_exception(error)).rstrip().encode(errors="backslashreplace").decode()
    return "crashed", message_type, describe(error)[:_REPORT_CHARS_MAX], trace[-_REPORT_CHARS_MAX:]


def run_life(connection: socket.socket, spec: RemoteLifeSpec, on_lost: Callable[[], None] = lambda: None) -> None:
    """Run one life in a new event loop of this thread."""
    with connection, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_RemoteDriver(spec, on_lost).run(connection))


def main(descriptor: int) -> None:
    """Run a child process: read its preparation and the spec of its life from the socket, then run that life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent acts upon an interrupt
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
        with suppress(OSError):  # the parent has exited
            connection.sendall(wire.encode_frame(*_crash_report("construction", error)))
        sys.exit(1)
    run_life(connection, spec, on_lost=lambda: os._exit(1))


def _exit_with_parent(parent: int) -> None:
    """Have this process killed when its parent dies, even where a busy handler does not see the lost connection."""
    with suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
