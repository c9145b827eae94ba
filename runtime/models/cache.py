"""The model cache on disk: a folder in it is complete or absent, whoever else is building it at the same time.

Owns the cache's place, locks, manifests and half-built folders. Knows nothing of what a model folder contains or where
it comes from.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from cuelight.errors import ModelUnavailable

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # no such module on Windows: two builders may then both work, and the first to finish wins
    fcntl = None

MANIFEST = "cuelight.json"

# Raised when a conversion writes different files for the same source, so that older folders are built again.
FORMAT = 1

Build = Callable[[Path, Path], None]
"""Fill the first folder with the model; the second is scratch space on the same disk, removed afterwards."""


def cache_directory() -> Path:
    """`$CUELIGHT_CACHE`, else `$XDG_CACHE_HOME/cuelight`, else `~/.cache/cuelight`."""
    if chosen := os.environ.get("CUELIGHT_CACHE"):
        return Path(chosen).absolute()
    # A relative XDG path is invalid by that standard and to be ignored.
    if (xdg := os.environ.get("XDG_CACHE_HOME")) and Path(xdg).is_absolute():
        return Path(xdg) / "cuelight"
    try:
        return Path.home() / ".cache" / "cuelight"
    except RuntimeError as error:
        raise ModelUnavailable("there is no home folder to keep models in: set CUELIGHT_CACHE to a folder") from error


def built_once(name: str, source: str, build: Build, waiting: Callable[[], None]) -> Path:
    """The folder `models/<name>` of the cache, built first if it is absent, damaged or made from another `source`.

    `source` is the SHA-256 of what the model is made from. `build` runs in at most one process at a time; `waiting` is
    called before waiting for another one. Raises `ModelUnavailable` when the cache cannot be written, and what `build`
    raises; no folder is left behind then.
    """
    folder = cache_directory() / "models" / name
    if is_whole(folder, source):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{name}.lock"), waiting) as exclusive:
            if not is_whole(folder, source):
                _rebuild(folder, source, build, exclusive)
    except OSError as error:
        raise ModelUnavailable(
            f"the model cache {folder.parent} cannot be used: {error.strerror or error}. "
            "Free some space there, or set CUELIGHT_CACHE to a folder you can write to."
        ) from error
    return folder


def is_whole(folder: Path, source: str) -> bool:
    """Whether `folder` was built from `source` and every file of it still has the size it was written with."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT or manifest["source"] != source:
            return False
        return all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # absent, or not a manifest of ours
        return False


def _rebuild(folder: Path, source: str, build: Build, exclusive: bool) -> None:
    if exclusive:
        # Nobody else builds this name now, so any such folder belongs to a process that was killed.
        for stale in folder.parent.glob(f"{folder.name}.*.partial"):
            shutil.rmtree(stale, ignore_errors=True)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model, scratch = partial / "model", partial / "scratch"
    try:
        model.mkdir(parents=True)
        scratch.mkdir()
        build(model, scratch)
        files = {file.relative_to(model).as_posix(): file.stat().st_size for file in _files(model)}
        manifest = {"format": FORMAT, "source": source, "files": files}
        (model / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        _replace(folder, model, source)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _replace(folder: Path, model: Path, source: str) -> None:
    """Put `model` where a damaged or outdated `folder` may stand; someone else's equal result is as good as ours."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        model.rename(folder)
    except OSError:
        if not is_whole(folder, source):
            raise


@contextlib.contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock file; yields whether it really excludes others. The system lets go of it when a process dies."""
    if fcntl is None:
        yield False
        return
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield True
