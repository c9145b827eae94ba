"""The cache manager's core by example. Rule numbers are those of the scheduling and caching rules the engine keeps."""

from __future__ import annotations

import hashlib
import struct

import pytest

from cuelight.actors.cache.hashing import HashChain
from cuelight.actors.cache.pool import BlockPool
from cuelight.actors.cache.tables import REFUSED_CHAINS_MAX, BlockTables
from cuelight.messages.cache import Admission, Filled, Growth
from cuelight.messages.request import NULL_BLOCK, RequestId
from cuelight.messages.scheduler import Grant

BLOCK_SIZE = 4


def make_tables(blocks_total: int, watermark_fraction: float = 0.0) -> BlockTables:
    return BlockTables(BlockPool(blocks_total + 1), BLOCK_SIZE, watermark_fraction)


def tokens(count: int, first: int = 0) -> tuple[int, ...]:
    """A prompt that shares no prefix with one of another `first`."""
    return tuple(range(first, first + count))


def admit(tables: BlockTables, request: int, token_ids: tuple[int, ...]) -> Grant | None:
    grant = tables.admit(Admission(RequestId(request), token_ids))
    tables.check()
    return grant


def admitted(tables: BlockTables, request: int, token_ids: tuple[int, ...]) -> Grant:
    grant = admit(tables, request, token_ids)
    assert grant is not None
    return grant


def grow(tables: BlockTables, request: int, token_count: int) -> Grant | None:
    grant = tables.grow(Growth(RequestId(request), token_count))
    tables.check()
    return grant


def fill(tables: BlockTables, request: int, computed: int, new: tuple[int, ...] = ()) -> None:
    tables.fill(Filled(RequestId(request), computed, new))
    tables.check()


def release(tables: BlockTables, request: int, computed: int, new: tuple[int, ...] = ()) -> None:
    tables.release(Filled(RequestId(request), computed, new))
    tables.check()


def serve(tables: BlockTables, request: int, token_ids: tuple[int, ...]) -> Grant:
    """Admit, compute everything, release: the full blocks stay as a cached prefix."""
    grant = admitted(tables, request, token_ids)
    release(tables, request, len(token_ids))
    return grant


def test_a_grant_covers_the_whole_prompt_in_table_order() -> None:
    """Rule `whole-prompt`: two half-prefilled prompts cannot deadlock each other, since each has all its blocks."""
    tables = make_tables(8)
    assert admit(tables, 1, tokens(9)) == Grant(RequestId(1), (1, 2, 3), cached_tokens=0, token_capacity=12)
    assert admit(tables, 2, tokens(4, 50)) == Grant(RequestId(2), (4,), cached_tokens=0, token_capacity=4)


def test_the_null_block_is_never_granted() -> None:
    """Rule `reference-counts`: the null block is never pooled."""
    tables = make_tables(3)
    assert tables.pool.total == 3
    assert NULL_BLOCK not in admitted(tables, 1, tokens(12)).block_ids
    assert admit(tables, 2, tokens(1, 50)) is None


def test_an_empty_pool_refuses_everything() -> None:
    tables = make_tables(0)
    assert admit(tables, 1, tokens(1)) is None
    assert tables.pool.free_count == 0


def test_rule_free_means_now_a_hit_that_nobody_holds_uses_up_a_free_block() -> None:
    tables = make_tables(4)
    serve(tables, 1, tokens(8))
    admitted(tables, 2, tokens(4, 50))
    assert tables.pool.free_count == 3
    # Two hits and two new blocks are four, though only two are new.
    assert admit(tables, 3, tokens(14)) is None
    assert admitted(tables, 4, tokens(12)).cached_tokens == 8
    assert tables.pool.free_count == 0


def test_rule_free_means_now_a_hit_that_another_request_holds_costs_nothing() -> None:
    tables = make_tables(4)
    admitted(tables, 1, tokens(8))
    fill(tables, 1, 8)
    assert admitted(tables, 2, tokens(16)).cached_tokens == 8
    assert tables.pool.free_count == 0


def test_rule_hits_first_new_blocks_never_evict_the_hits_of_the_same_admission() -> None:
    tables = make_tables(3)
    cached = serve(tables, 1, tokens(8)).block_ids
    serve(tables, 2, tokens(4, 50))
    # The hits are the longest free of the indexed blocks, so a new block taken first would be one of them.
    grant = admitted(tables, 3, tokens(12))
    assert grant.block_ids == (*cached, 3)
    assert grant.cached_tokens == 8


def test_rule_all_or_nothing_a_refused_admission_leaves_no_trace() -> None:
    tables = make_tables(4)
    cached = serve(tables, 1, tokens(8)).block_ids
    assert admit(tables, 2, tokens(17)) is None
    assert tables.pool.free_count == 4
    assert tables.pool.indexed_count == 2
    assert not any(tables.pool.is_held(block) for block in cached)
    assert tables.pool.evictions == 0


