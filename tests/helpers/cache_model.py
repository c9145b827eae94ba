"""Two models of the cache: one predicts its answers from the rules, one keeps the contents of each block."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeAlias

from cuelight.messages.cache import Admission
from cuelight.messages.request import BlockCopies, CopyKind, RequestId
from cuelight.messages.scheduler import Grant

Tokens: TypeAlias = tuple[int, ...]
Prefix: TypeAlias = tuple[bytes, Tokens]
"""A salt and the tokens from the first on: what a lookup goes by."""


def common_length(first: Tokens, second: Tokens) -> int:
    """How many tokens two sequences begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


@dataclass
class Holding:
    """What one request holds: its tokens, its blocks, how much is computed; and how often all was forgotten before."""

    salt: bytes
    token_ids: Tokens
    blocks: list[int]
    computed: int
    generation: int

    def prefix(self, end: int) -> Prefix:
        return self.salt, self.token_ids[:end]


@dataclass
class CacheModel:
    """Whole prefixes for keys, and one list for the free queue."""

    blocks_total: int
    block_size: int
    watermark: int
    host_total: int
    evictions: int = 0
    generation: int = 0
    free: list[int] = field(init=False)
    prefixes: dict[Prefix, int] = field(default_factory=dict)
    host: list[Prefix] = field(default_factory=list)
    """Least recently used first."""
    holdings: dict[RequestId, Holding] = field(default_factory=dict)
    copied: Counter[CopyKind] = field(default_factory=Counter)
    unread: set[Prefix] = field(default_factory=set)
    """Saved since the last answer, and not loaded."""
    doubtful: set[Prefix] = field(default_factory=set)
    """Saved since the last step that is known to be done."""

    def __post_init__(self) -> None:
        self.free = list(range(1, self.blocks_total + 1))

    def take(self, count: int, pinned: int = 0) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            for prefix in [prefix for prefix, holder in self.prefixes.items() if holder == block]:
                del self.prefixes[prefix]
                self.evictions += 1
                self.save(prefix, self.host_total - pinned)
        return taken

    def save(self, prefix: Prefix, slots: int) -> None:
        if prefix in self.host:
            self.host.remove(prefix)
        elif slots:
            self.copied[CopyKind.SAVE] += 1
            while len(self.host) >= slots:
                # What is lost before the copies are made is not copied.
                self.copied[CopyKind.SAVE] -= self.host[0] in self.unread
                self.unread.discard(self.host.pop(0))
            self.unread.add(prefix)
            self.doubtful.add(prefix)
        else:
            return
        self.host.append(prefix)

    def live(self, request: RequestId | None) -> Holding | None:
        """What this request holds, if others may use it."""
        holding = None if request is None else self.holdings.get(request)
        return holding if holding is not None and holding.generation == self.generation else None

    def lookup(self, admission: Admission) -> list[int | None]:
        """The prefix blocks found; None for one in host memory."""
        hits: list[int | None] = []
        for end in range(self.block_size, len(admission.token_ids), self.block_size):
            prefix = admission.salt, admission.token_ids[:end]
            if prefix not in self.prefixes and prefix not in self.host:
                break
            hits.append(self.prefixes.get(prefix))
        return hits

    def admit(self, admission: Admission) -> Grant | None:
        request, token_ids, salt = admission.request_id, admission.token_ids, admission.salt
        hits = self.lookup(admission)
        count = math.ceil(len(token_ids) / self.block_size)
        device_hits = [block for block in hits if block is not None]
        after = len(set(self.free) - set(device_hits)) - (count - len(device_hits))
        if after < (self.watermark if self.holdings else 0):
            return None
        self.free = [block for block in self.free if block not in device_hits]
        loaded = [(salt, token_ids[: (i + 1) * self.block_size]) for i, block in enumerate(hits) if block is None]
        self.host = [prefix for prefix in self.host if prefix not in loaded]
        fresh = self.take(count - len(device_hits), len(loaded))
        self.host += reversed(loaded)
        self.unread.difference_update(loaded)
        self.copied[CopyKind.LOAD] += len(loaded)
        blocks = [fresh.pop(0) if block is None else block for block in hits] + fresh
        cached = len(hits) * self.block_size
        shared = self.shared_with(self.live(admission.sample_of), admission, cached)
        self.copied[CopyKind.FORK] += shared > 0
        holding = Holding(salt, token_ids, list(blocks), cached + shared, self.generation)
        self.holdings[request] = holding
        self.offer(holding, 0)
        return Grant(request, tuple(blocks), cached + shared, count * self.block_size)

    def shared_with(self, leader: Holding | None, admission: Admission, start: int) -> int:
        """Tokens of the block at `start` that the other sample has computed."""
        if leader is None or leader.salt != admission.salt:
            return 0
        alike = common_length(leader.token_ids, admission.token_ids)
        return max(0, min(alike, leader.computed, len(admission.token_ids) - 1, start + self.block_size) - start)

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
        if holding.generation != self.generation:
            return
        for i in range(first, holding.computed // self.block_size):
            if holding.blocks[i] not in self.prefixes.values():
                self.prefixes.setdefault(holding.prefix((i + 1) * self.block_size), holding.blocks[i])

    def release(self, request: RequestId, computed: int, new: Tokens) -> None:
        self.fill(request, computed, new)
        holding = self.holdings.pop(request)
        self.offer(holding, 0)
        held = {block for other in self.holdings.values() for block in other.blocks}
        for block in reversed(holding.blocks):
            if block not in held:
                self.free.insert(len(self.free) if block in self.prefixes.values() else 0, block)

    def lose(self) -> None:
        """All blocks are lost, and what is certain is in host memory."""
        self.free = list(range(1, self.blocks_total + 1))
        self.prefixes.clear()
        self.holdings.clear()
        self.host = [prefix for prefix in self.host if prefix not in self.doubtful]
        self.doubtful.clear()
        self.evictions = 0

    def forget(self) -> None:
        """Cached blocks become spare ones, longest free first."""
        cached = [block for block in self.free if block in self.prefixes.values()]
        self.free = cached + [block for block in self.free if block not in cached]
        self.prefixes.clear()
        self.host.clear()
        self.generation += 1


class SlotContents:
    """The K/V of the pool and of host memory: each token's slot holds what it was computed from."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.pool: dict[int, list[object]] = {}
        self.host: dict[int, list[object]] = {}
        self.pending: list[BlockCopies] = []
        """Copies that the next step makes first."""

    def compute(self, holding: Holding, end: int) -> list[int]:
        """Write the K/V of tokens `holding.computed` to `end`, and more that will never count; the blocks written to.

        The latter is what a step in flight does to a request that ends or fails meanwhile.
        """
        written = []
        for position in range(holding.computed, min(end + 2, len(holding.blocks) * self.block_size)):
            block = holding.blocks[position // self.block_size]
            value = self.value(holding, position) if position < end else "never confirmed"
            self.pool.setdefault(block, [None] * self.block_size)[position % self.block_size] = value
            written.append(block)
        return written

    @staticmethod
    def value(holding: Holding, position: int) -> object:
        return holding.generation, *holding.prefix(position + 1)

    def step(self) -> None:
        """What was to be copied first has been."""
        for copies in self.pending:
            self.copy(copies)
        self.pending.clear()

    def copy(self, copies: BlockCopies) -> None:
        """In reverse: the copies of one message may be made in any order."""
        read = self.host if copies.copying is CopyKind.LOAD else self.pool
        written = self.host if copies.copying is CopyKind.SAVE else self.pool
        assert len(set(copies.targets)) == len(copies.targets) == len(copies.sources)
        assert read is not written or not set(copies.targets) & set(copies.sources)
        for source, target in reversed(list(zip(copies.sources, copies.targets, strict=True))):
            written[target] = list(read[source])

    def holds(self, holding: Holding) -> bool:
        """Whether its blocks, in order, hold the K/V of exactly its computed tokens."""
        return all(
            self.pool[holding.blocks[position // self.block_size]][position % self.block_size]
            == self.value(holding, position)
            for position in range(holding.computed)
        )
