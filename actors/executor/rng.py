"""Random numbers for sampling, as a pure function of (seed, position, token).

Neither the batch, nor a preemption, nor a restart changes the tokens that a seeded request samples. The C++ and the
torch implementations produce the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

TOKEN_FIRST, TOKEN_SECOND = 0x7FEB352D, 0x846CA68B
"""The two factors of the 32-bit mixing function (lowbias32, Wellons 2018)."""


def key(seed: int, position: int) -> int:
    """Return 64 bits for (seed, position): SplitMix64 (Steele, Lea, Flood 2014), seeded per request."""
    x = _mix((seed + _GOLDEN) & _MASK) + position * _GOLDEN
    return _mix(x & _MASK)


def keys(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Return `key` of each pair of seed and position, of the same shape [pairs]."""
    starts = np.array([(seed + _GOLDEN) & _MASK for seed in seeds], np.uint64)
    return _mixed(_mixed(starts) + np.array(positions, np.uint64) * np.uint64(_GOLDEN))


def bits(row_key: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Return 32 bits for each token. Under the same key, different tokens have different bits."""
    x = token_ids.astype(np.uint32) + np.uint32(row_key & 0xFFFFFFFF)
    return _mixed_32(_mixed_32(x) ^ np.uint32(row_key >> 32))


def noise(row_key: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return a sample of the Gumbel distribution for each token, in -3.2..22.9.

    The argmax of scores plus this noise is distributed as the softmax of the scores (Gumbel-max).
    """
    y = (bits(row_key, token_ids).astype(np.float64) + 0.5) * 2.0**-32  # in the open interval (0, 1)
    return -np.log(-np.log1p(-y))


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return `_mix` of each element. numpy's unsigned integers wrap around, so no mask is needed."""
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
