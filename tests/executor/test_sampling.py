"""Sampling tokens from logits, against a plain implementation: one row at a time, in plain Python."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from benchmark_modules import benchmark
from checked_graphs import waits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from cuelight.actors.executor.batch import SamplingRow
from cuelight.actors.executor.model import sampling as sampling_module
from cuelight.actors.executor.model.sampling import TOP_K_PICKED_MAX, peak_bytes, sample
from cuelight.actors.executor.rng import bits, key, keys, noise
from cuelight.messages.request import RequestId, Sampling

VOCABULARY = 50
SEEDS = st.integers(0, 2**64 - 1)


def sampling_row(sampling: Sampling, position: int = 10, output_index: int = 3) -> SamplingRow:
    return SamplingRow(RequestId(1), 0, 0, position, output_index, sampling)


def obvious_noise(seed: int, position: int, token: int) -> float:
    """The noise in Python integers, with the functions of `math`."""

    def mixed(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    high, low = divmod(key(seed, position), 2**32)
    y = (mixed(mixed((token + low) % 2**32) ^ high) + 0.5) / 2**32
    return -math.log(-math.log1p(-y))


def obvious(logits: list[float], sampling: Sampling, position: int) -> int:
    """Sort, cut to the k best, cut to the smallest set whose probability reaches p, and take the highest score."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])[: sampling.top_k or None]
    scaled = {token: (logits[token] - max(logits)) / sampling.temperature for token in order}
    total, reached = sum(map(math.exp, scaled.values())), 0.0
    kept: list[int] = []
    for token in order:
        if kept and sampling.top_p < 1 and reached >= sampling.top_p * total:
            break
        kept.append(token)
        reached += math.exp(scaled[token])
    assert sampling.seed is not None
    seed = sampling.seed
    return max(kept, key=lambda token: scaled[token] + obvious_noise(seed, position, token))


def random_logits(rows: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread


def options() -> st.SearchStrategy[Sampling]:
    return st.builds(
        Sampling,
        temperature=st.sampled_from([0.1, 0.7, 1.0, 2.5]),
        top_k=st.sampled_from([0, 0, 1, 2, 10, VOCABULARY, 1000]),
        top_p=st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 0.1]),
        seed=SEEDS,
    )


@given(st.integers(0, 10**6), options(), st.integers(0, 10**6))
@settings(deadline=None)
def test_token_matches_the_plain_implementation(seed: int, sampling: Sampling, position: int) -> None:
    logits = random_logits(1, seed)
    wanted = obvious(logits[0].tolist(), sampling, position)
    assert sample(logits, [sampling_row(sampling, position)], ()).tolist() == [wanted]


@given(st.integers(0, 10**6), st.lists(options() | st.just(Sampling()), min_size=2, max_size=8))
@settings(deadline=None)
def test_row_alone_matches_the_row_in_any_batch(seed: int, wishes: list[Sampling]) -> None:
    logits = random_logits(len(wishes), seed)
    sampling_rows = [sampling_row(sampling, position=row) for row, sampling in enumerate(wishes)]
    together = sample(logits.clone(), sampling_rows, (7,)).tolist()
    alone = [sample(logits[row : row + 1].clone(), [sampling_rows[row]], (7,)).item() for row in range(len(wishes))]
    assert together == alone


def test_greedy_takes_the_best_and_of_equals_the_first() -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[0, 30] = 1.0
    logits[1, [5, 9]] = 2.0
    assert sample(logits, [sampling_row(Sampling())] * 3, ()).tolist() == [30, 5, 0]


def test_equal_logits_under_filters_keep_the_order_of_the_vocabulary() -> None:
    """The tokens that `top_k` keeps among equals must not depend on the sort of a device."""
    wishes = [Sampling(temperature=1.0, top_k=3, seed=seed) for seed in range(64)]
    tokens = sample(torch.zeros(64, VOCABULARY), [sampling_row(wish) for wish in wishes], ()).tolist()
    assert set(tokens) == {0, 1, 2}


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 1e-9}, {"top_p": 1e-300}, {"temperature": 1e-6}])
def test_tightest_cuts_are_greedy(cut: dict[str, float]) -> None:
    logits = random_logits(100, 1)
    wishes = [Sampling(**{"temperature": 1.0, **cut}, seed=seed) for seed in range(100)]  # type: ignore[arg-type]
    assert torch.equal(sample(logits.clone(), [sampling_row(wish) for wish in wishes], ()), logits.argmax(-1))


