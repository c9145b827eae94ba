"""Actors that tests place on threads and in processes, with their messages: a module that those processes import."""

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
    """To the player, which passes it on to the sink."""

    number: int


class Urgent(msgspec.Struct, frozen=True, tag=True):
    """The same, overtaking."""

    number: int


class Padded(msgspec.Struct, frozen=True, tag=True):
    """A message of some size."""

    padding: bytes


class Answer(msgspec.Struct, frozen=True, tag=True):
    """What the player says of itself."""

    number: int
    text: str = ""


class Do(msgspec.Struct, frozen=True, tag=True):
    """Something that the player is to do while it handles this; see `Player._do`."""

    action: str
    number: int = 0
    text: str = ""
    reply_to: Recipient[Answer] | None = None


class Inner(msgspec.Struct, frozen=True):
    """A part of a message."""

    addresses: tuple[Recipient[Answer], ...]


class Greet(msgspec.Struct, frozen=True, tag=True):
    """Tell all of these addresses who you are."""

    addresses: tuple[Recipient[Answer], ...]
    inner: Inner


class Carry(msgspec.Struct, frozen=True, tag=True):
    """Tell `to` a note, or hand this on to the next of the way, which does the same."""

    to: Ref[Note]
    way: tuple[Ref[Carry], ...]
    number: int


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Keep this address until told to `Do("drop")`; told by someone who is kept."""

    address: Recipient[Answer]


Protocol = Note | Urgent | Padded | Do | Greet | Carry | Hold | Terminated
Heard = Note | Urgent | Padded | Answer | Carry | Terminated
SINK: Role[Heard] = Role("sink", Heard, 100_000)
PLAYER: Role[Protocol] = Role("player", Protocol, 100_000, urgent=(Urgent,))
OTHER: Role[Protocol] = Role("other", Protocol, 100_000, urgent=(Urgent,))
CHILD: Role[Protocol] = Role("child", Protocol, 100)

_BY_NAME = {role.name: role for role in (PLAYER, OTHER, CHILD)}

CROWDED: Role[Note] = Role("crowded", Note, 10)
"""Somebody with a small mailbox, who does not look into it."""


class Player(Actor[Protocol]):
    """Passes notes on to the sink, and does what it is told to do."""

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

    def _do(self, action: str, number: int, text: str) -> Answer:  # noqa: PLR0912  # a list of tricks
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
                    ActorSpec(CHILD, player, placement=InProcess()) if text else ActorSpec(CHILD, player)
                )
                self._sink.tell(Answer(0, repr(child)))
                child.tell(Note(number))
            case "spawn and tell":
                context.spawn(ActorSpec(CHILD, player)).tell(Do(text, text="child"))
            case "spawn that it dismisses":
                context.spawn(ActorSpec(CHILD, player)).tell(Do("dismiss", number, text))
            case "dismiss the child":
                context.dismiss(CHILD)
            case "spawn and show":
                self._sink.tell(Carry(context.spawn(ActorSpec(CHILD, player)), (), number))
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


def _do_to_itself(action: str, number: int, text: str) -> Answer:  # noqa: PLR0912  # a list of tricks
    """What concerns the thread or process that the actor lives in."""
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
            ctypes.PyDLL(None).pause()  # which keeps the interpreter's lock
        case "gate":
            through(text)
        case "print at exit":
            print(text)  # noqa: T201  # buffered, where the output is no terminal
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
    """This process's open files."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        try:
            found[path.name] = str(path.readlink())
        except FileNotFoundError:
            continue  # the one that lists them
    return found


def _write_to_parent(data: bytes) -> None:
    for name in (name for name, target in descriptors().items() if target.startswith("socket")):
        with socket.socket(fileno=os.dup(int(name))) as connection:
            maker = int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)
            if maker == os.getppid():
                connection.sendall(data)


def through(path: str) -> None:
    """Wait at a named pipe until somebody has opened and closed its other end."""
    Path(path).read_bytes()


def player(context: Context[Protocol]) -> Player:
    """The usual player."""
    return Player(context)


def broken(context: Context[Protocol]) -> Player:
    """One that cannot be built."""
    raise ValueError("no such player")


def breaking(context: Context[Protocol], *, path: str) -> Player:
    """One that can be built once."""
    try:
        Path(path).touch(exist_ok=False)
    except FileExistsError:
        raise ValueError("there has been one") from None
    return Player(context)


def gated(context: Context[Protocol], *, path: str) -> Player:
    """One whose constructor waits."""
    through(path)
    return Player(context)


def dying(context: Context[Protocol], *, action: str, number: int = 0) -> Player:
    """One whose constructor ends the process."""
    _do_to_itself(action, number, "")
    return Player(context)


def counting(context: Context[Protocol], *, path: str) -> Player:
    """One that says in which life it is."""
    with Path(path).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(".")
        life = file.tell()
    context.find(SINK).tell(Answer(life, "born"))
    return Player(context)
