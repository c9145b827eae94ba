"""The native choice of tokens against the obvious one in numpy, in every form that this machine can run."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from cuelight.actors.executor.batch import Draw
from cuelight.actors.executor.chance import uniform
from cuelight.actors.executor.native.sampler import SampleKernel, Sampler
from cuelight.actors.executor.native.sampling import choose
from cuelight.messages.request import RequestId, Sampling

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


NEAR = 1e-6
"""Weights in float32 may move a boundary between tokens by so much of the whole."""

INFINITY = float("inf")


@dataclass(frozen=True)
class Options:
    """Of one row."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    uniform: float = 0.5


def sampled(native: ctypes.CDLL, logits: Floats, options: list[Options]) -> list[int]:
    """What the kernel chooses for the rows of logits."""
    out = np.full(len(options), -7, np.int64)
    SampleKernel(native).sample(
        logits,
        np.array([each.temperature for each in options]),
        np.array([each.top_k for each in options], np.int64),
        np.array([each.top_p for each in options]),
        np.array([each.uniform for each in options]),
        out,
    )
    return [int(token) for token in out]


def order_and_weights(logits: Floats, options: Options) -> tuple[Ints, npt.NDArray[np.float64]]:
    """The tokens that `top_k` keeps in the order in which they are gone through, and what each weighs."""
    filtered = options.top_k > 0 or options.top_p < 1
    order = np.argsort(-logits, kind="stable") if filtered else np.arange(len(logits))
    order = order[: options.top_k or None]
    with np.errstate(over="ignore"):  # to minus infinity, which has no weight
        differences = (logits[order] - logits.max()).astype(np.float64)
        return order, np.exp(differences / options.temperature)


def defensible(logits: Floats, options: Options) -> set[int]:
    """The tokens that could be chosen if each boundary moved by `NEAR`."""
    order, weights = order_and_weights(logits, options)
    sums = weights.cumsum()
    tokens: set[int] = set()
    for top_p in {options.top_p, options.top_p - NEAR, min(1.0, options.top_p + NEAR)}:
        count = len(order)
        if options.top_p < 1:
            count = max(1, int(np.searchsorted(sums - weights, top_p * sums[-1])))
        last = int(np.flatnonzero(weights[:count])[-1])
        first, end = (
            min(last, int(np.searchsorted(sums[:count], u * sums[count - 1], side="right")))
            for u in (options.uniform - NEAR, options.uniform + NEAR)
        )
        tokens.update(order[first : end + 1].tolist())
    return tokens


def check(native: ctypes.CDLL, logits: Floats, options: list[Options]) -> int:
    """Each row's choice is defensible; returns how many are not the most exact choice."""
    differing = 0
    for row, (token, each) in enumerate(zip(sampled(native, logits, options), options, strict=True)):
        best = exact(logits[row], each)
        if token != best:
            differing += 1
            assert token in defensible(logits[row], each), (row, each, best)
    return differing


def exact(logits: Floats, options: Options) -> int:
    order, weights = order_and_weights(logits, options)
    sums = weights.cumsum()
    count = len(order)
    if options.top_p < 1:
        count = max(1, int(np.searchsorted(sums - weights, options.top_p * sums[-1])))
    picked = int(np.searchsorted(sums[:count], options.uniform * sums[count - 1], side="right"))
    return int(order[min(picked, int(np.flatnonzero(weights[:count])[-1]))])


