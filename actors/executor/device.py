"""What the executor actor drives: something that prepares a step's batch and then runs it."""

from __future__ import annotations

from typing import Protocol, TypeVar

from cuelight.messages.executor import ExecuteStep
from cuelight.messages.request import BlockCopies, HostTier
from cuelight.messages.scheduler import StepDone

B = TypeVar("B")


class Device(Protocol[B]):
    """Steps are prepared in order on one thread and run in the same order on another, so both may overlap.

    `prepare` alone touches what it needs of the rows; `copy` and `run` alone touch the device, on one thread.
    """

    @property
    def block_count(self) -> int:
        """Blocks in the KV pool, the null block (id 0) included."""

    @property
    def block_size(self) -> int:
        """Token slots per block."""

    @property
    def host(self) -> HostTier:
        """Host memory for blocks that leave the pool, ids 0 to `block_count - 1`, and what its use costs."""

    def prepare(self, step: ExecuteStep) -> B:
        """Apply the step's changes to the rows and lay out its batch. Does not depend on sampled tokens."""

    def copy(self, copies: BlockCopies) -> None:
        """Copy whole blocks. Called before `run` of the step that carries the copies, also if that step is not run."""

    def run(self, batch: B) -> StepDone:
        """Compute the batch and sample from it."""