def test_tiny_and_huge_temperatures_stay_finite() -> None:
    logits = random_logits(2, 2, spread=1e4)
    tokens = sample(
        logits.clone(), [sampling_row(Sampling(temperature=t, seed=1)) for t in (1e-300, 1e300)], ()
    ).tolist()
    assert tokens[0] == logits[0].argmax()
    assert 0 <= tokens[1] < VOCABULARY


def test_only_seed_and_position_decide() -> None:
    logits = random_logits(1, 3, spread=0.1)

    def token(seed: int, position: int, output_index: int = 3) -> int:
        sampling = Sampling(temperature=1.0, seed=seed)
        drawn = SamplingRow(RequestId(seed * 7 + output_index), output_index, 0, position, output_index, sampling)
        return int(sample(logits.clone(), [drawn], ()).item())

    for position in range(20):
        assert token(5, position) == token(5, position, output_index=position)
    assert len({token(5, position) for position in range(40)}) > 15
    assert len({token(seed, 5) for seed in range(40)}) > 15


def test_frequencies_match_the_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    count = 20_000
    probabilities = (logits.double() / 0.8).softmax(-1)
    sampling_rows = [sampling_row(Sampling(temperature=0.8, seed=9), position=position) for position in range(count)]
    tokens = Counter(sample(logits.expand(count, -1).clone(), sampling_rows, ()).tolist())
    chi = sum((tokens[i] - count * p) ** 2 / (count * p) for i, p in enumerate(probabilities.tolist()))
    assert chi < 18.5, "beyond the 99.9th percentile for four degrees of freedom"


def test_rule_stop_order_no_end_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 7], logits[0, 8], logits[0, 9] = 3.0, 2.0, 1.0

    def token(index: int, **wish: object) -> int:
        drawn = sampling_row(Sampling(min_tokens=3, **wish), output_index=index)  # type: ignore[arg-type]
        return int(sample(logits.clone(), [drawn], (7,)).item())

    assert [token(index) for index in range(5)] == [8, 8, 8, 7, 7]
    assert [token(index, stop_token_ids=(8,)) for index in range(5)] == [9, 9, 9, 7, 7]
    assert [token(index, stop_token_ids=(8,), ignore_eos=True) for index in range(5)] == [7] * 5
    assert [token(index, temperature=1.0, top_k=1, seed=index) for index in range(5)] == [8, 8, 8, 7, 7]
    hot = {token(0, temperature=1.0, seed=seed) for seed in range(200)}
    assert 7 not in hot
    assert len(hot) > 10


def test_tokens_forbidden_to_a_row_are_allowed_to_others() -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[:, 7] = 3.0
    logits[:, 8] = 2.0
    assert sample(logits, [sampling_row(Sampling(min_tokens=9)), sampling_row(Sampling())], (7,)).tolist() == [8, 7]


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0, seed=1), Sampling(temperature=1.0, top_k=5)]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rule_errors_stay_alone_non_finite_row_fails_alone(sampling: Sampling, value: float) -> None:
    logits = random_logits(3, 4)
    logits[1] = value
    wanted = sample(logits[[0, 2]].clone(), [sampling_row(sampling)] * 2, ()).tolist()
    first, bad, last = sample(logits, [sampling_row(sampling)] * 3, ()).tolist()
    assert bad == -1
    assert [first, last] == wanted


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_non_finite_logit_fails_a_row(value: float) -> None:
    logits = random_logits(1, 5)
    logits[0, 30] = value
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=1), Sampling(temperature=1.0, top_p=0.5, seed=1)):
        assert sample(logits.clone(), [sampling_row(sampling)], ()).tolist() == [-1]


