"""What a simulation makes of messages: bytes to compare, and copies of what crosses to where another actor lives."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec

from cuelight.kernel.actor import ActorSpec, InLoop
from cuelight.kernel.clock import ActorClock
from cuelight.kernel.codec import AddressId, Codec, Name, reachable, type_name
from cuelight.kernel.errors import MessageTooLarge, NotAccepted
from cuelight.kernel.events import Delivered, Event
from cuelight.kernel.ref import Recipient, Ref


class AddressIds:
    """Addresses as ids: an actor of the cast is its name, any other address a number, in the order of being met."""

    def __init__(self, find: Callable[[str], Ref[object] | None]) -> None:
        self._find = find
        self._numbers: dict[int, int] = {}
        self._met: list[Recipient[object]] = []

    def of(self, address: Recipient[object]) -> AddressId:
        """The id of this address, for as long as this object lives."""
        if isinstance(address, Ref) and self._find(address.name) is address:
            return address.name
        if isinstance(address, _CopyingRecipient):
            return address.number
        number = self._numbers.setdefault(id(address), len(self._met))
        if number == len(self._met):
            self._met.append(address)  # kept, so that no other address can have its place in memory
        return number

    def address(self, address_id: AddressId) -> Recipient[object]:
        """The address of this id."""
        if isinstance(address_id, int):
            return self._met[address_id]
        ref = self._find(address_id)
        assert ref is not None, "whoever was encoded by name is in the cast"
        return ref


_MEMORY_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Where in memory something is, as the repr of many an object has it, and so the error that speaks of that object."""


class EventLog:
    """Events as bytes. What msgpack has no room for is there as its type's name, and places in memory are left out."""

    def __init__(self, ids: AddressIds) -> None:
        def encode_other(value: object) -> AddressId:
            return ids.of(value) if isinstance(value, Recipient) else type_name(type(value))

        # Sets in an order of their own, since theirs differs from run to run.
        self._encoder = msgspec.msgpack.Encoder(enc_hook=encode_other, order="deterministic")
        self._data: list[bytes] = []

    def add(self, event: Event) -> None:
        """Append one event."""
        if not isinstance(event, Delivered):
            self._append(event)
            return
        name = type_name(type(event.message))
        head = (event.seconds, event.sender, event.actor, name)
        try:
            self._append((*head, event.message))
        except Exception:  # numbers too large, keys without an order: each has its own way to refuse
            self._append(head)

    def _append(self, value: object) -> None:
        data = self._encoder.encode(value)
        if b" at 0x" in data:
            data = self._encoder.encode(_without_memory_addresses(msgspec.msgpack.decode(data)))
        self._data.append(data)

    def data(self) -> bytes:
        """All events so far."""
        return b"".join(self._data)


def _without_memory_addresses(value: object) -> object:
    match value:
        case str():
            return _MEMORY_ADDRESS.sub(" at 0x", value)
        case dict():
            return {_without_memory_addresses(key): _without_memory_addresses(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(map(_without_memory_addresses, value))
        case _:
            return value


class MessageCopier:
    """The way to and from actors that live elsewhere: messages arrive as copies, made by the codec."""

    def __init__(self, cast: Sequence[ActorSpec[object]], ids: AddressIds, actor_clock: ActorClock) -> None:
        """Raises NotSendable, as `reachable`."""
        self._codec = Codec(_types(tuple([part.role.accepts for part in cast])), ids.of, self._to_address)
        self._ids = ids
        self._actor_clock = actor_clock
        self._bytes_max = {
            part.role.name: part.placement.message_bytes_max for part in cast if not isinstance(part.placement, InLoop)
        }

    def copy_to(self, receiver: str, message: object) -> object:
        """The message from whoever acts, as it arrives. Raises NotSendable, MessageTooLarge."""
        if self._actor_clock.acting == receiver:
            return message
        for place in (self._actor_clock.acting, receiver):
            if (bytes_max := self._bytes_max.get(place)) is not None:
                message = self._copy(message, bytes_max)
        return message

    def copy_out(self, takes: tuple[type, ...], message: object) -> object:
        """The message as it arrives at an address of no actor. Raises NotAccepted, NotSendable, MessageTooLarge."""
        if self._actor_clock.acting not in self._bytes_max:
            return message
        if type(message) not in takes and object not in takes:
            raise NotAccepted(f"this address does not accept {type(message).__qualname__}")
        return self._copy(message, self._bytes_max[self._actor_clock.acting])

    def _copy(self, message: object, bytes_max: int) -> object:
        name = type_name(type(message))
        body = self._codec.encode(message)
        if len(body) > bytes_max:
            raise MessageTooLarge(f"{name} has {len(body)} bytes; {bytes_max} may cross")
        return self._codec.decode(name, body)

    def _to_address(self, address_id: AddressId, takes: tuple[type, ...]) -> Recipient[object]:
        address = self._ids.address(address_id)
        return _CopyingRecipient(self, address_id, address, takes) if isinstance(address_id, int) else address


@lru_cache(maxsize=64)
def _types(protocols: tuple[object, ...]) -> dict[Name, type]:
    return reachable(protocols)


class _CopyingRecipient:
    """An address of no actor, as whoever lives elsewhere has it."""

    __slots__ = ("_address", "_copier", "_takes", "number")

    def __init__(self, copier: MessageCopier, number: int, address: Recipient[object], takes: tuple[type, ...]) -> None:
        self._copier = copier
        self.number = number
        self._address = address
        self._takes = takes

    def tell(self, message: object, /) -> None:
        self._address.tell(self._copier.copy_out(self._takes, message))
