"""One connection between a system and an actor that lives elsewhere: frames of msgpack over a socket, both ends alike.

An address in a message crosses as an id: an actor of the cast by its name, any other by a number under which the side
that has it keeps it until the other side has dropped it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Final, Protocol, TypeAlias, cast

import msgspec

from cuelight.kernel.codec import AddressId, Codec, Name, type_name
from cuelight.kernel.errors import MessageTooLarge, NotAccepted, NotSendable
from cuelight.kernel.ref import Address, Ref
from cuelight.kernel.supervision import Terminated

WINDOW: Final = 32
"""Messages handed over to where an actor lives and not yet begun there, at most. As many may be lost with a process."""

_LENGTH_BYTES: Final = 4
_EXTRA_BYTES: Final = 1024 * 1024
"""What a frame may have beside a message of the largest size."""


class Deliver(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """To the actor: a message from its mailbox."""

    sender: str
    name: Name
    body: bytes


class Told(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A message to an actor of the cast, by name, or to an address that the receiving side keeps, by number."""

    to: AddressId
    name: Name
    body: bytes


class Forget(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The address you keep under this number has been dropped here."""

    id: int


class Begun(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """From the actor: so many of the messages that were handed over, by lane, have been begun since the last time."""

    urgent: int
    ordinary: int


class Watch(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """From the actor: it watches this one."""

    name: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """From the actor: it has been built."""


class Crashed(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """From the actor: it raised, and its life is over."""

    message_type: str
    error: str
    trace: str


class Slow(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """From the actor: a handler took that long."""

    message_type: str
    seconds: float


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """To the actor: stop, when all that was handed over is handled (with `drop`, at once)."""

    drop: bool


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """From the actor: it has stopped in order, and its life is over."""


Frame: TypeAlias = Deliver | Told | Forget | Begun | Watch | Ready | Crashed | Slow | Stop | Stopped

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def framed(payload: bytes) -> bytes:
    """The payload behind its length."""
    return len(payload).to_bytes(_LENGTH_BYTES, "big") + payload


def encoded(frame: Frame) -> bytes:
    """A frame as it goes over the socket."""
    return framed(_encoder.encode(frame))


@dataclass(frozen=True, slots=True)
class Packed:
    """A message ready to cross, with the addresses in it that this side must keep once it has crossed."""

    message: object
    name: Name
    body: bytes
    kept: tuple[tuple[int, Address[object]], ...]


class Packer:
    """Makes messages ready to cross. One per actor that lives elsewhere, over all its lives.

    `names` are the actors known by name at the other end; any other address crosses as a number.
    """

    def __init__(
        self,
        types: dict[Name, type],
        names: set[str],
        find: Callable[[str], Address[object] | None],
        bytes_max: int,
        first_id: int = 0,
    ) -> None:
        self.types = types
        self.names = names
        self.find = find
        self.bytes_max = bytes_max
        self._ids = count(first_id)
        self._kept: list[tuple[int, Address[object]]] = []
        self._codec = Codec(types, self._to_id, lambda _id, _takes: _nobody)

    def pack(self, message: object) -> Packed:
        """Raises NotSendable, MessageTooLarge."""
        self._kept = []
        name = type_name(type(message))
        body = self._codec.encode(message)
        if len(body) > self.bytes_max and not isinstance(message, Terminated):
            raise MessageTooLarge(f"{name} has {len(body)} bytes; {self.bytes_max} may cross")
        self._codec.decode(name, body)  # what the other side could not read is the sender's mistake
        return Packed(message, name, body, tuple(self._kept))

    def _to_id(self, address: Address[object]) -> AddressId:
        if isinstance(address, Remote) and address.packer is self:
            return -1 - address.id
        if isinstance(address, Ref) and address.name in self.names and self.find(address.name) is address:
            return address.name
        number = next(self._ids)
        self._kept.append((number, address))
        return number


class Remote(Ref[object]):
    """An address that the other side keeps for as long as this is alive."""

    __slots__ = ("_loop", "_wire", "id", "packer")

    def __init__(self, wire: Wire, number: int, takes: tuple[type, ...]) -> None:
        super().__init__(f"~{number}", lambda message: wire.tell(number, takes, message))
        self._wire = wire
        self._loop = asyncio.get_running_loop()
        self.packer = wire.packer
        self.id = number

    def __del__(self) -> None:
        with suppress(RuntimeError):  # the loop is closed; and whatever thread the collector runs on, it is not ours
            self._loop.call_soon_threadsafe(self._wire.send, Forget(self.id))


_nobody: Final = Ref[object]("nobody", lambda _message: None)
"""An address that is no longer kept."""


class Peer(Protocol):
    """Who uses a wire."""

    def heard(self, frame: Frame, /) -> None:
        """A frame that is not about addresses."""

    def told(self, address: Address[object], message: object, /) -> None:
        """Something for an address on this side."""

    def failed(self, message_type: str, error: Exception, /) -> None:
        """What the other side said could not be understood, or not be handed on."""

    def lost(self) -> None:
        """The other side is gone."""


class Wire(asyncio.Protocol):
    """One end. Sends and receives frames, and keeps the addresses that the other side holds."""

    def __init__(self, packer: Packer, peer: Peer) -> None:
        self.packer = packer
        self._peer = peer
        self._codec = Codec(packer.types, packer._to_id, self._to_address)
        self._kept: dict[int, Address[object]] = {}
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._has_finished = False
        self.hang_up: Callable[[], None] = lambda: None
        """Called when the other end has said its last."""
        self.over = asyncio.Event()
        """The connection is no more."""

    def send(self, frame: Frame) -> None:
        """Send it, unless the connection is over."""
        self.write(encoded(frame))

    def write(self, data: bytes) -> None:
        """Frames, or what the other end reads before it speaks in frames."""
        if self._transport is not None and not self._has_finished and not self._transport.is_closing():
            self._transport.write(data)

    def deliver(self, packed: Packed, sender: str) -> None:
        """Hand a message over to the actor at the other end."""
        self._kept.update(packed.kept)
        self.send(Deliver(sender, packed.name, packed.body))

    def tell(self, to: AddressId, takes: tuple[type, ...], message: object) -> None:
        """Tell an address at the other end. Raises NotAccepted, NotSendable."""
        if type(message) not in takes and object not in takes:
            raise NotAccepted(f"{to} does not accept {type(message).__qualname__}")
        packed = self.packer.pack(message)
        self._kept.update(packed.kept)
        self.send(Told(to, packed.name, packed.body))

    def decode(self, name: Name, body: bytes) -> object:
        """A message that has crossed. Raises NotAccepted, NotSendable."""
        return self._codec.decode(name, body)

    async def finish(self) -> None:
        """Send what is still to be sent, and wait until the other end has closed: closing first would cut it off."""
        self._has_finished = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()
        await self.over.wait()

    def close(self) -> None:
        """Send what is still to be sent, and no more."""
        if self._transport is None:
            self.over.set()
        else:
            self._transport.close()

    def _to_address(self, address: AddressId, takes: tuple[type, ...]) -> Address[object]:
        if isinstance(address, str):
            return self.packer.find(address) or _nobody
        if address < 0:
            return self._kept.get(-1 - address, _nobody)
        return Remote(self, address, takes)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one, and does not inherit from it

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._buffer += data
        begin = 0
        while len(self._buffer) - begin >= _LENGTH_BYTES and not self._transport.is_closing():
            body = begin + _LENGTH_BYTES
            end = body + int.from_bytes(self._buffer[begin:body], "big")
            if end - body > self.packer.bytes_max + _EXTRA_BYTES:
                self._peer.failed("", NotSendable("what came from the other side is no frame"))
                break
            if end > len(self._buffer):
                break
            self._receive(bytes(memoryview(self._buffer)[body:end]))
            begin = end
        del self._buffer[:begin]

    def _receive(self, data: bytes) -> None:
        name = ""
        try:
            match _decoder.decode(data):
                case Told(to, name, body):
                    address = self.packer.find(to) if isinstance(to, str) else self._kept.get(to)
                    self._peer.told(address or _nobody, self.decode(name, body))
                case Forget(number):
                    self._kept.pop(number, None)
                case frame:
                    self._peer.heard(frame)
        except Exception as error:  # such as of whoever was told; at home it would have gone up to the sender
            self._peer.failed(name, error)

    def eof_received(self) -> None:
        self.hang_up()

    def connection_lost(self, _error: Exception | None) -> None:
        self._kept.clear()
        self.over.set()
        self._peer.lost()
