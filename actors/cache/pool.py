"""The block pool: which blocks are held, which are free, and which hold a prefix that can be found again.

Knows block ids and digests; nothing of requests, tokens or tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from cuelight.messages.request import NULL_BLOCK


class BlockPool:
    """Blocks 1 to `block_count - 1`, each held by so many tables or free.

    A free block may still be indexed: it keeps its contents until it is taken for something else. The free blocks are
    one queue, taken from the front; unindexed blocks join it at the front and indexed ones at the back:

        spare (last returned first)  │  never used (ascending)  │  indexed (longest free first)

    A free block that is indexed loses its digest only when taken, or with all others at once, and never gains one, so
    the three parts never mix, only the third is ever entered in the middle, and a new pool costs nothing per block.
    """

    def __init__(self, block_count: int) -> None:
        assert block_count >= 1, "a pool has at least the null block"
        self.total = block_count - 1
        self.evictions = 0
        self._spare: list[int] = []
        self._indexed_free: OrderedDict[int, None] = OrderedDict()
        self._index: dict[bytes, int] = {}
        # By block id, as far as blocks were ever used; the length is the next block that never was.
        self._holders: list[int] = [0]
        self._digests: list[bytes | None] = [None]

    @property
    def free_count(self) -> int:
        """Blocks that nobody holds, indexed ones included."""
        return len(self._spare) + self._never_used_count + len(self._indexed_free)

    @property
    def indexed_count(self) -> int:
        """Blocks that a lookup can find, held or free."""
        return len(self._index)

    @property
    def _never_used_count(self) -> int:
        return self.total + 1 - len(self._holders)

    def find(self, digest: bytes) -> int | None:
        """The block that holds this prefix block, if any."""
        return self._index.get(digest)

    def is_held(self, block: int) -> bool:
        return self._holders[block] > 0

    def is_indexed(self, block: int) -> bool:
        return self._digests[block] is not None

    def touch(self, blocks: Iterable[int]) -> None:
        """One more table holds these indexed blocks."""
        for block in blocks:
            assert self._digests[block] is not None, f"block {block} is shared without being a known prefix"
            if self._holders[block] == 0:
                del self._indexed_free[block]
            self._holders[block] += 1

    def take(self, block_count: int, evicted: Callable[[int, bytes], None] | None = None) -> list[int]:
        """Free blocks for one table to hold; the prefixes they still held are gone.

        `evicted` hears which block held which of them, in this order, before anything is written to it.
        """
        assert block_count <= self.free_count, f"{block_count} blocks asked of {self.free_count} free ones"
        return [self._take_one(evicted) for _ in range(block_count)]

    def _take_one(self, evicted: Callable[[int, bytes], None] | None) -> int:
        if self._spare:
            block = self._spare.pop()
            self._holders[block] = 1
        elif self._never_used_count:
            block = len(self._holders)
            self._holders.append(1)
            self._digests.append(None)
        else:
            block, _ = self._indexed_free.popitem(last=False)
            digest = self._evict(block)
            if evicted is not None:
                evicted(block, digest)
            self._holders[block] = 1
        return block

    def _evict(self, block: int) -> bytes:
        digest = self._digests[block]
        assert digest is not None, f"block {block} is among the indexed ones and has no digest"
        del self._index[digest]
        self._digests[block] = None
        self.evictions += 1
        return digest

    def forget(self) -> None:
        """No lookup finds a block any more. Held blocks stay held, and free ones have nothing left to lose."""
        self._spare.extend(reversed(self._indexed_free))
        self._indexed_free.clear()
        self._index.clear()
        self._digests = [None] * len(self._digests)

    def index(self, block: int, digest: bytes) -> None:
        """Let lookups find this held block, unless they already find another one with the same contents.

        Such a duplicate stays out of the index rather than replace a block in a live table.
        """
        assert self._holders[block] > 0, f"block {block} is indexed while nobody holds it"
        assert self._digests[block] is None, f"block {block} is indexed twice"
        if digest not in self._index:
            self._index[digest] = block
            self._digests[block] = digest

    def unindex(self, block: int) -> None:
        """No lookup finds this held block any more, if any did."""
        assert self._holders[block] > 0, f"block {block} is taken out of the index while nobody holds it"
        digest, self._digests[block] = self._digests[block], None
        if digest is not None:
            del self._index[digest]

    def give_back(self, blocks: Iterable[int]) -> None:
        """One table fewer holds these blocks. They become free in the order given."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is given back and was not held"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if self._digests[block] is None:
                self._spare.append(block)
            else:
                self._indexed_free[block] = None

    def check(self, table_entries: Mapping[int, int]) -> None:
        """Walk the whole pool. `table_entries` says how many table entries name each block."""
        used_ever = range(1, len(self._holders))
        assert len(self._digests) == len(self._holders) <= self.total + 1, "a block beyond the pool was used"
        assert self._holders[NULL_BLOCK] == 0 and self._digests[NULL_BLOCK] is None, "the null block was used"
        assert all(block in used_ever for block in table_entries), "a table names a block outside the pool"
        free = [*self._spare, *self._indexed_free]
        held = [block for block in used_ever if self._holders[block]]
        assert sorted(free + held) == list(used_ever), "free and held blocks are not all blocks, each once"
        assert self.free_count + len(held) == self.total, "the free count is wrong"
        for block in used_ever:
            entries = table_entries.get(block, 0)
            assert self._holders[block] == entries, f"block {block}: {self._holders[block]} holders, {entries} entries"
        assert not any(self.is_indexed(block) for block in self._spare), "an indexed block is among the spare ones"
        assert all(self.is_indexed(block) for block in self._indexed_free), "a free block lost its digest"
        indexed = {digest: block for block, digest in enumerate(self._digests) if digest is not None}
        assert indexed == self._index, "the index and the blocks' digests disagree"
        assert len(indexed) == sum(map(self.is_indexed, used_ever)), "two blocks have one digest"


