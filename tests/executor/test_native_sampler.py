"""The native sampler against a plain one in numpy, in every form that this machine can run."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from benchmark_modules import benchmark

from cuelight.actors.executor.batch import SamplingRow
from cuelight.actors.executor.native.runner import SampleKernel, Sampler
from cuelight.actors.executor.rng import key, keys, noise
from cuelight.messages.request import RequestId, Sampling

choose = benchmark("numpy_sampling").choose

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


NEAR = 1e-6
"""Fraction of the total weight by which float32 weights may move the cut of `top_p`."""

DISTANCE = 4e-5
"""Standard deviation between the logits of a token decoded and recomputed in another batch."""

INFINITY = float("inf")


@dataclass(frozen=True)
class Options:
    """Sampling options of one row."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    key: int = 0


def sampled(native: ctypes.CDLL, logits: Floats, options: list[Options]) -> list[int]:
    """Return the tokens that the kernel samples from rows of logits."""
    out = np.full(len(options), -7, np.int64)
    SampleKernel(native).sample(
        logits,
        np.array([each.temperature for each in options]),
        np.array([each.top_k for each in options], np.int64),
        np.array([each.top_p for each in options]),
        np.array([each.key for each in options], np.uint64),
        out,
    )
    return [int(token) for token in out]


def exact(logits: Floats, options: Options) -> int:
    """Sample with all scores and a full sort, in double precision."""
    order = np.argsort(-logits, kind="stable")[: options.top_k or None]
    with np.errstate(over="ignore"):  # to minus infinity, which has no weight
        differences = (logits[order].astype(np.float64) - np.float64(logits.max())) / options.temperature
    if options.top_p < 1:
        weights = np.exp(differences)
        sums = weights.cumsum()
        count = max(1, int(np.searchsorted(sums - weights, options.top_p * sums[-1])))
        order, differences = order[:count], differences[:count]
    return int(order[(differences + noise(options.key, order)).argmax()])


def defensible(logits: Floats, options: Options) -> set[int]:
    """The tokens that may be sampled if the cut of `top_p` moves by `NEAR`."""
    top_p = options.top_p
    ends = {top_p, top_p - NEAR, min(1.0, top_p + NEAR)} if top_p < 1 else {top_p}
    return {exact(logits, replace(options, top_p=each)) for each in ends}


def check(native: ctypes.CDLL, logits: Floats, options: list[Options]) -> int:
    """Check that each row's token is defensible; return how many differ from the exact one."""
    differing = 0
    for row, (token, each) in enumerate(zip(sampled(native, logits, options), options, strict=True)):
        best = exact(logits[row], each)
        if token != best:
            differing += 1
            assert token in defensible(logits[row], each), (row, each, best)
    return differing


