"""The journal: a tap that records every life and every delivery in a file, at a bounded cost.

Knows when bytes go to the file, and what happens when they cannot. What they mean is in `records.py`.
"""

from __future__ import annotations

import asyncio
import os
import reprlib
import stat
import sys
import weakref
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from cuelight.kernel.codec import AddressId, Codec, type_name
from cuelight.kernel.errors import NotSendable
from cuelight.kernel.events import Delivered, Ended, Event, Started
from cuelight.kernel.journal.records import (
    LAST_RECORD,
    MAGIC,
    JournalError,
    Record,
    Recorded,
    encode_header,
    encode_record,
)
from cuelight.kernel.log import get_logger
from cuelight.kernel.ref import Recipient, Ref

if sys.platform != "win32":
    import fcntl

BUFFER_BYTES_MAX: Final = 1024 * 1024
"""So much is written at once, even within one turn of the loop."""

STRONG_ADDRESSES_MAX: Final = 1024
"""Of the addresses that nothing can refer to weakly, so many keep their number at a time."""

OPAQUE_CHARS_MAX: Final = 200
"""Of a message that cannot be recorded, so much is said."""

log = get_logger("cuelight.kernel")


class Journal:
    """Records what it is told of, as a system's tap.

    What one turn of the event loop brings is written at the end of that turn, so a process that is killed loses no more
    than that. A write that fails, or a file that would grow beyond `bytes_max`, stops the recording and nothing else.

    Args:
        path: the file; an older journal there is overwritten.
        about: what the program says about itself, to whoever reads the file.
        bytes_max: the size of the file, at most.
        record_bytes_max: a larger message is recorded without its contents.

    Raises:
        JournalError: the file cannot be created, another journal is being written to it, or it holds something else.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        about: dict[str, object] | None = None,
        bytes_max: int = 1024**3,
        record_bytes_max: int = 16 * 1024**2,
    ) -> None:
        self.path = Path(path)
        self.error: str | None = None
        """Why the recording stopped before it was closed."""
        self._bytes_max = bytes_max
        self._record_bytes_max = record_bytes_max
        self._numbers = _Numbers()
        self._codec = Codec({}, self._numbers.of, _no_address)
        self._buffer = bytearray()
        header = encode_header(about or {})
        self._size = len(header)
        """Bytes of the file, with those that wait in the buffer."""
        self._scheduled_in: asyncio.AbstractEventLoop | None = None
        self._file: int | None = _create(self.path, header)

    def __call__(self, event: Event) -> None:
        """Record an event; nothing once the recording has stopped or the journal is closed."""
        if self._file is None:
            return
        record = encode_record(self._record_of(event))
        if self._size + len(record) + len(LAST_RECORD) > self._bytes_max:
            self._write()
            self._stop(f"the journal has reached its {self._bytes_max} bytes")
            return
        self._size += len(record)
        self._buffer += record
        if len(self._buffer) >= BUFFER_BYTES_MAX:
            self._write()
        else:
            self._schedule()

    @property
    def size_bytes(self) -> int:
        """Of the file, with what waits to be written."""
        return self._size

    @property
    def is_closed(self) -> bool:
        """Whether nothing is recorded any more."""
        return self._file is None

    @property
    def buffered_bytes(self) -> int:
        """What a kill would lose now."""
        return len(self._buffer)

    def flush(self) -> None:
        """Write what waits for the end of this turn."""
        if self._buffer:
            self._write()

    def close(self) -> None:
        """Write what is left, and that the recording ended in order. Harmless when done twice."""
        if self._file is not None:
            self._buffer += LAST_RECORD
            self._write()
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _record_of(self, event: Event) -> Record:
        match event:
            case Delivered():
                return self._recorded(event)
            case Ended():
                return msgspec.structs.replace(event, error=_encodable(event.error))
            case Started():
                return event

    def _recorded(self, event: Delivered) -> Recorded:
        message, body, opaque = event.message, b"", ""
        try:
            body = self._codec.encode(message)
        except NotSendable:
            opaque = _described(message)
        if len(body) > self._record_bytes_max:
            body, opaque = b"", f"<{type(message).__qualname__} of {len(body)} bytes>"
        return Recorded(event.seconds, event.sender, event.actor, type_name(type(message)), body, opaque)

    def _schedule(self) -> None:
        """Write at the end of this turn; without a loop, when there is enough to write."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if self._scheduled_in is not loop:
            self._scheduled_in = loop
            loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._scheduled_in = None
        self._write()

    def _write(self) -> None:
        """Write all of the buffer. Where the disk is full, that leaves a torn record at the end."""
        if self._file is None:
            return
        buffer, self._buffer = self._buffer, bytearray()
        rest = memoryview(buffer)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            self._stop(f"the journal cannot be written: {error}")

    def _stop(self, reason: str) -> None:
        self.error = reason
        log.warning("journal_stopped", path=str(self.path), error=reason)
        self._release()

    def _release(self) -> None:
        file, self._file = self._file, None
        self._buffer.clear()
        self._numbers.clear()
        if file is not None:
            with suppress(OSError):  # it is closed all the same
                fcntl.flock(file, fcntl.LOCK_UN)  # a forked process may hold it open
            with suppress(OSError):
                os.close(file)


