"""The randomness of sampling: a draw depends on (seed, position) alone, so neither the batch, nor a preemption, nor a
restart changes what a seeded request samples."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, position): SplitMix64 (Steele, Lea, Flood 2014), seeded per request."""
    x = _mix((seed + 0x9E3779B97F4A7C15) & _MASK) + position * 0x9E3779B97F4A7C15
    return (_mix(x & _MASK) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