def random_options(random: np.random.Generator, n: int) -> Options:
    return Options(
        temperature=float(random.choice([1e-3, 0.1, 0.7, 1.0, 2.5, 100.0])),
        top_k=int(random.choice([0, 1, 2, 5, 40, n // 2, n, 2 * n])),
        top_p=float(random.choice([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0, 1.0])),
        key=int(random.integers(2**64, dtype=np.uint64)),
    )


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 100, 255, 257, 1000, 5003])
def test_samples_match_the_plain_sampler(form: ctypes.CDLL, n: int) -> None:
    random = np.random.default_rng(n)
    differing, rows = 0, 300
    logits = (random.standard_normal((rows, n)) * random.choice([0.1, 1, 3, 10], (rows, 1))).astype(np.float32)
    logits += random.choice([-100, 0, 20], (rows, 1)).astype(np.float32)
    logits[:: rows // 10] = logits[:: rows // 10].round()  # many equal
    differing = check(form, logits, [random_options(random, n) for _ in range(rows)])
    assert differing <= 1


def test_vocabulary_of_a_real_model(form: ctypes.CDLL) -> None:
    n, rows = 49152, 12
    random = np.random.default_rng(0)
    logits = (random.standard_normal((rows, n)) * random.choice([0.5, 2, 5], (rows, 1))).astype(np.float32)
    settings = [
        *(Options(1.0), Options(0.7, 50), Options(1.0, 0, 0.9), Options(0.7, 50, 0.95), Options(100.0, 0, 0.5)),
        *(Options(1.0, 5000), Options(1.0, 2000, 0.3), Options(1e-3), Options(2.0, 0, 0.9999), Options(1.0, 3072, 0.2)),
        *(Options(3.0, 40000, 0.99), Options(1.0, 1024, 0.99)),
    ]
    differing = 0
    for position in range(5):
        options = [replace(each, key=key(row, position)) for row, each in enumerate(settings)]
        differing += check(form, logits, options)
    assert differing == 0


def hard_rows(n: int) -> dict[str, Floats]:
    """Logits at the limits of the algorithm."""
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


@cache  # for all forms
def hard_cases(n: int) -> list[tuple[str, Floats, list[Options], list[set[int]]]]:
    """Hard rows, each with options and the tokens that may be sampled."""
    settings = [
        Options(temperature, top_k, top_p, key(seed, n))
        for temperature in (1e-30, 1e-3, 1.0, 100.0, 1e30)
        for top_k in (0, 1, 3, n - 1, n, n + 1)
        for top_p in (1e-12, 0.5, 0.9, 1 - 2.0**-53, 1.0)
        for seed in range(2)
        if top_k >= 0
    ]
    return [
        (name, row, settings, [defensible(row, options) for options in settings]) for name, row in hard_rows(n).items()
    ]


@pytest.mark.parametrize("n", [1, 7, 64, 1500])
def test_hard_rows(form: ctypes.CDLL, n: int) -> None:
    for name, row, settings, right in hard_cases(n):
        logits = np.broadcast_to(row, (len(settings), n)).copy()
        chosen = sampled(form, logits, settings)
        for token, options, tokens in zip(chosen, settings, right, strict=True):
            assert token in tokens, (name, options)
            assert row[token] > -INFINITY, (name, options)


def test_neither_threads_nor_other_rows_change_a_sample(form: ctypes.CDLL) -> None:
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


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (9, 1.0), (0, 0.8), (20, 0.9)])
def test_frequencies_match_the_probabilities(form: ctypes.CDLL, top_k: int, top_p: float) -> None:
    random = np.random.default_rng(4)
    n, rows = 40, 40_000
    logits = (1.3 * random.standard_normal(n)).astype(np.float32)
    order = np.argsort(-logits)[: top_k or None]
    weights = np.exp(logits[order].astype(np.float64) / 0.8)
    if top_p < 1:
        kept = 1 + int((weights.cumsum() < top_p * weights.sum()).sum())
        order, weights = order[:kept], weights[:kept]
    expected = rows * weights / weights.sum()
    out = np.zeros(rows, np.int64)
    SampleKernel(form).sample(
        np.broadcast_to(logits, (rows, n)),
        np.full(rows, 0.8),
        np.full(rows, top_k),
        np.full(rows, top_p),
        keys([9] * rows, range(rows)),
        out,
    )
    counts = np.bincount(out, minlength=n)
    assert counts[order].sum() == rows
    chi, freedom = float(((counts[order] - expected) ** 2 / expected).sum()), len(order) - 1
    assert chi < freedom + 3.1 * (2 * freedom) ** 0.5 + 6, "beyond about the 99.9th percentile"


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (50, 1.0), (0, 0.9), (50, 0.9)])
def test_similar_logits_give_nearly_always_the_same_token(
    native: ctypes.CDLL, top_k: int, top_p: float
) -> None:
    n, pairs, samples = 49152, 20, 400
    random = np.random.default_rng(6)
    flips = inverse_flips = 0
    uniforms = random.random(samples)
    temperatures, top_ks, top_ps = (
        np.full(samples, 1.0),
        np.full(samples, top_k),
        np.full(samples, top_p),
    )
    for pair in range(pairs):
        logits = (2 * random.standard_normal(n)).astype(np.float32)
        both = [logits, logits + (DISTANCE * random.standard_normal(n)).astype(np.float32)]
        tokens = np.zeros((2, samples), np.int64)
        for row, out in zip(both, tokens, strict=True):
            rows = np.broadcast_to(row, (samples, n))
            SampleKernel(native).sample(rows, temperatures, top_ks, top_ps, keys([pair] * samples, range(samples)), out)
        flips += int((tokens[0] != tokens[1]).sum())
        sums = [np.exp(row.astype(np.float64)).cumsum() for row in both]
        inverse = [np.searchsorted(each, uniforms * each[-1]) for each in sums]
        inverse_flips += int((inverse[0] != inverse[1]).sum())
    assert flips < 3
    assert inverse_flips > 20, "the distance is one that moves a walk through the sums"


