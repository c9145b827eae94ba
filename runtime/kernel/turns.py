"""What a simulation draws from: things that may happen next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

from cuelight.kernel.stage import Seat

Condition: TypeAlias = Callable[[], bool]


class Turn(Protocol):
    """Something that may happen next."""

    def is_ready(self) -> bool:
        """Whether it may happen now."""

    def take_turn(self) -> None:
        """It happens, or a step of it."""


class Act:
    """A life of an actor. Where the seat has no actor, it is yet to be built."""

    __slots__ = ("_go_on", "is_started", "seat")

    def __init__(self, seat: Seat, go_on: Callable[[Act], None]) -> None:
        self.seat = seat
        self.is_started = False
        self._go_on = go_on

    def is_ready(self) -> bool:
        """Whether there is something to begin, to handle or to end."""
        is_leaving = self.seat.life is not None and self.seat.life.is_leaving
        return not self.is_started or len(self.seat.mailbox) > 0 or self.seat.mailbox.closed or is_leaving

    def take_turn(self) -> None:
        """Take the next step of this life."""
        self._go_on(self)


class Procedure:
    """Something done in steps, each when the condition holds that the one before has given; then it leaves `turns`."""

    __slots__ = ("_steps", "_turns", "is_ready")

    def __init__(self, turns: list[Turn], steps: Iterator[Condition]) -> None:
        self._turns = turns
        self._steps = steps
        self.is_ready: Condition = at_once

    def take_turn(self) -> None:
        """Take the next step."""
        try:
            self.is_ready = next(self._steps)
        except StopIteration:
            if self in self._turns:  # else its last step was to end all procedures
                self._turns.remove(self)


def at_once() -> bool:
    """The condition that always holds."""
    return True