class HostSlots:
    """Slots 0 to `slot_count - 1`; the least recently used one is lost first.

    Blocks are to come, and to be used, tail first: so the end of a long prefix is lost before its beginning.
    """

    def __init__(self, slot_count: int) -> None:
        assert slot_count >= 0, "there cannot be fewer slots than none"
        self.total = slot_count
        # Least recently used first.
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._spare: list[int] = []
        self._used_ever = 0
        # Slots that are saved to by copies that may not have been made, and the round of those.
        self._unconfirmed: dict[int, int] = {}

    @property
    def used_count(self) -> int:
        """Slots that hold a block, pinned ones included."""
        return self._used_ever - len(self._spare)

    def __contains__(self, digest: bytes) -> bool:
        """Whether a slot holds this prefix block."""
        return digest in self._slots

    def touch(self, digest: bytes) -> None:
        """This block was used just now."""
        self._slots.move_to_end(digest)

    def keep(self, digest: bytes) -> int | None:
        """The slot that holds this block from now on, in place of another if need be; None if every slot is pinned."""
        assert digest not in self._slots, "a block is saved twice"
        if self._spare:
            slot = self._spare.pop()
        elif self._used_ever < self.total:
            slot = self._used_ever
            self._used_ever += 1
        elif self._slots:
            _, slot = self._slots.popitem(last=False)
        else:
            return None
        self._slots[digest] = slot
        return slot

    def pin(self, digests: Iterable[bytes]) -> dict[bytes, int]:
        """The slots of these blocks, which nobody finds and nothing replaces until they are unpinned."""
        return {digest: self._slots.pop(digest) for digest in digests}

    def unpin(self, pinned: dict[bytes, int]) -> None:
        """They are as any other again, and were used just now, in the order in which they were pinned."""
        self._slots.update(pinned)

    def forget(self) -> None:
        """Every slot is free."""
        self._slots.clear()
        self._spare.clear()
        self._unconfirmed.clear()
        self._used_ever = 0

    def mark_unconfirmed(self, slots: Sequence[int], round_: int) -> None:
        """Blocks are saved to these slots by copies of this round, of which nobody has heard yet."""
        for slot in slots:
            self._unconfirmed[slot] = round_

    def confirm(self, round_: int) -> None:
        """The copies of all rounds up to this one have been made."""
        for slot in [slot for slot, doubted in self._unconfirmed.items() if doubted <= round_]:
            del self._unconfirmed[slot]

    def forget_unconfirmed(self) -> None:
        """Slots of which nobody knows what is in them are free."""
        for digest in [digest for digest, slot in self._slots.items() if slot in self._unconfirmed]:
            self._spare.append(self._slots.pop(digest))
        self._unconfirmed.clear()

    def check(self) -> None:
        """Walk all slots while none is pinned."""
        assert self._used_ever <= self.total, "a slot beyond host memory was used"
        held = [*self._slots.values(), *self._spare]
        assert sorted(held) == list(range(self._used_ever)), "used slots hold one block each"
        assert self._unconfirmed.keys() <= set(self._slots.values()), "a slot without a block is in doubt"
