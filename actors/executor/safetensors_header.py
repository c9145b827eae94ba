"""The header of a safetensors file: the type, shape and byte range of each tensor.

Format (https://github.com/huggingface/safetensors): the header's length in eight bytes, a JSON header, the tensors.
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
    """The file does not begin with a complete safetensors header."""


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor in the file. `data_offsets` are the first byte and the end of its data, counted from `data_begin`."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


@dataclass(frozen=True)
class SafetensorsHeader:
    """The tensors of a file by name; their data begins at byte `data_begin` of the file."""

    entries: dict[str, TensorEntry]
    data_begin: int

    @property
    def file_bytes(self) -> int:
        """Size of the whole file in bytes."""
        return self.data_begin + max([entry.data_offsets[1] for entry in self.entries.values()], default=0)


def read_header(path: Path) -> SafetensorsHeader:
    """Read the header of a file. Raises OSError and BadHeader."""
    with path.open("rb") as file:
        length = file.read(LENGTH_BYTES)
        size = int.from_bytes(length, "little")
        if len(length) < LENGTH_BYTES or size > min(HEADER_BYTES_MAX, path.stat().st_size - LENGTH_BYTES):
            raise BadHeader(f"the file ends within its header, or the header is over {HEADER_BYTES_MAX} bytes")
        content = file.read(size)
    try:
        raw = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=TensorEntry) for name, entry in raw.items()}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadHeader(f"the header cannot be read: {error}") from error
    return SafetensorsHeader(entries, LENGTH_BYTES + size)
