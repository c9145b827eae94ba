"""The block tables: the blocks of each request, in order, and how far they are filled.

Grants or refuses blocks, one request at a time. The order of requests is the scheduler's; messages are in `actor.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from cuelight.actors.cache.hashing import HashChain
from cuelight.actors.cache.pool import BlockPool, HostSlots
from cuelight.messages.cache import Admission, Filled, Growth
from cuelight.messages.request import BlockCopies, CopyKind, HostTier, RequestId
from cuelight.messages.scheduler import Grant

REFUSED_CHAINS_MAX = 16
"""A round refuses at most one admission, nearly always the same one, so a few chains suffice."""


@dataclass(slots=True)
class _BlockTable:
    chain: HashChain
    blocks: list[int]
    computed_tokens: int
    full_blocks: int
    """Number of leading blocks that are full and computed. Each is indexed, or duplicates a block that was indexed."""
    found_blocks: int = 0
    """Number of leading blocks that came from the prefix cache at admission."""
    is_unindexed: bool = False
    """Whether its blocks stay out of the index: prefixes were forgotten since its admission, or it is poisoned."""


class BlockTables:
    """The tables of all requests that hold blocks, over one pool of blocks of `block_size` tokens.

    `watermark_fraction` of the pool, rounded up, stays free after an admission, so that running requests can grow;
    a request alone in the pool may use all of it. Evicted prefix blocks are saved to `host` memory if moving a block
    takes less time than computing it again. Lookups also find the blocks in `kept`, the slots of an earlier instance.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        watermark_fraction: float,
        host: HostTier = HostTier(),  # noqa: B008  # frozen
        kept: HostSlots | None = None,
    ) -> None:
        assert block_size >= 1, "a block holds at least one token"
        assert 0.0 <= watermark_fraction < 1.0, "the watermark is a fraction of the pool"
        self.pool = pool
        moving_pays = host.move_seconds < block_size * host.recompute_seconds
        slot_count = host.block_count if moving_pays else 0
        self.host = kept if kept is not None and kept.total == slot_count else HostSlots(slot_count)
        self._copies = CopyBatches()
        self._block_size = block_size
        self._watermark_blocks = math.ceil(watermark_fraction * pool.total)
        self._tables: dict[RequestId, _BlockTable] = {}
        # Blocks of known tokens that are not computed yet: from the digest to the running request that computes it.
        self._computing: dict[bytes, RequestId] = {}
        # Chains of refused admissions, oldest first, so that a retry does not hash its prompt again.
        self._refused: dict[RequestId, HashChain] = {}

    def is_being_computed(self, admission: Admission) -> bool:
        """Return whether a running request is computing the first block that this request would have to compute.

        Such a request is deferred: computing the same block twice, side by side, would slow down both. Another sample
        of a prompt is also deferred while the first sample is computing a token, beyond the hits, that both share.
        """
        leader = self._leader(admission)
        if not self._computing and leader is None:
            return False
        chain = self._chain(admission)
        self._remember(admission.request_id, chain)
        next_block = len(self._find_prefix(chain))
        if next_block < self._shareable(chain) and chain.digest(next_block) in self._computing:
            return True
        if leader is None:
            return False
        # A leader that is behind the hits has other tokens to compute first.
        next_token = leader.computed_tokens
        is_useful = next_block * self._block_size <= next_token < len(chain) - 1
        return is_useful and chain.shares_prefix(leader.chain, next_token + 1)

    def admit(self, admission: Admission) -> Grant | None:
        """Grant blocks for all tokens, cached blocks first, or return None and change nothing if they do not all fit.

        At least one token is left to compute, even if all are cached: the step needs its logits.
        """
        request_id, token_ids = admission.request_id, admission.token_ids
        assert request_id not in self._tables, f"request {request_id} is admitted twice"
        assert token_ids, f"request {request_id} has no tokens"
        chain = self._chain(admission)
        hits = self._find_prefix(chain)
        block_count = self._blocks_for(len(token_ids))
        # A hit without a holder counts as a free block until it is taken; a hit in host memory needs a free block to
        # be loaded into.
        needed = block_count - sum(block is not None and self.pool.is_held(block) for block in hits)
        if needed + (self._watermark_blocks if self._tables else 0) > self.pool.free_count:
            self._remember(request_id, chain)
            return None
        blocks = self._hold(chain, hits, block_count)
        cached_tokens = len(hits) * self._block_size
        cached_tokens += self._fork(self._leader(admission), chain, blocks, cached_tokens)
        table = _BlockTable(chain, blocks, cached_tokens, cached_tokens // self._block_size, len(hits))
        self._tables[request_id] = table
        self._index(table, len(hits))
        for i in range(table.full_blocks, len(chain) // self._block_size):
            self._computing.setdefault(chain.digest(i), request_id)
        return Grant(request_id, tuple(blocks), cached_tokens, len(blocks) * self._block_size)

    def grow(self, growth: Growth) -> Grant | None:
        """Append the blocks, possibly none, that the table lacks for `token_count` tokens; None if they do not fit."""
        table = self._tables.get(growth.request_id)
        assert table is not None, f"request {growth.request_id} grows but has no table"
        missing = max(0, self._blocks_for(growth.token_count) - len(table.blocks))
        if missing > self.pool.free_count:
            return None
        blocks = self.pool.take(missing, self._save)
        table.blocks += blocks
        return Grant(growth.request_id, tuple(blocks), 0, len(table.blocks) * self._block_size)

    def fill(self, filled: Filled) -> None:
        """Store new tokens and the number of computed ones, and index the blocks that became full."""
        table = self._tables.get(filled.request_id)
        assert table is not None, f"request {filled.request_id} is filled but has no table"
        self._fill(table, filled)

    def release(self, filled: Filled, *, is_poisoned: bool = False) -> None:
        """Fill, then free the table, its tail first. Does nothing for a request without a table.

        Full blocks stay in the index, where other requests find them until they are evicted. The blocks that a poisoned
        request computed are removed from the index.
        """
        self._refused.pop(filled.request_id, None)
        table = self._tables.pop(filled.request_id, None)
        if table is None:
            return
        if is_poisoned:
            table.is_unindexed = True
            for block in table.blocks[table.found_blocks :]:
                self.pool.unindex(block)
        self._fill(table, filled)
        for i in range(table.full_blocks, len(table.chain) // self._block_size):
            self._end_computing(filled.request_id, table.chain.digest(i))
        # If a block of this table was a duplicate and the indexed one has been evicted since, index this block instead.
        self._index(table, 0)
        self.pool.give_back(reversed(table.blocks))

    def forget_prefixes(self) -> None:
        """Empty the prefix cache. Every table stays, but its blocks, present and later ones, stay out of the index."""
        self.pool.forget()
        self.host.forget()
        self._computing.clear()
        for table in self._tables.values():
            table.is_unindexed = True

    def take_copies(self) -> tuple[BlockCopies, ...]:
        """Return the copies to make, in order, before anything is written to the blocks granted since the last call."""
        return self._copies.take()

    def check(self) -> None:
        """Walk all tables and the whole pool and assert that they agree. Takes time proportional to the pool."""
        entries = Counter(block for table in self._tables.values() for block in table.blocks)
        self.pool.check(entries)
        self.host.check()
        for request_id, table in self._tables.items():
            assert table.full_blocks * self._block_size <= table.computed_tokens, f"{request_id}: full before computed"
            assert table.computed_tokens <= len(table.chain), f"{request_id}: more computed than known"
            for i, block in enumerate(table.blocks):
                if i >= table.full_blocks:
                    assert entries[block] == 1, f"block {block} is shared and not full"
                    assert not self.pool.is_indexed(block), f"block {block} is indexed and not full"
                elif self.pool.is_indexed(block):
                    assert not table.is_unindexed, f"block {block} is indexed, but its table is unindexed"
                    assert self.pool.find(table.chain.digest(i)) == block, f"block {block} has a wrong digest"
        for digest, request_id in self._computing.items():
            table = self._tables[request_id]
            assert not table.is_unindexed, f"{request_id} is unindexed, but others wait for its blocks"
            blocks = range(table.full_blocks, len(table.chain) // self._block_size)
            assert digest in {table.chain.digest(i) for i in blocks}, f"{request_id} is not computing {digest.hex()}"
        assert len(self._refused) <= REFUSED_CHAINS_MAX, f"{len(self._refused)} refused chains are kept"
        assert not self._refused.keys() & self._tables.keys(), "an admitted request has a refused chain"

    def _fill(self, table: _BlockTable, filled: Filled) -> None:
        table.chain.extend(filled.token_ids)
        request_id, computed = filled.request_id, filled.computed_tokens
        assert table.computed_tokens <= computed, f"request {request_id}: computed tokens went down"
        assert computed <= len(table.chain), f"request {request_id}: more computed than known tokens"
        assert computed <= len(table.blocks) * self._block_size, f"request {request_id}: computed beyond its blocks"
        table.computed_tokens = computed
        if computed // self._block_size > table.full_blocks:
            first, table.full_blocks = table.full_blocks, computed // self._block_size
            for i in range(first, table.full_blocks):
                self._end_computing(request_id, table.chain.digest(i))
            self._index(table, first)

    def _end_computing(self, request_id: RequestId, digest: bytes) -> None:
        """Forget that this request computes the block: it has done so, or will not."""
        if self._computing.get(digest) == request_id:
            del self._computing[digest]

    def _index(self, table: _BlockTable, first: int) -> None:
        if table.is_unindexed:
            return
        for i in range(first, table.full_blocks):
            if not self.pool.is_indexed(table.blocks[i]):
                self.pool.index(table.blocks[i], table.chain.digest(i))

    def _hold(self, chain: HashChain, hits: list[int | None], block_count: int) -> list[int]:
        """Return the blocks of a new table, hits first. Hits in host memory are loaded and indexed at once."""
        # Hold and pin the hits first: taking new blocks could evict them, or overwrite them in host memory.
        self.pool.touch(block for block in hits if block is not None)
        missing = [chain.digest(i) for i, block in enumerate(hits) if block is None]
        pinned = self.host.pin(reversed(missing))
        fresh = self.pool.take(block_count - len(hits) + len(missing), self._save)
        self.host.unpin(pinned)
        for digest, block in zip(missing, fresh, strict=False):
            self._copies.add(CopyKind.LOAD, pinned[digest], block)
            self.pool.index(block, digest)
        rest = iter(fresh)
        return [next(rest) if block is None else block for block in hits] + list(rest)

    def _save(self, block: int, digest: bytes) -> None:
        """Save an evicted block to host memory before it is written to; if it is there already, touch it."""
        if digest in self.host:
            self.host.touch(digest)
        elif (slot := self.host.keep(digest)) is not None:
            self._copies.add(CopyKind.SAVE, block, slot)

    def _fork(self, source: _BlockTable | None, chain: HashChain, blocks: list[int], start: int) -> int:
        """Copy the block at token `start` from the first sample's table; return how many of its tokens are computed.

        Both samples will write to their block, so it is copied at once rather than shared until then.
        """
        if source is None:
            return 0
        # At most one block, and one token is left to compute (rule `recompute-last`).
        end = min(source.computed_tokens, len(chain) - 1, start + self._block_size)
        while end > start and not chain.shares_prefix(source.chain, end):
            end -= 1
        if end <= start:
            return 0
        block = start // self._block_size
        self._copies.add(CopyKind.FORK, source.blocks[block], blocks[block])
        return end - start

    def _leader(self, admission: Admission) -> _BlockTable | None:
        """Return the table of the request that `admission` is another sample of, if its contents can be used."""
        if admission.sample_of is None:
            return None
        table = self._tables.get(admission.sample_of)
        return None if table is None or table.is_unindexed else table

    def _chain(self, admission: Admission) -> HashChain:
        kept = self._refused.pop(admission.request_id, None)
        # A preempted request may have gained tokens since it was refused.
        if kept is not None and kept.matches(admission.token_ids, admission.salt):
            return kept
        return HashChain(admission.token_ids, self._block_size, admission.salt)

    def _remember(self, request_id: RequestId, chain: HashChain) -> None:
        self._refused[request_id] = chain
        if len(self._refused) > REFUSED_CHAINS_MAX:
            del self._refused[next(iter(self._refused))]

    def _find_prefix(self, chain: HashChain) -> list[int | None]:
        """Return the cached blocks of the sequence's longest prefix, with None for a block that is in host memory."""
        hits: list[int | None] = []
        for i in range(self._shareable(chain)):
            digest = chain.digest(i)
            block = self.pool.find(digest)
            if block is None and digest not in self.host:
                break
            hits.append(block)
        return hits

    def _shareable(self, chain: HashChain) -> int:
        """Return how many leading blocks may come from the prefix cache (rule `recompute-last`)."""
        return (len(chain) - 1) // self._block_size

    def _blocks_for(self, token_count: int) -> int:
        return -(-token_count // self._block_size)


class _CopyBatch:
    """Copies of one kind that may be made in any order or at once: none writes what another reads or writes."""

    __slots__ = ("copying", "read", "sources", "targets", "written")

    def __init__(self, copying: CopyKind) -> None:
        self.copying = copying
        self.sources: list[int] = []
        self.targets: list[int] = []
        self.read: set[int] = set()
        self.written: set[int] = set()


class CopyBatches:
    """Collects copies, in the order in which they must take effect, into few batches.

    A copy joins the latest batch of its kind, unless that batch or a later one conflicts with it: reads what the copy
    writes, or writes what it reads or writes.
    """

    def __init__(self) -> None:
        self._batches: list[_CopyBatch] = []

    def add(self, copying: CopyKind, source: int, target: int) -> None:
        """Add a copy. `source` and `target` are blocks of the pool or slots of host memory, depending on the kind."""
        # Blocks and slots have numbers of their own; complemented, slots are negative and distinct from blocks.
        read = ~source if copying is CopyKind.LOAD else source
        written = ~target if copying is CopyKind.SAVE else target
        assert read != written, f"block {source} is copied to itself"
        batch = self._batch_for(copying, read, written)
        batch.sources.append(source)
        batch.targets.append(target)
        batch.read.add(read)
        batch.written.add(written)

    def _batch_for(self, copying: CopyKind, read: int, written: int) -> _CopyBatch:
        for batch in reversed(self._batches):
            if written in batch.written or written in batch.read or read in batch.written:
                break
            if batch.copying is copying:
                return batch
        batch = _CopyBatch(copying)
        self._batches.append(batch)
        return batch

    def take(self) -> tuple[BlockCopies, ...]:
        """Return the copies added since the last call, without saves that a later save overwrites unread."""
        taken: list[BlockCopies] = []
        lost: set[int] = set()  # slots that are overwritten before any copy reads them
        for batch in reversed(self._batches):
            pairs = list(zip(batch.sources, batch.targets, strict=True))
            if batch.copying is CopyKind.SAVE:
                pairs = [(source, slot) for source, slot in pairs if slot not in lost]
                lost.update(batch.targets)
            elif batch.copying is CopyKind.LOAD:
                lost.difference_update(batch.sources)
            if pairs:
                sources, targets = zip(*pairs, strict=True)
                taken.append(BlockCopies(batch.copying, sources, targets))
        self._batches.clear()
        return tuple(reversed(taken))
