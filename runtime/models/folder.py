"""Reads a local Hugging Face folder: checks that are cheap, the model's facts, and its fingerprint.

The checks name a missing or damaged file before a loader fails on it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cuelight.actors.executor.safetensors_header import BadHeader, read_header
from cuelight.errors import ModelUnavailable


def checked_folder(folder: Path) -> Path:
    """Return `folder`, if it has a readable configuration, complete safetensors weights and a tokenizer.

    Raises ModelUnavailable.
    """
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        missing.append("weights (*.safetensors)")
    if not (folder / "tokenizer.json").is_file():
        missing.append("tokenizer.json")
    if missing:
        hint = ""
        if not weights and any(folder.glob("*.bin")):
            hint = ". Weights in .bin files are not supported: save them as safetensors first"
        elif not weights and (files := sorted(folder.glob("*.gguf"))):
            hint = f". It has a GGUF file: give that instead, {files[0]}"
        raise ModelUnavailable(f"the model folder {folder} lacks {', '.join(missing)}{hint}.")
    json_object(folder / "config.json")
    _check_shards(folder)
    for file in weights:
        _check_safetensors(file)
    return folder


def json_object(path: Path) -> dict[str, object]:
    """Return the object in a JSON file. Raises ModelUnavailable if the file cannot be read or has no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnavailable(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelUnavailable(f"{path} does not contain a JSON object")
    return content


def _check_shards(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    shards = json_object(index).get("weight_map")
    names = sorted({str(shard) for shard in shards.values()}) if isinstance(shards, dict) else []
    if not names and not (folder / "model.safetensors").is_file():
        raise ModelUnavailable(f"{index} names no weights.")
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ModelUnavailable(f"the model folder {folder} lacks {', '.join(absent)}, which {index.name} names.")


def _check_safetensors(file: Path) -> None:
    """Compare the size of a safetensors file with where its header says that the last tensor ends."""
    try:
        size, expected = file.stat().st_size, read_header(file).file_bytes
    except OSError as error:
        raise ModelUnavailable(f"{file} cannot be read: {error.strerror or error}") from error
    except BadHeader as error:
        raise ModelUnavailable(f"{file} is not a safetensors file, or is cut short. Copy it again.") from error
    if size != expected:
        raise ModelUnavailable(f"{file} is damaged: it has {size} bytes instead of {expected}. Copy it again.")


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a model that intake and the scheduler need."""

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]


def read_facts(folder: Path) -> ModelFacts:
    """Return the facts in a Hugging Face folder's configuration files.

    Raises:
        ModelUnavailable: a file is missing, or a value is missing or invalid.
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
            raise ModelUnavailable(
                f"inconsistent model folder {folder}: "
                f"eos_token_id {token_id} is outside the vocabulary of {vocab_size} tokens"
            )
    return ModelFacts(
        vocab_size=vocab_size,
        context_length=_whole(config, folder, _name_of_context_length(config), at_least=2),
        eos_token_ids=ends,
    )


def _name_of_context_length(config: Mapping[str, object]) -> str:
    """Return the key of the context length in this model's configuration."""
    return "n_positions" if "n_positions" in config else "max_position_embeddings"


def _whole(config: Mapping[str, object], folder: Path, name: str, *, at_least: int) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelUnavailable(f"the configuration in {folder} has no whole number {name}: the model cannot be served")
    if value < at_least:
        raise ModelUnavailable(f"{name} in {folder} must be at least {at_least}, not {value}")
    return value


TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja"),
    *("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.json"),
)
IRRELEVANT = (
    *("name_or_path", "transformers_version", "processor_class", "is_local", "local_files_only", "backend"),
    *("auto_map", "_commit_hash", "model_max_length"),
)
"""Keys of the tokenizer's configuration that do not affect tokenization."""


@dataclass(frozen=True)
class Fingerprint:
    """Digests of a model.

    Models with the same `tokenizer` convert between text and tokens in the same way; `model` identifies one model.
    """

    tokenizer: str
    model: str


NO_FINGERPRINT = Fingerprint("", "")
"""The fingerprint of a model that is not compared with another."""


def fingerprint(folder: Path) -> Fingerprint:
    """Return the fingerprint of the model in a Hugging Face folder.

    Computed from its configuration, its tokenizer, and the names and sizes of its weight files. Blocks. Raises
    ModelUnavailable for files that cannot be read.
    """
    try:
        tokenizer, model = hashlib.sha256(), hashlib.sha256()
        for name in TOKENIZER_FILES:
            if (file := folder / name).is_file():
                _add(tokenizer, name, _essence(file))
        _add(model, "tokenizer", tokenizer.digest())
        _add(model, "config.json", _essence(folder / "config.json"))
        for weights in sorted(folder.glob("*.safetensors")):
            _add(model, weights.name, str(weights.stat().st_size).encode())
    except OSError as error:
        raise ModelUnavailable(f"the model in {folder} cannot be read: {error}") from error
    return Fingerprint(tokenizer.hexdigest(), model.hexdigest())


def _add(digest: hashlib._Hash, name: str, content: bytes) -> None:
    digest.update(f"{name} {len(content)} ".encode() + content)


def _essence(file: Path) -> bytes:
    """Return the file's content in a normal form, in which the layout of JSON makes no difference."""
    content = file.read_bytes()
    if file.suffix != ".json":
        return content
    try:
        value = msgspec.json.decode(content)
    except msgspec.DecodeError:
        return content
    if isinstance(value, dict) and file.name == "tokenizer_config.json":
        value = {key: each for key, each in value.items() if key not in IRRELEVANT}
    return msgspec.json.encode(value, order="sorted")
