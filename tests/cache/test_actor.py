"""The cache manager's actor: order within a `Reserve`, its answers, and the figures sent to the observer."""

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
        self.received: list[M] = []

    def tell(self, message: M, /) -> None:
        self.received.append(message)


ROUND = 17


class CacheHarness:
    """A cache manager with a pool of `blocks_total` blocks of four tokens, its scheduler and its observer."""

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
        answers_before = len(self.scheduler.received)
        self.cache.handle(Reserve(round_, filled, growths, admissions, token_budget, self.scheduler, copies_done))
        assert len(self.scheduler.received) == answers_before + 1
        return self.scheduler.received[-1]


def admission(request: int, token_count: int, first: int = 0) -> Admission:
    return Admission(RequestId(request), tuple(range(first, first + token_count)))


def ids(granted: Granted) -> list[int]:
    return [grant.request_id for grant in granted.grants]


def test_messages_before_the_first_reset_are_ignored() -> None:
    observer: Inbox[BlockFigures] = Inbox()
    scheduler: Inbox[Granted] = Inbox()
    cache = CacheManager(observer, 0.01)
    cache.handle(Reserve(ROUND, (Filled(RequestId(7), 3, ()),), (), (admission(1, 1),), 100, scheduler))
    cache.handle(Release((Filled(RequestId(7), 4, ()),)))
    cache.handle(ForgetPrefixes())
    assert scheduler.received == []
    assert observer.received == []


def test_reset_frees_all_blocks_but_the_null_block() -> None:
    harness = CacheHarness(9)
    assert harness.observer.received == [BlockFigures(blocks_total=9, blocks_free=9)]


def test_filled_comes_before_growths_and_growths_before_admissions() -> None:
    harness = CacheHarness(4)
    harness.reserve(admissions=(admission(1, 8),))
    granted = harness.reserve(
        filled=(Filled(RequestId(1), 8, (8,)),),
        growths=(Growth(RequestId(1), 12),),
        admissions=(admission(2, 9),),
    )
    assert granted == Granted(ROUND, (Grant(RequestId(1), (3,), 0, 12), Grant(RequestId(2), (1, 2, 4), 8, 12)), ())


def test_each_growth_is_granted_whole_or_refused() -> None:
    harness = CacheHarness(4)
    harness.reserve(admissions=(admission(1, 4), admission(2, 4, 50), admission(3, 4, 100)))
    growths = (Growth(RequestId(1), 12), Growth(RequestId(2), 8), Growth(RequestId(3), 8))
    granted = harness.reserve(growths=growths)
    assert granted == Granted(ROUND, (Grant(RequestId(2), (4,), 0, 8),), (RequestId(1), RequestId(3)))


def test_rule_running_first_round_that_must_preempt_admits_no_request() -> None:
    harness = CacheHarness(4)
    harness.reserve(admissions=(admission(1, 12),))
    granted = harness.reserve(growths=(Growth(RequestId(1), 24),), admissions=(admission(2, 4, 50),))
    assert granted == Granted(ROUND, (), (RequestId(1),))


def test_admissions_stop_at_the_first_refused() -> None:
    harness = CacheHarness(4)
    granted = harness.reserve(admissions=(admission(1, 8), admission(2, 12, 50), admission(3, 4, 100)))
    assert ids(granted) == [1]
    assert granted.refused == (RequestId(2),)


def test_admissions_stop_when_the_budget_is_used_up() -> None:
    """The last admission may exceed it, as it is prefilled in chunks; later ones are neither granted nor refused."""
    harness = CacheHarness(20)
    admissions = (admission(1, 6), admission(2, 10, 50), admission(3, 4, 100))
    granted = harness.reserve(admissions=admissions, token_budget=7)
    assert ids(granted) == [1, 2]
    assert granted.refused == ()
    granted = harness.reserve(admissions=admissions[2:], token_budget=0)
    assert granted == Granted(ROUND, (), ())


def test_only_uncached_tokens_count_against_the_budget() -> None:
    harness = CacheHarness(20)
    harness.reserve(admissions=(admission(1, 8),))
    granted = harness.reserve(
        filled=(Filled(RequestId(1), 8, ()),),
        admissions=(admission(2, 9), admission(3, 10), admission(4, 9)),
        token_budget=3,
    )
    assert [(grant.request_id, grant.cached_tokens) for grant in granted.grants] == [(2, 8), (3, 8)]


