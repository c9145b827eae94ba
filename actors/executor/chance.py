"""The randomness of sampling: a draw depends on (seed, position) alone, so neither the batch, nor a preemption, nor a
restart changes what a seeded request samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, position): SplitMix64 (Steele, Lea, Flood 2014), seeded per request."""
    x = _mix((seed + _GOLDEN) & _MASK) + position * _GOLDEN
    return (_mix(x & _MASK) >> 11) * 2.0**-53


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """`uniform` of each pair."""
    starts = np.array([(seed + _GOLDEN) & _MASK for seed in seeds], np.uint64)
    x = _mixed(starts) + np.array(positions, np.uint64) * np.uint64(_GOLDEN)
    return (_mixed(x) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`_mix` of each; unsigned numbers of numpy wrap around by themselves."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return x ^ (x >> 31)
