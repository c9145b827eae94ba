"""The device protocol: prepare the batch of a step, copy blocks, run the batch."""

from __future__ import annotations

from typing import Protocol, TypeVar

from cuelight.messages.executor import ExecuteStep
from cuelight.messages.request import BlockCopies, HostTier
from cuelight.messages.scheduler import StepDone

B = TypeVar("B")
R_co = TypeVar("R_co", covariant=True)


class Pending(Protocol[R_co]):
    """Work that a device computes asynchronously."""

    def wait(self) -> R_co:
        """Block until the work is done and return its result. Raises the error of the work. Called once."""


class DeviceLost(Exception):
    """The device and its memory have become unusable; only a new executor can continue."""


class Device(Protocol[B]):
    """A device that the executor drives from three threads.

    Steps are prepared on the first thread, run on the second, and pending results awaited on the third, each in the
    order of the steps, so the three may overlap. Only `prepare` reads and writes the state of the rows; only `copy` and
    `run` enqueue work on the device. A synchronous device returns results from `copy` and `run`; an asynchronous one
    returns `Pending` and accepts the next step before this one is done.
    """

    @property
    def block_count(self) -> int:
        """Number of blocks in the KV pool, including the null block (id 0)."""

    @property
    def block_size(self) -> int:
        """Number of token slots per block."""

    @property
    def host(self) -> HostTier:
        """Host memory for blocks that leave the pool, with ids 0 to `block_count - 1`, and the cost of using it."""

    def prepare(self, step: ExecuteStep) -> B:
        """Apply the step's changes to the rows and lay out its batch, without reading any sampled token."""

    def copy(self, copies: BlockCopies) -> Pending[None] | None:
        """Copy whole blocks.

        Called before `run` of the step that carries the copies, and also if that step is never run.
        """

    def run(self, batch: B) -> StepDone | Pending[StepDone]:
        """Compute the batch and sample from it. A prepared batch whose step is void is dropped instead of run.

        This method, or `Pending.wait` of its result, raises DeviceLost if no later step can succeed either, and
        MemoryError if a smaller step may.
        """
