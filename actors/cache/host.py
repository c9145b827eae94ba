"""The slots of host memory: which prefix block each holds after it was evicted from the pool.

Knows slots and digests; nothing of pool blocks, of requests or of when a copy is made.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class HostSlots:
    """Slots 0 to `slot_count - 1`; the least recently used one is lost first.

    Blocks are to come, and to be used, tail first: so the end of a long prefix is lost before its beginning.
    """

    def __init__(self, slot_count: int) -> None:
        assert slot_count >= 0, "there cannot be fewer slots than none"
        self.total = slot_count
        self.used_count = 0
        # Least recently used first. A slot is never free again once used, so the used ones are the first ones.
        self._slots: OrderedDict[bytes, int] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        """Whether a slot holds this prefix block."""
        return digest in self._slots

    def touch(self, digest: bytes) -> None:
        """This block was used just now."""
        self._slots.move_to_end(digest)

    def keep(self, digest: bytes) -> int | None:
        """The slot that holds this block from now on, in place of another if need be; None if every slot is pinned."""
        assert digest not in self._slots, "a block is saved twice"
        if self.used_count < self.total:
            slot = self.used_count
            self.used_count += 1
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
        self.used_count = 0

    def check(self) -> None:
        """Walk all slots while none is pinned."""
        assert self.used_count <= self.total, "a slot beyond host memory was used"
        assert sorted(self._slots.values()) == list(range(self.used_count)), "used slots hold one block each"