def test_rule_watermark_an_admission_earlier_in_the_same_message_brings_the_watermark() -> None:
    harness = CacheHarness(4, watermark_fraction=0.25)
    granted = harness.reserve(admissions=(admission(1, 12), admission(2, 4, 50)))
    assert ids(granted) == [1]
    assert granted.refused == (RequestId(2),)
    assert harness.observer.received[-1].blocks_free == 1


def test_a_release_keeps_the_prefix_and_is_not_answered() -> None:
    harness = CacheHarness(4)
    harness.reserve(admissions=(admission(1, 6),))
    harness.cache.handle(Release((Filled(RequestId(1), 8, (6, 7, 8)), Filled(RequestId(99), 0, ()))))
    assert len(harness.scheduler.received) == 1
    figures = BlockFigures(blocks_total=4, blocks_free=4, blocks_cached=2, tokens_looked_up=6)
    assert harness.observer.received[-1] == figures
    assert harness.reserve(admissions=(admission(2, 9),)).grants[0].cached_tokens == 8


def test_blocks_of_a_poisoned_request_are_not_indexed_but_its_hits_stay() -> None:
    harness = CacheHarness(12)
    harness.reserve(admissions=(admission(1, 4),))
    harness.cache.handle(Release((Filled(RequestId(1), 4, ()),)))
    harness.reserve(admissions=(admission(2, 13),))
    harness.reserve(filled=(Filled(RequestId(2), 8, ()),))
    assert harness.reserve(admissions=(admission(3, 9),)).grants[0].cached_tokens == 8
    harness.cache.handle(Release((Filled(RequestId(2), 12, ()),), poisoned=(RequestId(2),)))
    assert harness.reserve(admissions=(admission(4, 13),)).grants[0].cached_tokens == 4
    harness.cache.handle(Release((Filled(RequestId(4), 12, ()), Filled(RequestId(3), 8, ()))))
    assert harness.reserve(admissions=(admission(5, 13),)).grants[0].cached_tokens == 12


def test_observer_receives_changed_figures_once_per_message() -> None:
    harness = CacheHarness(4)
    harness.reserve(admissions=(admission(1, 4), admission(2, 4, 50)))
    assert len(harness.observer.received) == 2
    harness.reserve(filled=(Filled(RequestId(1), 2, ()),), growths=(Growth(RequestId(1), 4),))
    harness.reserve()
    harness.cache.handle(Release(()))
    assert len(harness.observer.received) == 2
    harness.reserve(filled=(Filled(RequestId(1), 4, ()),))
    figures = BlockFigures(blocks_total=4, blocks_free=2, blocks_cached=1, tokens_looked_up=8)
    assert harness.observer.received[2:] == [figures]


def test_reset_clears_tables_and_prefixes_but_not_counters() -> None:
    harness = CacheHarness(2)
    harness.reserve(admissions=(admission(1, 8),))
    harness.cache.handle(Release((Filled(RequestId(1), 8, ()),)))
    harness.reserve(admissions=(admission(2, 8, 50),))
    assert harness.observer.received[-1].evictions == 2
    for _ in range(2):
        harness.cache.handle(Reset(6, 2))
        figures = BlockFigures(blocks_total=5, blocks_free=5, evictions=2, tokens_looked_up=16)
        assert harness.observer.received[-1] == figures
    assert len(harness.observer.received) == 6
    harness.cache.handle(Release((Filled(RequestId(2), 8, ()),)))
    granted = harness.reserve(admissions=(admission(1, 9), admission(2, 9)))
    assert granted == Granted(ROUND, (Grant(RequestId(1), (1, 2, 3, 4, 5), 0, 10),), (), (RequestId(2),))


def test_growth_without_a_table_raises() -> None:
    with pytest.raises(AssertionError, match="request 5 grows but has no table"):
        CacheHarness(4).reserve(growths=(Growth(RequestId(5), 4),))