def test_tokens_of_no_probability_are_never_sampled() -> None:
    logits = torch.full((300, VOCABULARY), -math.inf)
    logits[:, [3, 40]] = 0.0
    wishes = [Sampling(temperature=1.0, top_p=(1.0, 0.99)[seed % 2], seed=seed) for seed in range(300)]
    assert set(sample(logits, [sampling_row(wish) for wish in wishes], ()).tolist()) == {3, 40}


def test_half_precision_logits_are_sampled_as_float32() -> None:
    logits = random_logits(4, 6).bfloat16()
    sampling_rows = [sampling_row(Sampling(temperature=1.0, seed=seed, top_k=seed * 5)) for seed in range(4)]
    assert torch.equal(sample(logits.clone(), sampling_rows, ()), sample(logits.float(), sampling_rows, ()))


def numbers(seeds: list[int], positions: list[int], tokens: list[int]) -> list[float]:
    """The bits of each (seed, position, token) as a number in 0..1."""
    each = zip(seeds, positions, tokens, strict=True)
    return [float(bits(key(seed, position), np.array([token]))[0]) * 2.0**-32 for seed, position, token in each]


def test_bits_are_uniform_in_positions_seeds_and_tokens() -> None:
    same, counted = [1] * 10_000, list(range(10_000))
    for drawn in (numbers(same, counted, same), numbers(counted, same, same), numbers(same, same, counted)):
        assert abs(sum(drawn) / 10_000 - 0.5) < 0.01
        bins = Counter(int(number * 100) for number in drawn)
        assert sum((bins[i] - 100) ** 2 / 100 for i in range(100)) < 150, "beyond the 99.9th percentile"
        lagged = sum((a - 0.5) * (b - 0.5) for a, b in pairwise(drawn)) / 10_000
        assert abs(lagged) < 0.004, "adjacent numbers do not correlate"


def test_noise_of_a_token_differs_between_rows() -> None:
    tokens = np.arange(1000)
    rows = np.array([noise(key(seed, position), tokens) for seed in range(10) for position in range(10)])
    alike = np.corrcoef(rows)[~np.eye(100, dtype=bool)]
    assert abs(alike).max() < 0.16, "five deviations"
    alike = np.corrcoef(rows.T)[~np.eye(1000, dtype=bool)]
    assert abs(alike).max() < 0.6, "six deviations"


def test_no_two_tokens_of_a_row_have_the_same_bits() -> None:
    assert len(np.unique(bits(key(3, 4), np.arange(300_000)))) == 300_000


def test_noise_is_finite_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = np.array([0, 2**32 - 1], np.uint32)
    monkeypatch.setattr("cuelight.actors.executor.rng.bits", lambda *_: ends)
    np.testing.assert_allclose(noise(0, np.arange(2)), [33 * math.log(2), -math.log(33 * math.log(2))])


def test_noise_is_stable_across_versions() -> None:
    """A seed must give the same text after an update."""
    assert [key(0, 0), key(1, 2), key(2**64 - 1, 10**9)] == [
        5197578548964807871,
        17405687883870564846,
        16379557702859085239,
    ]
    assert bits(key(1, 2), np.array([0, 1, 49151])).tolist() == [1065063422, 1462770872, 3396370945]


@given(SEEDS, st.integers(0, 10**9))
def test_key_is_a_function_of_seed_and_position(seed: int, position: int) -> None:
    assert key(seed, position) == key(seed, position)
    assert key(seed, position) != key(seed, position + 1)
    assert key(seed, position) != key((seed + 1) % 2**64, position)


@given(st.lists(st.tuples(SEEDS, st.integers(0, 10**9)), min_size=1, max_size=20))
def test_keys_match_the_key_of_each_row(pairs: list[tuple[int, int]]) -> None:
    seeds, positions = zip(*pairs, strict=True)
    assert keys(seeds, positions).tolist() == [key(*pair) for pair in pairs]


@given(SEEDS, st.integers(0, 10**9), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20))
def test_noise_matches_the_plain_implementation(seed: int, position: int, tokens: list[int]) -> None:
    obvious_ones = [obvious_noise(seed, position, token) for token in tokens]
    np.testing.assert_allclose(noise(key(seed, position), np.array(tokens)), obvious_ones, rtol=1e-13, atol=1e-13)


