"""Sampling in numpy: the same token as the general path samples, with any options."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest
import torch
from benchmark_modules import benchmark
from hypothesis import given, settings
from hypothesis import strategies as st

from cuelight.actors.executor.batch import SamplingRow
from cuelight.actors.executor.model.sampling import sample
from cuelight.messages.request import RequestId, Sampling

FIRST_SORTED, choose = benchmark("numpy_sampling").FIRST_SORTED, benchmark("numpy_sampling").choose

Floats = npt.NDArray[np.float32]

END = 7


def sampling_row(sampling: Sampling, position: int = 10, output_index: int = 3) -> SamplingRow:
    return SamplingRow(RequestId(1), 0, 0, position, output_index, sampling)


def both(logits: Floats, drawn: SamplingRow) -> tuple[int, int]:
    """The tokens of the numpy sampler and of the general path."""
    return choose(logits.copy(), drawn, (END,)), int(
        sample(torch.from_numpy(logits[None].copy()), [drawn], (END,)).item()
    )


def random_logits(seed: int, vocabulary: int, spread: float) -> Floats:
    chance = np.random.default_rng(seed)
    return (chance.standard_normal(vocabulary) * spread).astype(np.float32)


def wishes(vocabulary: int) -> st.SearchStrategy[Sampling]:
    return st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 1e-300, 1e-6, 0.1, 0.7, 1.0, 2.5, 100.0, 1e300]),
        top_k=st.sampled_from([0, 0, 1, 2, 10, vocabulary - 1, vocabulary, 10 * vocabulary])
        | st.integers(0, vocabulary),
        top_p=st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 0.1, 1e-9, 1e-300]) | st.floats(1e-6, 1.0),
        seed=st.integers(0, 2**64 - 1),
        min_tokens=st.sampled_from([0, 0, 5]),
        stop_token_ids=st.sampled_from([(), (3,), (0, 1, 2)]),
        ignore_eos=st.booleans(),
    )


@pytest.mark.parametrize("vocabulary", [8, 50, FIRST_SORTED, FIRST_SORTED + 1, 3000])
@pytest.mark.parametrize("spread", [0.01, 3.0, 1000.0])
def test_token_matches_the_general_path(vocabulary: int, spread: float) -> None:
    @given(st.integers(0, 10**6), wishes(vocabulary), st.integers(0, 10**6))
    @settings(deadline=None, max_examples=60)
    def check(seed: int, sampling: Sampling, position: int) -> None:
        ours, general = both(random_logits(seed, vocabulary, spread), sampling_row(sampling, position))
        assert ours == general

    check()


@pytest.mark.parametrize("top_k", [FIRST_SORTED - 1, FIRST_SORTED, FIRST_SORTED + 1, 2000, 4999, 5000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 1.0])
def test_top_p_is_a_fraction_of_the_tokens_top_k_keeps(top_k: int, top_p: float) -> None:
    """With nearly equal logits, the total of the `top_k` is far below that of all."""
    logits = random_logits(top_k, 5000, 0.3)
    tokens = set()
    for seed in range(40):
        ours, general = both(logits, sampling_row(Sampling(temperature=1.0, top_k=top_k, top_p=top_p, seed=seed)))
        assert ours == general
        tokens.add(ours)
    assert len(tokens) > 15


def test_more_tokens_are_sorted_where_top_p_needs_them() -> None:
    logits = np.zeros(5000, np.float32)
    logits[::7] = 1e-3
    for top_p in (0.1, 0.2, 0.204, 0.205, 0.3, 0.9, 0.9999):
        ranks = []
        for seed in range(20):
            ours, general = both(logits, sampling_row(Sampling(temperature=1.0, top_p=top_p, seed=seed)))
            assert ours == general
            ranks.append(ours)
        assert len(set(ranks)) > 15


@pytest.mark.parametrize("vocabulary", [50, 5000])
def test_equal_logits_keep_the_order_of_the_vocabulary(vocabulary: int) -> None:
    logits = np.zeros(vocabulary, np.float32)
    for cut in ({"top_k": 3}, {"top_p": 2.5 / vocabulary}):
        chosen = {
            choose(logits.copy(), sampling_row(Sampling(temperature=1.0, seed=seed, **cut)), ()) for seed in range(99)
        }  # type: ignore[arg-type]
        assert chosen == {0, 1, 2}
    chance = random.Random(1)
    for _ in range(50):
        few = np.array([chance.choice([0.0, 1.0, -0.0, 2.0]) for _ in range(vocabulary)], np.float32)
        wish = Sampling(temperature=1.0, top_k=chance.randint(1, vocabulary), top_p=chance.random(), seed=1)
        ours, general = both(few, sampling_row(wish))
        assert ours == general


def test_rule_stop_order_no_end_before_min_tokens() -> None:
    logits = np.zeros(50, np.float32)
    logits[[END, 8, 9]] = 3.0, 2.0, 1.0

    def token(index: int, **wish: object) -> int:
        return choose(logits.copy(), sampling_row(Sampling(min_tokens=3, **wish), output_index=index), (END,))  # type: ignore[arg-type]

    assert [token(index) for index in range(5)] == [8, 8, 8, END, END]
    assert [token(index, stop_token_ids=(8,)) for index in range(5)] == [9, 9, 9, END, END]
    assert [token(index, stop_token_ids=(8,), ignore_eos=True) for index in range(5)] == [END] * 5
    assert [token(index, ignore_eos=True) for index in range(5)] == [END] * 5
    hot = {token(0, temperature=1.0, seed=seed) for seed in range(200)}
    assert END not in hot
    assert len(hot) > 10


@pytest.mark.parametrize(
    "wish", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}, {"temperature": 1.0, "top_p": 0.5}]
)
def test_all_tokens_forbidden_gives_minus_one(wish: dict[str, float]) -> None:
    sampling = Sampling(min_tokens=9, stop_token_ids=(0, 1, 2), **wish)  # type: ignore[arg-type]
    assert choose(np.zeros(3, np.float32), sampling_row(sampling), ()) == -1
    ends = sampling_row(Sampling(min_tokens=9, stop_token_ids=(0, 1, 2), ignore_eos=True, **wish))  # type: ignore[arg-type]
    assert both(np.zeros(3, np.float32), ends) == (-1, -1)


def test_tokens_of_no_probability_are_never_sampled() -> None:
    logits = np.full(3000, -np.inf, np.float32)
    logits[[3, 2040]] = 0.0
    for seed in range(100):
        wish = Sampling(temperature=1.0, top_p=(1.0, 0.99)[seed % 2], top_k=(0, 2000)[seed // 2 % 2], seed=seed)
        ours, general = both(logits, sampling_row(wish))
        assert ours == general
        assert ours in {3, 2040}
