"""The randomness of sampling: noise that depends on (seed, position, token) alone, so neither the batch, nor a
preemption, nor a restart changes what a seeded request samples. The C++ and the torch form give the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

TOKEN_FIRST, TOKEN_SECOND = 0x7FEB352D, 0x846CA68B
"""The factors of the mix of 32 bits (lowbias32, Wellons 2018)."""


def key(seed: int, position: int) -> int:
    """64 bits from (seed, position): SplitMix64 (Steele, Lea, Flood 2014), seeded per request."""
    x = _mix((seed + _GOLDEN) & _MASK) + position * _GOLDEN
    return _mix(x & _MASK)


def keys(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.uint64]:
    """`key` of each pair."""
    starts = np.array([(seed + _GOLDEN) & _MASK for seed in seeds], np.uint64)
    return _mixed(_mixed(starts) + np.array(positions, np.uint64) * np.uint64(_GOLDEN))


def bits(row_key: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """32 bits for each token: with one key no two tokens have the same."""
    x = token_ids.astype(np.uint32) + np.uint32(row_key & 0xFFFFFFFF)
    return _mixed_32(_mixed_32(x) ^ np.uint32(row_key >> 32))


def noise(row_key: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A number for each token from Gumbel's distribution, in -3.2..22.9.

    The largest of scores with this noise belongs to each token as often as its probability says.
    """
    y = (bits(row_key, token_ids).astype(np.float64) + 0.5) * 2.0**-32  # in 0..1, without the ends
    return -np.log(-np.log1p(-y))


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`_mix` of each; unsigned numbers of numpy wrap around by themselves."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))


def _mixed_32(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(TOKEN_FIRST)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(TOKEN_SECOND)
    return x ^ (x >> np.uint32(16))


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return x ^ (x >> 31)
