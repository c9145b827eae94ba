"""Native matrix products: speed beside this machine's limits and beside torch's own operations for the same work.

    python -m benchmarks.native_linear [--threads 2] [--seconds 0.1] [--large 1] [--json FILE]

The shapes are SmolLM2-135M's, with `--large 1` those of larger models too. Copies of the weights take turns, so that
each product finds its weights in memory, as in a model, and not in a cache. Ours and torch's take turns as well; each
figure is the fastest call of several. The limit of a product is the least time for its arithmetic or for reading its
weights, whichever is more, measured in the same run. torch's figures are multiples of our time; its
weights lie where torch puts them, ours in an arena on huge pages, as an engine would keep them.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from benchmarks.common import options, report
from benchmarks.native_limits import Ceilings, Limits
from cuelight.actors.executor.native.build import load_native
from cuelight.actors.executor.native.linear import Arena, Bytes, Floats, LinearKernels, WeightFormat
from cuelight.models.cache import cache_directory

SMALL = {"qkv": (960, 576), "output": (576, 576), "gate+up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
LARGE = {"2048": (2048, 2048), "4096": (4096, 4096), "gate+up 4096": (11008, 4096), "down 4096": (4096, 11008)}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

COLD_BYTES = 96 << 20
"""Total size of the weight copies, larger than the cache that cores share."""

PACKED_FOR_ROWS = 32
"""As the engine's own float32 layers are packed."""

Call = Callable[[], object]
Contender = Callable[[torch.Tensor], Iterator[Call]]


def turns(calls: list[Call]) -> Iterator[Call]:
    return itertools.cycle(calls)


