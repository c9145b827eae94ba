"""The cache manager's core against two independent models, over random histories.

`CacheModel` predicts every grant from the rules. `SlotContents` keeps what the K/V of each slot was computed from, in
the pool and in host memory, and so knows whether a hit is truthful, a copy comes in time and a write is harmless.
"""

from __future__ import annotations

import copy
import math
import os
from collections import Counter
from dataclasses import replace
from functools import partial

from cache_model import CacheModel, SlotContents, Tokens, common_length
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cuelight.actors.cache.pool import BlockPool
from cuelight.actors.cache.tables import BlockTables
from cuelight.messages.cache import Admission, Filled, Growth
from cuelight.messages.request import CopyKind, HostTier, RequestId

FAMILIES: tuple[Tokens, ...] = (tuple(range(24)), (0, 1, 2, 3) * 6, (7,) * 24)
SALTS = (b"", b"", b"", b"another tenant")


@st.composite
def prompts(draw: st.DrawFn) -> Tokens:
    """The beginning of one of a few well-known texts, then perhaps something of its own."""
    shared = draw(st.sampled_from(FAMILIES))[: draw(st.integers(0, 24))]
    return (*shared, *draw(st.lists(st.integers(0, 2), min_size=0 if shared else 1, max_size=3)))


class CacheMachine(RuleBasedStateMachine):
    """Admissions, growths, fills, releases, preemptions, forgetting and losing the pool in any order."""

    @initialize(
        blocks_total=st.sampled_from((0, 1, 3, *range(4, 13), *range(4, 13), 30)),
        block_size=st.sampled_from((1, 2, 3, 4, 4)),
        watermark_fraction=st.sampled_from((0.0, 0.0, 0.1, 0.3)),
        host_total=st.sampled_from((0, 1, 2, 3, 5, 8, 40)),
    )
    def reset(self, blocks_total: int, block_size: int, watermark_fraction: float, host_total: int) -> None:
        host = HostTier(host_total, move_seconds=0.9 * block_size, recompute_seconds=1.0)
        self.make = partial(BlockTables, block_size=block_size, watermark_fraction=watermark_fraction, host=host)
        self.tables = self.make(BlockPool(blocks_total + 1))
        self.round = 0
        self.model = CacheModel(blocks_total, block_size, math.ceil(watermark_fraction * blocks_total), host_total)
        self.device = SlotContents(block_size)
        self.copied: Counter[CopyKind] = Counter()
        self.waiting: dict[RequestId, Admission] = {}
        self.next_id = 0

    @rule(prompt=prompts(), salt=st.sampled_from(SALTS))
    def come(self, prompt: Tokens, salt: bytes) -> None:
        self._submit(prompt, salt)

    def _submit(self, prompt: Tokens, salt: bytes, sample_of: RequestId | None = None) -> RequestId:
        self.next_id += 1
        self._admit(Admission(RequestId(self.next_id), prompt, salt, sample_of))
        return RequestId(self.next_id)

    @rule(data=st.data(), salt=st.sampled_from(SALTS))
    def serve(self, data: st.DataObject, salt: bytes) -> None:
        """As much of a well-known text as fits the pool, from beginning to end: most of this is found again later."""
        longest = min(24, self.model.blocks_total * self.model.block_size)
        if longest:
            text = data.draw(st.sampled_from(FAMILIES))[: data.draw(st.sampled_from((longest, longest // 2 + 1)))]
            request = self._submit(text, salt)
            if request in self.model.holdings:
                self._compute(request, (), len(text), "end")

    @precondition(lambda self: self.model.holdings)
    @rule(data=st.data(), more=st.lists(st.integers(0, 2), max_size=2), salt=st.sampled_from((None, None, None, b"")))
    def sample(self, data: st.DataObject, more: list[int], salt: bytes | None) -> None:
        """Another sample of a request that runs, and is computed so far, or one that only says so."""
        sample_of = data.draw(st.sampled_from(sorted(self.model.holdings)))
        leader = self.model.holdings[sample_of]
        most = min(len(leader.token_ids), len(leader.blocks) * self.model.block_size)
        self._compute(sample_of, (), data.draw(st.integers(leader.computed, most)), "")
        length = len(leader.token_ids) - data.draw(st.sampled_from((0, 0, 1, 2, 3)))
        prompt = (*leader.token_ids[: max(1, length)], *more)
        self._submit(prompt, leader.salt if salt is None else salt, sample_of)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), more=st.lists(st.integers(0, 2), max_size=1))
    def retry(self, data: st.DataObject, more: list[int]) -> None:
        before = self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting))))
        self._admit(Admission(before.request_id, (*before.token_ids, *more), before.salt, before.sample_of))

    def _admit(self, admission: Admission) -> None:
        self._see_who_computes(admission)
        predicted = self.model.admit(admission)
        grant = self.tables.admit(admission)
        assert grant == predicted
        if grant is None:
            self.waiting[admission.request_id] = admission
            return
        assert grant.cached_tokens < len(admission.token_ids) <= grant.token_capacity
        admitted = self.model.holdings[admission.request_id]
        assert self._after_the_copies().holds(admitted), "a hit is not what it says"

    def _after_the_copies(self) -> SlotContents:
        """Were the round to end now. Others may join its copies, so they are not taken."""
        after = copy.deepcopy(self.device)
        after.pending += copy.deepcopy(self.tables._copies).take()
        after.step()
        return after

    def _see_who_computes(self, admission: Admission) -> None:
        """Nobody waits without somebody who computes the next token, and a sample waits for the first one's tokens."""
        start = len(self.model.lookup(admission)) * self.model.block_size
        limit = len(admission.token_ids) - 1
        ahead: dict[RequestId, bool] = {}
        for request, holding in self.model.holdings.items():
            alike = 0
            if holding.salt == admission.salt and holding.generation == self.model.generation:
                alike = min(common_length(holding.token_ids, admission.token_ids), limit)
            ahead[request] = max(holding.computed, start) < alike
        if self.tables.is_being_computed(admission):
            assert any(ahead.values()), "it waits for nobody"
        elif admission.sample_of is not None and ahead.get(admission.sample_of):
            assert self.model.holdings[admission.sample_of].computed < start, "it does not wait for the first sample"

    @rule()
    def answer(self) -> None:
        """A round ends. The next step may make the copies of several."""
        self._answer()

    def _answer(self) -> None:
        copies = self.tables.take_copies()
        self.model.unread.clear()
        for batch in copies:
            self.copied[batch.copying] += len(batch.sources)
            if batch.copying is CopyKind.SAVE:
                self.tables.host.mark_unconfirmed(batch.targets, self.round)
        self.round += 1
        self.device.pending += copies

    @precondition(lambda self: self.model.holdings)
    @rule(data=st.data(), more=st.integers(0, 9))
    def grow(self, data: st.DataObject, more: int) -> None:
        request = data.draw(st.sampled_from(sorted(self.model.holdings)))
        token_count = len(self.model.holdings[request].token_ids) + more
        predicted = self.model.grow(request, token_count)
        assert self.tables.grow(Growth(request, token_count)) == predicted

    @precondition(lambda self: self.model.holdings)
    @rule(data=st.data(), new=st.lists(st.integers(0, 2), max_size=4), leaves=st.sampled_from(("", "", "end", "wait")))
    def compute(self, data: st.DataObject, new: list[int], leaves: str) -> None:
        """Tell of a chunk that was computed, of new tokens, or of both; perhaps the request ends or is preempted."""
        request = data.draw(st.sampled_from(sorted(self.model.holdings)))
        holding = self.model.holdings[request]
        limit = min(len(holding.token_ids) + len(new), len(holding.blocks) * self.model.block_size)
        self._compute(request, tuple(new), data.draw(st.integers(holding.computed, limit)), leaves)

    def _compute(self, request: RequestId, new: Tokens, computed: int, leaves: str) -> None:
        holding = self.model.holdings[request]
        self._answer()
        self.device.step()
        self.tables.host.confirm(self.round)
        self.model.doubtful.clear()
        written = self.device.compute(replace(holding, token_ids=holding.token_ids + new), computed)
        entries = Counter(block for other in self.model.holdings.values() for block in other.blocks)
        assert all(entries[block] == 1 for block in written), "a shared block is written to"
        filled = Filled(request, computed, new)
        if leaves:
            self.model.release(request, computed, new)
            self.tables.release(filled)
        else:
            self.model.fill(request, computed, new)
            self.tables.fill(filled)
        if leaves == "wait":
            self.waiting[request] = Admission(request, holding.token_ids, holding.salt)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort_waiting(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[request]
        self.tables.release(Filled(request, 0, ()))

    @rule(is_due=st.sampled_from((False,) * 9 + (True,)))
    def forget(self, is_due: bool) -> None:
        """Not as often as the rest: little is left to find in a cache that is always forgotten."""
        if is_due:
            self._answer()
            self.model.forget()
            self.tables.forget_prefixes()

    @rule(data=st.data(), is_due=st.sampled_from((False,) * 9 + (True,)))
    def lose(self, data: st.DataObject, is_due: bool) -> None:
        """The executor dies, with its pool, and has made some of the copies that it was to make."""
        if not is_due:
            return
        self._answer()
        del self.device.pending[data.draw(st.integers(0, len(self.device.pending))) :]
        self.device.step()
        self.device.pool.clear()
        for request, holding in self.model.holdings.items():
            self.waiting[request] = Admission(request, holding.token_ids, holding.salt)
        self.model.lose()
        self.tables.host.forget_unconfirmed()
        self.tables = self.make(BlockPool(self.model.blocks_total + 1), kept=self.tables.host)

    @invariant()
    def everything_agrees(self) -> None:
        self.tables.check()
        assert self.tables.pool.free_count == len(self.model.free)
        assert self.tables.pool.indexed_count == len(self.model.prefixes)
        assert self.tables.pool.evictions == self.model.evictions
        assert self.tables.host.used_count == len(self.model.host)

    @invariant()
    def tables_share_only_full_prefix_blocks(self) -> None:
        contents: dict[int, object] = {}
        for holding in self.model.holdings.values():
            for i, block in enumerate(holding.blocks):
                end = (i + 1) * self.model.block_size
                prefix = (holding.generation, holding.prefix(end)) if end <= holding.computed else None
                if block in contents:
                    assert prefix is not None and contents[block] == prefix
                contents[block] = prefix

    @invariant()
    def what_is_computed_is_there_once_the_copies_are_made(self) -> None:
        after = self._after_the_copies()
        assert all(after.holds(holding) for holding in self.model.holdings.values())

    def teardown(self) -> None:
        """Rule `reference-counts`: after a drain, every block is free."""
        self._answer()
        assert self.copied == +self.model.copied
        for request in sorted(self.model.holdings):
            self.tables.release(Filled(request, self.model.holdings[request].computed, ()))
        self.tables.check()
        assert self.tables.pool.free_count == self.tables.pool.total


TestCacheMachine = CacheMachine.TestCase
HISTORIES = int(os.environ.get("CUELIGHT_HISTORIES", "60"))
TestCacheMachine.settings = settings(max_examples=HISTORIES, stateful_step_count=60, deadline=None)
