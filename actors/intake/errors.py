"""The exceptions of intake's plain functions, and the wording of their reasons.

Internal to the engine: the client library translates them into its public errors.
"""

from __future__ import annotations

from typing import Never

from cuelight.messages.request import Refusal


class Refused(Exception):
    """A request cannot be served. `reason` is a sentence for the client.

    `retry_after_seconds` estimates when a retry may succeed; None where waiting does not help or the time is unknown.
    """

    def __init__(self, refusal: Refusal, reason: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.refusal = refusal
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class UnknownOption(Exception):
    """A request has an option with an unknown name."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f"unknown option {name!r}; the options are {', '.join(known)}")
        self.name = name


def kind(value: object) -> str:
    """Describe a value of the wrong type for a reason."""
    return "None" if value is None else f"of type {type(value).__name__}"


def number(value: int) -> str:
    """Format an integer for a reason; large ones by their size, since Python refuses to print the largest."""
    return str(value) if value.bit_length() <= 128 else f"a number of {value.bit_length()} bits"


def wrong_type(name: str, expected: str, value: object) -> Never:
    """Raise `Refused` for an option that is not of the `expected` type."""
    raise Refused(Refusal.WRONG_TYPE, f"{name} must be {expected}, and it is {kind(value)}")
