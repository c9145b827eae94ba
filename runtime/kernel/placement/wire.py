"""The connection between a system and an actor on a thread or in a process: msgpack frames over a socket.

Both ends are alike. An address in a message crosses as an id: an actor of the cast by its name, any other address by a
number. The side that has the address keeps it under that number until the other side has dropped it.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Final, NamedTuple, Never, Protocol, cast

import msgspec

from cuelight.kernel.actor import Role
from cuelight.kernel.codec import AddressId, Codec, Name, reachable, type_name
from cuelight.kernel.errors import MessageTooLarge, NotAccepted, NotSendable
from cuelight.kernel.ref import Recipient, Ref
from cuelight.kernel.supervision import Terminated

WINDOW: Final = 32
"""Messages sent to a placed actor and not yet begun there, at most. As many may be lost with a process."""

_LENGTH_BYTES: Final = 4
_EXTRA_BYTES: Final = 1024 * 1024
"""Bytes of a frame beside a message of the largest size, at most."""


def encode_frame(what: str, *arguments: object) -> bytes:
    """Return the bytes of a frame: the length of the rest, the frame's kind `what`, and its arguments.

    "said" carries a message to an actor, by name, or to another address; at the actor's side, a name other than the
    actor's is that of a watched actor. "forget" has the other end drop the address of this number. Any other kind calls
    the method `on_…` of that name of the other end's `WireHandler`.
    """
    data = msgspec.msgpack.encode((what, *arguments))
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


class EncodedMessage(NamedTuple):
    """An encoded message; in its body each address is an index into `addresses`."""

    message: object
    name: Name
    body: bytes
    addresses: list[Recipient[object]]


class MessageEncoder:
    """Encodes messages between the actors of a cast, for any wire, and decodes them."""

    def __init__(self, cast: Sequence[Role[Never]], bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._addresses: list[Recipient[object]] = []
        """The addresses in the message that is being encoded."""
        self._find: Callable[[int, tuple[type, ...]], Recipient[object]] = lambda index, _: self._addresses[index]
        """Returns the addresses in the message that is being decoded."""
        self.names = {role.name for role in cast}
        """The actors known by name at both ends."""
        types: dict[Name, type] = {type_name(Terminated): Terminated}
        for role in cast:
            with suppress(NotSendable):  # no encoded message can reach this role then
                types.update({**reachable([role.accepts]), **types})
        self._codec = Codec(types, self._to_index, lambda index, takes: self._find(int(index), takes))

    def encode(self, message: object) -> EncodedMessage:
        """Encode a message, and check that it can be decoded. Raises NotSendable, MessageTooLarge."""
        self._addresses = []
        name = type_name(type(message))
        body = self._codec.encode(message)
        if len(body) > self.bytes_max and not isinstance(message, Terminated):
            raise MessageTooLarge(f"{name} has {len(body)} bytes; {self.bytes_max} may cross")
        # A message that the other side cannot decode is the sender's mistake.
        self.decode(name, body, lambda index, _: self._addresses[index])
        return EncodedMessage(message, name, body, self._addresses)

    def decode(self, name: Name, body: bytes, find: Callable[[int, tuple[type, ...]], Recipient[object]]) -> object:
        """Return the decoded message; `find` returns the address of each index in it. Raises NotSendable."""
        self._find = find
        return self._codec.decode(name, body)

    def _to_index(self, address: Recipient[object]) -> int:
        self._addresses.append(address)
        return len(self._addresses) - 1


_DEAD_LETTERS: Final = Ref[object]("dead letters", lambda _message: None)
"""Stands for an address that is no longer kept: drops every message."""


class RemoteRef(Ref[object]):
    """An address at the other side, which keeps it as long as this object lives."""

    __slots__ = ("_loop", "id", "wire")

    def __init__(self, wire: "Wire", number: int, takes: tuple[type, ...]) -> None:
        super().__init__(f"~{number}", partial(wire.tell, -1 - number, takes))
        self._loop = asyncio.get_running_loop()
        self.wire = wire
        self.id = number

    def __del__(self) -> None:
        with suppress(RuntimeError):  # the loop is closed; the collector may run on any thread
            self._loop.call_soon_threadsafe(self.wire.call, "forget", self.id)


class WireHandler(Protocol):
    """The user of one end of a wire; also has a method `on_…` for each call from the other end."""

    def on_message(self, to: AddressId, sender: str, message: object, /) -> None:
        """Deliver a message to an address on this side."""

    def on_error(self, message_type: str, error: Exception, /) -> None:
        """Handle the error of a frame that could not be decoded or whose handling raised."""

    def on_disconnect(self) -> None:
        """Handle the end of the connection."""


class Wire(asyncio.Protocol):
    """One end of a connection: sends and receives frames, and keeps the addresses that the other side holds."""

    def __init__(
        self, encoder: MessageEncoder, find: Callable[[str], Recipient[object] | None], handler: WireHandler
    ) -> None:
        self.encoder = encoder
        self._find = find
        self._handler = handler
        self._numbers = count()
        self._exported: dict[int, Recipient[object]] = {}
        self._buffer = bytearray()
        self._connection: socket.socket | None = None
        self._transport: asyncio.Transport | None = None
        self.over = asyncio.Event()
        """Set when the connection has ended."""

    async def connect(self, connection: socket.socket) -> None:
        """Use a socket, one of a pair, as this end of the connection."""
        self._connection = connection
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connection)

    def write(self, data: bytes) -> None:
        """Send bytes: frames, or the preamble of a child process. Ignored once the connection has ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def call(self, what: str, *arguments: object) -> None:
        """Send a frame of kind `what`, which calls `on_…` of that name at the other end's handler."""
        self.write(encode_frame(what, *arguments))

    def send(self, to: AddressId, sender: str, encoded: EncodedMessage) -> None:
        """Send an encoded message to an address at the other end. Ignored once the connection has ended."""
        if not self.over.is_set():
            self.call("said", to, sender, encoded.name, encoded.body, [self._id(each) for each in encoded.addresses])

    def tell(self, to: AddressId, takes: tuple[type, ...], message: object) -> None:
        """Encode a message and send it to an address at the other end. Raises NotAccepted, NotSendable."""
        if type(message) not in takes and object not in takes:
            who = to if isinstance(to, str) else "this address"
            raise NotAccepted(f"{who} does not accept {type(message).__qualname__}")
        self.send(to, "", self.encoder.encode(message))

    def address(self, key: AddressId, takes: tuple[type, ...] = ()) -> Recipient[object]:
        """Return the address of an id from the other side."""
        if isinstance(key, str):
            return self._find(key) or _DEAD_LETTERS
        return RemoteRef(self, key, takes) if key >= 0 else self._exported.get(-1 - key, _DEAD_LETTERS)

    def _id(self, address: Recipient[object]) -> AddressId:
        """Return a name, the number under which this side keeps the address, or `-1 - n` for the other side's `n`."""
        if isinstance(address, RemoteRef) and address.wire is self:
            return -1 - address.id
        if isinstance(address, Ref) and address.name in self.encoder.names and self._find(address.name) is address:
            return address.name
        number = next(self._numbers)
        self._exported[number] = address
        return number

    async def finish(self) -> None:
        """Send all pending frames, and wait until the other end has closed: closing first would discard frames."""
        transport, self._transport = self._transport, None
        if transport is not None and not transport.is_closing():
            transport.write_eof()
        await self.over.wait()

    def close(self) -> None:
        """Send the pending frames, then close the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from it

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= _LENGTH_BYTES and self._transport is not None and not self._transport.is_closing():
            end = _LENGTH_BYTES + int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
            if end > self.encoder.bytes_max + _EXTRA_BYTES:
                self._handler.on_error("", NotSendable(f"the other side sent an invalid frame, of {end} bytes"))
                return
            if end > len(self._buffer):
                return
            frame = bytes(memoryview(self._buffer)[_LENGTH_BYTES:end])
            del self._buffer[:end]
            self._receive(frame)

    def _receive(self, data: bytes) -> None:
        name = ""
        try:
            name, *arguments = msgspec.msgpack.decode(data)
            if name == "said":
                to, sender, name, body, ids = arguments
                message = self.encoder.decode(name, body, lambda index, takes: self.address(ids[index], takes))
                self._handler.on_message(to, sender, message)
            elif name == "forget":
                self._exported.pop(arguments[0], None)
            else:
                getattr(self._handler, f"on_{name}")(*arguments)
        except Exception as error:  # such as that of a full mailbox, which in the loop would reach the sender
            self._handler.on_error(name, error)

    def eof_received(self) -> None:
        # Shut the socket down, since copies in forked processes keep the connection open for the other end.
        assert self._connection is not None, "data was received over a connection"
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def connection_lost(self, _error: Exception | None) -> None:
        self._exported.clear()
        self.over.set()
        self._handler.on_disconnect()
