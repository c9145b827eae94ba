"""Faults of a simulation beside what actors do wrong, and their injection."""

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
    """What a fault makes a handler or a constructor raise."""


class SimulatedKill(SimulatedCrash, ProcessKilled):
    """The end of an actor's process by a simulated SIGKILL, with what was handed over to it."""

    def __init__(self) -> None:
        Exception.__init__(self)
        self.signal = "SIGKILL"


@dataclass(frozen=True)
class Faults:
    """What may go wrong. `crash` and `kill` are probabilities for each delivery, by default none.

    A crash happens before a message is handled, at one of the first tells while it is, or afterwards; and a
    constructor at a restart. A kill happens likewise, but only to actors that live in a process. `delay_seconds_max` is
    how long a message may take to a mailbox; those of one sender, receiver and lane stay in order.
    """

    crash: float = 0.0
    kill: float = 0.0
    delay_seconds_max: float = 0.0


class FaultInjector:
    """Draws from a seed when faults happen, and raises them."""

    def __init__(self, faults: Faults, chance: random.Random) -> None:
        self._faults = faults
        self._chance = chance
        self._fault: SimulatedCrash | None = None
        self._tells_before_fault = 0.0

    def before_build(self) -> None:
        """Raises SimulatedCrash where a constructor is to crash."""
        if self._faults.crash and self._chance.random() < self._faults.crash:
            raise SimulatedCrash

    def handle(self, slot: ActorSlot, handle: Callable[[], None]) -> None:
        """Let an actor handle a message, or some of it. Raises SimulatedCrash, and what the handler raises."""
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
        raise fault  # the handler told fewer, or went on regardless

    def before_tell(self) -> None:
        """Whoever acts is about to tell something. Raises SimulatedCrash."""
        if self._fault is not None:
            if not self._tells_before_fault:
                raise self._fault
            self._tells_before_fault -= 1

    def lost_count(self, slot: ActorSlot) -> int:
        """How many messages that wait have been handed over to a process that is killed as it handles another one."""
        return int(self._chance.random() * min(WINDOW, len(slot.mailbox) + 1))

    def _draw(self, slot: ActorSlot) -> SimulatedCrash | None:
        if self._faults.crash and self._chance.random() < self._faults.crash:
            return SimulatedCrash()
        is_process = isinstance(slot.part.placement, InProcess)
        if is_process and self._faults.kill and self._chance.random() < self._faults.kill:
            return SimulatedKill()
        return None
