"""Host memory that outlives executors, so that a new executor can reuse the contents that an earlier one saved.

This module handles bytes and the right to use them; the layout of blocks is up to the executor.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

import msgspec

from cuelight.kernel import get_logger
from cuelight.messages.request import HostTier

HEADER_BYTES: Final = mmap.PAGESIZE
_MARK, _AGE, _COSTS = struct.Struct("32s"), struct.Struct("Q"), struct.Struct("2d")
_AGE_AT: Final = _MARK.size
_COSTS_AT: Final = _AGE_AT + _AGE.size

log = get_logger("cuelight.executor")


class HostMemoryFile:
    """An anonymous file in memory (memfd), which exists until `close` or the end of this object.

    Mappings of the file outlast it. Executors use the file in turn, on threads or in processes; a pickled instance
    carries the path of the file.
    """

    def __init__(self, number: int) -> None:
        """Create the file. `number`, below 2**40, is unique to it. Raises OSError without support for memfd."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no os.memfd_create")
        descriptor = os.memfd_create("cuelight host memory")
        give_back = weakref.finalize(self, os.close, descriptor)
        give_back.atexit = False
        self._be(f"/proc/{os.getpid()}/fd/{descriptor}", _identity(descriptor), number, give_back)

    def _be(self, path: str, identity: tuple[int, int], number: int, give_back: Callable[[], object]) -> None:
        self._path, self._identity, self.number = path, identity, number
        self._give_back = give_back
        self._turn = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Callable[..., HostMemoryFile], tuple[str, tuple[int, int], int]]:
        return _found, (self._path, self._identity, self.number)

    def close(self) -> None:
        """Close the file. Idempotent. Mappings of it stay valid."""
        self._give_back()

    def claim(self) -> HostMemoryClaim:
        """Return a claim for a new executor and revoke all earlier claims. Does not block."""
        self._turn += 1
        return HostMemoryClaim(self, self._turn)

    @contextmanager
    def used(self, turn: int) -> Iterator[None]:
        """Use the memory exclusively within the block. Raises RuntimeError if another executor has claimed it."""
        with self._lock:
            if turn != self._turn:
                raise RuntimeError("another executor has claimed this host memory")
            yield

    def map(self, size: int) -> mmap.mmap:
        """Map the first `size` bytes and grow the file if it is smaller. Raises OSError, ValueError, OverflowError."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if _identity(descriptor) != self._identity:  # the owner's process has ended and its number is reused
                raise OSError(f"{self._path} is no longer the same file")
            if os.fstat(descriptor).st_size < size:
                os.ftruncate(descriptor, size)
            return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class HostMemoryClaim:
    """The right of one executor to use a host memory file, until a later claim revokes it."""

    memory: HostMemoryFile
    turn: int

    def open(self, byte_count: int, contents: str) -> HostMemoryMapping | None:
        """Map `byte_count` bytes; None, with a warning in the log, if they are unavailable.

        The contents of an earlier executor survive if it gave the same `contents`, a description of model and layout.
        Raises RuntimeError if another executor has claimed the memory.
        """
        try:
            mapped = self.memory.map(HEADER_BYTES + byte_count)
        except (OSError, ValueError, OverflowError) as error:
            log.warning("host_memory_does_not_last", reason=str(error))
            return None
        return HostMemoryMapping(self, mapped, contents)


class HostMemoryMapping:
    """`data`, preceded by a header that identifies its contents for the next executor.

    `number` identifies the contents: it changes whenever new contents are begun.
    """

    def __init__(self, claim: HostMemoryClaim, mapped: mmap.mmap, contents: str) -> None:
        self._claim, self._mapped = claim, mapped
        self._mark = hashlib.sha256(contents.encode()).digest()
        self.data = memoryview(mapped)[HEADER_BYTES:]
        with self.in_use():
            (mark,), (age,) = _MARK.unpack_from(mapped), _AGE.unpack_from(mapped, _AGE_AT)
            self.has_survived = mark == self._mark
            if not self.has_survived:
                # In this order, since this process may die in between.
                age += 1
                _AGE.pack_into(mapped, _AGE_AT, age)
                _MARK.pack_into(mapped, 0, b"")
        self.number = (claim.memory.number << 20) + age

    def in_use(self) -> AbstractContextManager[None]:
        """Use the memory exclusively within the block. Raises RuntimeError if another executor has claimed it."""
        return self._claim.memory.used(self._claim.turn)

    def tier(self, block_count: int, measure: Callable[[], HostTier]) -> HostTier:
        """Return the host tier with its costs, measured once per contents, because `measure` overwrites them."""
        if self.has_survived:
            move_seconds, recompute_seconds = _COSTS.unpack_from(self._mapped, _COSTS_AT)
            return HostTier(block_count, move_seconds, recompute_seconds, self.number)
        tier = measure()
        with self.in_use():
            _COSTS.pack_into(self._mapped, _COSTS_AT, tier.move_seconds, tier.recompute_seconds)
            _MARK.pack_into(self._mapped, 0, self._mark)
        return msgspec.structs.replace(tier, memory=self.number)


def in_use(host_memory: HostMemoryMapping | None) -> AbstractContextManager[None]:
    """Return `host_memory.in_use()`; without a mapping the memory is private, and nothing is locked."""
    return nullcontext() if host_memory is None else host_memory.in_use()


def _found(path: str, identity: tuple[int, int], number: int) -> HostMemoryFile:
    """Unpickle a `HostMemoryFile` in a process that does not own it."""
    memory = HostMemoryFile.__new__(HostMemoryFile)
    memory._be(path, identity, number, give_back=lambda: None)
    return memory


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
