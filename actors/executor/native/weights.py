"""Weights in safetensors files, read where they lie: each tensor is a view into the mapped file.

bfloat16, which numpy lacks, comes as its 16 bits. Owns nothing but the mapping; knows no model.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from cuelight.actors.executor.safetensors_header import BadHeader, SafetensorsHeader, TensorEntry, read_header

Tensor: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.float16] | npt.NDArray[np.uint16]
Type: TypeAlias = np.dtype[np.float32] | np.dtype[np.float16] | np.dtype[np.uint16]

TYPES: Mapping[str, Type] = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(np.uint16)}


class BadWeights(Exception):
    """The folder's weights are missing, cut off or not what they say."""


class MappedTensors(dict[str, Tensor]):
    """Tensors by name, and the files that they are views of."""

    def __init__(self) -> None:
        super().__init__()
        self._files: list[mmap.mmap] = []

    def add(self, file: mmap.mmap, tensors: Mapping[str, Tensor]) -> None:
        """One file's."""
        self._files.append(file)
        self.update(tensors)

    def leave_memory(self) -> None:
        """What was read of the files is no longer counted as this process's memory; it is read again when wanted."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for file in self._files:
                file.madvise(mmap.MADV_DONTNEED)


def read_weights(folder: Path) -> MappedTensors:
    """Every tensor of the types we know, by name, read-only. Raises BadWeights."""
    tensors = MappedTensors()
    for path in _files(folder):
        try:
            header = read_header(path)
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            tensors.add(mapped, _views(header, np.frombuffer(mapped, np.uint8)[header.data_begin :]))
        except (OSError, ValueError) as error:
            raise BadWeights(f"{path} cannot be read: {error}") from error
    return tensors


def _files(folder: Path) -> list[Path]:
    """One file, or else all that the index names: transformers chooses in this order."""
    one, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if one.exists() or not index.exists():
        return [one]
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise BadWeights(f"{index} names no files: {error}") from error


def _views(header: SafetensorsHeader, data: npt.NDArray[np.uint8]) -> dict[str, Tensor]:
    return {name: _view(name, entry, data) for name, entry in header.entries.items() if entry.dtype in TYPES}


def _view(name: str, entry: TensorEntry, data: npt.NDArray[np.uint8]) -> Tensor:
    kind, (begin, end) = TYPES[entry.dtype], entry.data_offsets
    if not begin <= end <= len(data) or end - begin != kind.itemsize * math.prod(entry.shape):
        raise BadHeader(f"{name} is cut off, or not of the shape it says")
    tensor = cast(Tensor, data[begin:end].view(kind).reshape(entry.shape))
    return tensor if tensor.flags.aligned else tensor.copy()


def as_float32(tensor: Tensor) -> npt.NDArray[np.float32]:
    """A copy, of the same numbers."""
    if tensor.dtype == np.uint16:
        return (tensor.astype(np.uint32) << 16).view(np.float32)
    return tensor.astype(np.float32)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """One below the other; in float32 if they are of several types, since bfloat16 is no number to numpy."""
    if len(tensors) == 1:
        return tensors[0]
    same = len({tensor.dtype for tensor in tensors}) == 1
    return cast(Tensor, np.concatenate(tensors if same else [as_float32(tensor) for tensor in tensors]))
