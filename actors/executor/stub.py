"""A device without weights, for tests, simulations and examples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from cuelight.messages.executor import ExecuteStep, Row
from cuelight.messages.request import NULL_BLOCK, BlockCopies, CopyKind, HostTier, RequestId
from cuelight.messages.scheduler import StepDone

_LETTERS: Final = b"etaoin shrdlu cmfwyp "


@dataclass
class _StubRow:
    token_ids: list[int]
    computed: int
    block_ids: list[int]


@dataclass(frozen=True)
class StubBatch:
    """The batch of the stub: the step itself."""

    step: ExecuteStep


def hashed_token(token_ids: Sequence[int], vocab_size: int) -> int:
    """Return the next token as a pure function of all tokens before it, below `vocab_size`."""
    digest = hashlib.blake2b(b",".join(str(token).encode() for token in token_ids), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size


def next_letter(token_ids: Sequence[int]) -> int:
    """Return the code of a letter or a space, as a pure function of all tokens before it."""
    return _LETTERS[hashed_token(token_ids, len(_LETTERS))]


def stub_host(block_count: int) -> HostTier:
    """Return a host tier of `block_count` blocks that are always worth saving: moving them costs nothing."""
    return HostTier(block_count, move_seconds=0.0, recompute_seconds=1.0) if block_count else HostTier()


class StubDevice:
    """A device that stores tokens in KV slots, in place of their K/V, so a wrong block table or copy is detected.

    The next token is `next_token(all tokens read back through the block table)`: slots are written chunk by chunk,
    shared through the prefix cache and reused, exactly as K/V would be.
    """

    def __init__(
        self,
        block_count: int,
        block_size: int,
        next_token: Callable[[Sequence[int]], int] | None = None,
        host: HostTier = HostTier(),  # noqa: B008  # frozen
    ) -> None:
        self.block_count = block_count
        self.block_size = block_size
        self.host = host
        self._next_token = next_token or (lambda token_ids: hashed_token(token_ids, 1000))
        self._slots: list[int | None] = [None] * (block_count * block_size)
        self._host_slots: list[int | None] = [None] * (host.block_count * block_size)
        self._rows: dict[RequestId, _StubRow] = {}
        self._epoch = 0
        self.steps = 0

    def prepare(self, step: ExecuteStep) -> StubBatch:
        """Return the step as the batch; `run` applies its changes to the rows."""
        return StubBatch(step)

    def copy(self, copies: BlockCopies) -> None:
        """Copy the slots of whole blocks."""
        match copies.copying:
            case CopyKind.SAVE:
                self._copy(copies, self._slots, self._host_slots)
            case CopyKind.LOAD:
                self._copy(copies, self._host_slots, self._slots)
            case CopyKind.FORK:
                assert not set(copies.sources) & set(copies.targets), "no block is both a source and a target"
                self._copy(copies, self._slots, self._slots)
            case _:
                assert_never(copies.copying)

    def _copy(self, copies: BlockCopies, read: list[int | None], written: list[int | None]) -> None:
        assert len(set(copies.targets)) == len(copies.targets), "a block takes one copy"
        for source, target in zip(copies.sources, copies.targets, strict=True):
            written[self._block(target, written)] = read[self._block(source, read)]

    def _block(self, block_id: int, slots: list[int | None]) -> slice:
        assert block_id != NULL_BLOCK or slots is self._host_slots, "the null block is never copied"
        start = block_id * self.block_size
        assert 0 <= start < len(slots), "the block exists"
        return slice(start, start + self.block_size)

    def run(self, batch: StubBatch) -> StepDone:
        """Write each chunk's tokens into their slots, and sample for each chunk that reaches the end of its row."""
        step = batch.step
        self.steps += 1
        self._apply(step)
        sampled: list[tuple[RequestId, int]] = []
        for chunk in step.chunks:
            row = self._rows[chunk.request_id]
            end = row.computed + chunk.token_count
            assert end <= len(row.token_ids), "a chunk computes tokens that exist"
            for position in range(row.computed, end):
                self._slots[self._slot(row, position)] = row.token_ids[position]
            row.computed = end
            if end == len(row.token_ids):
                token_id = self._next_token(self._read(row))
                row.token_ids.append(token_id)
                sampled.append((chunk.request_id, token_id))
        request_ids, token_ids = zip(*sampled, strict=True) if sampled else ((), ())
        return StepDone(step.epoch, step.step, tuple(request_ids), tuple(token_ids))

    def _apply(self, step: ExecuteStep) -> None:
        if step.epoch != self._epoch:
            self._epoch = step.epoch
            self._rows.clear()
        for request_id in step.ended:
            del self._rows[request_id]
        for row in step.rows:
            assert row.request_id not in self._rows, "a row enters once"
            self._rows[row.request_id] = self._enter(row)
        for extension in step.extensions:
            self._rows[extension.request_id].block_ids.extend(extension.block_ids)

    @staticmethod
    def _enter(row: Row) -> _StubRow:
        return _StubRow(list(row.token_ids), row.computed_tokens, list(row.block_ids))

    def _slot(self, row: _StubRow, position: int) -> int:
        block_id = row.block_ids[position // self.block_size]
        assert block_id != NULL_BLOCK, "the null block holds no token of a row"
        return block_id * self.block_size + position % self.block_size

    def _read(self, row: _StubRow) -> list[int]:
        tokens = [self._slots[self._slot(row, position)] for position in range(row.computed)]
        assert tokens == row.token_ids, "the slots hold this row's tokens and nothing else"
        return row.token_ids