def test_strided_rows_are_sampled_and_greedy_rows_are_left(native: ctypes.CDLL) -> None:
    wide = np.full((3, 40), 50.0, np.float32)
    logits = wide[:, :30]
    logits[:] = -np.arange(30)
    logits[2, 3] = 100
    assert sampled(native, logits, [Options(0.0), Options(1e-3), Options(1.0, 5, 0.9)]) == [-7, 0, 3]


def test_token_of_no_weight_is_never_sampled(form: ctypes.CDLL) -> None:
    n = 500
    logits = np.full((40, n), 20.0, np.float32)
    logits[:, 1::2] = np.nextafter(np.float32(20), np.float32(0))
    for temperature, top_k, top_p in [(1e-9, 0, 1.0), (1e-9, n, 1.0), (1e-9, n, 1 - 2.0**-53), (1e-9, 400, 0.9)]:
        tokens = sampled(form, logits, [Options(temperature, top_k, top_p, key(seed, 0)) for seed in range(40)])
        assert all(token % 2 == 0 for token in tokens), (temperature, top_k, top_p)


def test_rows_without_a_possible_token_give_minus_one(form: ctypes.CDLL) -> None:
    logits = np.full((3, 100), -INFINITY, np.float32)
    options = [Options(1.0), Options(1.0, 5), Options(1.0, 0, 0.5)]
    assert sampled(form, logits, options) == [-1, -1, -1]


def test_arrays_of_wrong_shape_are_refused(native: ctypes.CDLL) -> None:
    kernel = SampleKernel(native)
    logits, numbers, whole = np.zeros((2, 4), np.float32), np.ones(2), np.zeros(2, np.int64)
    chance = np.zeros(2, np.uint64)
    with pytest.raises(ValueError, match="needed 2 numbers"):
        kernel.sample(logits, np.ones(3), whole, numbers, chance, whole)
    with pytest.raises(ValueError, match="rows of float32"):
        kernel.sample(logits[:, ::2], numbers, whole, numbers, chance, whole)
    with pytest.raises(ValueError, match="rows of float32"):
        kernel.sample(logits[:, :0], numbers, whole, numbers, chance, whole)


def sampling_row(sampling: Sampling, position: int = 10, output_index: int = 3) -> SamplingRow:
    return SamplingRow(RequestId(1), 0, 0, position, output_index, sampling)


def test_step_samples_as_row_by_row_in_numpy(form: ctypes.CDLL) -> None:
    random = np.random.default_rng(3)
    n, rows = 997, 400
    logits = (3 * random.standard_normal((rows, n))).astype(np.float32)
    sampling_rows = []
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
        sampling_rows.append(sampling_row(sampling, position=row, output_index=int(random.integers(16))))
    eos = [5, 6]
    best = logits.argmax(axis=1)
    expected = [choose(logits[row].copy(), sampling_rows[row], eos) for row in range(rows)]
    chosen = Sampler(form, eos).choose(logits, best, sampling_rows)
    differing = [row for row in range(rows) if chosen[row] != expected[row]]
    assert len(differing) <= 1
    for row in differing:
        sampling = sampling_rows[row].sampling
        row_key = key(sampling.seed or 0, sampling_rows[row].position)
        options = Options(sampling.temperature, sampling.top_k, sampling.top_p, row_key)
        assert chosen[row] in defensible(logits[row], options)


def test_rows_without_a_usable_token_stay_so(native: ctypes.CDLL) -> None:
    logits = np.zeros((3, 4), np.float32)
    logits[0, 1] = np.nan
    everything = Sampling(temperature=1.0, min_tokens=9, stop_token_ids=(0, 1, 2, 3))
    sampling_rows = [
        sampling_row(Sampling(temperature=1.0, seed=1)),
        sampling_row(everything),
        sampling_row(Sampling()),
    ]
    assert Sampler(native, []).choose(logits, np.array([-1, 0, 0]), sampling_rows).tolist() == [-1, -1, 0]
