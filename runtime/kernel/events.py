"""The events that a tap receives: the beginning and the end of every life, and every delivery between them."""

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from cuelight.kernel.supervision import ExitCause


class Started(msgspec.Struct, frozen=True, tag=True):
    """A life of an actor begins: its `life`-th one, counted from 1. `seed` is that of `Context.chance`."""

    seconds: float
    actor: str
    life: int
    seed: int


class Delivered(msgspec.Struct, frozen=True, tag=True):
    """`actor` is about to handle `message`; `seconds` is the time that its clock will show.

    For an actor on a thread or in a process, the event comes after the handling began, when its acknowledgement
    arrives.

    `sender` is an actor's name, "" for code outside the actors, "(own)" for the actor's own threads and timers.
    """

    seconds: float
    sender: str
    actor: str
    message: object


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The end of a life. `error` is empty where the actor stopped in order; `killed_by` is as in `Terminated`."""

    seconds: float
    actor: str
    life: int
    error: str
    cause: ExitCause
    killed_by: str = ""


Event: TypeAlias = Started | Delivered | Ended
Tap: TypeAlias = Callable[[Event], None]
