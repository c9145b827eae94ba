"""The cache manager's shell: order within a `Reserve`, what is answered, and what the observer is told."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec
import pytest

from cuelight.actors.cache.actor import CacheManager
from cuelight.messages.cache import Admission, Filled, ForgetPrefixes, Growth, Release, Reserve, Reset
from cuelight.messages.observer import BlockFigures
from cuelight.messages.request import BlockCopies, CopyKind, HostTier, RequestId
from cuelight.messages.scheduler import Grant, Granted

M = TypeVar("M")


class Inbox(Generic[M]):
    def __init__(self) -> None:
        self.heard: list[M] = []

    def tell(self, message: M, /) -> None:
        self.heard.append(message)


ROUND = 17


class Stage:
    """A cache manager with a pool of `blocks_total` blocks of four tokens, and its two counterparts."""

    def __init__(
        self, blocks_total: int, watermark_fraction: float = 0.0, host_blocks: int = 0, memory: int = 0
    ) -> None:
        self.observer: Inbox[BlockFigures] = Inbox()
        self.scheduler: Inbox[Granted] = Inbox()
        self.cache = CacheManager(self.observer, watermark_fraction)
        self.reset = Reset(blocks_total + 1, 4, HostTier(host_blocks, 1.0, 1.0, memory))
        self.cache.handle(self.reset)

    def reserve(
        self,
        filled: tuple[Filled, ...] = (),
        growths: tuple[Growth, ...] = (),
        admissions: tuple[Admission, ...] = (),
        token_budget: int = 1000,
        round_: int = ROUND,
        copies_done: int = -1,
    ) -> Granted:
        answers_before = len(self.scheduler.heard)
        self.cache.handle(Reserve(round_, filled, growths, admissions, token_budget, self.scheduler, copies_done))
        assert len(self.scheduler.heard) == answers_before + 1
        return self.scheduler.heard[-1]


def admission(request: int, token_count: int, first: int = 0) -> Admission:
    return Admission(RequestId(request), tuple(range(first, first + token_count)))


def ids(granted: Granted) -> list[int]:
    return [grant.request_id for grant in granted.grants]


def test_what_comes_before_the_first_reset_was_meant_for_another() -> None:
    observer: Inbox[BlockFigures] = Inbox()
    scheduler: Inbox[Granted] = Inbox()
    cache = CacheManager(observer, 0.01)
    cache.handle(Reserve(ROUND, (Filled(RequestId(7), 3, ()),), (), (admission(1, 1),), 100, scheduler))
    cache.handle(Release((Filled(RequestId(7), 4, ()),)))
    cache.handle(ForgetPrefixes())
    assert scheduler.heard == []
    assert observer.heard == []


def test_a_reset_gives_all_blocks_but_the_null_block() -> None:
    stage = Stage(9)
    assert stage.observer.heard == [BlockFigures(blocks_total=9, blocks_free=9)]


def test_filled_comes_before_growths_and_growths_before_admissions() -> None:
    stage = Stage(4)
    stage.reserve(admissions=(admission(1, 8),))
    granted = stage.reserve(
        filled=(Filled(RequestId(1), 8, (8,)),),
        growths=(Growth(RequestId(1), 12),),
        admissions=(admission(2, 9),),
    )
    assert granted == Granted(ROUND, (Grant(RequestId(1), (3,), 0, 12), Grant(RequestId(2), (1, 2, 4), 8, 12)), ())


def test_each_growth_is_granted_whole_or_refused() -> None:
    stage = Stage(4)
    stage.reserve(admissions=(admission(1, 4), admission(2, 4, 50), admission(3, 4, 100)))
    growths = (Growth(RequestId(1), 12), Growth(RequestId(2), 8), Growth(RequestId(3), 8))
    granted = stage.reserve(growths=growths)
    assert granted == Granted(ROUND, (Grant(RequestId(2), (4,), 0, 8),), (RequestId(1), RequestId(3)))


def test_rule_running_first_a_round_that_must_preempt_admits_nobody() -> None:
    stage = Stage(4)
    stage.reserve(admissions=(admission(1, 12),))
    granted = stage.reserve(growths=(Growth(RequestId(1), 24),), admissions=(admission(2, 4, 50),))
    assert granted == Granted(ROUND, (), (RequestId(1),))


def test_admissions_stop_at_the_first_refused() -> None:
    stage = Stage(4)
    granted = stage.reserve(admissions=(admission(1, 8), admission(2, 12, 50), admission(3, 4, 100)))
    assert ids(granted) == [1]
    assert granted.refused == (RequestId(2),)


def test_admissions_stop_when_the_budget_is_used_up() -> None:
    """The last one may exceed it: it is prefilled in chunks. Those behind it are neither granted nor refused."""
    stage = Stage(20)
    admissions = (admission(1, 6), admission(2, 10, 50), admission(3, 4, 100))
    granted = stage.reserve(admissions=admissions, token_budget=7)
    assert ids(granted) == [1, 2]
    assert granted.refused == ()
    granted = stage.reserve(admissions=admissions[2:], token_budget=0)
    assert granted == Granted(ROUND, (), ())


def test_only_uncached_tokens_count_against_the_budget() -> None:
    stage = Stage(20)
    stage.reserve(admissions=(admission(1, 8),))
    granted = stage.reserve(
        filled=(Filled(RequestId(1), 8, ()),),
        admissions=(admission(2, 9), admission(3, 10), admission(4, 9)),
        token_budget=3,
    )
    assert [(grant.request_id, grant.cached_tokens) for grant in granted.grants] == [(2, 8), (3, 8)]


def test_rule_watermark_an_admission_earlier_in_the_same_message_brings_the_watermark() -> None:
    stage = Stage(4, watermark_fraction=0.25)
    granted = stage.reserve(admissions=(admission(1, 12), admission(2, 4, 50)))
    assert ids(granted) == [1]
    assert granted.refused == (RequestId(2),)
    assert stage.observer.heard[-1].blocks_free == 1


def test_a_release_keeps_the_prefix_and_is_not_answered() -> None:
    stage = Stage(4)
    stage.reserve(admissions=(admission(1, 6),))
    stage.cache.handle(Release((Filled(RequestId(1), 8, (6, 7, 8)), Filled(RequestId(99), 0, ()))))
    assert len(stage.scheduler.heard) == 1
    figures = BlockFigures(blocks_total=4, blocks_free=4, blocks_cached=2, tokens_looked_up=6)
    assert stage.observer.heard[-1] == figures
    assert stage.reserve(admissions=(admission(2, 9),)).grants[0].cached_tokens == 8


def test_what_a_spoilt_request_computed_is_no_prefix_but_what_it_found_still_is() -> None:
    stage = Stage(12)
    stage.reserve(admissions=(admission(1, 4),))
    stage.cache.handle(Release((Filled(RequestId(1), 4, ()),)))
    stage.reserve(admissions=(admission(2, 13),))
    stage.reserve(filled=(Filled(RequestId(2), 8, ()),))
    assert stage.reserve(admissions=(admission(3, 9),)).grants[0].cached_tokens == 8
    stage.cache.handle(Release((Filled(RequestId(2), 12, ()),), poisoned=(RequestId(2),)))
    assert stage.reserve(admissions=(admission(4, 13),)).grants[0].cached_tokens == 4
    stage.cache.handle(Release((Filled(RequestId(4), 12, ()), Filled(RequestId(3), 8, ()))))
    assert stage.reserve(admissions=(admission(5, 13),)).grants[0].cached_tokens == 12


def test_the_observer_hears_changed_figures_once_a_message() -> None:
    stage = Stage(4)
    stage.reserve(admissions=(admission(1, 4), admission(2, 4, 50)))
    assert len(stage.observer.heard) == 2
    stage.reserve(filled=(Filled(RequestId(1), 2, ()),), growths=(Growth(RequestId(1), 4),))
    stage.reserve()
    stage.cache.handle(Release(()))
    assert len(stage.observer.heard) == 2
    stage.reserve(filled=(Filled(RequestId(1), 4, ()),))
    figures = BlockFigures(blocks_total=4, blocks_free=2, blocks_cached=1, tokens_looked_up=8)
    assert stage.observer.heard[2:] == [figures]


def test_a_reset_forgets_tables_and_prefixes_but_not_past_counts() -> None:
    stage = Stage(2)
    stage.reserve(admissions=(admission(1, 8),))
    stage.cache.handle(Release((Filled(RequestId(1), 8, ()),)))
    stage.reserve(admissions=(admission(2, 8, 50),))
    assert stage.observer.heard[-1].evictions == 2
    for _ in range(2):
        stage.cache.handle(Reset(6, 2))
        figures = BlockFigures(blocks_total=5, blocks_free=5, evictions=2, tokens_looked_up=16)
        assert stage.observer.heard[-1] == figures
    assert len(stage.observer.heard) == 6
    stage.cache.handle(Release((Filled(RequestId(2), 8, ()),)))
    granted = stage.reserve(admissions=(admission(1, 9), admission(2, 9)))
    assert granted == Granted(ROUND, (Grant(RequestId(1), (1, 2, 3, 4, 5), 0, 10),), (), (RequestId(2),))


def test_a_growth_without_a_table_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="request 5 grows but has no table"):
        Stage(4).reserve(growths=(Growth(RequestId(5), 4),))


def test_a_prefix_is_found_with_its_salt() -> None:
    stage = Stage(8)
    mine, yours = (Admission(RequestId(i), tuple(range(6)), salt) for i, salt in enumerate((b"mine", b"yours")))
    stage.reserve(admissions=(mine,))
    stage.cache.handle(Release((Filled(mine.request_id, 6, ()),)))
    granted = stage.reserve(admissions=(yours, Admission(RequestId(2), tuple(range(6)), b"mine")))
    assert [grant.cached_tokens for grant in granted.grants] == [0, 4]
    assert stage.observer.heard[-1].tokens_looked_up == 18
    assert stage.observer.heard[-1].tokens_found == 4


def test_prefixes_are_forgotten_and_tables_are_not() -> None:
    stage = Stage(8)
    stage.reserve(admissions=(admission(1, 6),))
    stage.reserve(filled=(Filled(RequestId(1), 6, ()),), admissions=(admission(2, 6, 50),))
    stage.cache.handle(Release((Filled(RequestId(2), 6, ()),)))
    assert stage.observer.heard[-1].blocks_cached == 2
    stage.cache.handle(ForgetPrefixes())
    assert stage.observer.heard[-1].blocks_cached == stage.observer.heard[-1].evictions == 0
    granted = stage.reserve(growths=(Growth(RequestId(1), 9),), admissions=(admission(3, 6), admission(4, 6, 50)))
    assert [(grant.request_id, grant.cached_tokens) for grant in granted.grants] == [(1, 0), (3, 0), (4, 0)]
    assert len(stage.scheduler.heard) == 3, "a ForgetPrefixes is not answered"


def test_what_growths_and_admissions_copy_comes_with_the_answer() -> None:
    """Saves of both, and a load into a block that was saved: it comes after them."""
    stage = Stage(4, host_blocks=4)
    stage.reserve(admissions=(admission(1, 8),))
    stage.cache.handle(Release((Filled(RequestId(1), 8, ()),)))
    stage.reserve(admissions=(admission(2, 16, 50),))
    stage.cache.handle(Release((Filled(RequestId(2), 16, ()),)))
    stage.reserve(admissions=(admission(3, 3, 100),))
    granted = stage.reserve(growths=(Growth(RequestId(3), 5),), admissions=(admission(4, 8),))
    (growth, last) = granted.grants
    assert last.cached_tokens == 4
    # Slot 3 was free, slot 1 is to be loaded; of the others, 0 and 2 are in the order in which they were used.
    save = BlockCopies(CopyKind.SAVE, (*growth.block_ids, *last.block_ids), (3, 0, 2))
    assert granted.copies == (save, BlockCopies(CopyKind.LOAD, (1,), last.block_ids[:1]))
    figures = stage.observer.heard[-1]
    assert (figures.blocks_saved, figures.blocks_loaded, figures.blocks_forked) == (6, 1, 0)
    assert (figures.host_blocks_total, figures.host_blocks_used) == (4, 4)
    stage.cache.handle(Reset(5, 4))
    figures = stage.observer.heard[-1]
    assert (figures.blocks_saved, figures.host_blocks_total, figures.host_blocks_used) == (6, 0, 0)


def test_a_copy_is_answered_once() -> None:
    stage = Stage(1, host_blocks=1)
    stage.reserve(admissions=(admission(1, 4),))
    stage.cache.handle(Release((Filled(RequestId(1), 4, ()),)))
    assert stage.reserve(admissions=(admission(2, 4, 50),)).copies == (BlockCopies(CopyKind.SAVE, (1,), (0,)),)
    assert stage.reserve().copies == ()


def test_other_samples_wait_for_the_first_one_and_copy_its_last_block() -> None:
    stage = Stage(8)
    samples = tuple(Admission(RequestId(i), tuple(range(6)), sample_of=RequestId(0) if i else None) for i in range(4))
    granted = stage.reserve(admissions=samples, token_budget=100)
    assert ids(granted) == [0]
    assert granted.deferred == (RequestId(1), RequestId(2), RequestId(3))
    granted = stage.reserve(filled=(Filled(RequestId(0), 6, ()),), admissions=samples[1:], token_budget=3)
    assert [(grant.request_id, grant.cached_tokens) for grant in granted.grants] == [(1, 5), (2, 5), (3, 5)]
    targets = tuple(grant.block_ids[1] for grant in granted.grants)
    assert granted.copies == (BlockCopies(CopyKind.FORK, (2, 2, 2), targets),)
    figures = stage.observer.heard[-1]
    assert (figures.blocks_forked, figures.tokens_looked_up, figures.tokens_found) == (3, 24, 15)


def test_host_memory_that_does_not_pay_has_no_blocks() -> None:
    stage = Stage(4)
    stage.cache.handle(Reset(5, 4, HostTier(100, move_seconds=4.0, recompute_seconds=1.0)))
    assert stage.observer.heard[-1] == BlockFigures(blocks_total=4, blocks_free=4)


def saving(memory: int = 5) -> Stage:
    """Two blocks of request 1 were saved in the round before the last, one of request 2 in the last."""
    stage = Stage(3, host_blocks=8, memory=memory)
    for number in range(3):
        stage.reserve(admissions=(admission(number, (8, 4, 8)[number], 100 * number),), round_=ROUND + number)
        stage.cache.handle(Release((Filled(RequestId(number), (8, 4, 8)[number], ()),)))
    last = stage.reserve(admissions=(admission(3, 12, 900),), round_=ROUND + 3)
    assert [copies.copying for copies in last.copies] == [CopyKind.SAVE]
    assert stage.observer.heard[-1].blocks_saved == 5
    return stage


def found(stage: Stage) -> list[int]:
    """Tokens that each of the three prompts would find."""
    counts = []
    for number in range(3):
        granted = stage.reserve(admissions=(admission(9, 9, 100 * number),))
        counts.append(granted.grants[0].cached_tokens)
        stage.cache.handle(Release((Filled(RequestId(9), counts[-1], ()),)))
    return counts


@pytest.mark.parametrize(
    ("copies_done", "expected"),
    [(-1, [0, 0, 0]), (ROUND + 1, [0, 0, 0]), (ROUND + 2, [8, 0, 0]), (ROUND + 3, [8, 4, 8])],
)
def test_a_reset_keeps_what_is_certain_to_be_in_host_memory(copies_done: int, expected: list[int]) -> None:
    stage = saving()
    stage.cache.handle(msgspec.structs.replace(stage.reset, copies_done=copies_done))
    figures = stage.observer.heard[-1]
    assert (figures.blocks_free, figures.blocks_cached) == (3, 0)
    assert figures.host_blocks_used == sum(expected) // 4
    assert found(stage) == expected


def test_what_was_said_to_be_made_is_certain_for_a_scheduler_that_knows_nothing() -> None:
    stage = saving()
    stage.reserve(round_=ROUND + 4, copies_done=ROUND + 2)
    stage.cache.handle(stage.reset)
    assert found(stage) == [8, 0, 0]


def test_rounds_of_an_earlier_scheduler_are_no_rounds_of_this_one() -> None:
    stage = saving()
    stage.reserve(round_=ROUND + 4, copies_done=ROUND + 3)
    stage.cache.handle(stage.reset)
    stage.reserve(round_=1, copies_done=0)
    stage.cache.handle(msgspec.structs.replace(stage.reset, copies_done=0))
    assert found(stage) == [8, 4, 8]


def test_another_memory_or_one_that_is_never_the_same_holds_nothing() -> None:
    for memory, then in ((5, 6), (5, 0), (0, 0)):
        stage = saving(memory)
        host = msgspec.structs.replace(stage.reset.host, memory=then)
        stage.cache.handle(msgspec.structs.replace(stage.reset, host=host, copies_done=ROUND + 3))
        assert stage.observer.heard[-1].host_blocks_used == 0
        assert found(stage) == [0, 0, 0]


def test_slots_that_were_in_doubt_are_used_again() -> None:
    stage = saving()
    stage.cache.handle(msgspec.structs.replace(stage.reset, copies_done=ROUND + 2))
    slots: set[int] = set()
    for number in range(20, 24):
        granted = stage.reserve(admissions=(admission(number, 12, 100 * number),))
        slots.update(*[copies.targets for copies in granted.copies])
        stage.cache.handle(Release((Filled(RequestId(number), 12, ()),)))
        stage.cache._tables.check()
    assert slots == set(range(8)), "also those of what was kept, when their time has come"
