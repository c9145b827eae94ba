"""The block pool and the slots of host memory: held and free blocks, and the index of cached prefixes.

Contains block ids and digests only; requests and tokens are in `tables.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from cuelight.messages.request import NULL_BLOCK


class BlockPool:
    """Reference counts and prefix index of blocks 1 to `block_count - 1`; block 0 is the null block.

    A free block may still be indexed: its contents remain until the block is taken for another table. The free blocks
    form one queue, taken from the front; unindexed blocks join at the front and indexed blocks at the back:

        spare (last returned first)  │  never used (ascending)  │  indexed (longest free first)

    A free block never gains a digest, and loses one only when it is taken or when all digests are forgotten. So the
    three parts stay separate, blocks leave the middle of the third part only, and a new pool costs nothing per block.
    """

    def __init__(self, block_count: int) -> None:
        assert block_count >= 1, "a pool has at least the null block"
        self.total = block_count - 1
        self.evictions = 0
        self._spare: list[int] = []
        self._indexed_free: OrderedDict[int, None] = OrderedDict()
        self._index: dict[bytes, int] = {}
        # By block id, for blocks that were ever used; the length is the id of the next block that never was.
        self._holders: list[int] = [0]
        self._digests: list[bytes | None] = [None]

    @property
    def free_count(self) -> int:
        """Number of blocks that no table holds, indexed ones included."""
        return len(self._spare) + self._never_used_count + len(self._indexed_free)

    @property
    def indexed_count(self) -> int:
        """Number of blocks that a lookup can find, held or free."""
        return len(self._index)

    @property
    def _never_used_count(self) -> int:
        return self.total + 1 - len(self._holders)

    def find(self, digest: bytes) -> int | None:
        """Return the block that holds the prefix block with this digest, or None."""
        return self._index.get(digest)

    def is_held(self, block: int) -> bool:
        """Return whether at least one table holds the block."""
        return self._holders[block] > 0

    def is_indexed(self, block: int) -> bool:
        """Return whether a lookup can find the block."""
        return self._digests[block] is not None

    def touch(self, blocks: Iterable[int]) -> None:
        """Add one holder to each of these indexed blocks."""
        for block in blocks:
            assert self._digests[block] is not None, f"block {block} is shared but not indexed"
            if self._holders[block] == 0:
                del self._indexed_free[block]
            self._holders[block] += 1

    def take(self, block_count: int, evicted: Callable[[int, bytes], None] | None = None) -> list[int]:
        """Return `block_count` free blocks, now held by one table; prefixes still indexed in them are evicted.

        `evicted` is called with block and digest of each eviction, in order, before anything is written to the block.
        """
        assert block_count <= self.free_count, f"{block_count} blocks requested, {self.free_count} are free"
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
        assert digest is not None, f"block {block} is in the free indexed blocks but has no digest"
        del self._index[digest]
        self._digests[block] = None
        self.evictions += 1
        return digest

    def forget(self) -> None:
        """Empty the index. Held blocks stay held; free indexed blocks become spare."""
        self._spare.extend(reversed(self._indexed_free))
        self._indexed_free.clear()
        self._index.clear()
        self._digests = [None] * len(self._digests)

    def index(self, block: int, digest: bytes) -> None:
        """Add this held block to the index, unless the index has another block with the same contents.

        A duplicate stays out of the index, so that a block in a live table is not replaced.
        """
        assert self._holders[block] > 0, f"block {block} is to be indexed but not held"
        assert self._digests[block] is None, f"block {block} is indexed twice"
        if digest not in self._index:
            self._index[digest] = block
            self._digests[block] = digest

    def unindex(self, block: int) -> None:
        """Remove this held block from the index, if it is there."""
        assert self._holders[block] > 0, f"block {block} is to be removed from the index but not held"
        digest, self._digests[block] = self._digests[block], None
        if digest is not None:
            del self._index[digest]

    def give_back(self, blocks: Iterable[int]) -> None:
        """Remove one holder from each of these blocks. Blocks without holders become free in the order given."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is given back but not held"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if self._digests[block] is None:
                self._spare.append(block)
            else:
                self._indexed_free[block] = None

    def check(self, table_entries: Mapping[int, int]) -> None:
        """Walk the whole pool and assert that it is consistent.

        `table_entries` maps a block to the number of table entries that name it.
        """
        used_ever = range(1, len(self._holders))
        assert len(self._digests) == len(self._holders) <= self.total + 1, "a block beyond the pool was used"
        assert self._holders[NULL_BLOCK] == 0 and self._digests[NULL_BLOCK] is None, "the null block was used"
        assert all(block in used_ever for block in table_entries), "a table names a block outside the pool"
        free = [*self._spare, *self._indexed_free]
        held = [block for block in used_ever if self._holders[block]]
        assert sorted(free + held) == list(used_ever), "a block is both free and held, or neither"
        assert self.free_count + len(held) == self.total, "the free count is wrong"
        for block in used_ever:
            entries = table_entries.get(block, 0)
            assert self._holders[block] == entries, f"block {block}: {self._holders[block]} holders, {entries} entries"
        assert not any(self.is_indexed(block) for block in self._spare), "an indexed block is among the spare ones"
        assert all(self.is_indexed(block) for block in self._indexed_free), "a free indexed block has no digest"
        indexed = {digest: block for block, digest in enumerate(self._digests) if digest is not None}
        assert indexed == self._index, "the index and the blocks' digests disagree"
        assert len(indexed) == sum(map(self.is_indexed, used_ever)), "two blocks have one digest"


