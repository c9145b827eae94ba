"""A stand-in for a model whose steps take a given time and no processor time."""

from __future__ import annotations

import time
from functools import partial

from cuelight.actors.executor.stub import StubBatch, StubDevice
from cuelight.config import EngineConfig
from cuelight.core.parts import EngineParts
from cuelight.messages.scheduler import StepDone
from cuelight.testing import next_letter, stub_parts


class SlowDevice(StubDevice):
    """A stub whose steps take at least so long."""

    def __init__(self, step_seconds: float, block_count: int, block_size: int) -> None:
        super().__init__(block_count, block_size, next_letter)
        self._step_seconds = step_seconds

    def run(self, batch: StubBatch) -> StepDone:
        """As a stub's, and then nothing for a while."""
        done = super().run(batch)
        time.sleep(self._step_seconds)
        return done


def slow_parts(step_seconds: float, config: EngineConfig) -> EngineParts[StubBatch]:
    """Return the parts of an engine around such a device."""
    stub = stub_parts(config)
    load = partial(SlowDevice, step_seconds, config.block_count or 1024, config.block_size)
    return EngineParts(stub.facts, stub.encoder, stub.decode, load)
