"""Facts of a model, read from the configuration files of its folder. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cuelight.errors import ModelUnavailable
from cuelight.model_folder import json_object


@dataclass(frozen=True)
class ModelFacts:
    """What intake and the scheduler need to know of a model."""

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]


def read_facts(folder: Path) -> ModelFacts:
    """The facts in a Hugging Face folder's configuration files.

    Raises:
        ModelUnavailable: a file is missing or does not say what it must.
    """
    config = json_object(folder / "config.json")
    text = config.get("text_config")
    if isinstance(text, dict):
        config = {**config, **text}
    generation = folder / "generation_config.json"
    eos = (json_object(generation) if generation.exists() else {}).get("eos_token_id", config.get("eos_token_id"))
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    vocab_size = _whole(config, folder, "vocab_size", at_least=1)
    ends = tuple(_whole({"eos_token_id": token_id}, folder, "eos_token_id", at_least=0) for token_id in eos_ids)
    for token_id in ends:
        if token_id >= vocab_size:
            raise ModelUnavailable(f"{folder} is not of one model: its end token is {token_id}, of {vocab_size} tokens")
    return ModelFacts(
        vocab_size=vocab_size,
        context_length=_whole(config, folder, _name_of_context_length(config), at_least=2),
        eos_token_ids=ends,
    )


def _name_of_context_length(config: Mapping[str, object]) -> str:
    """What this model's configuration calls it."""
    return "n_positions" if "n_positions" in config else "max_position_embeddings"


def _whole(config: Mapping[str, object], folder: Path, name: str, *, at_least: int) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelUnavailable(f"{folder} does not say its {name}: this model cannot be served")
    if value < at_least:
        raise ModelUnavailable(f"{folder} cannot be served: its {name} is {value}, and must be at least {at_least}")
    return value