def random_options(random: np.random.Generator, n: int) -> Options:
    return Options(
        temperature=float(random.choice([1e-3, 0.1, 0.7, 1.0, 2.5, 100.0])),
        top_k=int(random.choice([0, 1, 2, 5, 40, n // 2, n, 2 * n])),
        top_p=float(random.choice([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0, 1.0])),
        uniform=float(random.random()),
    )


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 100, 255, 257, 1000, 5003])
def test_chooses_as_the_obvious_way_does(form: ctypes.CDLL, n: int) -> None:
    random = np.random.default_rng(n)
    differing, rows = 0, 300
    logits = (random.standard_normal((rows, n)) * random.choice([0.1, 1, 3, 10], (rows, 1))).astype(np.float32)
    logits += random.choice([-100, 0, 20], (rows, 1)).astype(np.float32)
    logits[:: rows // 10] = logits[:: rows // 10].round()  # many equal
    differing = check(form, logits, [random_options(random, n) for _ in range(rows)])
    assert differing <= rows // 100


def test_a_vocabulary_of_a_real_model(form: ctypes.CDLL) -> None:
    n, rows = 49152, 12
    random = np.random.default_rng(0)
    logits = (random.standard_normal((rows, n)) * random.choice([0.5, 2, 5], (rows, 1))).astype(np.float32)
    settings = [
        *(Options(1.0), Options(0.7, 50), Options(1.0, 0, 0.9), Options(0.7, 50, 0.95), Options(100.0, 0, 0.5)),
        *(Options(1.0, 5000), Options(1.0, 2000, 0.3), Options(1e-3), Options(2.0, 0, 0.9999), Options(1.0, 3072, 0.2)),
        *(Options(3.0, 40000, 0.99), Options(1.0, 1024, 0.99)),
    ]
    uniforms = random.random((5, rows))
    differing = 0
    for row_uniforms in uniforms.tolist():
        options = [replace(each, uniform=u) for each, u in zip(settings, row_uniforms, strict=True)]
        differing += check(form, logits, options)
    assert differing <= 3


def hard_rows(n: int) -> dict[str, Floats]:
    """Logits that are easily got wrong."""
    random = np.random.default_rng(5)
    normal = random.standard_normal(n)
    rows = {
        "equal": np.zeros(n),
        "equal and low": np.full(n, -3e38),
        "one huge": np.where(np.arange(n) == n // 3, 1e30, normal),
        "one higher": np.where(np.arange(n) == n // 3, 5.0, 1e-3 * normal),
        "one far below": np.where(np.arange(n) == n // 3, -50.0, 1e-3 * normal),
        "both ends of float32": np.where(np.arange(n) % 2 == 0, 3.4e38, -3.4e38),
        "mostly forbidden": np.where(np.arange(n) % 17 == 3 % n, normal, -INFINITY),
        "all but one forbidden": np.where(np.arange(n) == n - 1, -7.0, -INFINITY),
        "denormal": 1e-40 * normal,
        "zeros of both signs": np.where(np.arange(n) % 2 == 0, 0.0, -0.0),
        "neighbouring floats": (1.0 + random.integers(0, 3, n) * 2.0**-23),
        "halving": -np.log(2.0) * np.arange(n),
        "towers": -np.exp(np.linspace(-80, 80, n)),
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}


@pytest.mark.parametrize("n", [1, 7, 64, 1500])
def test_hard_rows(form: ctypes.CDLL, n: int) -> None:
    settings = [
        Options(temperature, top_k, top_p, u)
        for temperature in (1e-30, 1e-3, 1.0, 100.0, 1e30)
        for top_k in (0, 1, 3, n - 1, n, n + 1)
        for top_p in (1e-12, 0.5, 0.9, 1 - 2.0**-53, 1.0)
        for u in (0.0, 0.3, 0.7501, 1 - 2.0**-53)
        if top_k >= 0
    ]
    for name, row in hard_rows(n).items():
        logits = np.broadcast_to(row, (len(settings), n)).copy()
        chosen = sampled(form, logits, settings)
        for token, options in zip(chosen, settings, strict=True):
            assert token in defensible(row, options), (name, options)
            assert row[token] > -INFINITY, (name, options)


def test_neither_threads_nor_other_rows_change_a_choice(form: ctypes.CDLL) -> None:
    random = np.random.default_rng(2)
    logits = (3 * random.standard_normal((64, 1501))).astype(np.float32)
    options = [random_options(random, 1501) for _ in range(64)]
    before = form.cue_threads()
    try:
        form.cue_set_threads(3)
        together = sampled(form, logits, options)
        form.cue_set_threads(1)
        alone = [sampled(form, logits[row : row + 1], options[row : row + 1])[0] for row in range(64)]
    finally:
        form.cue_set_threads(before)
    assert together == alone
    assert len(set(together)) > 10


def test_frequencies_are_the_probabilities(form: ctypes.CDLL) -> None:
    # Uniforms at even distances: every token is chosen as often as its probability says, but for rounding at its ends.
    logits = np.log(np.array([0.1, 0.2, 0.4, 0.3], np.float32))
    rows = 1000
    uniforms = (np.arange(rows) + 0.5) / rows
    repeated = np.broadcast_to(logits, (rows, 4)).copy()
    plain = np.bincount(sampled(form, repeated, [Options(1.0, uniform=float(u)) for u in uniforms]))
    assert plain.tolist() == [100, 200, 400, 300]
    nucleus = np.bincount(sampled(form, repeated, [Options(1.0, 0, 0.65, float(u)) for u in uniforms]))
    np.testing.assert_allclose(nucleus, [0, 0, 571, 429], atol=1)


def test_rows_may_lie_apart_and_greedy_ones_stay(native: ctypes.CDLL) -> None:
    wide = np.full((3, 40), 50.0, np.float32)
    logits = wide[:, :30]
    logits[:] = -np.arange(30)
    logits[2, 3] = 100
    assert sampled(native, logits, [Options(0.0), Options(1e-3), Options(1.0, 5, 0.9)]) == [-7, 0, 3]


def test_a_token_of_no_weight_is_never_chosen(form: ctypes.CDLL) -> None:
    n = 500
    logits = np.full((1, n), 20.0, np.float32)
    logits[:, 1::2] = np.nextafter(np.float32(20), np.float32(0))
    for temperature, top_k, top_p in [(1e-9, 0, 1.0), (1e-9, n, 1.0), (1e-9, n, 1 - 2.0**-53), (1e-9, 400, 0.9)]:
        for u in (0.0, 0.5, 1 - 2.0**-53, 1.0):
            (token,) = sampled(form, logits, [Options(temperature, top_k, top_p, u)])
            assert token % 2 == 0, (temperature, top_k, top_p, u)


def test_nothing_to_choose_from(form: ctypes.CDLL) -> None:
    logits = np.full((3, 100), -INFINITY, np.float32)
    options = [Options(1.0), Options(1.0, 5), Options(1.0, 0, 0.5)]
    assert sampled(form, logits, options) == [-1, -1, -1]


def test_arrays_that_do_not_fit_are_refused(native: ctypes.CDLL) -> None:
    kernel = SampleKernel(native)
    logits, numbers, whole = np.zeros((2, 4), np.float32), np.ones(2), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="needed 2 numbers"):
        kernel.sample(logits, np.ones(3), whole, numbers, numbers, whole)
    with pytest.raises(ValueError, match="rows of float32"):
        kernel.sample(logits[:, ::2], numbers, whole, numbers, numbers, whole)
    with pytest.raises(ValueError, match="rows of float32"):
        kernel.sample(logits[:, :0], numbers, whole, numbers, numbers, whole)


def draw(sampling: Sampling, position: int = 10, output_index: int = 3) -> Draw:
    return Draw(RequestId(1), 0, 0, position, output_index, sampling)


def test_a_step_chooses_as_row_by_row_in_numpy(form: ctypes.CDLL) -> None:
    random = np.random.default_rng(3)
    n, rows = 997, 400
    logits = (3 * random.standard_normal((rows, n))).astype(np.float32)
    draws = []
    for row in range(rows):
        each = random_options(random, n)
        sampling = Sampling(
            temperature=float(random.choice([0.0, each.temperature])),
            top_k=each.top_k,
            top_p=each.top_p,
            seed=int(random.integers(2**63)),
            min_tokens=int(random.choice([0, 8])),
            stop_token_ids=(int(logits[row].argmax()),),
            ignore_eos=bool(random.random() < 0.5),
        )
        draws.append(draw(sampling, position=row, output_index=int(random.integers(16))))
    eos = [5, 6]
    best = logits.argmax(axis=1)
    expected = [choose(logits[row].copy(), draws[row], eos) for row in range(rows)]
    chosen = Sampler(form, eos).choose(logits, best, draws)
    differing = [row for row in range(rows) if chosen[row] != expected[row]]
    assert len(differing) <= rows // 100
    for row in differing:
        sampling = draws[row].sampling
        u = uniform(sampling.seed or 0, draws[row].position)
        assert chosen[row] in defensible(logits[row], Options(sampling.temperature, sampling.top_k, sampling.top_p, u))


def test_rows_without_a_usable_token_stay_so(native: ctypes.CDLL) -> None:
    logits = np.zeros((3, 4), np.float32)
    logits[0, 1] = np.nan
    everything = Sampling(temperature=1.0, min_tokens=9, stop_token_ids=(0, 1, 2, 3))
    draws = [draw(Sampling(temperature=1.0, seed=1)), draw(everything), draw(Sampling())]
    assert Sampler(native, []).choose(logits, np.array([-1, 0, 0]), draws).tolist() == [-1, -1, 0]
