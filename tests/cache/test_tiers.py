"""Salts, forgetting and host memory, by example. Rule numbers are those of the scheduling and caching rules."""

from __future__ import annotations

import pytest
from caching import BLOCK_SIZE, admit, asking, fill, forget, loaded, make_tables, release, saved, serve, tokens

from cuelight.actors.cache.hashing import HashChain
from cuelight.actors.cache.pool import BlockPool, HostSlots
from cuelight.actors.cache.tables import BlockTables
from cuelight.messages.cache import Growth
from cuelight.messages.request import CopyKind, HostTier, RequestId
from cuelight.messages.scheduler import Grant


def test_rule_hash_keys_a_prefix_is_found_only_with_its_salt() -> None:
    tables = make_tables(20)
    serve(tables, 1, tokens(9), b"mine")
    assert admit(tables, 2, tokens(9), b"yours").cached_tokens == 0
    assert admit(tables, 3, tokens(9)).cached_tokens == 0
    assert admit(tables, 4, tokens(9), b"mine").cached_tokens == 8


def test_rule_hash_keys_nobody_waits_for_a_prefix_of_another_salt() -> None:
    tables = make_tables(20)
    admit(tables, 1, tokens(9), b"mine")
    assert tables.is_being_computed(asking(2, tokens(9), b"mine"))
    assert not tables.is_being_computed(asking(3, tokens(9), b"yours", sample_of=1))


def test_rule_hash_keys_a_refused_request_is_not_tried_again_with_the_digests_of_another_salt() -> None:
    tables = make_tables(4)
    serve(tables, 1, tokens(8), b"mine")
    admit(tables, 2, tokens(12, 50))
    assert tables.admit(asking(3, tokens(9), b"mine")) is None
    release(tables, 2, 0)
    assert admit(tables, 3, tokens(9), b"yours").cached_tokens == 0


def test_rule_forget_prefixes_what_was_computed_is_forgotten() -> None:
    tables = make_tables(8)
    serve(tables, 1, tokens(16))
    forget(tables)
    assert (tables.pool.indexed_count, tables.pool.free_count) == (0, 8)
    assert admit(tables, 2, tokens(17)).cached_tokens == 0
    assert tables.pool.evictions == 0


def test_rule_forget_prefixes_who_runs_keeps_its_blocks_and_is_never_found() -> None:
    """Neither what it had computed, nor what it computes afterwards, nor when it ends."""
    tables = make_tables(16)
    admit(tables, 1, tokens(14))
    fill(tables, 1, 9)
    forget(tables)
    fill(tables, 1, 14)
    grant = tables.grow(Growth(RequestId(1), 17))
    assert grant == Grant(RequestId(1), (5,), 0, 20)
    assert admit(tables, 2, tokens(14)).cached_tokens == 0
    release(tables, 2, 0)
    release(tables, 1, 17, (14, 15, 16))
    assert tables.pool.indexed_count == 0
    assert admit(tables, 3, tokens(14)).cached_tokens == 0


def test_rule_forget_prefixes_nobody_waits_for_what_nobody_will_find() -> None:
    tables = make_tables(16)
    admit(tables, 1, tokens(12))
    fill(tables, 1, 6)
    assert tables.is_being_computed(asking(2, tokens(12)))
    forget(tables)
    assert not tables.is_being_computed(asking(2, tokens(12), sample_of=1))
    assert admit(tables, 2, tokens(12), sample_of=1).cached_tokens == 0
    assert tables.take_copies() == ()


def test_rule_forget_prefixes_what_is_computed_after_the_forgetting_is_found() -> None:
    """By another request, and by one that ran through it, was preempted and came back."""
    tables = make_tables(16)
    admit(tables, 1, tokens(9))
    fill(tables, 1, 9)
    forget(tables)
    release(tables, 1, 9)
    assert admit(tables, 1, tokens(9)).cached_tokens == 0
    fill(tables, 1, 9)
    assert admit(tables, 2, tokens(9)).cached_tokens == 8


