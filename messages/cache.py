"""Messages to the cache manager. A planning round takes one `Reserve`."""

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
    """A waiting request needs blocks for all of `token_ids`, less the prefix that is already cached.

    Only prefixes with the same `salt` are used. A sample of the prompt of `sample_of` can also use a copy of the last
    block of `sample_of`, which is not full.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    salt: bytes = b""
    sample_of: RequestId | None = None


class Filled(msgspec.Struct, frozen=True):
    """The K/V of a request's first `computed_tokens` tokens are in its blocks; full blocks become reusable prefixes.

    `token_ids` are the tokens that have not been sent to the cache manager yet, in order.
    """

    request_id: RequestId
    computed_tokens: int
    token_ids: tuple[int, ...]


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Hold blocks for one step. Answered once: `Granted`, with the same `round`; not at all before the first `Reset`.

    Handled in this order: `filled`; `growths`, each granted whole or refused; if none was refused, `admissions` in
    order, until one is refused or the uncached tokens of the admitted requests reach `token_budget`. The copies of
    rounds up to `copies_done` have been made.
    """

    round: int
    filled: tuple[Filled, ...]
    growths: tuple[Growth, ...]
    admissions: tuple[Admission, ...]
    token_budget: int
    reply_to: Address[Granted]
    copies_done: int = -1


class Release(msgspec.Struct, frozen=True, tag=True):
    """Release the blocks of these requests. Not answered. Computed full blocks stay cached until evicted.

    Blocks of a `poisoned` request do not stay cached: its logits were not finite, and its K/V may not be either.
    """

    released: tuple[Filled, ...]
    poisoned: tuple[RequestId, ...] = ()


class Reset(msgspec.Struct, frozen=True, tag=True):
    """Forget every block table and prefix: the pool is new and empty, `block_count` blocks of `block_size` tokens.

    Blocks in host memory are kept if `host.memory` is the same as before and the copies that saved them have been made:
    those of rounds up to `copies_done`, here or in a `Reserve` before.
    """

    block_count: int
    block_size: int
    host: HostTier = HostTier()
    copies_done: int = -1


class ForgetPrefixes(msgspec.Struct, frozen=True, tag=True):
    """Forget every cached prefix. Not answered; block tables are kept, and running requests continue."""


CacheMessage: TypeAlias = Reserve | Release | Reset | ForgetPrefixes
