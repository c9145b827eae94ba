"""Loads a model's tokenizer from a cache entry, which a child process with transformers writes once.

Imports neither torch, transformers nor tokenizers.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from cuelight.actors.detokenizer.decoder import load_cached_decoder, load_decoder
from cuelight.actors.intake.tokenizer import REFUSAL_FILE, TOKENIZER_FILE, PromptEncoder
from cuelight.errors import ModelUnavailable
from cuelight.kernel import get_logger
from cuelight.models.cache import built_once

KEEPER = "cuelight.actors.intake.tokenizer_cache"
KEEPER_SECONDS_MAX = 120.0

log = get_logger("cuelight.engine")


def load_tokenizer(folder: Path) -> tuple[PromptEncoder, Callable[[Sequence[int]], str]]:
    """Return the encoder of prompts and the decoder of tokens. Blocks; raises the errors of transformers.

    The loader of transformers imports torch, which takes seconds and about 200 MB for the life of the process. So it
    runs in a child process, once per model; it runs in this process if the result cannot be cached, or torch is
    imported already.
    """
    if not _has_torch() and (kept := _kept(folder)) is not None:
        return PromptEncoder.load_cached(kept), load_cached_decoder(kept / TOKENIZER_FILE)
    return PromptEncoder.load(folder), load_decoder(folder)


def _has_torch() -> bool:
    return "torch" in sys.modules


def _kept(folder: Path) -> Path | None:
    try:
        name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()
        kept = built_once(
            f"tokenizer-{name[:32]}", _state_of(folder), lambda into, _: _keep(folder, into), _note_waiting
        )
        reason = (kept / REFUSAL_FILE).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return kept
    except (OSError, ModelUnavailable) as error:
        reason = str(error)
    log.warning("tokenizer_not_kept", reason=reason, folder=str(folder))
    return None


def _state_of(folder: Path) -> str:
    """Return a digest of the folder's file names, sizes and times, and of the versions of the tokenizer packages."""
    digest = hashlib.sha256()
    for package in ("transformers", "tokenizers"):
        digest.update(f"{package} {version(package)}\0".encode())
    for file in sorted([*folder.iterdir(), *(folder / "additional_chat_templates").glob("*")]):
        facts = file.stat()
        digest.update(os.fsencode(file) + f"\0{facts.st_size} {facts.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _keep(folder: Path, into: Path) -> None:
    """Write the cache entry in a child process. Raises ModelUnavailable."""
    # -P keeps the current folder off the child's path: a torch.py lying there must not be imported.
    command = [sys.executable, "-P", "-m", KEEPER, str(folder), str(into)]
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=KEEPER_SECONDS_MAX,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelUnavailable(f"the tokenizer's loader did not finish: {error}") from error
    if done.returncode != 0:
        raise ModelUnavailable(f"the tokenizer's loader failed: {done.stderr.strip().rpartition(chr(10))[2]}")


def _note_waiting() -> None:
    log.info("waiting", reason="another process is loading the same tokenizer")
