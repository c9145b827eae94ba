"""Reading of a model folder for the native decoder: the architecture of a Llama-like model, and its weights.

The decoder supports Llama, Mistral, Qwen2 and Qwen3. A configuration with any unknown feature is refused, so that
transformers decodes the model instead.
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
    """The native decoder does not support this model; the message says why."""


@dataclass(frozen=True)
class Architecture:
    """The architecture according to the configuration; `inverse_frequencies` is [head_dim / 2]."""

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
        """Return cosines and sines, [positions, head_dim / 2]. Angles are rounded to float32, as in transformers."""
        angles = np.arange(positions, dtype=np.float32)[:, None] * self.inverse_frequencies
        return np.cos(angles), np.sin(angles)


def read_architecture(folder: Path) -> Architecture:
    """Read the architecture from `config.json`. Raises NotNative."""
    try:
        config: object = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise NotNative(f"its configuration cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise NotNative("its configuration is not a JSON object")
    family = _family(config)
    heads = _whole(config, "num_attention_heads")
    hidden = _whole(config, "hidden_size")
    # Fields without a value have the family's default; a default that only suits a single model is not accepted.
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
        raise NotNative(f"{name} of its configuration must be a positive whole number below 2**31, not {value!r}")
    return value


def _number(config: Config, name: str, default: float | None = None) -> float:
    value = config.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
        raise NotNative(f"{name} of its configuration must be a positive number, not {value!r}")
    return float(value)


def _inverse_frequencies(config: Config, head_dim: int) -> Floats:
    """Return inverse frequencies as transformers computes "default", "linear" and "llama3", rounded like there."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(part, dict) for part in rope.values()):
        raise NotNative("its rotary embedding is described in an unknown way")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1):
        raise NotNative("its rotary embedding rotates only a part of each head")
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
    """Stretch long wavelengths by the factor, keep short ones, and interpolate between."""
    factor, low, high = (np.float32(_number(rope, f"{name}factor")) for name in ("", "low_freq_", "high_freq_"))
    if not low < high:
        raise NotNative(f"its low_freq_factor of {low:g} is not below its high_freq_factor of {high:g}")
    # A reciprocal and a product, since torch divides a number by a tensor in this way.
    waves = np.float32(1) / frequencies * np.float32(2 * math.pi)
    turns = np.float32(1) / waves * np.float32(original_positions)
    smooth = np.clip((turns - low) / (high - low), np.float32(0), np.float32(1))
    stretched: Floats = (1 - smooth) * frequencies / factor + smooth * frequencies
    return stretched


Tensor: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.float16] | npt.NDArray[np.uint16]
Type: TypeAlias = np.dtype[np.float32] | np.dtype[np.float16] | np.dtype[np.uint16]

TYPES: Mapping[str, Type] = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(np.uint16)}


class BadWeights(Exception):
    """The folder's weights are missing, truncated or inconsistent; the message says which."""


class MappedTensors(dict[str, Tensor]):
    """Tensors by name, which are views of memory-mapped files."""

    def __init__(self) -> None:
        super().__init__()
        self._files: list[mmap.mmap] = []

    def add(self, file: mmap.mmap, tensors: Mapping[str, Tensor]) -> None:
        """Add the tensors of a file."""
        self._files.append(file)
        self.update(tensors)

    def leave_memory(self) -> None:
        """Release the memory of pages that have been read; they are read again when accessed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for file in self._files:
                file.madvise(mmap.MADV_DONTNEED)


def read_weights(folder: Path) -> MappedTensors:
    """Map all tensors of the types in `TYPES`, read-only. Raises BadWeights."""
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
    """Return the single weights file, or else all files of the index, as transformers does. Raises BadWeights."""
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
        raise BadHeader(f"{name} is truncated, or its bytes do not match its shape {list(entry.shape)}")
    tensor = cast(Tensor, data[begin:end].view(kind).reshape(entry.shape))
    return tensor if tensor.flags.aligned else tensor.copy()


def as_float32(tensor: Tensor) -> npt.NDArray[np.float32]:
    """Return a copy as float32."""
    if tensor.dtype == np.uint16:
        return (tensor.astype(np.uint32) << 16).view(np.float32)
    return tensor.astype(np.float32)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along the first dimension; as float32 if types differ, since numpy has no bfloat16."""
    if len(tensors) == 1:
        return tensors[0]
    same = len({tensor.dtype for tensor in tensors}) == 1
    return cast(Tensor, np.concatenate(tensors if same else [as_float32(tensor) for tensor in tensors]))
