"""The header of a safetensors file: the type, the shape and the place of each tensor.

The format is that of https://github.com/huggingface/safetensors: eight bytes of length, a JSON header, the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec

HEADER_BYTES_MAX: Final = 100 * 1024 * 1024
LENGTH_BYTES: Final = 8

Count = Annotated[int, msgspec.Meta(ge=0)]


class BadHeader(ValueError):
    """The file does not begin with the header of a safetensors file, or ends within it."""


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor. `data_offsets` are where its numbers begin and end, counted from the end of the header."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


@dataclass(frozen=True)
class SafetensorsHeader:
    """The tensors of one file by name; their numbers begin at byte `data_begin` of the file."""

    entries: dict[str, TensorEntry]
    data_begin: int

    @property
    def file_bytes(self) -> int:
        """The size of the whole file."""
        return self.data_begin + max([entry.data_offsets[1] for entry in self.entries.values()], default=0)


def read_header(path: Path) -> SafetensorsHeader:
    """Read the header of one file. Raises OSError and BadHeader."""
    with path.open("rb") as file:
        length = file.read(LENGTH_BYTES)
        size = int.from_bytes(length, "little")
        if len(length) < LENGTH_BYTES or size > min(HEADER_BYTES_MAX, path.stat().st_size - LENGTH_BYTES):
            raise BadHeader("the file is shorter than its header says")
        content = file.read(size)
    try:
        raw = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=TensorEntry) for name, entry in raw.items()}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadHeader(f"the header cannot be read: {error}") from error
    return SafetensorsHeader(entries, LENGTH_BYTES + size)
