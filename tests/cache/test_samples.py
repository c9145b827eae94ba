"""Other samples of a prompt: they wait for the first one's prefill, and copy its last block where that is not full."""

from __future__ import annotations

import pytest
from caching import admit, asking, fill, forget, forked, loaded, make_tables, release, saved, serve, tokens

from cuelight.actors.cache.pool import BlockPool
from cuelight.actors.cache.tables import BlockTables
from cuelight.messages.request import HostTier


@pytest.mark.parametrize(
    ("length", "cached"), [(2, 1), (3, 2), (4, 3), (5, 4), (6, 5), (7, 6), (8, 7), (9, 8), (10, 9), (13, 12)]
)
def test_rule_recompute_last_all_but_one_token_are_found(length: int, cached: int) -> None:
    """Whether they end with a block or not; where the last of these ends a block, it is shared and not copied."""
    tables = make_tables(20)
    source = admit(tables, 1, tokens(length)).block_ids
    fill(tables, 1, length)
    grant = admit(tables, 2, tokens(length), sample_of=1)
    assert grant.cached_tokens == cached
    shared = cached // 4
    assert grant.block_ids[:shared] == source[:shared]
    assert not set(grant.block_ids[shared:]) & set(source)
    assert tables.take_copies() == ((forked(source[shared], grant.block_ids[shared]),) if cached % 4 else ())


def test_a_prompt_of_one_token_has_nothing_to_share() -> None:
    tables = make_tables(4)
    admit(tables, 1, tokens(1))
    assert not tables.is_being_computed(asking(2, tokens(1), sample_of=1))
    fill(tables, 1, 1)
    assert admit(tables, 2, tokens(1), sample_of=1).cached_tokens == 0


def test_who_is_no_sample_copies_nothing() -> None:
    tables = make_tables(20)
    admit(tables, 1, tokens(6))
    fill(tables, 1, 6)
    assert admit(tables, 2, tokens(6)).cached_tokens == 4
    assert tables.take_copies() == ()


def test_only_computed_tokens_are_used() -> None:
    tables = make_tables(20)
    admit(tables, 1, tokens(8))
    fill(tables, 1, 6)
    assert admit(tables, 2, tokens(8), sample_of=1).cached_tokens == 6


def test_only_equal_tokens_are_used() -> None:
    """A sample that ran already may come back with output of its own, and the first one has some, too."""
    tables = make_tables(20)
    admit(tables, 1, tokens(5))
    fill(tables, 1, 7, (50, 51))
    assert admit(tables, 2, (*tokens(5), 50, 61, 62), sample_of=1).cached_tokens == 6
    assert admit(tables, 3, (*tokens(5), 60), sample_of=1).cached_tokens == 5
    assert admit(tables, 4, (9, *tokens(4), 50), sample_of=1).cached_tokens == 0, "other tokens before the block"


def test_another_salt_copies_nothing() -> None:
    tables = make_tables(20)
    admit(tables, 1, tokens(3), b"mine")
    fill(tables, 1, 3)
    assert admit(tables, 2, tokens(3), b"yours", sample_of=1).cached_tokens == 0
    assert admit(tables, 3, tokens(3), b"mine", sample_of=1).cached_tokens == 2


@pytest.mark.parametrize("sample_of", [1, 9])
def test_a_first_sample_that_is_gone_or_was_never_there_changes_nothing(sample_of: int) -> None:
    tables = make_tables(20)
    serve(tables, 1, tokens(6))
    assert not tables.is_being_computed(asking(2, tokens(6), sample_of=sample_of))
    assert admit(tables, 2, tokens(6), sample_of=sample_of).cached_tokens == 4
    assert tables.take_copies() == ()