def test_rule_forget_prefixes_host_memory_is_forgotten_as_well() -> None:
    tables = make_tables(2, host_blocks=4)
    serve(tables, 1, tokens(8))
    serve(tables, 2, tokens(8, 50))
    assert tables.host.used_count == 2
    forget(tables)
    assert tables.host.used_count == 0
    assert admit(tables, 3, tokens(8)).cached_tokens == 0


def test_an_evicted_block_is_saved_and_comes_back() -> None:
    tables = make_tables(3, host_blocks=3)
    assert serve(tables, 1, tokens(9)).block_ids == (1, 2, 3)
    assert tables.take_copies() == ()
    admit(tables, 2, tokens(12, 50))
    assert tables.take_copies() == (saved((2, 0), (1, 1)),)
    release(tables, 2, 0)
    grant = admit(tables, 1, tokens(9))
    assert grant.cached_tokens == 8
    assert tables.take_copies() == (loaded((1, grant.block_ids[0]), (0, grant.block_ids[1])),)


def test_what_was_loaded_can_be_found_at_once_and_is_not_saved_again() -> None:
    tables = make_tables(4, host_blocks=8)
    serve(tables, 1, tokens(8))
    serve(tables, 2, tokens(16, 50))
    first = admit(tables, 3, tokens(9))
    assert first.cached_tokens == 8
    assert admit(tables, 4, tokens(9)).block_ids[:2] == first.block_ids[:2]
    release(tables, 4, 8)
    release(tables, 3, 9)
    tables.take_copies()
    evictions = tables.pool.evictions
    admit(tables, 5, tokens(16, 100))
    assert tables.pool.evictions == evictions + 2
    assert tables.take_copies() == ()


def test_a_growth_saves_what_it_evicts() -> None:
    tables = make_tables(2, host_blocks=1)
    serve(tables, 1, tokens(4))
    admit(tables, 2, tokens(3, 50))
    assert tables.take_copies() == ()
    assert tables.grow(Growth(RequestId(2), 5)) is not None
    assert tables.take_copies() == (saved((1, 0)),)


def test_a_prefix_is_found_here_and_there_in_turn() -> None:
    """Of two requests that computed it at once, one has left behind the first block, and one still holds the third."""
    tables = make_tables(12, host_blocks=1)
    admit(tables, 1, tokens(13))
    last = admit(tables, 2, tokens(13)).block_ids[2]
    fill(tables, 1, 8)
    fill(tables, 2, 12)
    first = admit(tables, 3, tokens(5)).block_ids[0]
    release(tables, 1, 8)
    admit(tables, 4, tokens(24, 50))
    assert tables.take_copies() == (saved((2, 0)),)
    release(tables, 4, 0)
    grant = admit(tables, 5, tokens(13))
    assert grant.cached_tokens == 12
    assert (grant.block_ids[0], grant.block_ids[2]) == (first, last)
    assert tables.take_copies() == (loaded((0, grant.block_ids[1])),)


def test_rule_free_means_now_a_load_uses_up_a_free_block() -> None:
    tables = make_tables(4, host_blocks=4)
    serve(tables, 1, tokens(8))
    admit(tables, 2, tokens(16, 50))
    release(tables, 2, 0)
    admit(tables, 3, tokens(8, 100))
    tables.take_copies()
    assert tables.admit(asking(4, tokens(12))) is None
    assert tables.take_copies() == ()
    release(tables, 3, 0)
    assert admit(tables, 4, tokens(12)).cached_tokens == 8


def test_rule_hits_first_a_save_never_takes_the_slot_of_a_load_of_the_same_admission() -> None:
    """The slot that is to be loaded is the one that would be lost next."""
    tables = make_tables(2, host_blocks=2)
    serve(tables, 1, tokens(5))
    serve(tables, 2, tokens(8, 50))
    serve(tables, 3, tokens(4, 100))
    tables.take_copies()
    grant = admit(tables, 4, tokens(5))
    assert grant.cached_tokens == 4
    # Both blocks held a prefix; the second save takes the slot of the first one, which need not be made then.
    first, second = grant.block_ids
    assert tables.take_copies() == (saved((second, 1)), loaded((0, first)))


