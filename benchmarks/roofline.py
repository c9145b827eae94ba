"""Compute the least data and operations of a step, and their least time at this machine's limits.

    python -m benchmarks.roofline [--threads 2]

prints the limits alone, as JSON: they are measured in a process of its own, whose memory is not the engine's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.common import options, percentile
from benchmarks.native_limits import COLD_BYTES, SLICE_BYTES, Ceilings, Limits
from benchmarks.stopwatch import Step
from cuelight.actors.executor.batch import Batch
from cuelight.actors.executor.native.linear import WeightFormat
from cuelight.actors.executor.native.model_folder import read_architecture

WEIGHT_BYTES = {WeightFormat.F32: 4.0, WeightFormat.BF16: 2.0, WeightFormat.INT8: 1.0, WeightFormat.INT4: 0.5 + 2 / 32}
"""Bytes of one weight, including the scales of INT4's groups; the scales of whole rows are negligible."""

PASSES = 4


@dataclass(frozen=True)
class Work:
    """Bytes that must come from memory once, and operations: a multiplication and an addition are two."""

    bytes: float
    products: float
    attention: float

    def seconds(self, limits: Limits, kind: WeightFormat) -> float:
        """The least for this much, if reading and computing overlap in full."""
        peak = limits.int8 if kind in (WeightFormat.INT8, WeightFormat.INT4) else limits.float32
        if kind is WeightFormat.BF16:
            peak *= 2  # instructions for bfloat16 do twice as much, where there are any
        computing = self.products / peak + self.attention / limits.float32
        return max(computing, self.bytes / limits.memory) / 1e9


class Model:
    """Counts the work of a step. Raises NotNative for an architecture that it does not know."""

    def __init__(self, folder: Path, kind: WeightFormat, block_size: int) -> None:
        self._a = a = read_architecture(folder)
        self._block_size = block_size
        self.kind = kind
        self._kv_bytes = 2 * a.layers * a.kv_heads * a.head_dim * (4 if kind is WeightFormat.F32 else 2)
        queries = a.heads * a.head_dim
        self._qkv = a.hidden * (queries + 2 * a.kv_heads * a.head_dim)
        self._others = queries * a.hidden + 3 * a.hidden * a.intermediate
        self._head = a.vocabulary * a.hidden

    def work(self, batch: Batch) -> Work:
        """Weights once a step, keys and values once a block however many rows share it; logits only where sampled."""
        a, tokens, samples = self._a, len(batch.token_ids), len(batch.sampling_rows)
        weights = a.layers * self._qkv + (a.layers - (samples == 0)) * self._others + self._head * (samples > 0)
        read = sum(chunk.context_length for chunk in batch.chunks)
        tables = np.concatenate([chunk.block_ids for chunk in batch.chunks])
        # A block that several share is a full one.
        read -= (len(tables) - len(np.unique(tables))) * self._block_size
        products = (
            a.layers * self._qkv * tokens + ((a.layers - 1) * tokens + samples) * self._others + self._head * samples
        )
        return Work(
            bytes=weights * WEIGHT_BYTES[self.kind] + read * self._kv_bytes,
            products=2.0 * products,
            attention=4.0 * a.layers * a.heads * a.head_dim * _pairs(batch),
        )


def _pairs(batch: Batch) -> int:
    """A token attends to itself and all before it."""
    pairs = 0
    for chunk in batch.chunks:
        count = chunk.stop - chunk.start
        pairs += count * chunk.context_length - count * (count - 1) // 2
    return pairs


def measured_limits(threads: int, before: Limits | None = None) -> Limits | None:
    """In another process; the better of these and those `before`. None where there is no compiler to measure with."""
    command = [sys.executable, "-m", "benchmarks.roofline", "--threads", str(threads)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        return before
    now: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    earlier = {} if before is None else asdict(before)
    return Limits(**{name: max(value, earlier.get(name, 0.0)) for name, value in now.items()})


def comparison(model: Model, limits: Limits, steps: Iterable[Step], forward_seconds: float) -> dict[str, object]:
    """The steps' work beside the limits, and how near the forward passes came."""
    works = [model.work(step.batch) for step in steps]
    least = sum(work.seconds(limits, model.kind) for work in works)
    count = max(1, len(works))
    read, products = sum(work.bytes for work in works), sum(work.products + work.attention for work in works)
    return {
        "MB a step": f"{read / count / 1e6:.0f}",
        "GOP a step": f"{products / count / 1e9:.2f}",
        "least ms": f"{1e3 * least / count:.2f}",
        "forward ms": f"{1e3 * forward_seconds / count:.2f}",
        "of the limit": f"{100 * least / forward_seconds:.0f} %",
        "GB/s": f"{read / forward_seconds / 1e9:.1f}",
        "GOP/s": f"{products / forward_seconds / 1e9:.0f}",
    }


def streaming(ceilings: Ceilings) -> float:
    """Billions of bytes a second that come from memory, one slice after the other; the best tenth is left out.

    `Ceilings` keeps the single best slice, which may have lain in the cache: a model's weights do not.
    """
    rates: list[float] = []
    for number in range(PASSES):
        for offset in range(0, COLD_BYTES, SLICE_BYTES):
            begin = time.perf_counter()
            ceilings._library.limit_read(ceilings._memory.ctypes.data + offset, SLICE_BYTES)
            if number > 0:  # the first pass finds what was written last in the cache
                rates.append(SLICE_BYTES / (time.perf_counter() - begin) / 1e9)
    return percentile(rates, 0.9)


def main() -> None:
    arguments = options(__doc__, threads=2)
    ceilings = Ceilings(arguments.threads)
    print(json.dumps(asdict(replace(ceilings.measure(), memory=streaming(ceilings)))))


if __name__ == "__main__":
    main()