def test_a_prefix_is_found_with_its_salt() -> None:
    harness = CacheHarness(8)
    mine, yours = (Admission(RequestId(i), tuple(range(6)), salt) for i, salt in enumerate((b"mine", b"yours")))
    harness.reserve(admissions=(mine,))
    harness.cache.handle(Release((Filled(mine.request_id, 6, ()),)))
    granted = harness.reserve(admissions=(yours, Admission(RequestId(2), tuple(range(6)), b"mine")))
    assert [grant.cached_tokens for grant in granted.grants] == [0, 4]
    assert harness.observer.received[-1].tokens_looked_up == 18
    assert harness.observer.received[-1].tokens_found == 4


def test_forget_prefixes_keeps_block_tables() -> None:
    harness = CacheHarness(8)
    harness.reserve(admissions=(admission(1, 6),))
    harness.reserve(filled=(Filled(RequestId(1), 6, ()),), admissions=(admission(2, 6, 50),))
    harness.cache.handle(Release((Filled(RequestId(2), 6, ()),)))
    assert harness.observer.received[-1].blocks_cached == 2
    harness.cache.handle(ForgetPrefixes())
    assert harness.observer.received[-1].blocks_cached == harness.observer.received[-1].evictions == 0
    granted = harness.reserve(growths=(Growth(RequestId(1), 9),), admissions=(admission(3, 6), admission(4, 6, 50)))
    assert [(grant.request_id, grant.cached_tokens) for grant in granted.grants] == [(1, 0), (3, 0), (4, 0)]
    assert len(harness.scheduler.received) == 3, "a ForgetPrefixes is not answered"


def test_copies_of_growths_and_admissions_come_with_the_answer() -> None:
    """Saves for a growth and an admission precede the load into one of the saved blocks."""
    harness = CacheHarness(4, host_blocks=4)
    harness.reserve(admissions=(admission(1, 8),))
    harness.cache.handle(Release((Filled(RequestId(1), 8, ()),)))
    harness.reserve(admissions=(admission(2, 16, 50),))
    harness.cache.handle(Release((Filled(RequestId(2), 16, ()),)))
    harness.reserve(admissions=(admission(3, 3, 100),))
    granted = harness.reserve(growths=(Growth(RequestId(3), 5),), admissions=(admission(4, 8),))
    (growth, last) = granted.grants
    assert last.cached_tokens == 4
    # Slot 3 was free and slot 1 is to be loaded; slots 0 and 2 are in least-recently-used order.
    save = BlockCopies(CopyKind.SAVE, (*growth.block_ids, *last.block_ids), (3, 0, 2))
    assert granted.copies == (save, BlockCopies(CopyKind.LOAD, (1,), last.block_ids[:1]))
    figures = harness.observer.received[-1]
    assert (figures.blocks_saved, figures.blocks_loaded, figures.blocks_forked) == (6, 1, 0)
    assert (figures.host_blocks_total, figures.host_blocks_used) == (4, 4)
    harness.cache.handle(Reset(5, 4))
    figures = harness.observer.received[-1]
    assert (figures.blocks_saved, figures.host_blocks_total, figures.host_blocks_used) == (6, 0, 0)


def test_a_copy_is_answered_once() -> None:
    harness = CacheHarness(1, host_blocks=1)
    harness.reserve(admissions=(admission(1, 4),))
    harness.cache.handle(Release((Filled(RequestId(1), 4, ()),)))
    assert harness.reserve(admissions=(admission(2, 4, 50),)).copies == (BlockCopies(CopyKind.SAVE, (1,), (0,)),)
    assert harness.reserve().copies == ()


def test_other_samples_wait_for_the_first_and_copy_its_last_block() -> None:
    harness = CacheHarness(8)
    samples = tuple(Admission(RequestId(i), tuple(range(6)), sample_of=RequestId(0) if i else None) for i in range(4))
    granted = harness.reserve(admissions=samples, token_budget=100)
    assert ids(granted) == [0]
    assert granted.deferred == (RequestId(1), RequestId(2), RequestId(3))
    granted = harness.reserve(filled=(Filled(RequestId(0), 6, ()),), admissions=samples[1:], token_budget=3)
    assert [(grant.request_id, grant.cached_tokens) for grant in granted.grants] == [(1, 5), (2, 5), (3, 5)]
    targets = tuple(grant.block_ids[1] for grant in granted.grants)
    assert granted.copies == (BlockCopies(CopyKind.FORK, (2, 2, 2), targets),)
    figures = harness.observer.received[-1]
    assert (figures.blocks_forked, figures.tokens_looked_up, figures.tokens_found) == (3, 24, 15)


