"""The cache manager's core against two independent witnesses, over random histories.

`Model` predicts every grant from the rules, with whole prefixes for keys and one list for the free queue. `Device`
remembers what the K/V of each slot was computed from, and so knows whether a hit is truthful and a write is harmless.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cuelight.actors.cache.pool import BlockPool
from cuelight.actors.cache.tables import Tables
from cuelight.messages.cache import Admission, Filled, Growth
from cuelight.messages.request import RequestId
from cuelight.messages.scheduler import Grant

Tokens = tuple[int, ...]

FAMILIES: tuple[Tokens, ...] = (tuple(range(24)), (0, 1, 2, 3) * 6, (7,) * 24)


@st.composite
def prompts(draw: st.DrawFn) -> Tokens:
    """The beginning of one of a few well-known texts, then perhaps something of its own."""
    shared = draw(st.sampled_from(FAMILIES))[: draw(st.integers(0, 24))]
    return (*shared, *draw(st.lists(st.integers(0, 2), min_size=0 if shared else 1, max_size=3)))


@dataclass
class Holding:
    """What one request holds: its tokens, its blocks, how much is computed."""

    token_ids: Tokens
    blocks: list[int]
    computed: int


@dataclass
class Model:
    blocks_total: int
    block_size: int
    watermark: int
    evictions: int = 0
    free: list[int] = field(init=False)
    prefixes: dict[Tokens, int] = field(default_factory=dict)
    holdings: dict[RequestId, Holding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = list(range(1, self.blocks_total + 1))

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        kept = {prefix: block for prefix, block in self.prefixes.items() if block not in taken}
        self.evictions += len(self.prefixes) - len(kept)
        self.prefixes = kept
        return taken

    def admit(self, request: RequestId, token_ids: Tokens) -> Grant | None:
        hits: list[int] = []
        for end in range(self.block_size, len(token_ids), self.block_size):
            block = self.prefixes.get(token_ids[:end])
            if block is None:
                break
            hits.append(block)
        count = math.ceil(len(token_ids) / self.block_size)
        after = len(set(self.free) - set(hits)) - (count - len(hits))
        if after < (self.watermark if self.holdings else 0):
            return None
        self.free = [block for block in self.free if block not in hits]
        blocks = hits + self.take(count - len(hits))
        cached = len(hits) * self.block_size
        self.holdings[request] = Holding(token_ids, list(blocks), cached)
        return Grant(request, tuple(blocks), cached, count * self.block_size)

    def grow(self, request: RequestId, token_count: int) -> Grant | None:
        blocks = self.holdings[request].blocks
        missing = max(0, math.ceil(token_count / self.block_size) - len(blocks))
        if missing > len(self.free):
            return None
        taken = self.take(missing)
        blocks += taken
        return Grant(request, tuple(taken), 0, len(blocks) * self.block_size)

    def fill(self, request: RequestId, computed: int, new: Tokens) -> None:
        """Offer the blocks that became full to the index."""
        holding = self.holdings[request]
        holding.token_ids += new
        first, holding.computed = holding.computed // self.block_size, computed
        self.offer(holding, first)

    def offer(self, holding: Holding, first: int) -> None:
        for i in range(first, holding.computed // self.block_size):
            if holding.blocks[i] not in self.prefixes.values():
                self.prefixes.setdefault(holding.token_ids[: (i + 1) * self.block_size], holding.blocks[i])

    def release(self, request: RequestId, computed: int, new: Tokens) -> None:
        self.fill(request, computed, new)
        holding = self.holdings.pop(request)
        self.offer(holding, 0)
        held = {block for other in self.holdings.values() for block in other.blocks}
        for block in reversed(holding.blocks):
            if block not in held:
                self.free.insert(len(self.free) if block in self.prefixes.values() else 0, block)


class Device:
    """The K/V pool: each slot holds the prefix that its K/V was computed from."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[tuple[int, int], Tokens] = {}

    def compute(self, holding: Holding, token_ids: Tokens, end: int) -> list[int]:
        """Write the K/V of tokens `holding.computed` to `end`; the blocks written to."""
        written = []
        for position in range(holding.computed, end):
            block = holding.blocks[position // self.block_size]
            self.slots[block, position % self.block_size] = token_ids[: position + 1]
            written.append(block)
        return written

    def holds(self, blocks: Tokens, token_ids: Tokens) -> bool:
        """Whether `blocks`, in order, hold the K/V of exactly `token_ids`."""
        return all(
            self.slots.get((blocks[position // self.block_size], position % self.block_size))
            == token_ids[: position + 1]
            for position in range(len(token_ids))
        )


class CacheMachine(RuleBasedStateMachine):
    """Admissions, growths, fills, releases and resets in any order."""

    @initialize(
        blocks_total=st.one_of(st.integers(0, 8), st.integers(12, 40)),
        block_size=st.integers(1, 4),
        watermark_fraction=st.sampled_from((0.0, 0.0, 0.1, 0.3)),
    )
    def reset(self, blocks_total: int, block_size: int, watermark_fraction: float) -> None:
        self.tables = Tables(BlockPool(blocks_total + 1), block_size, watermark_fraction)
        self.model = Model(blocks_total, block_size, math.ceil(watermark_fraction * blocks_total))
        self.device = Device(block_size)
        self.waiting: dict[RequestId, Tokens] = {}
        self.next_id = 0

    @rule(prompt=prompts())
    def submit(self, prompt: Tokens) -> None:
        self.next_id += 1
        self._admit(RequestId(self.next_id), prompt)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), more=st.lists(st.integers(0, 2), max_size=1))
    def retry(self, data: st.DataObject, more: list[int]) -> None:
        request = data.draw(st.sampled_from(sorted(self.waiting)))
        self._admit(request, (*self.waiting.pop(request), *more))

    def _admit(self, request: RequestId, prompt: Tokens) -> None:
        predicted = self.model.admit(request, prompt)
        grant = self.tables.admit(Admission(request, prompt))
        assert grant == predicted
        if grant is None:
            self.waiting[request] = prompt
        else:
            assert grant.cached_tokens < len(prompt) <= grant.token_capacity
            assert self.device.holds(grant.block_ids, prompt[: grant.cached_tokens]), "a hit is not what it says"

    @precondition(lambda self: self.model.holdings)
    @rule(data=st.data(), more=st.integers(0, 9))
    def grow(self, data: st.DataObject, more: int) -> None:
        request = data.draw(st.sampled_from(sorted(self.model.holdings)))
        token_count = len(self.model.holdings[request].token_ids) + more
        predicted = self.model.grow(request, token_count)
        assert self.tables.grow(Growth(request, token_count)) == predicted

    @precondition(lambda self: self.model.holdings)
    @rule(data=st.data(), new=st.lists(st.integers(0, 2), max_size=4), ends=st.booleans())
    def compute(self, data: st.DataObject, new: list[int], ends: bool) -> None:
        """Tell of a chunk that was computed, of new tokens, or of both; perhaps it was the request's last."""
        request = data.draw(st.sampled_from(sorted(self.model.holdings)))
        holding = self.model.holdings[request]
        token_ids = (*holding.token_ids, *new)
        limit = min(len(token_ids), len(holding.blocks) * self.model.block_size)
        computed = data.draw(st.integers(holding.computed, limit))
        written = self.device.compute(holding, token_ids, computed)
        entries = Counter(block for other in self.model.holdings.values() for block in other.blocks)
        assert all(entries[block] == 1 for block in written), "a shared block is written to"
        filled = Filled(request, computed, tuple(new))
        if ends:
            self.model.release(request, computed, tuple(new))
            self.tables.release(filled)
        else:
            self.model.fill(request, computed, tuple(new))
            self.tables.fill(filled)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort_waiting(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[request]
        self.tables.release(Filled(request, 0, ()))

    @invariant()
    def everything_agrees(self) -> None:
        self.tables.check()
        assert self.tables.pool.free_count == len(self.model.free)
        assert self.tables.pool.indexed_count == len(self.model.prefixes)
        assert self.tables.pool.evictions == self.model.evictions

    @invariant()
    def tables_share_only_full_prefix_blocks(self) -> None:
        contents: dict[int, Tokens] = {}
        for holding in self.model.holdings.values():
            for i, block in enumerate(holding.blocks):
                end = (i + 1) * self.model.block_size
                prefix = holding.token_ids[:end] if end <= holding.computed else ()
                if block in contents:
                    assert prefix and contents[block] == prefix
                contents[block] = prefix

    def teardown(self) -> None:
        """Rule 21: after a drain, every block is free."""
        for request in sorted(self.model.holdings):
            self.tables.release(Filled(request, self.model.holdings[request].computed, ()))
        self.tables.check()
        assert self.tables.pool.free_count == self.tables.pool.total


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