def test_rule_hits_first_when_every_slot_is_to_be_loaded_nothing_is_saved() -> None:
    tables = make_tables(3, host_blocks=2)
    serve(tables, 1, tokens(8))
    serve(tables, 2, tokens(12, 50))
    tables.take_copies()
    grant = admit(tables, 3, tokens(9))
    assert grant.cached_tokens == 8
    assert [copies.copying for copies in tables.take_copies()] == [CopyKind.LOAD]


def test_rule_tail_first_in_host_memory_too_a_long_prefix_loses_its_end_first() -> None:
    tables = make_tables(4, host_blocks=4)
    serve(tables, 1, tokens(16))
    serve(tables, 2, tokens(16, 50))
    admit(tables, 3, tokens(8, 100))
    release(tables, 3, 0)
    # Two blocks of the second prompt have taken the slots of the first one's last two.
    assert admit(tables, 4, tokens(16)).cached_tokens == 8


def test_rule_tail_first_what_was_loaded_loses_its_end_first_as_well() -> None:
    """Its two blocks stay on the device, and what is saved meanwhile takes the slot of one of them."""
    tables = make_tables(6, host_blocks=4)
    serve(tables, 1, tokens(8))
    serve(tables, 2, tokens(24, 50))
    assert admit(tables, 3, tokens(9)).cached_tokens == 8
    admit(tables, 4, tokens(12, 100))
    first, second = (HashChain(tokens(8), BLOCK_SIZE).digest(i) for i in range(2))
    assert (first in tables.host, second in tables.host) == (True, False)


def test_rule_tail_first_what_was_evicted_again_is_lost_after_what_was_evicted_before() -> None:
    tables = make_tables(3, host_blocks=3)
    serve(tables, 1, tokens(4))
    serve(tables, 2, tokens(12, 50))
    serve(tables, 3, tokens(5))
    again = HashChain(tokens(4), BLOCK_SIZE).digest(0)
    assert again in tables.host and tables.pool.find(again) is not None
    serve(tables, 4, tokens(12, 100))
    assert tables.pool.find(again) is None
    admit(tables, 5, tokens(8, 150))
    assert again in tables.host


def test_rule_resume_as_prefill_a_preempted_request_computes_again_only_its_block_that_is_not_full() -> None:
    """Though others have had all blocks meanwhile."""
    tables = make_tables(8, host_blocks=8)
    admit(tables, 1, tokens(14))
    fill(tables, 1, 14)
    assert tables.grow(Growth(RequestId(1), 18)) is not None
    release(tables, 1, 18, (14, 15, 16, 17))
    serve(tables, 2, tokens(32, 50))
    assert tables.pool.find(HashChain(tokens(4), BLOCK_SIZE).digest(0)) is None
    assert admit(tables, 1, tokens(19)).cached_tokens == 16


@pytest.mark.parametrize(
    "host",
    [HostTier(0, 1.0, 100.0), HostTier(8, 4.0, 1.0), HostTier(8, 9.0, 1.0), HostTier(8)],
    ids=["no memory", "as slow as computing", "slower", "nothing measured"],
)
def test_where_moving_does_not_pay_nothing_is_moved(host: HostTier) -> None:
    tables = BlockTables(BlockPool(3), BLOCK_SIZE, 0.0, host)
    serve(tables, 1, tokens(8))
    serve(tables, 2, tokens(8, 50))
    assert admit(tables, 3, tokens(8)).cached_tokens == 0
    assert tables.take_copies() == ()
    assert tables.host.total == 0


def test_the_check_of_host_memory_finds_what_is_wrong() -> None:
    host = HostSlots(2)
    assert host.keep(b"a") == 0
    pinned = host.pin([b"a"])
    with pytest.raises(AssertionError, match="lost or used twice"):
        host.check()
    host.unpin(pinned)
    host.check()
    with pytest.raises(AssertionError, match="saved twice"):
        host.keep(b"a")
