"""What may go wrong in a simulation beside what actors do wrong, and the striking of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from cuelight.kernel.actor import InProcess
from cuelight.kernel.errors import ProcessKilled
from cuelight.kernel.stage import Seat
from cuelight.kernel.wire import WINDOW


class SimulatedCrash(Exception):
    """What a fault makes a handler or a constructor raise."""


class SimulatedKill(SimulatedCrash, ProcessKilled):
    """The end of an actor's process by a simulated SIGKILL, with what was handed over to it."""

    def __init__(self) -> None:
        Exception.__init__(self)
        self.signal = "SIGKILL"


@dataclass(frozen=True)
class Faults:
    """What may go wrong. `crash` and `kill` are probabilities for each delivery, by default none.

    A crash strikes before a message is handled, at one of the first tells while it is, or afterwards; and a
    constructor at a restart. A kill strikes likewise, but only actors that live in a process. `delay_seconds_max` is
    how long a message may take to a mailbox; those of one sender, receiver and lane stay in order.
    """

    crash: float = 0.0
    kill: float = 0.0
    delay_seconds_max: float = 0.0


class Striker:
    """Draws when faults strike, and lets them."""

    def __init__(self, faults: Faults, chance: random.Random) -> None:
        self._faults = faults
        self._chance = chance
        self._blow: SimulatedCrash | None = None
        self._tells_before_blow = 0.0

    def build(self) -> None:
        """Raises SimulatedCrash where a constructor is to crash."""
        if self._faults.crash and self._chance.random() < self._faults.crash:
            raise SimulatedCrash

    def handle(self, seat: Seat, handle: Callable[[], None]) -> None:
        """Let an actor handle a message, or some of it. Raises SimulatedCrash, and what the handler raises."""
        blow = self._draw(seat)
        if blow is None:
            handle()
            return
        tells = self._chance.choice((-1, 0, 1, 2, 3, math.inf))
        if tells < 0:
            raise blow
        self._blow, self._tells_before_blow = blow, tells
        try:
            handle()
        finally:
            self._blow = None
        raise blow  # the handler told fewer, or went on regardless

    def before_tell(self) -> None:
        """Whoever acts is about to tell something. Raises SimulatedCrash."""
        if self._blow is not None:
            if not self._tells_before_blow:
                raise self._blow
            self._tells_before_blow -= 1

    def lost_with(self, seat: Seat) -> int:
        """How many messages that wait have been handed over to a process that is killed as it handles another one."""
        return int(self._chance.random() * min(WINDOW, len(seat.mailbox) + 1))

    def _draw(self, seat: Seat) -> SimulatedCrash | None:
        if self._faults.crash and self._chance.random() < self._faults.crash:
            return SimulatedCrash()
        is_process = isinstance(seat.part.placement, InProcess)
        if is_process and self._faults.kill and self._chance.random() < self._faults.kill:
            return SimulatedKill()
        return None
