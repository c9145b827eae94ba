"""What a Llama-like decoder is made of, from its configuration: sizes, rotary embedding, and which weights it has.

Serves Llama, Mistral, Qwen2 and Qwen3. What it does not know for certain it refuses, and the general path serves it.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from cuelight.actors.executor.safetensors_header import BadHeader, SafetensorsHeader, TensorEntry, read_header

Floats: TypeAlias = npt.NDArray[np.float32]
Config: TypeAlias = Mapping[str, object]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class NotNative(Exception):
    """This model is not one that the native decoder knows; the text says why."""


@dataclass(frozen=True)
class Architecture:
    """Sizes as in the configuration; `inverse_frequencies` has `head_dim / 2` entries."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    positions: int
    epsilon: float
    is_tied: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_head_norms: bool
    inverse_frequencies: Floats

    def rotary_tables(self, positions: int) -> tuple[Floats, Floats]:
        """Cosines and sines, [positions, head_dim / 2]. The angle is rounded to float32, as transformers does."""
        angles = np.arange(positions, dtype=np.float32)[:, None] * self.inverse_frequencies
        return np.cos(angles), np.sin(angles)


def read_architecture(folder: Path) -> Architecture:
    """Raises NotNative."""
    try:
        config: object = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise NotNative(f"its configuration cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise NotNative("its configuration is not a JSON object")
    family = _family(config)
    heads = _whole(config, "num_attention_heads")
    hidden = _whole(config, "hidden_size")
    # What a configuration leaves out is each family's own; where that is a number of one model's, it must be said.
    kv_heads = _whole(config, "num_key_value_heads", heads if family == "llama" else None)
    head_dim = _whole(config, "head_dim", None if family == "qwen3" else hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise NotNative(f"{heads} heads of {head_dim} cannot share {kv_heads} of keys and values")
    has_bias = bool(config.get("attention_bias")) and family in ("llama", "qwen3")
    return Architecture(
        layers=_whole(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_whole(config, "intermediate_size"),
        vocabulary=_whole(config, "vocab_size"),
        positions=_whole(config, "max_position_embeddings"),
        epsilon=_number(config, "rms_norm_eps", 1e-6),
        is_tied=bool(config.get("tie_word_embeddings")),
        has_qkv_bias=has_bias or family == "qwen2",
        has_output_bias=has_bias,
        has_head_norms=family == "qwen3",
        inverse_frequencies=_inverse_frequencies(config, head_dim),
    )


def _family(config: Config) -> str:
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise NotNative(f"it is a {family}")
    if config.get("hidden_act", "silu") != "silu" or config.get("mlp_bias"):
        raise NotNative("its feed-forward layers are of another kind")
    is_windowed = family == "mistral" or (family != "llama" and bool(config.get("use_sliding_window")))
    if is_windowed and config.get("sliding_window", "by default") is not None:
        raise NotNative("its attention has a sliding window")
    layer_types = config.get("layer_types") or ()
    if not isinstance(layer_types, list | tuple) or any(kind != "full_attention" for kind in layer_types):
        raise NotNative("its layers are not all of full attention")
    if config.get("quantization_config"):
        raise NotNative("its weights are quantized already")
    return family


def _whole(config: Config, name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 31:
        raise NotNative(f"its configuration does not say its {name}")
    return value


def _number(config: Config, name: str, default: float | None = None) -> float:
    value = config.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
        raise NotNative(f"its configuration does not say its {name}")
    return float(value)


def _inverse_frequencies(config: Config, head_dim: int) -> Floats:
    """As transformers' "default", "linear" and "llama3" compute them, with its roundings to float32."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(part, dict) for part in rope.values()):
        raise NotNative("its rotary embedding is described in an unknown way")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1):
        raise NotNative("its rotary embedding turns a part of each head")
    theta = _number(rope, "rope_theta", _number(config, "rope_theta", 10000.0))
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1) / (theta ** exponents.astype(np.float64)).astype(np.float32)
    match rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return frequencies
        case "linear":
            return frequencies / np.float32(_number(rope, "factor"))
        case "llama3":
            positions = _number(rope, "original_max_position_embeddings", _whole(config, "max_position_embeddings"))
            return _llama3(frequencies, rope, _number(config, "original_max_position_embeddings", positions))
        case other:
            raise NotNative(f"its rotary embedding is {other}")


def _llama3(frequencies: Floats, rope: Config, original_positions: float) -> Floats:
    """Long waves are stretched by the factor, short ones are not, and those between smoothly."""
    factor, low, high = (np.float32(_number(rope, f"{name}factor")) for name in ("", "low_freq_", "high_freq_"))
    if not low < high:
        raise NotNative("its rotary embedding has no room between low and high frequencies")
    # A reciprocal and a product: so torch divides a number by a tensor.
    waves = np.float32(1) / frequencies * np.float32(2 * math.pi)
    turns = np.float32(1) / waves * np.float32(original_positions)
    smooth = np.clip((turns - low) / (high - low), np.float32(0), np.float32(1))
    stretched: Floats = (1 - smooth) * frequencies / factor + smooth * frequencies
    return stretched


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
