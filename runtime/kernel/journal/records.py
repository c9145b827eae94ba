"""The file format of journals, and its reader.

A file has a magic, a version, and records. A record has a length and a CRC-32, which cover the rest of it: one byte for
its kind, and msgpack. The first record holds the `about` of the recording program; the last one marks a recording that
was closed in order.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

import msgspec

from cuelight.kernel.codec import Name
from cuelight.kernel.errors import KernelError
from cuelight.kernel.events import Ended, Started

MAGIC: Final = b"cuelight journal"
VERSION: Final = 2

_HEAD: Final = struct.Struct("<II")
_ABOUT, _STARTED, _DELIVERED, _ENDED, _CLOSED = (bytes([kind]) for kind in range(5))


class JournalError(KernelError):
    """The file cannot be read or written, is no journal of this version, or lacks the requested actor."""


class Recorded(msgspec.Struct, frozen=True, array_like=True):
    """A `Delivered` as the journal stores it: the message as bytes, with the name of its type.

    A message that cannot be encoded or is too large is recorded without bytes; `opaque` holds a description of it.
    """

    seconds: float
    sender: str
    actor: str
    type_name: Name
    body: bytes
    opaque: str = ""


Record: TypeAlias = Started | Recorded | Ended

_encoder: Final = msgspec.msgpack.Encoder()
_DECODERS: Final[dict[bytes, msgspec.msgpack.Decoder[Record]]] = {
    _STARTED: msgspec.msgpack.Decoder(Started),
    _DELIVERED: msgspec.msgpack.Decoder(Recorded),
    _ENDED: msgspec.msgpack.Decoder(Ended),
}


def encode_record(record: Record) -> bytes:
    """Return the bytes of a record in the file."""
    match record:
        case Recorded():
            return _framed(_DELIVERED + _encoder.encode(record))
        case Started():
            return _framed(_STARTED + _encoder.encode(record))
        case Ended():
            return _framed(_ENDED + _encoder.encode(record))


def encode_header(about: dict[str, object]) -> bytes:
    """Return the first bytes of a file. Raises JournalError for values that msgpack cannot represent."""
    try:
        return MAGIC + bytes([VERSION]) + _framed(_ABOUT + _encoder.encode(about))
    except (TypeError, ValueError, OverflowError) as error:
        raise JournalError(f"the journal's `about` cannot be encoded as msgpack: {error}") from error


def _framed(body: bytes) -> bytes:
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


LAST_RECORD: Final = _framed(_CLOSED)
"""The last record of a recording that was closed in order."""


class JournalReader:
    """The records of a journal up to the first incomplete one; each iteration reads the file again."""

    def __init__(self, path: Path, about: dict[str, object], offset: int) -> None:
        self.path = path
        self.about = about
        """The recording program's description of itself: the `about` of its `Journal`."""
        self._offset = offset
        self._is_truncated: bool | None = None
        self._damage = ""

    def __iter__(self) -> Iterator[Record]:
        """Yield the records in order, up to the end or the first incomplete or damaged one. Raises JournalError."""
        self._is_truncated, self._damage = None, ""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                yield from self._records(file)
        except OSError as error:
            raise JournalError(f"{self.path} cannot be read: {error}") from error

    @property
    def is_truncated(self) -> bool:
        """Whether the recording lacks its last record: killed, stopped, still in progress, or damaged since."""
        if self._is_truncated is None:
            for _ in self:
                pass
        assert self._is_truncated is not None, "an iteration to the end sets it"
        return self._is_truncated

    @property
    def damage(self) -> str:
        """A description of the first damaged record; empty where the file merely ends early."""
        return self._damage if self.is_truncated else ""

    def _records(self, file: BinaryIO) -> Iterator[Record]:
        while True:
            offset = file.tell()
            try:
                body = _next_body(file)
                if body is None or body == _CLOSED:
                    self._is_truncated = body is None
                    return
                record = _decode_record(body)
            except (ValueError, msgspec.MsgspecError) as error:
                self._is_truncated, self._damage = True, f"the record at byte {offset} is damaged: {error}"
                return
            yield record


def read_journal(path: str | os.PathLike[str]) -> JournalReader:
    """Open a journal for reading, also while it is being written.

    Raises JournalError for a file that cannot be read, is no journal, or was written by another version.
    """
    try:
        with Path(path).open("rb") as file:
            start = file.read(len(MAGIC) + 1)
            if len(start) <= len(MAGIC) or start[:-1] != MAGIC:
                raise JournalError(f"{os.fspath(path)} is no journal")
            if start[-1] != VERSION:
                raise JournalError(f"{os.fspath(path)} is of version {start[-1]}; this program reads {VERSION}")
            body = _next_body(file)
            if body is None or body[:1] != _ABOUT:
                raise JournalError(f"{os.fspath(path)} breaks off before its first record")
            about = msgspec.msgpack.decode(body[1:], type=dict[str, object])
            return JournalReader(Path(path), about, file.tell())
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise JournalError(f"{os.fspath(path)} cannot be read: {error}") from error


def _next_body(file: BinaryIO) -> bytes | None:
    """Return the next record's bytes, or None where the file ends first. Raises ValueError for a damaged record."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    length, checksum = _HEAD.unpack(head)
    if length > os.fstat(file.fileno()).st_size - file.tell():
        return None
    body = file.read(length)
    if not body or zlib.crc32(body) != checksum:
        raise ValueError("its checksum does not match")
    return body


def _decode_record(body: bytes) -> Record:
    if (decoder := _DECODERS.get(body[:1])) is None:
        raise ValueError(f"its kind {body[0]} is unknown")
    return decoder.decode(memoryview(body)[1:])
