"""How the plain parts of intake say no. Never seen outside the engine: the client library raises its own errors."""

from __future__ import annotations

from cuelight.messages.request import Refusal


class Refused(Exception):
    """This request cannot be served; `reason` is a sentence for whoever sent it."""

    def __init__(self, refusal: Refusal, reason: str) -> None:
        super().__init__(reason)
        self.refusal = refusal
        self.reason = reason


class UnknownOption(Exception):
    """No sampling option has this name."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f"there is no option {name!r}; the options are {', '.join(known)}")
        self.name = name