def test_rule_all_or_nothing_a_refused_growth_leaves_no_trace() -> None:
    tables = make_tables(4)
    admitted(tables, 1, tokens(8))
    assert grow(tables, 1, 17) is None
    assert tables.pool.free_count == 2
    assert grow(tables, 1, 16) == Grant(RequestId(1), (3, 4), cached_tokens=0, token_capacity=16)


def test_a_growth_that_already_fits_is_granted_without_blocks() -> None:
    tables = make_tables(2)
    admitted(tables, 1, tokens(6))
    assert grow(tables, 1, 8) == Grant(RequestId(1), (), cached_tokens=0, token_capacity=8)
    assert grow(tables, 1, 2) == Grant(RequestId(1), (), cached_tokens=0, token_capacity=8)


def test_rule_cached_as_granted_cached_tokens_are_those_of_the_blocks_granted() -> None:
    """What was cached when a request was refused is looked up anew when it is tried again."""
    tables = make_tables(5)
    serve(tables, 1, tokens(8))
    admitted(tables, 2, tokens(16, 50))
    assert admit(tables, 3, tokens(9)) is None
    assert grow(tables, 2, 20) is not None
    release(tables, 2, 0)
    assert tables.pool.evictions == 2
    assert admitted(tables, 3, tokens(9)).cached_tokens == 0


def test_rule_watermark_the_watermark_stays_free_after_an_admission() -> None:
    tables = make_tables(10, watermark_fraction=0.11)
    admitted(tables, 1, tokens(8))
    assert admit(tables, 2, tokens(28, 50)) is None
    assert admit(tables, 2, tokens(24, 50)) is not None
    assert tables.pool.free_count == 2


def test_rule_watermark_a_lone_request_may_use_everything() -> None:
    tables = make_tables(10, watermark_fraction=0.5)
    assert admit(tables, 1, tokens(40)) is not None


def test_rule_watermark_the_watermark_does_not_hold_back_growth() -> None:
    tables = make_tables(4, watermark_fraction=0.5)
    admitted(tables, 1, tokens(4))
    admitted(tables, 2, tokens(4, 50))
    assert grow(tables, 1, 12) is not None
    assert tables.pool.free_count == 0


def test_rule_reference_counts_after_a_drain_every_block_is_free() -> None:
    tables = make_tables(8)
    for request in range(4):
        admitted(tables, request, tokens(8) if request % 2 else tokens(5, 50))
    for request in range(4):
        release(tables, request, 0)
    assert tables.pool.free_count == tables.pool.total == 8


def test_rule_reference_counts_the_check_finds_what_is_wrong() -> None:
    pool = BlockPool(4)
    first, second = pool.take(2)
    pool.check({first: 1, second: 1})
    with pytest.raises(AssertionError, match="1 holders, 0 entries"):
        pool.check({first: 1})
    with pytest.raises(AssertionError, match="outside the pool"):
        pool.check({first: 1, second: 1, 3: 1})
    pool.index(first, b"digest")
    pool._spare.append(first)
    with pytest.raises(AssertionError, match="both free and held, or neither"):
        pool.check({first: 1, second: 1})


def test_rule_reference_counts_a_block_given_back_was_held() -> None:
    pool = BlockPool(4)
    blocks = pool.take(1)
    pool.give_back(blocks)
    with pytest.raises(AssertionError, match="given back but not held"):
        pool.give_back(blocks)


def test_rule_reference_counts_more_blocks_than_are_free_are_never_taken() -> None:
    with pytest.raises(AssertionError, match="5 blocks requested, 4 are free"):
        BlockPool(5).take(5)


@pytest.mark.parametrize(("length", "cached"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 8)])
def test_rule_recompute_last_a_full_hit_leaves_a_token_to_compute(length: int, cached: int) -> None:
    tables = make_tables(8)
    serve(tables, 1, tokens(8))
    assert admitted(tables, 2, tokens(length)).cached_tokens == cached


def test_rule_recompute_last_the_block_computed_again_is_the_requests_own() -> None:
    tables = make_tables(8)
    admitted(tables, 1, tokens(8))
    fill(tables, 1, 8)
    assert admitted(tables, 2, tokens(8)).block_ids == (1, 3)


def test_rule_chained_hash_a_digest_is_the_sha_256_of_parent_tokens_and_extra_keys() -> None:
    """Rule `sha256` as well: no guessable hash."""
    chain = HashChain((1, 2, 3, 4, 5), block_size=2, salt=b"tenant")
    first = hashlib.sha256(bytes(32) + struct.pack("<2i", 1, 2) + b"tenant").digest()
    assert chain.digest(0) == first
    assert chain.digest(1) == hashlib.sha256(first + struct.pack("<2i", 3, 4)).digest()


