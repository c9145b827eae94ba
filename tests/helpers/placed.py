"""Actors that tests place on threads and in processes, with their messages; the processes import this module."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from cuelight.kernel import Actor, ActorSpec, Context, InProcess, KernelError, Recipient, Ref, Role, Terminated


class Note(msgspec.Struct, frozen=True, tag=True):
    """A message that the placed actor forwards to the sink."""

    number: int


class Urgent(msgspec.Struct, frozen=True, tag=True):
    """An urgent message that the placed actor forwards to the sink."""

    number: int


class Padded(msgspec.Struct, frozen=True, tag=True):
    """A message of a given size."""

    padding: bytes


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The placed actor's answer about itself."""

    number: int
    text: str = ""


class Do(msgspec.Struct, frozen=True, tag=True):
    """An action for the placed actor's handler; see `PlacedActor._do`."""

    action: str
    number: int = 0
    text: str = ""
    reply_to: Recipient[Answer] | None = None


class Inner(msgspec.Struct, frozen=True):
    """A part of a message."""

    addresses: tuple[Recipient[Answer], ...]


class Greet(msgspec.Struct, frozen=True, tag=True):
    """Send an `Answer` to all of these addresses."""

    addresses: tuple[Recipient[Answer], ...]
    inner: Inner


class Carry(msgspec.Struct, frozen=True, tag=True):
    """Send `to` a note, or forward this message to the next address of the way."""

    to: Ref[Note]
    way: tuple[Ref[Carry], ...]
    number: int


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Hold this address until `Do("drop")`."""

    address: Recipient[Answer]


Protocol = Note | Urgent | Padded | Do | Greet | Carry | Hold | Terminated
Received = Note | Urgent | Padded | Answer | Carry | Terminated
SINK: Role[Received] = Role("sink", Received, 100_000)
PLACED: Role[Protocol] = Role("placed", Protocol, 100_000, urgent=(Urgent,))
OTHER: Role[Protocol] = Role("other", Protocol, 100_000, urgent=(Urgent,))
CHILD: Role[Protocol] = Role("child", Protocol, 100)

_BY_NAME = {role.name: role for role in (PLACED, OTHER, CHILD)}

CROWDED: Role[Note] = Role("crowded", Note, 10)
"""Role of an actor with a small mailbox, which it does not read."""


class PlacedActor(Actor[Protocol]):
    """Forwards notes to the sink, and runs the actions of `Do`."""

    def __init__(self, context: Context[Protocol]) -> None:
        self._context = context
        self._sink = context.find(SINK)
        self._held: Recipient[Answer] | None = None

    def handle(self, message: Protocol) -> None:
        match message:
            case Note() | Urgent() | Padded() | Terminated():
                self._sink.tell(message)
            case Do(action, number, text, reply_to):
                answer = self._do(action, number, text)
                if reply_to is not None:
                    reply_to.tell(answer)
            case Greet(addresses, inner):
                for number, address in enumerate(addresses + inner.addresses):
                    address.tell(Answer(number, "hello"))
            case Carry(to, (), number):
                to.tell(Note(number))
            case Carry(to, (following, *way), number):
                following.tell(Carry(to, tuple(way), number + 1))
            case Hold(address):
                self._held = address

    def stopped(self) -> None:
        self._sink.tell(Answer(0, "stopped"))

    def _do(self, action: str, number: int, text: str) -> Answer:  # noqa: PLR0912  # a list of actions
        context = self._context
        match action:
            case "raise":
                raise ValueError(text)
            case "flood":
                for each in range(number):
                    self._sink.tell(Note(each))
            case "flood self":
                for each in range(number):
                    context.ref.tell(Note(each))
            case "crowd":
                for each in range(number):
                    context.find(CROWDED).tell(Note(each))
            case "drop":
                self._held = None
            case "answer held":
                assert self._held is not None
                self._held.tell(Answer(number))
            case "hold own":
                context.find(OTHER).tell(Carry(context.ref, (), number))
            case "later":
                context.after(0.0, Note(number))
            case "work":
                context.worker("arithmetic").submit(lambda: 2 * number, Note, lambda _error: Note(-1))
            case "chance":
                return Answer(0, repr(context.chance.random()))
            case "clock":
                return Answer(int(0 <= time.monotonic() - context.clock.now() < 60))
            case "watch":
                context.watch(OTHER)
            case "dismiss":
                context.dismiss(_BY_NAME[text], drop=number > 0)
            case "kill":
                context.kill(_BY_NAME[text], "no longer wanted")
            case "find":
                return Answer(0, _error_of(lambda: context.find(Role(text, Note, 1))))
            case "spawn":
                child = context.spawn(
                    ActorSpec(CHILD, build_placed, placement=InProcess()) if text else ActorSpec(CHILD, build_placed)
                )
                self._sink.tell(Answer(0, repr(child)))
                child.tell(Note(number))
            case "spawn and tell":
                context.spawn(ActorSpec(CHILD, build_placed)).tell(Do(text, text="child"))
            case "spawn that it dismisses":
                context.spawn(ActorSpec(CHILD, build_placed)).tell(Do("dismiss", number, text))
            case "dismiss the child":
                context.dismiss(CHILD)
            case "spawn and show":
                self._sink.tell(Carry(context.spawn(ActorSpec(CHILD, build_placed)), (), number))
            case "send":
                return Answer(0, _error_of(lambda: self._sink.tell(_ODD[text])))
            case _:
                return _do_to_itself(action, number, text)
        return Answer(number)


_ODD: dict[str, Any] = {
    "unknown": Do("nothing"),
    "wrong field": Note("three"),  # type: ignore[arg-type]  # on purpose
    "unencodable": Note(object()),  # type: ignore[arg-type]
    "large": Padded(bytes(10_000)),
}


def _error_of(action: object) -> str:
    try:
        action()  # type: ignore[operator]
    except (KernelError, KeyError) as error:
        return type(error).__name__
    return ""


def _do_to_itself(action: str, number: int, text: str) -> Answer:  # noqa: PLR0912  # a list of actions
    """Run an action on the actor's thread or process."""
    match action:
        case "who":
            return Answer(os.getpid(), threading.current_thread().name)
        case "exit":
            sys.exit(number)
        case "exit at once":
            os._exit(number)
        case "signal":
            os.kill(os.getpid(), number)
            signal.pause()
        case "abort":
            os.abort()
        case "spin":
            Path(text).write_text(str(os.getpid()))
            while True:
                pass
        case "hang":
            Path(text).write_text(str(os.getpid()))
            ctypes.PyDLL(None).pause()  # holds the interpreter's lock
        case "gate":
            through(text)
        case "print at exit":
            print(text)  # noqa: T201  # buffered where the output is not a terminal
        case "descriptors":
            return Answer(0, "\n".join(f"{name}={target}" for name, target in descriptors().items()))
        case "inheritable":
            return Answer(sum(os.get_inheritable(int(each)) for each in descriptors() if int(each) > 2))
        case "environment":
            return Answer(0, os.environ.get(text, ""))
        case "surrogates":
            raise ValueError("name\udc80" * number)
        case "garbage":
            _write_to_parent(bytes.fromhex(text))
        case "leave a descendant":
            if os.fork() == 0:
                signal.pause()
        case _:
            raise AssertionError(action)
    return Answer(number)


