"""The copies of blocks that one round of planning needs, in an order in which they may be made.

Knows what reads and writes which block; nothing of why.
"""

from __future__ import annotations

from cuelight.messages.request import BlockCopies, CopyKind


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