def test_unprofitable_host_memory_has_no_blocks() -> None:
    harness = CacheHarness(4)
    harness.cache.handle(Reset(5, 4, HostTier(100, move_seconds=4.0, recompute_seconds=1.0)))
    assert harness.observer.received[-1] == BlockFigures(blocks_total=4, blocks_free=4)


def saving(memory: int = 5) -> CacheHarness:
    """A cache manager that saved two blocks of request 1 two rounds ago, and one of request 2 in the last round."""
    harness = CacheHarness(3, host_blocks=8, memory=memory)
    for number in range(3):
        harness.reserve(admissions=(admission(number, (8, 4, 8)[number], 100 * number),), round_=ROUND + number)
        harness.cache.handle(Release((Filled(RequestId(number), (8, 4, 8)[number], ()),)))
    last = harness.reserve(admissions=(admission(3, 12, 900),), round_=ROUND + 3)
    assert [copies.copying for copies in last.copies] == [CopyKind.SAVE]
    assert harness.observer.received[-1].blocks_saved == 5
    return harness


def found(harness: CacheHarness) -> list[int]:
    """Return the cached tokens of each of the three prompts."""
    counts = []
    for number in range(3):
        granted = harness.reserve(admissions=(admission(9, 9, 100 * number),))
        counts.append(granted.grants[0].cached_tokens)
        harness.cache.handle(Release((Filled(RequestId(9), counts[-1], ()),)))
    return counts


@pytest.mark.parametrize(
    ("copies_done", "expected"),
    [(-1, [0, 0, 0]), (ROUND + 1, [0, 0, 0]), (ROUND + 2, [8, 0, 0]), (ROUND + 3, [8, 4, 8])],
)
def test_reset_keeps_blocks_certain_to_be_in_host_memory(copies_done: int, expected: list[int]) -> None:
    harness = saving()
    harness.cache.handle(msgspec.structs.replace(harness.reset, copies_done=copies_done))
    figures = harness.observer.received[-1]
    assert (figures.blocks_free, figures.blocks_cached) == (3, 0)
    assert figures.host_blocks_used == sum(expected) // 4
    assert found(harness) == expected


def test_confirmed_copies_are_certain_for_a_new_scheduler() -> None:
    harness = saving()
    harness.reserve(round_=ROUND + 4, copies_done=ROUND + 2)
    harness.cache.handle(harness.reset)
    assert found(harness) == [8, 0, 0]


def test_rounds_of_an_earlier_scheduler_do_not_count() -> None:
    harness = saving()
    harness.reserve(round_=ROUND + 4, copies_done=ROUND + 3)
    harness.cache.handle(harness.reset)
    harness.reserve(round_=1, copies_done=0)
    harness.cache.handle(msgspec.structs.replace(harness.reset, copies_done=0))
    assert found(harness) == [8, 4, 8]


def test_other_or_unnamed_host_memory_holds_nothing() -> None:
    for memory, then in ((5, 6), (5, 0), (0, 0)):
        harness = saving(memory)
        host = msgspec.structs.replace(harness.reset.host, memory=then)
        harness.cache.handle(msgspec.structs.replace(harness.reset, host=host, copies_done=ROUND + 3))
        assert harness.observer.received[-1].host_blocks_used == 0
        assert found(harness) == [0, 0, 0]


def test_uncertain_slots_are_reused() -> None:
    harness = saving()
    harness.cache.handle(msgspec.structs.replace(harness.reset, copies_done=ROUND + 2))
    slots: set[int] = set()
    for number in range(20, 24):
        granted = harness.reserve(admissions=(admission(number, 12, 100 * number),))
        slots.update(*[copies.targets for copies in granted.copies])
        harness.cache.handle(Release((Filled(RequestId(number), 12, ()),)))
        harness.cache._tables.check()
    assert slots == set(range(8)), "also those of what was kept, when their time has come"
