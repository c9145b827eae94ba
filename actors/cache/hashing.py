"""The hash chain of one token sequence: a digest for each full block, by which other requests find its contents.

Contains tokens and digests only; block ids and the pool are in `pool.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from hashlib import sha256

_ROOT = bytes(32)


class HashChain:
    """A growing token sequence and the digests of its full blocks, each computed once, on first use.

    A digest covers the block's tokens and, through its parent, every token before them, so equal digests mean equal
    prefixes at equal positions. The hash is SHA-256 because a client that could build a collision could read another
    client's cache.
    """

    __slots__ = ("_block_size", "_digests", "_pack", "_salt", "_token_ids")

    def __init__(self, token_ids: Iterable[int], block_size: int, salt: bytes = b"") -> None:
        """Start a chain. `salt` is hashed into the first block, so sequences with different salts share no block."""
        self._token_ids = list(token_ids)
        self._digests: list[bytes] = []
        self._block_size = block_size
        self._pack = struct.Struct(f"<{block_size}i").pack
        self._salt = salt

    def __len__(self) -> int:
        """Number of tokens in the sequence so far."""
        return len(self._token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the sequence."""
        self._token_ids.extend(token_ids)

    def matches(self, token_ids: tuple[int, ...], salt: bytes = b"") -> bool:
        """Return whether the sequence is exactly `token_ids`, with this salt."""
        return salt == self._salt and len(token_ids) == len(self._token_ids) and self._token_ids == list(token_ids)

    def shares_prefix(self, other: HashChain, token_count: int) -> bool:
        """Return whether both chains begin with the same `token_count` tokens and have the same salt."""
        if token_count > min(len(self), len(other)) or self._salt != other._salt:
            return False
        full_blocks, rest = divmod(token_count, self._block_size)
        if full_blocks and self.digest(full_blocks - 1) != other.digest(full_blocks - 1):
            return False
        return self._token_ids[token_count - rest : token_count] == other._token_ids[token_count - rest : token_count]

    def digest(self, block_index: int) -> bytes:
        """Return the digest of a full block, 32 bytes."""
        assert block_index < len(self._token_ids) // self._block_size, "only a full block has a digest"
        while len(self._digests) <= block_index:
            self._digests.append(self._next_digest())
        return self._digests[block_index]

    def _next_digest(self) -> bytes:
        start = len(self._digests) * self._block_size
        parent, extra = (self._digests[-1], b"") if self._digests else (_ROOT, self._salt)
        # Parent and tokens have a fixed length, so different inputs never concatenate to the same bytes.
        return sha256(parent + self._pack(*self._token_ids[start : start + self._block_size]) + extra).digest()
