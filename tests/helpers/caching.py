"""What several of the cache manager's tests need: tables that are checked after each change, and copies in short."""

from __future__ import annotations

from cuelight.actors.cache.pool import BlockPool
from cuelight.actors.cache.tables import BlockTables
from cuelight.messages.cache import Admission, Filled
from cuelight.messages.request import BlockCopies, CopyKind, HostTier, RequestId
from cuelight.messages.scheduler import Grant

BLOCK_SIZE = 4


def make_tables(blocks_total: int, host_blocks: int = 0) -> BlockTables:
    host = HostTier(host_blocks, move_seconds=1.0, recompute_seconds=1.0)
    return BlockTables(BlockPool(blocks_total + 1), BLOCK_SIZE, 0.0, host)


def tokens(count: int, first: int = 0) -> tuple[int, ...]:
    """A prompt that shares no prefix with one of another `first`."""
    return tuple(range(first, first + count))


def asking(request: int, token_ids: tuple[int, ...], salt: bytes = b"", sample_of: int | None = None) -> Admission:
    return Admission(RequestId(request), token_ids, salt, None if sample_of is None else RequestId(sample_of))


def admit(
    tables: BlockTables, request: int, token_ids: tuple[int, ...], salt: bytes = b"", sample_of: int | None = None
) -> Grant:
    grant = tables.admit(asking(request, token_ids, salt, sample_of))
    tables.check()
    assert grant is not None
    return grant


def fill(tables: BlockTables, request: int, computed: int, new: tuple[int, ...] = ()) -> None:
    tables.fill(Filled(RequestId(request), computed, new))
    tables.check()


def release(tables: BlockTables, request: int, computed: int, new: tuple[int, ...] = ()) -> None:
    tables.release(Filled(RequestId(request), computed, new))
    tables.check()


def serve(tables: BlockTables, request: int, token_ids: tuple[int, ...], salt: bytes = b"") -> Grant:
    """Admit, compute everything, release."""
    grant = admit(tables, request, token_ids, salt)
    release(tables, request, len(token_ids))
    return grant


def forget(tables: BlockTables) -> None:
    tables.forget_prefixes()
    tables.check()


def saved(*pairs: tuple[int, int]) -> BlockCopies:
    return BlockCopies(CopyKind.SAVE, tuple(block for block, _ in pairs), tuple(slot for _, slot in pairs))


def loaded(*pairs: tuple[int, int]) -> BlockCopies:
    return BlockCopies(CopyKind.LOAD, tuple(slot for slot, _ in pairs), tuple(block for _, block in pairs))


def forked(source: int, target: int) -> BlockCopies:
    return BlockCopies(CopyKind.FORK, (source,), (target,))
