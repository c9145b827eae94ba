"""Folders of models with real shapes and random weights, built where they are needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

SHARD_BYTES: Final = 4 << 30
SPREAD: Final = 0.02
"""The standard deviation of the weights, as models are initialized with."""


@dataclass(frozen=True)
class Shape:
    """A model's kind and the sizes in its configuration."""

    kind: str
    sizes: Mapping[str, object]


def _shape(kind: str, **sizes: object) -> Shape:
    return Shape(kind, MappingProxyType(sizes))


QWEN3_06B: Final = _shape(
    "qwen3",
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151_936,
    max_position_embeddings=40_960,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
)
LLAMA3_8B: Final = _shape(
    "llama",
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128_256,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
)
SMALL: Final = MappingProxyType(
    {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 4096,
        "max_position_embeddings": 2048,
    }
)
SMALL_QWEN3: Final = _shape("qwen3", **SMALL, rms_norm_eps=1e-6, tie_word_embeddings=True)
SMALL_LLAMA: Final = _shape("llama", **SMALL, tie_word_embeddings=False)


def build(shape: Shape, folder: Path, device: str, dtype: str) -> Path:
    """The folder, with configuration, weights in shards and a tokenizer that has a word for each id."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True)
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    config = AutoConfig.for_model(shape.kind, **shape.sizes, **ends, dtype=dtype)
    config.architectures = [{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[shape.kind]]
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    chance = torch.Generator(device).manual_seed(1)
    index: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def write() -> None:
        name = f"model-{len(set(index.values())) + 1}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, name))
        shard.clear()

    # Tied weights come once.
    for name, parameter in model.named_parameters():
        weights = torch.empty(parameter.shape, dtype=getattr(torch, dtype), device=device)
        # Norms are vectors, and near one.
        weights.normal_(float(parameter.dim() == 1), SPREAD, generator=chance)
        shard[name] = weights.cpu()
        if sum(each.nbytes for each in shard.values()) > SHARD_BYTES:
            write()
    write()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    _write_tokenizer(folder, config.vocab_size)
    return folder


def _write_tokenizer(folder: Path, size: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
