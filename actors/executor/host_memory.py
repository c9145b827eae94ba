"""Host memory that outlives executors: each finds there what the executor before it has saved.

Knows bytes and who may use them; nothing of blocks.
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
    """A file without a name in the system's memory. It exists until `close` or the end of this object, and beyond that
    for as long as a process has it open.

    Executors have it one after another, on threads or in processes: pickled, this says where the file is to be found.
    """

    def __init__(self, number: int) -> None:
        """`number`, below 2**40, tells it from any other. Raises OSError where the system has nothing of the kind."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no files without a name")
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
        """Give it back. Harmless when done twice, and for those that have it open."""
        self._give_back()

    def claim(self) -> HostMemoryClaim:
        """For one more executor; those before it can use it no longer. Waits for nothing."""
        self._turn += 1
        return HostMemoryClaim(self, self._turn)

    @contextmanager
    def used(self, turn: int) -> Iterator[None]:
        """Nobody else uses it meanwhile. Raises RuntimeError where another executor has claimed it."""
        with self._lock:
            if turn != self._turn:
                raise RuntimeError("another executor has this memory by now")
            yield

    def map(self, size: int) -> mmap.mmap:
        """So many bytes of it, or more. Raises OSError, ValueError and OverflowError."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if _identity(descriptor) != self._identity:  # its owner has gone, and what is there is anybody's
                raise OSError(f"{self._path} is another file by now")
            if os.fstat(descriptor).st_size < size:
                os.ftruncate(descriptor, size)
            return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class HostMemoryClaim:
    """The right of one executor to use a host memory file, from its start on."""

    memory: HostMemoryFile
    turn: int

    def open(self, byte_count: int, contents: str) -> HostMemoryMapping | None:
        """So many bytes; None, and a warning, where they are not to be had.

        What the executors before have left is found if they said the same of their `contents`. Raises RuntimeError
        where another executor has claimed it.
        """
        try:
            mapped = self.memory.map(HEADER_BYTES + byte_count)
        except (OSError, ValueError, OverflowError) as error:
            log.warning("host_memory_does_not_last", reason=str(error))
            return None
        return HostMemoryMapping(self, mapped, contents)


class HostMemoryMapping:
    """`data`, and before it what tells whether that is of use to the next executor.

    `number` tells these contents from any others: it is another one each time that they are begun.
    """

    def __init__(self, claim: HostMemoryClaim, mapped: mmap.mmap, contents: str) -> None:
        self._claim, self._mapped = claim, mapped
        self._mark = hashlib.sha256(contents.encode()).digest()
        self.data = memoryview(mapped)[HEADER_BYTES:]
        with self.in_use():
            (mark,), (age,) = _MARK.unpack_from(mapped), _AGE.unpack_from(mapped, _AGE_AT)
            self.has_survived = mark == self._mark
            if not self.has_survived:
                # In this order, since this life may end in between.
                age += 1
                _AGE.pack_into(mapped, _AGE_AT, age)
                _MARK.pack_into(mapped, 0, b"")
        self.number = (claim.memory.number << 20) + age

    def in_use(self) -> AbstractContextManager[None]:
        """No other executor uses it meanwhile. Raises RuntimeError where one has claimed it."""
        return self._claim.memory.used(self._claim.turn)

    def tier(self, block_count: int, measure: Callable[[], HostTier]) -> HostTier:
        """What its use costs: as measured when the contents were begun, for that spoils them."""
        if self.has_survived:
            move_seconds, recompute_seconds = _COSTS.unpack_from(self._mapped, _COSTS_AT)
            return HostTier(block_count, move_seconds, recompute_seconds, self.number)
        tier = measure()
        with self.in_use():
            _COSTS.pack_into(self._mapped, _COSTS_AT, tier.move_seconds, tier.recompute_seconds)
            _MARK.pack_into(self._mapped, 0, self._mark)
        return msgspec.structs.replace(tier, memory=self.number)


def in_use(host_memory: HostMemoryMapping | None) -> AbstractContextManager[None]:
    """As the method; without a mapping the memory belongs to this executor alone."""
    return nullcontext() if host_memory is None else host_memory.in_use()


def _found(path: str, identity: tuple[int, int], number: int) -> HostMemoryFile:
    """In a process that does not own it."""
    memory = HostMemoryFile.__new__(HostMemoryFile)
    memory._be(path, identity, number, give_back=lambda: None)
    return memory


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
