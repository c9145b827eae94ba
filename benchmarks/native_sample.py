"""Native sampling beside the same choice in numpy and in torch, in microseconds a row; on one thread unless it says so.

Part of `python -m benchmarks.native`. "Peaked" logits fall off as those of a language model do, with ranks; the others
are flatter than any model's, which is the worst case for `top_p`. numpy and torch are multiples of the fastest form.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.native_limits import Ceilings
from benchmarks.numpy_sampling import Floats, choose
from cuelight.actors.executor.batch import SamplingRow
from cuelight.actors.executor.model.sampling import sample as torch_sample
from cuelight.actors.executor.native.runner import Sampler
from cuelight.messages.request import RequestId, Sampling

VOCABULARY = 49152
ROWS = 32
SLOW_ROWS = 4
"""Number of rows that numpy and torch sample."""

OPTIONS = {
    "temperature": Sampling(temperature=0.8),
    "top_k 50": Sampling(temperature=0.8, top_k=50),
    "top_k 50, top_p 0.95": Sampling(temperature=0.8, top_k=50, top_p=0.95),
    "top_p 0.9": Sampling(temperature=0.8, top_p=0.9),
}
FORMS = {"portable": 0, "avx2": 1, "avx512": 2}


def logits_by_kind() -> dict[str, Floats]:
    """Rows of logits that are unlike each other."""
    random = np.random.default_rng(0)
    ranks = random.permuted(np.tile(np.arange(1, VOCABULARY + 1), (ROWS, 1)), axis=1)
    noise = random.standard_normal((ROWS, VOCABULARY))
    kinds = {"peaked": noise - 2 * np.log(ranks), "normal, deviation 3": 3 * noise, "normal, deviation 1": noise}
    return {kind: logits.astype(np.float32) for kind, logits in kinds.items()}


def fastest(run: Callable[[], object], seconds: float) -> float:
    """Return the time of the fastest of at least three calls."""
    best, count, end = float("inf"), 0, time.perf_counter() + seconds
    while count < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
        count += 1
    return best


def measure(native: ctypes.CDLL, ceilings: Ceilings, seconds: float = 0.15) -> dict[str, list[dict[str, object]]]:
    """The table by its title."""
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = [_row(native, kind, name, logits, seconds) for kind, logits in logits_by_kind().items() for name in OPTIONS]
    torch.set_num_threads(torch_threads)
    return {f"Sampling, {ROWS} rows of {VOCABULARY}": rows}


def _row(native: ctypes.CDLL, kind: str, name: str, logits: Floats, seconds: float) -> dict[str, object]:
    sampling_rows = [SamplingRow(RequestId(row), row, row, row, 0, OPTIONS[name]) for row in range(ROWS)]
    best, sampler = logits.argmax(axis=1), Sampler(native, [])

    def ours() -> float:
        return fastest(lambda: sampler.choose(logits, best.copy(), sampling_rows), seconds) / ROWS

    figures, threads = {"all threads": ours()}, native.cue_threads()
    native.cue_set_threads(1)
    for form, wanted in FORMS.items():
        if native.cue_force_isa(wanted) == wanted:
            figures[form] = ours()
    native.cue_force_isa(-1)
    native.cue_set_threads(threads)
    alone = min(figures[form] for form in FORMS if form in figures)
    some = list(zip(logits, sampling_rows[:SLOW_ROWS], strict=False))
    rows = torch.from_numpy(logits[:SLOW_ROWS])
    numpys = fastest(lambda: [choose(row.copy(), sampling_row, []) for row, sampling_row in some], seconds) / SLOW_ROWS
    torchs = fastest(lambda: torch_sample(rows, sampling_rows[:SLOW_ROWS], []), seconds) / SLOW_ROWS
    return {
        "logits": kind,
        "options": name,
        **{f"{figure} us": f"{1e6 * each:.1f}" for figure, each in figures.items()},
        "numpy": f"{numpys / alone:.0f}x",
        "torch": f"{torchs / alone:.0f}x",
    }