class HostSlots:
    """An LRU cache of prefix blocks in host memory, slots 0 to `slot_count - 1`.

    Callers save and touch blocks tail first, so that the end of a long prefix is replaced before its beginning.
    """

    def __init__(self, slot_count: int) -> None:
        assert slot_count >= 0, f"slot_count is {slot_count}; it must not be negative"
        self.total = slot_count
        # Least recently used first.
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._spare: list[int] = []
        self._used_ever = 0
        # Slots whose copies may not have been made yet, and the round of those copies.
        self._unconfirmed: dict[int, int] = {}

    @property
    def used_count(self) -> int:
        """Number of slots that hold a block, pinned ones included."""
        return self._used_ever - len(self._spare)

    def __contains__(self, digest: bytes) -> bool:
        """Return whether a slot holds the prefix block with this digest. Pinned blocks are not found."""
        return digest in self._slots

    def touch(self, digest: bytes) -> None:
        """Make this block the most recently used."""
        self._slots.move_to_end(digest)

    def keep(self, digest: bytes) -> int | None:
        """Assign this block a slot, replacing the least recently used block if none is free.

        Return the slot, or None if every slot is pinned.
        """
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
        """Return the slots of these blocks, and neither find nor replace the blocks until `unpin`."""
        return {digest: self._slots.pop(digest) for digest in digests}

    def unpin(self, pinned: dict[bytes, int]) -> None:
        """Undo `pin`. The blocks become the most recently used, in the order in which they were pinned."""
        self._slots.update(pinned)

    def forget(self) -> None:
        """Free every slot."""
        self._slots.clear()
        self._spare.clear()
        self._unconfirmed.clear()
        self._used_ever = 0

    def mark_unconfirmed(self, slots: Sequence[int], round_: int) -> None:
        """Mark these slots as the targets of this round's copies, which no `confirm` covers yet."""
        for slot in slots:
            self._unconfirmed[slot] = round_

    def confirm(self, round_: int) -> None:
        """Confirm the copies of all rounds up to this one: they have been made."""
        for slot in [slot for slot, doubted in self._unconfirmed.items() if doubted <= round_]:
            del self._unconfirmed[slot]

    def forget_unconfirmed(self) -> None:
        """Free the slots whose copies are not confirmed: their contents are unknown."""
        for digest in [digest for digest, slot in self._slots.items() if slot in self._unconfirmed]:
            self._spare.append(self._slots.pop(digest))
        self._unconfirmed.clear()

    def check(self) -> None:
        """Walk all slots and assert that they are consistent. No slot may be pinned."""
        assert self._used_ever <= self.total, "a slot beyond host memory was used"
        held = [*self._slots.values(), *self._spare]
        assert sorted(held) == list(range(self._used_ever)), "a slot is lost or used twice"
        assert self._unconfirmed.keys() <= set(self._slots.values()), "a slot without a block is unconfirmed"
