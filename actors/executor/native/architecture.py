"""What a Llama-like decoder is made of, from its configuration: sizes, rotary embedding, and which weights it has.

Serves Llama, Mistral, Qwen2 and Qwen3. What it does not know for certain it refuses, and the general path serves it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

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
