"""Turns a GGUF file into a Hugging Face folder: configuration, safetensors weights, tokenizer and chat template.

Runs as a program of its own, `python -m cuelight.actors.executor.model.gguf SOURCE FOLDER`. Its standard output is for
the caller: `stage <done> <total> <what>` lines, then on failure one `error <message>` line and exit status 1. Knows
nothing of where files come from or are kept.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ReportStage = Callable[[str], None]

STAGES = ("reading", "configuration", "tokenizer", "weights", "writing", "checking")

ALL_F32 = 0
"""The `general.file_type` of a file whose weights are all float32."""

DIGIT_SPLITTERS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""`tokenizer.ggml.pre` values that split every digit off by itself before the byte-level split.

transformers builds their tokenizers without that first split, and `2026` then becomes other tokens than the model was
trained on. The values it knows itself it converts rightly.
"""

CHECK_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "In 2026, 18 ships & 3 tides - it's 07:45, or 1,234.5 in all.",
    "def f(x):\n    return x**2  # squares\n\n\tprint(f'{f(3)!r}')\n",
    "caf\u00e9, na\u00efve, \u4f60\u597d, \u041f\u0440\u0438\u0432\u0435\u0442, \U0001f680\U0001f469\u200d\U0001f52c",
)


class ConversionFailed(Exception):
    """The file cannot be converted; the message is one line for the user."""


def convert(source: Path, folder: Path, stage: ReportStage) -> None:
    """Write the model in `source` to the existing, empty `folder`. Raises `ConversionFailed`.

    Weights are stored as bfloat16, which is finer than any quantized format of GGUF; float32 files stay float32.
    """
    stage("reading")
    metadata = read_metadata(source)
    stage("configuration")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    place, where = str(source.parent), {"gguf_file": source.name, "local_files_only": True}
    # Reading the vocabulary takes seconds each time, so the configuration is read once and handed on.
    config = AutoConfig.from_pretrained(place, **where)
    stage("tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(place, **where, config=config)
    _fix_pre_tokenizer(tokenizer.backend_tokenizer, metadata.get("tokenizer.ggml.pre"))
    stage("weights")
    import torch

    dtype = torch.float32 if metadata.get("general.file_type") == ALL_F32 else torch.bfloat16
    dequantize = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        place, **where, config=config, dtype=dtype, quantization_config=dequantize
    )
    # transformers leaves this constructor untyped
    model.generation_config = GenerationConfig(do_sample=False, **_special_ids(metadata))  # type: ignore[no-untyped-call]
    stage("writing")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _tidy(folder)
    stage("checking")
    check_tokenizer(folder, metadata)


def read_metadata(source: Path) -> dict[str, Any]:
    """The file's single values by key (arrays left out), after a check that it is whole."""
    from gguf import GGUFReader, GGUFValueType

    if not source.is_file():
        raise ConversionFailed(f"{source} is not a file")
    with source.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ConversionFailed(f"{source} is not a GGUF file")
    try:
        reader = GGUFReader(source)
        fields = {key: field for key, field in reader.fields.items() if field.types[:1] != [GGUFValueType.ARRAY]}
        metadata = {key: field.contents() for key, field in fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, OSError, MemoryError) as error:
        # The reader maps every tensor and trusts the lengths in the file: a cut one fails in any of these ways.
        raise ConversionFailed(f"{source} cannot be read as GGUF; it may be cut short ({_one_line(error)})") from error
    if "general.architecture" not in metadata:
        raise ConversionFailed(f"{source} does not say which architecture it is")
    return metadata


def check_tokenizer(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Load the tokenizer as the engine will; it must give texts back unchanged and know the file's end token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for text in CHECK_TEXTS:
        back = tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True)
        if back != text:
            raise ConversionFailed(f"its tokenizer is not converted rightly: {text!r} comes back as {back!r}")
    end_id = metadata.get("tokenizer.ggml.eos_token_id")
    if end_id is not None and tokenizer.eos_token_id != end_id:
        raise ConversionFailed(f"its end token is {end_id}, but the converted tokenizer has {tokenizer.eos_token_id}")
    if metadata.get("tokenizer.ggml.pre") in DIGIT_SPLITTERS and len(tokenizer.tokenize("2026")) != 4:
        raise ConversionFailed("its tokenizer splits digits one by one, but the converted one does not")


def _fix_pre_tokenizer(tokenizer: Any, name: str | None) -> None:
    if name in DIGIT_SPLITTERS:
        from tokenizers import pre_tokenizers

        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """End, begin and padding ids. A file may name an end of turn apart from its end of text: both end an answer."""
    named = {key: metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "bos", "padding")}
    ends = list(dict.fromkeys(id_ for id_ in (named["eos"], named["eot"]) if id_ is not None))
    ids: dict[str, Any] = {"bos_token_id": named["bos"], "pad_token_id": named["padding"]}
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
        if named["padding"] is None:
            ids["pad_token_id"] = ends[0]
    return {key: value for key, value in ids.items() if value is not None}


def _tidy(folder: Path) -> None:
    """Remove what describes this conversion rather than the model, and name the tokenizer class by its common name."""
    _edit(folder / "config.json", drop=("_model_name_or_path",))
    _edit(
        folder / "tokenizer_config.json",
        drop=("backend", "is_local", "local_files_only"),
        tokenizer_class="PreTrainedTokenizerFast",
        clean_up_tokenization_spaces=False,
    )


def _edit(path: Path, drop: tuple[str, ...], **changes: Any) -> None:
    content = {key: value for key, value in json.loads(path.read_text(encoding="utf-8")).items() if key not in drop}
    path.write_text(json.dumps(content | changes, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _die_with_parent() -> None:
    """End this process when its standard input closes: the parent holds the other end for as long as it lives."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _report(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """Convert `SOURCE FOLDER`; with `--watch-stdin` in front, stop as soon as standard input closes."""
    if arguments[:1] == ["--watch-stdin"]:
        _die_with_parent()
        arguments = arguments[1:]
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m cuelight.actors.executor.model.gguf [--watch-stdin] SOURCE FOLDER\n")
        return 2
    source, folder = Path(arguments[0]).absolute(), Path(arguments[1])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        convert(source, folder, lambda name: _report(f"stage {STAGES.index(name)} {len(STAGES)} {name}"))
    except ConversionFailed as error:
        _report(f"error {_one_line(error)}")
        return 1
    except Exception as error:  # the libraries' own: their text is the reason, the trace goes to stderr
        _report(f"error {type(error).__name__}: {_one_line(error)}")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