def descriptors() -> dict[str, str]:
    """Return this process's open files by descriptor."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        try:
            found[path.name] = str(path.readlink())
        except FileNotFoundError:
            continue  # the descriptor of this listing
    return found


def _write_to_parent(data: bytes) -> None:
    for name in (name for name, target in descriptors().items() if target.startswith("socket")):
        with socket.socket(fileno=os.dup(int(name))) as connection:
            maker = int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)
            if maker == os.getppid():
                connection.sendall(data)


def through(path: str) -> None:
    """Wait at a named pipe until its other end has been opened and closed."""
    Path(path).read_bytes()


def build_placed(context: Context[Protocol]) -> PlacedActor:
    """Build a placed actor."""
    return PlacedActor(context)


def broken(context: Context[Protocol]) -> PlacedActor:
    """Raise, as a build that fails."""
    raise ValueError("cannot be built")


def breaking(context: Context[Protocol], *, path: str) -> PlacedActor:
    """Build a placed actor the first time, and raise afterwards."""
    try:
        Path(path).touch(exist_ok=False)
    except FileExistsError:
        raise ValueError("built once already") from None
    return PlacedActor(context)


def gated(context: Context[Protocol], *, path: str) -> PlacedActor:
    """Wait at a named pipe, then build a placed actor."""
    through(path)
    return PlacedActor(context)


def dying(context: Context[Protocol], *, action: str, number: int = 0) -> PlacedActor:
    """Run an action that may end the process, then build a placed actor."""
    _do_to_itself(action, number, "")
    return PlacedActor(context)


def counting(context: Context[Protocol], *, path: str) -> PlacedActor:
    """Build a placed actor that reports the number of its life."""
    with Path(path).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(".")
        life = file.tell()
    context.find(SINK).tell(Answer(life, "born"))
    return PlacedActor(context)
