"""Copies of blocks: in few batches, and with the outcome that making them one by one would have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuelight.actors.cache.tables import CopyBatches
from cuelight.messages.request import BlockCopies, CopyKind

Copy = tuple[CopyKind, int, int]
SAVE, LOAD, FORK = CopyKind.SAVE, CopyKind.LOAD, CopyKind.FORK


def gathered(copies: Iterable[Copy]) -> tuple[BlockCopies, ...]:
    """The batches that these copies make."""
    gathering = CopyBatches()
    for one in copies:
        gathering.add(*one)
    return gathering.take()


class Memory:
    """What is in each block of the pool, and in each slot of host memory."""

    def __init__(self) -> None:
        self.pool = {block: f"block {block}" for block in range(1, 7)}
        self.host = {slot: f"slot {slot}" for slot in range(6)}

    def copy(self, copying: CopyKind, sources: Sequence[int], targets: Sequence[int]) -> None:
        read = self.host if copying is LOAD else self.pool
        written = self.host if copying is SAVE else self.pool
        for source, target in zip(sources, targets, strict=True):
            written[target] = read[source]

    def both(self) -> list[dict[int, str]]:
        return [self.pool, self.host]


def is_sound(batch: BlockCopies) -> bool:
    """No block is written twice, and where both are blocks of the pool, none is both read and written."""
    once = len(set(batch.targets)) == len(batch.targets) == len(batch.sources)
    return once and (batch.copying is not FORK or not set(batch.sources) & set(batch.targets))


def is_of_use(copies: Sequence[Copy], index: int) -> bool:
    """Whether this is no save that another one replaces before its slot was loaded."""
    copying, _, slot = copies[index]
    later = [kind for kind, source, target in copies[index + 1 :] if slot == (source if kind is LOAD else target)]
    uses = [kind for kind in later if kind is not FORK]
    return copying is not SAVE or uses[:1] != [SAVE]


blocks, slots = st.integers(1, 6), st.integers(0, 5)
any_copy = st.one_of(
    st.tuples(st.just(SAVE), blocks, slots),
    st.tuples(st.just(LOAD), slots, blocks),
    st.tuples(st.just(FORK), blocks, blocks).filter(lambda copy: copy[1] != copy[2]),
)


@given(st.lists(any_copy, max_size=20))
def test_any_copies_in_batches_do_what_they_do_one_by_one(copies: list[Copy]) -> None:
    """Whatever order a batch is made in."""
    one_by_one, forwards, backwards = Memory(), Memory(), Memory()
    for copying, source, target in copies:
        one_by_one.copy(copying, [source], [target])
    batches = gathered(copies)
    for batch in batches:
        assert is_sound(batch)
        forwards.copy(batch.copying, batch.sources, batch.targets)
        backwards.copy(batch.copying, batch.sources[::-1], batch.targets[::-1])
    assert one_by_one.both() == forwards.both() == backwards.both()
    assert sum(len(batch.sources) for batch in batches) == sum(is_of_use(copies, i) for i in range(len(copies)))


def test_copies_of_one_kind_are_one_batch() -> None:
    """Blocks and slots of the same number are not the same: 1 is read here and written there."""
    assert gathered([(SAVE, 1, 2), (SAVE, 2, 1)]) == (BlockCopies(SAVE, (1, 2), (2, 1)),)
    assert gathered([(LOAD, 1, 2), (LOAD, 2, 1)]) == (BlockCopies(LOAD, (1, 2), (2, 1)),)
    assert gathered([(FORK, 1, 2), (FORK, 1, 3)]) == (BlockCopies(FORK, (1, 1), (2, 3)),)


def test_a_copy_goes_past_others_that_do_not_concern_it() -> None:
    """A save, then a load into the block it saved, for each of several admissions: two batches."""
    copies = [(SAVE, 1, 0), (LOAD, 3, 1), (SAVE, 2, 1), (LOAD, 4, 2)]
    assert gathered(copies) == (BlockCopies(SAVE, (1, 2), (0, 1)), BlockCopies(LOAD, (3, 4), (1, 2)))


@pytest.mark.parametrize(
    "copies",
    [
        pytest.param([(LOAD, 0, 1), (LOAD, 1, 1)], id="a block is loaded twice"),
        pytest.param([(FORK, 1, 2), (FORK, 2, 3)], id="what was copied is copied on"),
        pytest.param([(FORK, 1, 2), (FORK, 3, 1)], id="what was copied is written to"),
        pytest.param([(SAVE, 1, 0), (LOAD, 0, 2)], id="what was saved is loaded"),
        pytest.param([(LOAD, 0, 1), (SAVE, 2, 0)], id="what was loaded is saved over"),
        pytest.param([(SAVE, 1, 0), (FORK, 2, 1)], id="what was saved is written to"),
    ],
)
def test_copies_that_must_follow_each_other_do(copies: list[Copy]) -> None:
    (first, second) = gathered(copies)
    assert (first.copying, second.copying) == (copies[0][0], copies[1][0])
    assert (first.sources, second.sources) == ((copies[0][1],), (copies[1][1],))


def test_what_is_saved_over_unread_is_not_saved() -> None:
    copies = [(SAVE, 1, 0), (SAVE, 2, 1), (SAVE, 3, 0), (LOAD, 0, 4), (SAVE, 5, 0)]
    assert gathered(copies) == (
        BlockCopies(SAVE, (2,), (1,)),
        BlockCopies(SAVE, (3,), (0,)),
        BlockCopies(LOAD, (0,), (4,)),
        BlockCopies(SAVE, (5,), (0,)),
    )
    many = [(SAVE, block, block % 3) for block in range(1, 101)]
    assert sum(len(batch.sources) for batch in gathered(many)) == 3


def test_a_later_copy_does_not_overtake_what_it_depends_on() -> None:
    copies = [(SAVE, 1, 0), (LOAD, 1, 2), (SAVE, 2, 2)]
    assert [batch.copying for batch in gathered(copies)] == [SAVE, LOAD, SAVE]


def test_what_was_taken_is_not_given_out_again() -> None:
    gathering = CopyBatches()
    gathering.add(SAVE, 1, 0)
    assert len(gathering.take()) == 1
    assert gathering.take() == ()


def test_a_block_is_not_copied_to_itself() -> None:
    CopyBatches().add(SAVE, 1, 1)
    with pytest.raises(AssertionError, match="block 1 is copied to itself"):
        CopyBatches().add(FORK, 1, 1)