class _Numbers:
    """Numbers for the addresses of those who are no actors: one each, for as long as the address is there."""

    def __init__(self) -> None:
        self._count = 0
        self._weak: dict[int, tuple[weakref.ref[Recipient[object]], int]] = {}
        self._strong: OrderedDict[int, tuple[Recipient[object], int]] = OrderedDict()

    def of(self, address: Recipient[object]) -> AddressId:
        """An actor's name, or a number for any other address."""
        if isinstance(address, Ref):
            return address.name
        key = id(address)
        if (known := self._weak.get(key)) is not None:
            return known[1]
        if (held := self._strong.get(key)) is not None:
            return held[1]
        self._count += 1
        try:
            self._weak[key] = (weakref.ref(address, lambda _: self._weak.pop(key, None)), self._count)
        except TypeError:  # its class has slots, and none for this
            self._strong[key] = (address, self._count)
            if len(self._strong) > STRONG_ADDRESSES_MAX:
                self._strong.popitem(last=False)
        return self._count

    def clear(self) -> None:
        """Nothing will be numbered any more."""
        self._weak.clear()
        self._strong.clear()


def _create(path: Path, header: bytes) -> int:
    """The file, emptied, with the header in it. Raises JournalError."""
    try:
        # For its owner only: it holds all that is said.
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
    except (OSError, ValueError) as error:
        raise JournalError(f"the journal {path} cannot be created: {error}") from error
    try:
        _claim(file, path)
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        if os.write(file, header) < len(header):
            os.ftruncate(file, 0)  # a part of it would be no journal to whoever comes next
            raise JournalError(f"the journal {path} cannot be created: there is no room for it")
    except OSError as error:
        os.close(file)
        raise JournalError(f"the journal {path} cannot be created: {error}") from error
    except JournalError:
        os.close(file)
        raise
    return file


def _claim(file: int, path: Path) -> None:
    """Make sure that nothing is lost and nobody else writes here. Raises JournalError."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise JournalError(f"{path} is no ordinary file: a journal cannot be written there")
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalError(f"another journal is being written to {path}") from None
        except OSError:
            pass  # a file system without locks
    if status.st_size and os.read(file, len(MAGIC)) != MAGIC:
        raise JournalError(f"{path} exists and is no journal: it is not overwritten")


def _no_address(_: AddressId, __: tuple[type, ...]) -> Recipient[object]:
    raise NotSendable("a journal only encodes")


def _described(message: object) -> str:
    words = reprlib.Repr()
    words.maxother = OPAQUE_CHARS_MAX
    return _encodable(words.repr_instance(message, 1))  # which copes with one that raises


def _encodable(text: str) -> str:
    """The same text, unless it holds halves of characters, which UTF-8 has no form for."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
