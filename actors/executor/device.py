"""What the executor actor drives: something that prepares a step's batch and then runs it."""

from __future__ import annotations

from typing import Protocol, TypeVar

from cuelight.messages.executor import ExecuteStep
from cuelight.messages.request import BlockCopies, HostTier
from cuelight.messages.scheduler import StepDone

B = TypeVar("B")
R_co = TypeVar("R_co", covariant=True)


class Pending(Protocol[R_co]):
    """Work that a device has taken on and goes on with by itself."""

    def wait(self) -> R_co:
        """Block until it is done; its result. Raises what the work raised. Called once."""


class DeviceLost(Exception):
    """Nothing more can be computed on this device, nor with what it holds: only a new executor can."""


class Device(Protocol[B]):
    """Steps are prepared in order on one thread, run in the same order on another, and waited for, where there is
    something to wait for, in the same order on a third; so all three may overlap.

    `prepare` alone touches what it needs of the rows; `copy` and `run` alone give the device work, on one thread. A
    device that computes while they are called answers with the result; one that works by itself with what is pending,
    and then it can be given the next step before this one is done.
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

    def copy(self, copies: BlockCopies) -> Pending[None] | None:
        """Copy whole blocks. Called before `run` of the step that carries the copies, also if that step is not run."""

    def run(self, batch: B) -> StepDone | Pending[StepDone]:
        """Compute the batch and sample from it. A batch that was prepared may also be dropped, if its step is void.

        It, or what waits for its result, raises DeviceLost where no later step can work either, and MemoryError where a
        smaller one may.
        """
