"""Simulated tasks: the steps from which a simulation draws the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

from cuelight.kernel.table import ActorSlot

Condition: TypeAlias = Callable[[], bool]


class SimulatedTask(Protocol):
    """A task of a simulation, which is run step by step."""

    def is_ready(self) -> bool:
        """Return whether the next step is possible now."""

    def step(self) -> None:
        """Take the next step."""


class LifeTask:
    """The task of one life of an actor. Where the slot has no life, the first step builds the actor."""

    __slots__ = ("_step_life", "is_started", "slot")

    def __init__(self, slot: ActorSlot, step_life: Callable[[LifeTask], None]) -> None:
        self.slot = slot
        self.is_started = False
        self._step_life = step_life

    def is_ready(self) -> bool:
        """Return whether there is a start, a message or an end to handle."""
        is_stop_requested = self.slot.life is not None and self.slot.life.is_stop_requested
        return not self.is_started or len(self.slot.mailbox) > 0 or self.slot.mailbox.closed or is_stop_requested

    def step(self) -> None:
        """Take the next step of this life."""
        self._step_life(self)


class SupervisionTask:
    """A procedure of supervision: each step is ready once the condition holds that the step before has yielded.

    After the last step the task removes itself from `tasks`.
    """

    __slots__ = ("_steps", "_tasks", "is_ready")

    def __init__(self, tasks: list[SimulatedTask], steps: Iterator[Condition]) -> None:
        self._tasks = tasks
        self._steps = steps
        self.is_ready: Condition = always

    def step(self) -> None:
        """Take the next step."""
        try:
            self.is_ready = next(self._steps)
        except StopIteration:
            if self in self._tasks:  # otherwise its last step has removed all procedures
                self._tasks.remove(self)


def always() -> bool:
    """Return True: the condition that always holds."""
    return True