def mixed(count: int, seed: int) -> list[SamplingRow]:
    """Rows with options of every kind."""
    chance = random.Random(seed)
    wishes = [
        Sampling(
            temperature=chance.choice([0.0, 0.3, 1.0, 5.0]),
            top_k=chance.choice([0, 0, 1, 40, TOP_K_PICKED_MAX, TOP_K_PICKED_MAX + 1, 10**6]),
            top_p=chance.choice([1.0, 1.0, 0.99, 0.6, 0.01]),
            min_tokens=chance.choice([0, 0, 9]),
            seed=chance.getrandbits(64),
            stop_token_ids=tuple(chance.sample(range(3000), 2)),
            ignore_eos=chance.random() < 0.5,
        )
        for _ in range(count)
    ]
    return [sampling_row(wish, position=chance.randrange(10**6)) for wish in wishes]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("at_once", [1, 10_000, 1 << 22])
@pytest.mark.parametrize("rounded", [False, True])
def test_mixed_rows_match_the_plain_sampler(
    rounded: bool, at_once: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in parts, and where most logits have equals."""
    monkeypatch.setattr(sampling_module, "ELEMENTS_MAX", at_once)
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(seed)) * 3
    logits = (logits * 4).round() / 4 if rounded else logits
    sampling_rows = mixed(40, seed)
    expected = [
        benchmark("numpy_sampling").choose(row.numpy().copy(), one, (7, 8))
        for row, one in zip(logits, sampling_rows, strict=True)
    ]
    assert sample(logits, sampling_rows, (7, 8)).tolist() == expected


class Operations(TorchDispatchMode):
    """Record the names of torch's operations; fail where the host waits for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # as in torch
        assert not waits(function, args), f"the host waits for {function}"
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("size", [1, 40])
def test_sampling_never_waits_for_the_device(size: int) -> None:
    sampling_rows = mixed(size, 3)
    with Operations() as seen:
        sample(torch.randn(size, 3000), sampling_rows, (7, 8))
    assert seen.names


def test_only_needed_operations_run() -> None:
    def operations(*wishes: Sampling) -> set[str]:
        with Operations() as seen:
            sample(torch.randn(len(wishes), 3000), [sampling_row(wish) for wish in wishes], ())
        return set(seen.names)

    greedy, hot = Sampling(), Sampling(temperature=1.0, seed=1)
    few, cut = Sampling(temperature=1.0, top_k=5), Sampling(temperature=1.0, top_p=0.5)
    assert not operations(greedy, greedy) & {"sort", "topk", "cumsum", "exp", "log1p_", "index", "_to_copy"}
    assert "log1p_" in operations(greedy, hot)
    assert not operations(greedy, hot) & {"sort", "topk", "cumsum", "exp"}
    assert "topk" in operations(hot, few)
    assert "sort" not in operations(hot, few)
    assert "sort" in operations(greedy, cut)


class Made(TorchDispatchMode):
    """The bytes of all tensors made, as if none were freed."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, torch.Tensor] = {}

    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # as in torch
        result = function(*args, **(kwargs or {}))
        for each in tree_flatten(result)[0]:
            if isinstance(each, torch.Tensor):
                self._kept.setdefault(each.untyped_storage().data_ptr(), each)
        return result


@pytest.mark.parametrize("options", [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": TOP_K_PICKED_MAX, "top_p": 0.9}])
def test_peak_bytes_bounds_the_memory_of_sampling(options: dict[str, float]) -> None:
    rows, vocabulary = 8, 20_000
    wish = Sampling(temperature=1.0, **options)  # type: ignore[arg-type]  # by name
    with Made() as made:
        sample(torch.randn(rows, vocabulary), [sampling_row(wish)] * rows, ())
    assert 0.2 * peak_bytes(rows, vocabulary) < made.bytes() - 4 * rows * vocabulary < peak_bytes(rows, vocabulary)
    assert peak_bytes(100_000, vocabulary) == peak_bytes(10_000, vocabulary), "more rows are sampled in parts"
