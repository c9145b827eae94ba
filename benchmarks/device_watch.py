"""Measure when the device computes: by events in its own stream if it has one, otherwise by a clock on its thread.

From outside, as the stopwatch: methods of the runner are wrapped for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

import torch

from cuelight.actors.executor.batch import Batch
from cuelight.actors.executor.runner import ModelRunner


@dataclass(frozen=True)
class Step:
    """In seconds from some moment."""

    begin: float
    end: float
    batch: Batch

    @property
    def is_decode(self) -> bool:
        """Whether each row has one token, and samples another."""
        return len(self.batch.sampling_rows) == len(self.batch.chunks) == len(self.batch.token_ids)


@dataclass
class DeviceWatch:
    """While it is entered, gathers `steps`, and the processor's time for preparing them. For one engine at a time."""

    device: torch.device
    prepare_seconds: float = 0.0
    steps: list[Step] = field(default_factory=list)
    _marks: list[tuple[torch.cuda.Event, torch.cuda.Event, Batch]] = field(default_factory=list)
    _restore: list[Callable[[], None]] = field(default_factory=list)

    def __enter__(self) -> Self:
        compute = self._computed if self.device.type == "cpu" else self._computed_in_a_stream
        for name, wrapped in (("_compute", compute), ("prepare", self._prepared)):
            method = ModelRunner.__dict__[name]
            setattr(ModelRunner, name, wrapped(method))
            self._restore.append(partial(setattr, ModelRunner, name, method))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for restore in self._restore:
            restore()
        if self._marks and error is None:
            torch.cuda.synchronize(self.device)
            first = self._marks[0][0]
            for begin, end, batch in self._marks:
                self.steps.append(Step(first.elapsed_time(begin) / 1e3, first.elapsed_time(end) / 1e3, batch))

    def _computed(self, method: Callable[..., None]) -> Callable[..., None]:
        def compute(runner: ModelRunner, batch: Batch) -> None:
            begin = time.perf_counter()
            method(runner, batch)
            self.steps.append(Step(begin, time.perf_counter(), batch))

        return compute

    def _computed_in_a_stream(self, method: Callable[..., None]) -> Callable[..., None]:
        def compute(runner: ModelRunner, batch: Batch) -> None:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            method(runner, batch)
            end.record()
            self._marks.append((begin, end, batch))

        return compute

    def _prepared(self, method: Callable[..., Batch]) -> Callable[..., Batch]:
        def prepare(*arguments: object) -> Batch:
            begin = time.thread_time()
            batch = method(*arguments)
            self.prepare_seconds += time.thread_time() - begin
            return batch

        return prepare

    @property
    def span_seconds(self) -> float:
        """From the first step's begin to the last one's end."""
        return self.steps[-1].end - self.steps[0].begin

    @property
    def idle_share(self) -> float:
        """Share of the span in which the device had nothing to compute."""
        return 1 - sum(step.end - step.begin for step in self.steps) / self.span_seconds

    @property
    def row_count(self) -> int:
        """Rows of all steps together."""
        return sum(len(step.batch.chunks) for step in self.steps)

    def decodes(self, rows: int) -> Sequence[tuple[float, Step]]:
        """Return the steps of `rows` decodes that follow another, each with the seconds between their ends."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        both = ((a, b) for a, b in pairs if a.is_decode and b.is_decode)
        return [(b.end - a.end, b) for a, b in both if len(a.batch.chunks) == len(b.batch.chunks) == rows]
