"""What tells one model from another, and whether two of them speak in the same tokens. Reads files, never weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cuelight.errors import ModelUnavailable

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja"),
    *("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.json"),
)
IRRELEVANT = (
    *("name_or_path", "transformers_version", "processor_class", "is_local", "local_files_only", "backend"),
    *("auto_map", "_commit_hash", "model_max_length"),
)
"""What the tokenizer's configuration says of itself, and means nothing for what it does."""


@dataclass(frozen=True)
class Fingerprint:
    """Digests. Models with the same `tokenizer` turn text into the same tokens and back; `model` is of one alone."""

    tokenizer: str
    model: str


NO_FINGERPRINT = Fingerprint("", "")
"""Of a model that nobody compares with another one."""


def fingerprint(folder: Path) -> Fingerprint:
    """Of the model in a Hugging Face folder: its configuration, tokenizer, and the names and sizes of its weights.

    Blocks. Raises ModelUnavailable for files that cannot be read.
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
    """What the file means: the same for JSON that is laid out in another way."""
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