def test_rule_chained_hash_only_full_blocks_have_a_digest() -> None:
    chain = HashChain((1, 2, 3), block_size=2)
    with pytest.raises(AssertionError, match="only a full block"):
        chain.digest(1)
    chain.extend((4,))
    assert chain.digest(1) == HashChain((1, 2, 3, 4), block_size=2).digest(1)


def test_rule_chained_hash_the_same_tokens_at_another_place_are_another_block() -> None:
    tables = make_tables(8)
    serve(tables, 1, (1, 2, 3, 4, 5, 6, 7, 8))
    assert admitted(tables, 2, (5, 6, 7, 8, 1, 2, 3, 4, 9)).cached_tokens == 0
    assert admitted(tables, 3, (1, 2, 3, 4, 9, 9, 9, 9, 9)).cached_tokens == 4


def test_rule_hash_keys_the_salt_of_the_first_block_separates_the_whole_chain() -> None:
    mine, yours = HashChain(tokens(8), BLOCK_SIZE, salt=b"mine"), HashChain(tokens(8), BLOCK_SIZE, salt=b"yours")
    assert mine.digest(0) != yours.digest(0)
    assert mine.digest(1) != yours.digest(1)


def test_a_digest_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also over a refused admission that is tried again, and over the prefill that follows."""
    hashed: list[int] = []
    next_digest = HashChain._next_digest

    def counting(chain: HashChain) -> bytes:
        hashed.append(len(chain._digests))
        return next_digest(chain)

    tables = make_tables(6)
    serve(tables, 1, tokens(8))
    admitted(tables, 2, tokens(12, 50))
    monkeypatch.setattr(HashChain, "_next_digest", counting)
    for _ in range(3):
        assert admit(tables, 3, tokens(17)) is None
    assert hashed == [0, 1, 2]
    release(tables, 2, 0)
    assert admitted(tables, 3, tokens(17)).cached_tokens == 8
    fill(tables, 3, 17)
    release(tables, 3, 17)
    assert hashed == [0, 1, 2, 3]


def test_a_refused_request_may_come_back_with_more_tokens() -> None:
    """Rule `edited-tokens`: digests of other tokens are not kept."""
    tables = make_tables(4)
    serve(tables, 1, (1, 2, 3, 4))
    admitted(tables, 2, tokens(12, 50))
    assert admit(tables, 3, (9, 2, 3, 4, 5)) is None
    release(tables, 2, 0)
    assert admitted(tables, 3, (1, 2, 3, 4, 5, 6)).cached_tokens == 4


def test_the_memory_of_refused_admissions_is_bounded() -> None:
    tables = make_tables(1)
    for request in range(3 * REFUSED_CHAINS_MAX):
        assert admit(tables, request, tokens(5)) is None
    assert len(tables._refused) == REFUSED_CHAINS_MAX
    release(tables, 3 * REFUSED_CHAINS_MAX - 1, 0)
    assert len(tables._refused) == REFUSED_CHAINS_MAX - 1


def test_rule_computed_only_only_computed_tokens_become_a_prefix() -> None:
    tables = make_tables(8)
    admitted(tables, 1, tokens(10))
    fill(tables, 1, 7)
    assert tables.pool.indexed_count == 1
    fill(tables, 1, 10)
    assert tables.pool.indexed_count == 2
    # The eleventh and twelfth token fill the third block, but the twelfth is not computed yet.
    fill(tables, 1, 11, (10, 11))
    assert tables.pool.indexed_count == 2
    release(tables, 1, 12)
    assert tables.pool.indexed_count == 3
    assert admitted(tables, 2, tokens(13)).cached_tokens == 12


def test_rule_tail_first_a_long_prefix_loses_its_end_first() -> None:
    tables = make_tables(4)
    serve(tables, 1, tokens(16))
    admitted(tables, 2, tokens(4, 50))
    assert tables.pool.evictions == 1
    assert admitted(tables, 3, tokens(12)).cached_tokens == 8


def test_rule_eviction_order_unindexed_blocks_are_reused_first_and_indexed_ones_last() -> None:
    tables = make_tables(5)
    release_unindexed = admitted(tables, 1, tokens(7)).block_ids
    release(tables, 1, 0)
    cached = serve(tables, 2, tokens(4, 50)).block_ids
    # 1 came back unindexed and was reused and indexed; then 2 is the only spare one, and 3 to 5 were never used.
    assert release_unindexed == (1, 2)
    assert cached == (1,)
    assert admitted(tables, 3, tokens(16, 100)).block_ids == (2, 3, 4, 5)
    assert tables.pool.evictions == 0
    assert admitted(tables, 4, tokens(4, 150)).block_ids == (1,)
    assert tables.pool.evictions == 1


def test_rule_eviction_order_the_digest_stays_until_the_block_is_reused() -> None:
    tables = make_tables(2)
    serve(tables, 1, tokens(8))
    assert (tables.pool.free_count, tables.pool.indexed_count) == (2, 2)
    admitted(tables, 2, tokens(4, 50))
    assert tables.pool.indexed_count == 1
    admitted(tables, 3, tokens(4, 100))
    assert tables.pool.indexed_count == 0
    assert tables.pool.evictions == 2


def test_rule_eviction_order_a_hit_makes_a_prefix_recent_again() -> None:
    tables = make_tables(3)
    serve(tables, 1, tokens(4))
    serve(tables, 2, tokens(4, 50))
    assert serve(tables, 3, tokens(5)).cached_tokens == 4
    admitted(tables, 4, tokens(8, 100))
    assert admit(tables, 5, tokens(5, 50)) is None
    assert tables.pool.find(HashChain(tokens(4), BLOCK_SIZE).digest(0)) is not None
    assert tables.pool.find(HashChain(tokens(4, 50), BLOCK_SIZE).digest(0)) is None


def test_rule_duplicate_prefixes_two_requests_that_compute_one_prefix_keep_their_own_blocks() -> None:
    tables = make_tables(8)
    first, second = admitted(tables, 1, tokens(9)), admitted(tables, 2, tokens(9))
    assert not set(first.block_ids) & set(second.block_ids)
    fill(tables, 1, 9)
    fill(tables, 2, 9)
    assert tables.pool.indexed_count == 2
    assert admitted(tables, 3, tokens(9)).block_ids[:2] == first.block_ids[:2]


def test_rule_duplicate_prefixes_a_duplicate_takes_the_place_of_an_evicted_first() -> None:
    tables = make_tables(6)
    admitted(tables, 1, tokens(8))
    duplicate = admitted(tables, 2, tokens(8)).block_ids
    fill(tables, 1, 8)
    fill(tables, 2, 8)
    release(tables, 1, 8)
    admitted(tables, 3, tokens(16, 50))
    assert tables.pool.indexed_count == 0
    release(tables, 2, 8)
    assert tables.pool.indexed_count == 2
    assert admitted(tables, 4, tokens(8)).block_ids[0] == duplicate[0]


def test_a_shared_block_is_free_only_when_its_last_holder_left() -> None:
    tables = make_tables(4)
    admitted(tables, 1, tokens(8))
    fill(tables, 1, 8)
    admitted(tables, 2, tokens(9))
    release(tables, 1, 8)
    assert tables.pool.free_count == 1
    release(tables, 2, 9)
    assert tables.pool.free_count == 4


def test_a_cancelled_prefill_keeps_what_was_computed() -> None:
    tables = make_tables(8)
    admitted(tables, 1, tokens(20))
    fill(tables, 1, 4)
    release(tables, 1, 10)
    assert admitted(tables, 2, tokens(20)).cached_tokens == 8


def test_a_preempted_request_finds_its_own_blocks() -> None:
    tables = make_tables(8)
    admitted(tables, 1, tokens(6))
    grow(tables, 1, 9)
    release(tables, 1, 9, (6, 7, 8, 9))
    assert admitted(tables, 1, tokens(10)).cached_tokens == 8


def test_releasing_a_request_that_holds_nothing_is_harmless() -> None:
    tables = make_tables(4)
    release(tables, 7, 0)
    admitted(tables, 1, tokens(16))
    assert admit(tables, 2, tokens(5)) is None
    release(tables, 2, 0)
    assert tables.pool.free_count == 0


def test_our_bugs_are_said_by_name() -> None:
    tables = make_tables(4)
    admitted(tables, 1, tokens(5))
    with pytest.raises(AssertionError, match="request 1 is admitted twice"):
        admit(tables, 1, tokens(5))
    with pytest.raises(AssertionError, match="request 2 has no tokens"):
        admit(tables, 2, ())
    with pytest.raises(AssertionError, match="request 2 grows but has no table"):
        grow(tables, 2, 5)
    with pytest.raises(AssertionError, match="request 2 is filled but has no table"):
        fill(tables, 2, 0)
    with pytest.raises(AssertionError, match="more computed than known"):
        fill(tables, 1, 6)
    with pytest.raises(AssertionError, match="computed beyond its blocks"):
        fill(tables, 1, 9, (5, 6, 7, 8))
    fill(tables, 1, 5)
    with pytest.raises(AssertionError, match="went down"):
        fill(tables, 1, 4)


def test_a_large_pool_costs_nothing_until_it_is_used() -> None:
    pool = BlockPool(10**12)
    assert pool.take(3) == [1, 2, 3]
    assert pool.free_count == 10**12 - 4
