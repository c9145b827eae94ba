"""What a journal's file looks like, and the reader of such files.

A file is a magic, a version, and records: length and CRC-32 of what follows, one byte for its kind, msgpack. The first
record is what the program says about itself; the last one of a recording that ended in order says just that.
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
    """The file is no journal, was written by another version, or does not hold what is asked of it."""


class Recorded(msgspec.Struct, frozen=True, array_like=True):
    """A `Delivered` as the journal keeps it: its message as bytes, beside the name of its type.

    A message that cannot be encoded, or is too large, is opaque: without bytes, but with a few words on what it was.
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
    """A record as the file has it."""
    match record:
        case Recorded():
            return _framed(_DELIVERED + _encoder.encode(record))
        case Started():
            return _framed(_STARTED + _encoder.encode(record))
        case Ended():
            return _framed(_ENDED + _encoder.encode(record))


def encode_header(about: dict[str, object]) -> bytes:
    """The start of a file. Raises JournalError for what msgpack has no room for."""
    try:
        return MAGIC + bytes([VERSION]) + _framed(_ABOUT + _encoder.encode(about))
    except (TypeError, ValueError, OverflowError) as error:
        raise JournalError(f"what the program says about itself cannot be recorded: {error}") from error


def _framed(body: bytes) -> bytes:
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


LAST_RECORD: Final = _framed(_CLOSED)
"""The end of a recording that was closed in order."""


class JournalReader:
    """A journal's records, as far as they are whole; each iteration reads the file anew."""

    def __init__(self, path: Path, about: dict[str, object], offset: int) -> None:
        self.path = path
        self.about = about
        """What the program said about itself."""
        self._offset = offset
        self._is_truncated: bool | None = None
        self._damage = ""

    def __iter__(self) -> Iterator[Record]:
        """The records in order, up to the end or to the first one that is not whole. Raises JournalError."""
        self._is_truncated, self._damage = None, ""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                yield from self._records(file)
        except OSError as error:
            raise JournalError(f"{self.path} cannot be read: {error}") from error

    @property
    def is_truncated(self) -> bool:
        """Whether the recording did not end in order: killed, stopped, still going on, or damaged since."""
        if self._is_truncated is None:
            for _ in self:
                pass
        assert self._is_truncated is not None, "an iteration to the end knows"
        return self._is_truncated

    @property
    def damage(self) -> str:
        """Which bytes are not those that were written; empty where there are just too few."""
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
    """Open a journal for reading, which may still be being written.

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
    """The next record; None where the file ends before it does. Raises ValueError for one that is damaged."""
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
        raise ValueError(f"there is no kind {body[0]}")
    return decoder.decode(memoryview(body)[1:])
