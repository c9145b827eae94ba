"""Batches of the executor from row lengths, for the tests of what benchmarks count."""

from __future__ import annotations

import numpy as np

from cuelight.actors.executor.batch import Batch, BatchChunk, SamplingRow
from cuelight.messages.request import RequestId, Sampling


def batch(*rows: tuple[int, int, list[int]], sampling_rows: int | None = None) -> Batch:
    """Each row: tokens computed, context length, block table; all rows sample unless it is said how many do."""
    starts = np.cumsum([0, *(count for count, _, _ in rows)])
    zeros = np.zeros(starts[-1], np.int64)
    made = Batch(0, 1, zeros, zeros, zeros, zeros)
    for number, (count, context, table) in enumerate(rows):
        start = int(starts[number])
        made.chunks.append(BatchChunk(start, start + count, context, np.array(table, np.int64)))
    for number in range(len(rows) if sampling_rows is None else sampling_rows):
        made.sampling_rows.append(SamplingRow(RequestId(number), number, number, 1, 0, Sampling()))
    return made
