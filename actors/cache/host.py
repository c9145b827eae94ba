"""The slots of host memory: which prefix block each holds after it was evicted from the pool.

Knows slots and digests; nothing of pool blocks, of requests or of when a copy is made.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


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