def copies_of(count_bytes: int) -> int:
    return max(1, COLD_BYTES // count_bytes)


def fastest(contenders: dict[str, Iterator[Call]], seconds: float) -> dict[str, float]:
    """Seconds of each one's fastest call; each goes around its copies several times, one after the other."""
    best = dict.fromkeys(contenders, float("inf"))
    for calls in contenders.values():
        next(calls)()
    end = time.perf_counter() + seconds * len(contenders)
    while time.perf_counter() < end:
        for name, calls in contenders.items():
            for call in itertools.islice(calls, 8):
                begin = time.perf_counter()
                call()
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


class Ours:
    """Copies of one packed weight, multiplied through the library itself: the binding's checks are not timed."""

    def __init__(self, native: ctypes.CDLL, kernels: LinearKernels, weights: Floats, kind: WeightFormat) -> None:
        needed, memory = kernels.packed_bytes(kind, *weights.shape), Arena()
        self.packed = kernels.pack(weights, kind, into=memory.take(needed))
        self._linear = native.cue_linear
        self._copies = [self.packed.buffer, *(memory.take(needed) for _ in range(copies_of(needed) - 1))]
        for copy in self._copies[1:]:
            copy[:] = self.packed.buffer

    def calls(self, x: torch.Tensor) -> Iterator[Call]:
        rows, inputs = x.shape
        y = np.empty((rows, self.packed.width), np.float32)

        def call(copy: Bytes) -> Call:
            arguments = (copy.ctypes.data, x.data_ptr(), inputs, rows, None, 0, y.ctypes.data, y.shape[1])
            return lambda: self._linear(*arguments) or y

        return turns([call(copy) for copy in self._copies])


def torch_contenders(weights: torch.Tensor, kind: WeightFormat) -> dict[str, Contender]:
    """torch's operations for the same product; torch has no int4 product with float32 rows."""
    if kind is WeightFormat.INT8:
        return {"_int_mm": _int_mm(weights)}
    if kind is WeightFormat.BF16:
        return {"F.linear bf16": _plain(weights.bfloat16())}
    if kind is WeightFormat.F32:
        return {"_linear_pointwise": _pointwise(weights), "F.linear": _plain(weights)}
    return {}


def _plain(weights: torch.Tensor) -> Contender:
    copies = [weights.clone() for _ in range(copies_of(weights.nbytes))]

    def calls(x: torch.Tensor) -> Iterator[Call]:
        rows = x.to(weights.dtype)
        return turns([lambda w=w: torch.nn.functional.linear(rows, w) for w in copies])  # type: ignore[misc]

    return calls


def _pointwise(weights: torch.Tensor) -> Contender:
    ops = torch.ops.mkldnn
    copies = [ops._reorder_linear_weight(weights.clone(), PACKED_FOR_ROWS) for _ in range(copies_of(weights.nbytes))]

    def calls(x: torch.Tensor) -> Iterator[Call]:
        return turns([lambda w=w: ops._linear_pointwise(x, w, None, "none", [], "") for w in copies])  # type: ignore[misc]

    return calls


def _int_mm(weights: torch.Tensor) -> Contender:
    scales = weights.abs().amax(dim=1, keepdim=True) / 127
    values = (weights / scales).round().to(torch.int8).t().contiguous()
    copies = [values.clone() for _ in range(copies_of(values.nbytes))]

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        steps = x.abs().amax(dim=1, keepdim=True) / 127
        return torch._int_mm((x / steps).round().to(torch.int8), w) * steps * scales.t()

    def calls(x: torch.Tensor) -> Iterator[Call]:
        return turns([lambda w=w: product(x, w) for w in copies])  # type: ignore[misc]

    return calls


def row(name: str, rows: int, ours: Ours, best: dict[str, float], limits: Limits) -> dict[str, object]:
    packed = ours.packed
    operations = 2.0 * rows * packed.outputs * packed.inputs
    integer = packed.kind in {WeightFormat.INT8, WeightFormat.INT4}
    at_once = (
        2 if packed.kind is WeightFormat.BF16 else 1
    )  # instructions for bfloat16 do twice as much, where there are any
    limit = limits.seconds(operations / at_once, packed.buffer.nbytes, integer=integer)
    others = {other: seconds for other, seconds in best.items() if other != "ours"}
    return {
        "weights": packed.kind.name.lower(),
        "product": f"{name} {packed.outputs}x{packed.inputs}",
        "rows": rows,
        "us": round(best["ours"] * 1e6, 1),
        "G op/s": round(operations / best["ours"] / 1e9),
        "GB/s": round(packed.buffer.nbytes / best["ours"] / 1e9, 1),
        "of the limit": f"{limit / best['ours']:.0%}",
        "torch": ", ".join(f"{other} {seconds / best['ours']:.2f}x" for other, seconds in others.items()) or "-",
    }


def measure(
    native: ctypes.CDLL, ceilings: Ceilings, seconds: float = 0.1, large: bool = False
) -> dict[str, list[dict[str, object]]]:
    """Return the table under its title. Each contender of a row is measured for the given seconds."""
    kernels = LinearKernels(native)
    rows: list[tuple[str, int, Ours, dict[str, float]]] = []
    with torch.inference_mode():
        for kind in (WeightFormat.INT8, WeightFormat.INT4, WeightFormat.F32, WeightFormat.BF16):
            for name, shape in (SMALL | LARGE if large else SMALL).items():
                weights = np.random.default_rng(1).standard_normal(shape, np.float32)
                ours, others = Ours(native, kernels, weights, kind), torch_contenders(torch.from_numpy(weights), kind)
                for count in ROWS:
                    x = torch.randn(count, shape[1])
                    contenders = {"ours": ours.calls(x), **{other: make(x) for other, make in others.items()}}
                    rows.append((name, count, ours, fastest(contenders, seconds)))
                ceilings.measure(20)
    limits = ceilings.measure()
    best = f"{limits.float32:.0f} GFLOP/s, {limits.int8:.0f} int8 GOP/s, {limits.memory:.1f} GB/s"
    return {f"Matrix products (the limits: {best})": [row(*each, limits) for each in rows]}


def main() -> None:
    chosen = options(__doc__, threads=2, seconds=0.1, large=0)
    native = load_native(cache_directory() / "native")
    native.cue_set_threads(chosen.threads)
    torch.set_num_threads(chosen.threads)
    for title, rows in measure(native, Ceilings(chosen.threads), chosen.seconds, bool(chosen.large)).items():
        print(f"{title}\n")
        report(rows, chosen.json, threads=chosen.threads)


if __name__ == "__main__":
    main()
