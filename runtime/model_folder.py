"""Checks a local Hugging Face folder as far as that is cheap, so that a mistake is named here and not deep in a loader.

Knows the layout of such a folder and of a safetensors file; nothing of where it came from.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

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
    """A safetensors file starts with the length of its JSON header, which says where the last tensor ends."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (header_bytes,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(min(header_bytes, size)))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        expected = 8 + header_bytes + max(ends, default=0)
    except OSError as error:
        raise ModelUnavailable(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise ModelUnavailable(f"{file} is not a safetensors file, or is cut short. Copy it again.") from error
    if size != expected:
        raise ModelUnavailable(f"{file} is damaged: it has {size} bytes instead of {expected}. Copy it again.")