def test_a_full_block_that_nobody_else_can_find_is_copied_and_found_from_then_on() -> None:
    """The first sample's block is the duplicate of one that was evicted."""
    tables = make_tables(5)
    admit(tables, 1, tokens(4))
    source = admit(tables, 2, tokens(4)).block_ids
    fill(tables, 1, 4)
    fill(tables, 2, 4)
    release(tables, 1, 4)
    admit(tables, 3, tokens(16, 50))
    release(tables, 3, 0)
    grant = admit(tables, 4, tokens(5), sample_of=2)
    assert grant.cached_tokens == 4
    assert tables.take_copies() == (forked(source[0], grant.block_ids[0]),)
    assert admit(tables, 5, tokens(5)).block_ids[0] == grant.block_ids[0]


def test_samples_of_samples_are_copied_one_after_the_other() -> None:
    tables = make_tables(20)
    admit(tables, 1, tokens(3))
    fill(tables, 1, 3)
    assert admit(tables, 2, tokens(3), sample_of=1).cached_tokens == 2
    assert admit(tables, 3, tokens(3), sample_of=2).cached_tokens == 2
    assert tables.take_copies() == (forked(1, 2), forked(2, 3))


def test_a_sample_takes_the_full_blocks_from_host_memory_and_the_rest_from_the_first_sample() -> None:
    """The first one's full block is the duplicate of one that was evicted and saved."""
    tables = make_tables(8, host_blocks=1)
    admit(tables, 1, tokens(4))
    source = admit(tables, 2, tokens(6)).block_ids
    fill(tables, 1, 4)
    fill(tables, 2, 6)
    release(tables, 1, 4)
    admit(tables, 3, tokens(24, 50))
    release(tables, 3, 0)
    assert tables.take_copies() == (saved((1, 0)),)
    grant = admit(tables, 4, tokens(6), sample_of=2)
    assert grant.cached_tokens == 5
    assert tables.take_copies() == (loaded((0, grant.block_ids[0])), forked(source[1], grant.block_ids[1]))


def test_a_sample_waits_while_the_first_one_computes_what_it_can_use() -> None:
    tables = make_tables(20)
    admit(tables, 1, tokens(11))
    for computed in range(10):
        assert tables.is_being_computed(asking(2, tokens(11), sample_of=1)), computed
        fill(tables, 1, computed + 1)
    assert not tables.is_being_computed(asking(2, tokens(11), sample_of=1))
    assert admit(tables, 2, tokens(11), sample_of=1).cached_tokens == 10


def test_a_sample_waits_although_there_is_no_full_block() -> None:
    tables = make_tables(20)
    admit(tables, 1, tokens(3))
    assert not tables.is_being_computed(asking(2, tokens(3)))
    assert tables.is_being_computed(asking(2, tokens(3), sample_of=1))
    assert not tables.is_being_computed(asking(2, (7, *tokens(2)), sample_of=1)), "it says so, and is no sample"
    release(tables, 1, 1)
    assert not tables.is_being_computed(asking(2, tokens(3), sample_of=1)), "nobody computes it any more"


def test_a_sample_does_not_wait_for_single_tokens_behind_what_is_found_already() -> None:
    """Where the first sample is far behind, as another request has computed the prompt beside it."""
    tables = make_tables(20)
    admit(tables, 1, tokens(10))
    admit(tables, 2, tokens(10))
    fill(tables, 2, 8)
    assert not tables.is_being_computed(asking(3, tokens(10), sample_of=1))
    fill(tables, 1, 8)
    assert tables.is_being_computed(asking(3, tokens(10), sample_of=1))


def test_a_first_sample_whose_contents_were_forgotten_is_no_help() -> None:
    tables = make_tables(20)
    admit(tables, 1, tokens(7))
    fill(tables, 1, 7)
    forget(tables)
    assert admit(tables, 2, tokens(7), sample_of=1).cached_tokens == 0


def test_rule_all_or_nothing_a_refused_sample_leaves_no_trace() -> None:
    tables = BlockTables(BlockPool(4), 4, 0.0, HostTier())
    admit(tables, 1, tokens(6))
    fill(tables, 1, 6)
    admit(tables, 2, tokens(3, 50))
    assert tables.admit(asking(3, tokens(6), sample_of=1)) is None
    assert tables.take_copies() == ()
    release(tables, 2, 0)
    assert admit(tables, 3, tokens(6), sample_of=1).cached_tokens == 5
