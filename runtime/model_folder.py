"""Checks a local Hugging Face folder as far as that is cheap, so that a mistake is named here and not deep in a loader.

Knows the layout of such a folder; nothing of where it came from.
"""

from __future__ import annotations

import json
from pathlib import Path

from cuelight.actors.executor.safetensors_header import BadHeader, read_header
from cuelight.errors import ModelUnavailable


def checked_folder(folder: Path) -> Path:
    """`folder`, if it has a readable configuration, complete safetensors weights and a tokenizer."""
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
            hint = ". Weights in .bin files are not read: save them as safetensors first"
        elif not weights and (files := sorted(folder.glob("*.gguf"))):
            hint = f". It holds a GGUF file: name that instead, {files[0]}"
        raise ModelUnavailable(f"the model folder {folder} lacks {', '.join(missing)}{hint}.")
    json_object(folder / "config.json")
    _check_shards(folder)
    for file in weights:
        _check_safetensors(file)
    return folder


def json_object(path: Path) -> dict[str, object]:
    """What a JSON file holds. Raises ModelUnavailable if that is not an object, or cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnavailable(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelUnavailable(f"{path} does not hold a JSON object")
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
