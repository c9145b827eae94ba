"""Messages as msgpack, each with the name of its type; addresses within them as ids.

The users of a codec decide which id an address gets, and where the bytes go.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import UnionType
from typing import TypeAlias, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from cuelight.kernel.errors import NotAccepted, NotSendable
from cuelight.kernel.ref import Recipient

AddressId: TypeAlias = str | int
AddressFinder: TypeAlias = Callable[[AddressId, tuple[type, ...]], Recipient[object]]
"""Returns the address of an id, which takes messages of these types. May raise LookupError."""

Name: TypeAlias = str
"""`module:qualified name` of a type."""


def type_name(kind: type) -> Name:
    """Return the name under which a type crosses. A program's main module is `__main__` in child processes, too."""
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
    return f"{module}:{kind.__qualname__}"


def reachable(protocols: Iterable[object]) -> dict[Name, type]:
    """Return the message types of these protocols, and those that the addresses within them take as answers.

    A generic type keeps its arguments, as the protocol has them.

    Raises NotSendable for a type whose annotations cannot be resolved, and for a generic type with different arguments
    in two places: the name that crosses leaves the arguments out.
    """
    found: dict[Name, type] = {}
    searched: set[type] = set()
    hints: list[object] = [Recipient[protocol] for protocol in protocols]  # type: ignore[valid-type]  # as in a message
    while hints:
        hint = hints.pop()
        if not _is_address(hint):
            hints.extend(get_args(hint))
            if isinstance(kind := get_origin(hint) or hint, type) and kind not in searched:
                searched.add(kind)
                try:
                    hints.extend(get_type_hints(kind).values())
                except Exception as error:  # evaluating an annotation can raise anything
                    raise NotSendable(f"the annotations of {type_name(kind)} cannot be resolved: {error}") from error
            continue
        for kind, spelled in (member for takes in get_args(hint) for member in members(takes)):
            if found.setdefault(type_name(kind), cast(type, spelled)) != spelled:
                raise NotSendable(f"{found[type_name(kind)]} and {spelled} cannot be told apart once they have crossed")
            hints.append(spelled)
    return found


def members(protocol: object) -> Iterator[tuple[type, object]]:
    """Yield the classes of a protocol, which is a union or a single type, each with its annotation there."""
    while hasattr(protocol, "__supertype__"):  # a NewType is another name for a class
        protocol = protocol.__supertype__
    if get_origin(protocol) in (UnionType, Union):
        for member in get_args(protocol):
            yield from members(member)
    elif isinstance(kind := get_origin(protocol) or protocol, type):
        yield kind, protocol


def _is_address(hint: object) -> bool:
    return hasattr(get_origin(hint) or hint, "tell")


class Codec:
    """Encodes messages of any type, and decodes those of the given types.

    `to_id` returns the id as which an address in a message crosses; `to_address` returns the address of an id, given
    the types that the address takes.
    """

    def __init__(
        self, types: dict[Name, type], to_id: Callable[[Recipient[object]], AddressId], to_address: AddressFinder
    ) -> None:
        self._types = types
        self._to_address = to_address
        self._decoders: dict[Name, msgspec.msgpack.Decoder[object]] = {}

        def encode_other(value: object) -> AddressId:
            if isinstance(value, Recipient):
                return to_id(value)
            raise NotSendable(f"a {type(value).__qualname__} cannot be encoded")

        self._encoder = msgspec.msgpack.Encoder(enc_hook=encode_other)

    def encode(self, message: object) -> bytes:
        """Return the message as bytes, without its type. Raises NotSendable."""
        try:
            return self._encoder.encode(message)
        except Exception as error:  # a value that msgpack cannot represent, or whose attributes raise
            reason = error if isinstance(error, NotSendable) else repr(error)
            raise NotSendable(f"{type(message).__qualname__} cannot cross: {reason}") from error

    def decode(self, name: Name, body: bytes) -> object:
        """Return the message of the type of this name.

        Raises:
            NotAccepted: the codec has no type of this name.
            NotSendable: the type cannot be decoded, or the bytes do not fit it.
        """
        if name not in self._types:
            raise NotAccepted(f"no protocol here has a message {name}")
        try:
            if name not in self._decoders:
                self._decoders[name] = msgspec.msgpack.Decoder(self._types[name], dec_hook=self._decode_other)
            return self._decoders[name].decode(body)
        except Exception as error:  # of msgspec, of annotations, or of the type's own checks
            raise NotSendable(f"{name} cannot be decoded: {error}") from error

    def _decode_other(self, hint: type, value: object) -> object:
        if _is_address(hint) and isinstance(value, str | int):
            with suppress(LookupError):  # the value is no id
                return self._to_address(value, tuple(kind for arg in get_args(hint) for kind, _ in members(arg)))
        raise NotSendable(f"{hint} cannot be decoded")
