"""Encoded messages of a simulation: histories as bytes, and copies for actors on threads and in processes."""

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
    """Ids of addresses: the name of an actor of the cast, or a number for any other address, in order of appearance."""

    def __init__(self, find: Callable[[str], Ref[object] | None]) -> None:
        self._find = find
        self._numbers: dict[int, int] = {}
        self._met: list[Recipient[object]] = []

    def of(self, address: Recipient[object]) -> AddressId:
        """Return the id of an address, which is fixed for the life of this object."""
        if isinstance(address, Ref) and self._find(address.name) is address:
            return address.name
        if isinstance(address, _CopyingRecipient):
            return address.number
        number = self._numbers.setdefault(id(address), len(self._met))
        if number == len(self._met):
            self._met.append(address)  # kept alive, so that no other address can reuse its `id`
        return number

    def address(self, address_id: AddressId) -> Recipient[object]:
        """Return the address of an id."""
        if isinstance(address_id, int):
            return self._met[address_id]
        ref = self._find(address_id)
        assert ref is not None, f"no actor {address_id!r} is in the cast"
        return ref


_MEMORY_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""The memory address in the default repr of an object, and in error texts that contain such a repr."""


class EventLog:
    """Events as bytes. Values that msgpack cannot represent are encoded as their type's name; memory addresses in
    texts are left out.
    """

    def __init__(self, ids: AddressIds) -> None:
        def encode_other(value: object) -> AddressId:
            return ids.of(value) if isinstance(value, Recipient) else type_name(type(value))

        # Sorted, since the order of sets differs from run to run.
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
        except Exception:  # numbers that are too large, keys without an order: errors of several types
            self._append(head)

    def _append(self, value: object) -> None:
        data = self._encoder.encode(value)
        if b" at 0x" in data:
            data = self._encoder.encode(_without_memory_addresses(msgspec.msgpack.decode(data)))
        self._data.append(data)

    def data(self) -> bytes:
        """Return all events so far."""
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
    """Copies messages to and from actors on threads and in processes, as the codec would."""

    def __init__(self, cast: Sequence[ActorSpec[object]], ids: AddressIds, actor_clock: ActorClock) -> None:
        """Raises NotSendable, as `reachable`."""
        self._codec = Codec(_types(tuple([part.role.accepts for part in cast])), ids.of, self._to_address)
        self._ids = ids
        self._actor_clock = actor_clock
        self._bytes_max = {
            part.role.name: part.placement.message_bytes_max for part in cast if not isinstance(part.placement, InLoop)
        }

    def copy_to(self, receiver: str, message: object) -> object:
        """Return a message of the acting actor as it arrives at `receiver`. Raises NotSendable, MessageTooLarge."""
        if self._actor_clock.acting == receiver:
            return message
        for place in (self._actor_clock.acting, receiver):
            if (bytes_max := self._bytes_max.get(place)) is not None:
                message = self._copy(message, bytes_max)
        return message

    def copy_out(self, takes: tuple[type, ...], message: object) -> object:
        """Return a message of the acting actor as it arrives at an address outside the actors.

        Raises NotAccepted, NotSendable, MessageTooLarge.
        """
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
    """An address outside the actors in a copied message: sends copies."""

    __slots__ = ("_address", "_copier", "_takes", "number")

    def __init__(self, copier: MessageCopier, number: int, address: Recipient[object], takes: tuple[type, ...]) -> None:
        self._copier = copier
        self.number = number
        self._address = address
        self._takes = takes

    def tell(self, message: object, /) -> None:
        self._address.tell(self._copier.copy_out(self._takes, message))
