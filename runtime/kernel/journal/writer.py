"""The journal: a tap that records every life and every delivery in a file, at a bounded cost.

Buffering, writes and their failures are here; the format of the file is in `records.py`.
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
"""Size of the buffer at which it is written, even within one turn of the loop."""

STRONG_ADDRESSES_MAX: Final = 1024
"""Addresses without support for weak references that keep their numbers at a time."""

OPAQUE_CHARS_MAX: Final = 200
"""Characters of the description of a message that cannot be recorded, at most."""

log = get_logger("cuelight.kernel")


class Journal:
    """Records a system's events in a file, as the system's tap.

    The events of one turn of the event loop are written at the end of that turn, so a process that is killed loses at
    most its last turn. A write that fails, or a file that would grow beyond `bytes_max`, stops the recording only.

    Args:
        path: the file; an older journal there is overwritten.
        about: a description of the program for the file's readers, of types that msgpack can represent.
        bytes_max: the size of the file, at most.
        record_bytes_max: a larger message is recorded without its contents.

    Raises:
        JournalError: the file cannot be created, another journal is being written to it, or it is not a journal.
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
        """The reason why the recording stopped before it was closed, or None."""
        self._bytes_max = bytes_max
        self._record_bytes_max = record_bytes_max
        self._numbers = _Numbers()
        self._codec = Codec({}, self._numbers.of, _no_address)
        self._buffer = bytearray()
        header = encode_header(about or {})
        self._size = len(header)
        """Bytes in the file and in the buffer."""
        self._scheduled_in: asyncio.AbstractEventLoop | None = None
        self._file: int | None = _create(self.path, header)

    def __call__(self, event: Event) -> None:
        """Record an event; ignore it once the recording has stopped or the journal is closed."""
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
        """Bytes in the file and in the buffer."""
        return self._size

    @property
    def is_closed(self) -> bool:
        """Whether the recording has stopped or was closed."""
        return self._file is None

    @property
    def buffered_bytes(self) -> int:
        """Bytes in the buffer, which a kill would lose."""
        return len(self._buffer)

    def flush(self) -> None:
        """Write the buffer now instead of at the end of this turn."""
        if self._buffer:
            self._write()

    def close(self) -> None:
        """Write the buffer and the last record, and close the file. A second call is harmless."""
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
        """Schedule a write for the end of this turn; without a running loop, the buffer is written when it is full."""
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
        """Write the whole buffer. Where the disk is full, an incomplete record remains at the end of the file."""
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
            with suppress(OSError):  # the file is closed in any case
                fcntl.flock(file, fcntl.LOCK_UN)  # a forked process may hold it open
            with suppress(OSError):
                os.close(file)


class _Numbers:
    """Numbers for addresses outside the actors: one for each, as long as the address exists."""

    def __init__(self) -> None:
        self._count = 0
        self._weak: dict[int, tuple[weakref.ref[Recipient[object]], int]] = {}
        self._strong: OrderedDict[int, tuple[Recipient[object], int]] = OrderedDict()

    def of(self, address: Recipient[object]) -> AddressId:
        """Return the name of an actor's address, or a number for any other address."""
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
        except TypeError:  # its class has `__slots__` without `__weakref__`
            self._strong[key] = (address, self._count)
            if len(self._strong) > STRONG_ADDRESSES_MAX:
                self._strong.popitem(last=False)
        return self._count

    def clear(self) -> None:
        """Release all addresses."""
        self._weak.clear()
        self._strong.clear()


def _create(path: Path, header: bytes) -> int:
    """Create or empty the file, write the header, and return the descriptor. Raises JournalError."""
    try:
        # Readable by its owner only: the journal holds the contents of all messages.
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
    except (OSError, ValueError) as error:
        raise JournalError(f"the journal {path} cannot be created: {error}") from error
    try:
        _claim(file, path)
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        if os.write(file, header) < len(header):
            os.ftruncate(file, 0)  # with a partial header, later journals would refuse to overwrite the file
            raise JournalError(f"the journal {path} cannot be created: there is no room for it")
    except OSError as error:
        os.close(file)
        raise JournalError(f"the journal {path} cannot be created: {error}") from error
    except JournalError:
        os.close(file)
        raise
    return file


def _claim(file: int, path: Path) -> None:
    """Check that the file is empty or a journal, and lock it against other writers. Raises JournalError."""
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
    return _encodable(words.repr_instance(message, 1))  # `repr_instance` handles a repr that raises


def _encodable(text: str) -> str:
    """Return the text with lone surrogates escaped, which UTF-8 cannot encode."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
