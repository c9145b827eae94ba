"""Messages as bytes: which types may cross, how they are found, and what cannot be read."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import pytest

from cuelight.kernel import NotAccepted, NotSendable, Recipient, Ref
from cuelight.kernel.codec import Codec, reachable, type_name

T = TypeVar("T")


class Piece(msgspec.Struct, frozen=True):
    """A part of an answer."""

    number: int


class Colour(enum.Enum):
    """A field's type that is nobody's message."""

    RED = "red"


class Said(msgspec.Struct, frozen=True, tag=True):
    """An answer that asks back."""

    reply_to: Recipient[Piece | None]


@dataclass(frozen=True)
class Envelope:
    """A part of a message, with an address in it."""

    address: Recipient[Said] | None
    colour: Colour = Colour.RED


class Question(msgspec.Struct, frozen=True, tag=True):
    """Addresses at every depth."""

    envelopes: dict[str, tuple[Envelope, ...]]
    plain: Ref[float]
    again: Question | None = None


class Many(msgspec.Struct, frozen=True):
    """Answered with several pieces."""

    reply_to: Recipient[tuple[Piece, ...]]


class Others(msgspec.Struct, frozen=True):
    """Answered with a tuple of something else."""

    reply_to: Recipient[tuple[int, ...]]


class Box(msgspec.Struct, Generic[T], frozen=True, tag=True):
    """A message of some type."""

    content: T


class Unresolved(msgspec.Struct, frozen=True):
    """Means nothing."""

    field: Nothing  # type: ignore[name-defined]  # noqa: F821


class Around(msgspec.Struct, frozen=True):
    """Means nothing, for what is in it."""

    inner: Unresolved


class Odd(msgspec.Struct, frozen=True):
    """Has a field that no codec knows."""

    call: Callable[[], int]


@dataclass(frozen=True)
class Even:
    """Checks itself."""

    number: int

    def __post_init__(self) -> None:
        assert self.number % 2 == 0


def codec(*protocols: object) -> tuple[Codec, dict[object, object]]:
    """A codec for these, and what its addresses are."""
    addresses: dict[object, object] = {}

    def to_id(address: Recipient[object]) -> int:
        addresses[len(addresses)] = address
        return len(addresses) - 1

    def to_address(number: str | int, takes: tuple[type, ...]) -> Recipient[object]:
        taken.append(takes)
        return addresses[number]  # type: ignore[return-value]

    taken: list[tuple[type, ...]] = []
    addresses["taken"] = taken
    return Codec(reachable(protocols), to_id, to_address), addresses


def test_the_types_of_all_that_can_be_told_are_found() -> None:
    found = reachable([Question | int])
    assert set(found.values()) == {Question, int, Said, Piece, type(None), float}
    assert found[type_name(Said)] is Said
    assert reachable([Many, Piece])["builtins:tuple"] == tuple[Piece, ...]
    assert reachable([Box[int]])[type_name(Box)] == Box[int]


def test_types_that_look_alike_are_refused() -> None:
    with pytest.raises(NotSendable, match="cannot be told apart"):
        reachable([Many, Others])


@pytest.mark.parametrize("kind", [Unresolved, Around])
def test_annotations_that_cannot_be_resolved_are_refused(kind: type) -> None:
    with pytest.raises(NotSendable, match=r"Unresolved cannot be resolved: name 'Nothing' is not defined"):
        reachable([kind])


def test_a_message_comes_back_with_its_addresses() -> None:
    there, addresses = codec(Question)
    answer, plain = Ref[Said]("answer", lambda _said: None), Ref[float]("plain", lambda _number: None)
    question = Question({"a": (Envelope(None), Envelope(answer))}, plain, Question({}, plain))
    name, body = type_name(Question), there.encode(question)
    assert there.decode(name, body) == question
    assert there.decode(name, body) == question  # by the decoder that is there now
    assert set(addresses["taken"]) == {(Said,), (float,)}  # type: ignore[call-overload]


def test_an_answer_keeps_the_types_within() -> None:
    there, _ = codec(Many, Box[Piece])
    assert there.decode("builtins:tuple", there.encode((Piece(1), Piece(2)))) == (Piece(1), Piece(2))
    assert there.decode(type_name(Box), there.encode(Box(Piece(3)))) == Box(Piece(3))
    with pytest.raises(NotSendable):
        there.decode(type_name(Box), there.encode(Box("no piece")))


def test_the_main_module_is_called_so_in_a_child_too() -> None:
    kind = type("Local", (), {"__module__": "__mp_main__", "__qualname__": "Local"})
    assert type_name(kind) == "__main__:Local"


def test_what_cannot_be_read_says_why() -> None:
    there, _ = codec(Odd, Even, Piece)
    with pytest.raises(NotAccepted, match="no protocol here has a message some:Thing"):
        there.decode("some:Thing", b"")
    with pytest.raises(NotSendable, match=r"Piece cannot be decoded"):
        there.decode(type_name(Piece), b"\xc1")
    with pytest.raises(NotSendable, match="Odd"):
        there.decode(type_name(Odd), there.encode({"call": 3}))
    with pytest.raises(NotSendable, match="Even"):
        there.decode(type_name(Even), there.encode({"number": 3}))
    with pytest.raises(NotSendable, match="int cannot cross: OverflowError"):
        there.encode(2**70)
    with pytest.raises(NotSendable, match="a object cannot be encoded"):
        there.encode(object())


def test_a_type_that_no_decoder_can_be_made_for() -> None:
    there = Codec({"odd": dict[int | str | Piece | Said | list[int] | tuple[int], int]}, lambda _: 0, lambda *_: 0)  # type: ignore[arg-type]
    with pytest.raises(NotSendable, match="odd cannot be decoded"):
        there.decode("odd", b"\x80")
