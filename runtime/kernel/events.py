"""What a tap sees: the beginning and the end of every life, and every delivery between them."""

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from cuelight.kernel.supervision import ExitCause


class Started(msgspec.Struct, frozen=True, tag=True):
    """An actor was built: its `life`-th life, counted from 1. `seed` is that of its context's chance."""

    seconds: float
    actor: str
    life: int
    seed: int


class Delivered(msgspec.Struct, frozen=True, tag=True):
    """`actor` is about to handle `message`; `seconds` is the time it will see.

    Of an actor that lives elsewhere this is seen a little later, when the system hears that it has begun.

    `sender` is an actor's name, "" for code outside the actors, "(own)" for the actor's own threads and timers.
    """

    seconds: float
    sender: str
    actor: str
    message: object


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The end of a life; `error` is empty where the actor stopped in order. `killed_by` is as in `Terminated`."""

    seconds: float
    actor: str
    life: int
    error: str
    cause: ExitCause
    killed_by: str = ""


Event: TypeAlias = Started | Delivered | Ended
Tap: TypeAlias = Callable[[Event], None]
