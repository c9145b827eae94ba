"""Injected faults of a simulation, in addition to the actors' own crashes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from cuelight.kernel.actor import InProcess
from cuelight.kernel.errors import ProcessKilled
from cuelight.kernel.placement.wire import WINDOW
from cuelight.kernel.table import ActorSlot


class SimulatedCrash(Exception):
    """The exception that an injected crash raises in a handler or a constructor."""


class SimulatedKill(SimulatedCrash, ProcessKilled):
    """The end of an actor's process by a simulated SIGKILL, which loses the messages sent to the process."""

    def __init__(self) -> None:
        Exception.__init__(self)
        self.signal = "SIGKILL"


@dataclass(frozen=True)
class Faults:
    """The rates of injected faults: `crash` and `kill` are probabilities for each delivery, 0 by default.

    A crash happens before a message is handled, at one of the first messages that its handler sends, or after the
    handler; also, with the same probability, in a constructor at a restart. A kill happens at the same points of a
    delivery, only to actors placed in a process. `delay_seconds_max` is the longest time from sender to mailbox;
    messages of one sender, receiver and lane stay in order.
    """

    crash: float = 0.0
    kill: float = 0.0
    delay_seconds_max: float = 0.0


class FaultInjector:
    """Draws faults from a seed, and raises them."""

    def __init__(self, faults: Faults, chance: random.Random) -> None:
        self._faults = faults
        self._chance = chance
        self._fault: SimulatedCrash | None = None
        self._tells_before_fault = 0.0

    def before_build(self) -> None:
        """Draw whether a constructor crashes. Raises SimulatedCrash."""
        if self._faults.crash and self._chance.random() < self._faults.crash:
            raise SimulatedCrash

    def handle(self, slot: ActorSlot, handle: Callable[[], None]) -> None:
        """Run a handler, and raise a fault before, during or after it where one is drawn.

        Raises SimulatedCrash, and the errors of the handler.
        """
        fault = self._draw(slot)
        if fault is None:
            handle()
            return
        tells = self._chance.choice((-1, 0, 1, 2, 3, math.inf))
        if tells < 0:
            raise fault
        self._fault, self._tells_before_fault = fault, tells
        try:
            handle()
        finally:
            self._fault = None
        raise fault  # the handler sent fewer messages, or caught the fault

    def before_tell(self) -> None:
        """Count a message that the acting actor is about to send. Raises SimulatedCrash where the fault is due."""
        if self._fault is not None:
            if not self._tells_before_fault:
                raise self._fault
            self._tells_before_fault -= 1

    def lost_count(self, slot: ActorSlot) -> int:
        """Draw how many waiting messages had been sent to a process that is killed, and are lost with it."""
        return int(self._chance.random() * min(WINDOW, len(slot.mailbox) + 1))

    def _draw(self, slot: ActorSlot) -> SimulatedCrash | None:
        if self._faults.crash and self._chance.random() < self._faults.crash:
            return SimulatedCrash()
        is_process = isinstance(slot.part.placement, InProcess)
        if is_process and self._faults.kill and self._chance.random() < self._faults.kill:
            return SimulatedKill()
        return None
