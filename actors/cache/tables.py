"""The block tables: which blocks each request holds, in order, and how far they are filled.

Decides what is granted and what is refused; knows nothing of the order of service, of messages' senders or of text.
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
"""A round refuses one admission at most, nearly always the same one, so a few are plenty."""


@dataclass(slots=True)
class _BlockTable:
    chain: HashChain
    blocks: list[int]
    computed_tokens: int
    full_blocks: int
    """So many leading blocks are full and computed; each of them is in the index or the duplicate of one that was."""
    found_blocks: int = 0
    """So many leading blocks somebody else had computed."""
    is_unindexed: bool = False
    """Prefixes were forgotten since it was admitted: nobody is to find its blocks, nor what it computes from them."""


class BlockTables:
    """The tables of all requests that hold blocks, over one pool of blocks of `block_size` tokens.

    `watermark_fraction` of the pool, rounded up, stays free after an admission, so that running requests can grow;
    a request alone in the pool may use all of it. Prefix blocks that are evicted go to `host` memory, if moving one
    takes less time than computing it again; what is `kept` there from before can be found.
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
        # Blocks of known tokens that running requests have yet to compute, by digest, and who does.
        self._computing: dict[bytes, RequestId] = {}
        # Chains of refused admissions, oldest first: a retry does not hash its prompt again.
        self._refused: dict[RequestId, HashChain] = {}

    def is_being_computed(self, admission: Admission) -> bool:
        """Whether the first block that this request would have to compute is one that a running request computes now.

        Then it had better wait: computing the same block itself, beside the other one, would take both longer. It also
        waits for single tokens of the request whose other sample it is.
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
        # One that is not as far as the hits are has other things to compute first.
        next_token = leader.computed_tokens
        is_useful = next_block * self._block_size <= next_token < len(chain) - 1
        return is_useful and chain.shares_prefix(leader.chain, next_token + 1)

    def admit(self, admission: Admission) -> Grant | None:
        """Hold blocks for all tokens, cached ones first; None if they do not all fit, and then nothing has changed.

        At least one token is left to compute, even where all of them are cached: the step needs its logits.
        """
        request_id, token_ids = admission.request_id, admission.token_ids
        assert request_id not in self._tables, f"request {request_id} is admitted twice"
        assert token_ids, f"request {request_id} has no tokens"
        chain = self._chain(admission)
        hits = self._find_prefix(chain)
        block_count = self._blocks_for(len(token_ids))
        # A hit that nobody holds is one of the free blocks, and is not free any more once taken; one in host memory
        # needs a free block to come back to.
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
        """Append the blocks, maybe none, that the table lacks for `token_count` tokens; None if they do not all fit."""
        table = self._tables.get(growth.request_id)
        assert table is not None, f"request {growth.request_id} grows and holds no table"
        missing = max(0, self._blocks_for(growth.token_count) - len(table.blocks))
        if missing > self.pool.free_count:
            return None
        blocks = self.pool.take(missing, self._save)
        table.blocks += blocks
        return Grant(growth.request_id, tuple(blocks), 0, len(table.blocks) * self._block_size)

    def fill(self, filled: Filled) -> None:
        """Take note of new tokens and of how many are computed; blocks that became full can now be found."""
        table = self._tables.get(filled.request_id)
        assert table is not None, f"request {filled.request_id} was filled and holds no table"
        self._fill(table, filled)

    def release(self, filled: Filled, *, is_poisoned: bool = False) -> None:
        """Fill, then free the table, its tail first. Harmless for a request that holds nothing.

        No request finds from now on what a poisoned one has computed.
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
        # Where this table's block was a duplicate and the first one is gone by now, this one takes its place.
        self._index(table, 0)
        self.pool.give_back(reversed(table.blocks))

    def forget_prefixes(self) -> None:
        """Nobody finds from now on what was computed before, nor what is computed from it. Every table stays."""
        self.pool.forget()
        self.host.forget()
        self._computing.clear()
        for table in self._tables.values():
            table.is_unindexed = True

    def take_copies(self) -> tuple[BlockCopies, ...]:
        """What to copy, in order, before anything is written to the blocks that were granted since the last time."""
        return self._copies.take()

    def check(self) -> None:
        """Walk all tables and the whole pool, and assert that they agree. Costs time proportional to the pool."""
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
                    assert not table.is_unindexed, f"block {block} is indexed and was to be forgotten"
                    assert self.pool.find(table.chain.digest(i)) == block, f"block {block} has a wrong digest"
        for digest, request_id in self._computing.items():
            table = self._tables[request_id]
            assert not table.is_unindexed, f"{request_id} promised what nobody is to find"
            blocks = range(table.full_blocks, len(table.chain) // self._block_size)
            assert digest in {table.chain.digest(i) for i in blocks}, f"{request_id} promised what it has or never will"
        assert len(self._refused) <= REFUSED_CHAINS_MAX, "too many refused chains are kept"
        assert not self._refused.keys() & self._tables.keys(), "an admitted request is kept as refused"

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
        """The block is computed, or will not be by this request."""
        if self._computing.get(digest) == request_id:
            del self._computing[digest]

    def _index(self, table: _BlockTable, first: int) -> None:
        if table.is_unindexed:
            return
        for i in range(first, table.full_blocks):
            if not self.pool.is_indexed(table.blocks[i]):
                self.pool.index(table.blocks[i], table.chain.digest(i))

    def _hold(self, chain: HashChain, hits: list[int | None], block_count: int) -> list[int]:
        """The blocks of a new table, hits first; what is in host memory is loaded, and can be found at once."""
        # The hits first: taking new blocks could evict them, or save others over them in host memory.
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
        """Keep in host memory what a block held that is about to be written to."""
        if digest in self.host:
            self.host.touch(digest)
        elif (slot := self.host.keep(digest)) is not None:
            self._copies.add(CopyKind.SAVE, block, slot)

    def _fork(self, source: _BlockTable | None, chain: HashChain, blocks: list[int], start: int) -> int:
        """Copy the block at `start` from the other sample's table; how many of its tokens need not be computed.

        Both write to it from there on, so it is copied before that rather than shared until then.
        """
        if source is None:
            return 0
        # One block at most, and one token is left to compute (rule `recompute-last`).
        end = min(source.computed_tokens, len(chain) - 1, start + self._block_size)
        while end > start and not chain.shares_prefix(source.chain, end):
            end -= 1
        if end <= start:
            return 0
        block = start // self._block_size
        self._copies.add(CopyKind.FORK, source.blocks[block], blocks[block])
        return end - start

    def _leader(self, admission: Admission) -> _BlockTable | None:
        """The table of the request whose other sample this one is, if its contents can be used."""
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
        """The blocks that hold the beginning of this sequence; None for one that is only in host memory."""
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
    """Copies of one kind that may be made in any order, or all at once: none writes what another reads or writes."""

    __slots__ = ("copying", "read", "sources", "targets", "written")

    def __init__(self, copying: CopyKind) -> None:
        self.copying = copying
        self.sources: list[int] = []
        self.targets: list[int] = []
        self.read: set[int] = set()
        self.written: set[int] = set()


class CopyBatches:
    """Gathers copies in the order in which they must seem to happen, and gives them out in few batches.

    A copy joins the latest batch of its kind that nothing in between, nor the batch itself, bars it from: neither may
    read what it writes, or write what it reads or writes.
    """

    def __init__(self) -> None:
        self._batches: list[_CopyBatch] = []

    def add(self, copying: CopyKind, source: int, target: int) -> None:
        """`source` and `target` are blocks of the pool, or slots of host memory, as the kind of copy has it."""
        # Blocks and slots are numbered apart; below zero, slots cannot be mistaken for blocks.
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
        """What was gathered since the last time, without what was saved and then saved over unread."""
        taken: list[BlockCopies] = []
        lost: set[int] = set()  # slots whose contents nothing reads before they are saved over
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
