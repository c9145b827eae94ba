"""Choosing tokens from logits in numpy, row by row: the slow, plain path that judges the native sampler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cuelight.actors.executor.batch import SamplingRow
from cuelight.actors.executor.rng import key, noise
from cuelight.messages.request import Sampling

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FIRST_SORTED = 1024
"""Number of most probable tokens to sort before sorting all; nearly always enough for `top_p`."""


def choose(logits: Floats, sampling_row: SamplingRow, eos_token_ids: Sequence[int]) -> int:
    """The token for one row of finite logits [vocabulary], which it may change; -1 if all tokens are forbidden.

    `top_k` is applied before `top_p`, which keeps the smallest set of most probable tokens that reach it. Of what is
    kept, the token with the largest sum of logit / temperature and noise is chosen; of equals the first.
    """
    sampling = sampling_row.sampling
    if sampling_row.output_index < sampling.min_tokens:
        ends = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)]
        logits[ends] = -np.inf
    best = int(logits.argmax())
    if logits[best] == -np.inf:
        return -1
    if sampling.temperature == 0:
        return best
    kept = _kept(logits, logits[best], sampling)
    scores = _scaled(logits[kept], logits[best], sampling.temperature)
    scores += noise(key(sampling.seed or 0, sampling_row.position), kept)
    return int(kept[scores.argmax()])


def _scaled(logits: Floats, best: np.float32, temperature: float) -> Doubles:
    """Logarithms of unnormalised probabilities, in double; the best is 0."""
    scaled = logits.astype(np.float64)
    scaled -= np.float64(best)
    with np.errstate(over="ignore"):  # at the lowest temperatures: to minus infinity, which is never chosen
        scaled /= temperature
    return scaled


def _kept(logits: Floats, best: np.float32, sampling: Sampling) -> Ints:
    """The tokens that may be chosen, in the order of their ids."""
    size = len(logits)
    if sampling.top_k == 0 and sampling.top_p == 1:
        return np.arange(size)
    if 0 < sampling.top_k < size:
        order = _largest(logits, sampling.top_k)
        weights = np.exp(_scaled(logits[order], best, sampling.temperature))
        return np.sort(order[: _reaching(weights, sampling.top_p * weights.sum())])
    all_weights = np.exp(_scaled(logits, best, sampling.temperature))
    limit = sampling.top_p * all_weights.sum()
    order = _largest(logits, min(FIRST_SORTED, size))
    if (count := _reaching(all_weights[order], limit)) == len(order) < size:
        order = _largest(logits, size)
        count = _reaching(all_weights[order], limit)
    return np.sort(order[:count])


def _reaching(weights: Doubles, limit: float) -> int:
    """How many of the first reach this sum; one at least, and all if they do not."""
    return max(1, int(np.searchsorted(weights.cumsum() - weights, limit)))


def _largest(logits: Floats, count: int) -> Ints:
    """Where the largest lie, the first of equals first."""
    ids = np.arange(len(logits))
    if count < len(logits):
        ids = np.flatnonzero(logits >= np.partition(logits, -count)[-count])
    # In one number that grows as the logit falls, and with the id: to sort numbers is far quicker than to sort by them.
    bits = (logits[ids] + np.float32(0)).view(np.uint32)  # without minus zero
    falling = np.where(bits >> 31, bits, bits ^ np.uint32(0x7FFFFFFF))
    keys = falling.astype(np.uint64) << np.uint64(32) | ids.astype(np.uint64)
    keys.sort()
    return (keys[:count] & np.uint64(0xFFFFFFFF)).astype(np.int64)
