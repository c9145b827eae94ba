"""What the cache manager hears. Everything about one planning round travels in one `Reserve`."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from cuelight.messages.address import Address
from cuelight.messages.request import HostTier, RequestId
from cuelight.messages.scheduler import Granted


class Growth(msgspec.Struct, frozen=True):
    """A running request needs its table to hold `token_count` tokens in all."""

    request_id: RequestId
    token_count: int


class Admission(msgspec.Struct, frozen=True):
    """A waiting request asks for blocks for all of `token_ids`, less what the prefix cache already holds.

    It finds prefixes of the same `salt` only. Another sample of the prompt of `sample_of` can also use that one's last
    block, which is not full, by copying it.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    salt: bytes = b""
    sample_of: RequestId | None = None


class Filled(msgspec.Struct, frozen=True):
    """The K/V of a request's first `computed_tokens` tokens are in its blocks; full blocks become reusable prefixes.

    `token_ids` are the tokens that the cache manager has not been told of yet, in order.
    """

    request_id: RequestId
    computed_tokens: int
    token_ids: tuple[int, ...]


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Hold blocks for one step. Answered once: `Granted`, with the same `round`; not at all before the first `Reset`.

    Handled in this order: `filled`, then `growths`, each granted whole or refused, then, unless one was, `admissions`
    in order, until one is refused or the admitted requests' uncached tokens reach `token_budget`. The copies of rounds
    up to `copies_done` have been made.
    """

    round: int
    filled: tuple[Filled, ...]
    growths: tuple[Growth, ...]
    admissions: tuple[Admission, ...]
    token_budget: int
    reply_to: Address[Granted]
    copies_done: int = -1


class Release(msgspec.Struct, frozen=True, tag=True):
    """These requests hold their blocks no longer. Not answered. What was computed stays as a prefix until evicted.

    Not so what those computed that are `poisoned`: a block beside the token that a model made no number of may hold none
    either, and whoever found it would fail as they did.
    """

    released: tuple[Filled, ...]
    poisoned: tuple[RequestId, ...] = ()


class Reset(msgspec.Struct, frozen=True, tag=True):
    """The pool is new and empty: `block_count` blocks of `block_size` tokens. Every table and prefix is forgotten.

    Only what is in host memory is not, where that is the same as before: what was saved there by copies that have been
    made, those of rounds up to `copies_done` and of earlier ones that a `Reserve` has said so of.
    """

    block_count: int
    block_size: int
    host: HostTier = HostTier()
    copies_done: int = -1


class ForgetPrefixes(msgspec.Struct, frozen=True, tag=True):
    """No request finds from now on what was computed before. Not answered; tables are kept, and nobody is disturbed."""


CacheMessage: TypeAlias = Reserve | Release | Reset | ForgetPrefixes
