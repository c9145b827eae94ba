"""How the plain parts of intake say no, and in which words.

Never seen outside the engine: the client library raises its own errors.
"""

from __future__ import annotations

from typing import Never

from cuelight.messages.request import Refusal


class Refused(Exception):
    """This request cannot be served; `reason` is a sentence for whoever sent it, who may try again after a while."""

    def __init__(self, refusal: Refusal, reason: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.refusal = refusal
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class UnknownOption(Exception):
    """No option of a request has this name."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f"there is no option {name!r}; the options are {', '.join(known)}")
        self.name = name


def kind(value: object) -> str:
    """What a value of the wrong type is called in a reason."""
    return "None" if value is None else f"of type {type(value).__name__}"


def number(value: int) -> str:
    """An integer as a reason shows it: Python refuses to print the largest ones."""
    return str(value) if value.bit_length() <= 128 else f"a number of {value.bit_length()} bits"


def wrong_type(name: str, expected: str, value: object) -> Never:
    """Raise `Refused` for an option that is not of the `expected` type."""
    raise Refused(Refusal.WRONG_TYPE, f"{name} must be {expected}, and it is {kind(value)}")
