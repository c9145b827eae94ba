"""The model cache on disk: its location, locks, manifests and partly built folders.

A folder in the cache is complete or absent, even while several processes build it. Its contents are the callers'.
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
except ImportError:  # absent on Windows: two processes may then build a folder, and the first result is kept
    fcntl = None

MANIFEST = "cuelight.json"

# To be increased when a conversion writes different files for the same source, so that older folders are rebuilt.
FORMAT = 1

Build = Callable[[Path, Path], None]
"""Fill the first folder with the model; the second is scratch space on the same disk, removed afterwards."""


def cache_directory() -> Path:
    """Return `$CUELIGHT_CACHE`, else `$XDG_CACHE_HOME/cuelight`, else `~/.cache/cuelight`.

    Raises ModelUnavailable if none of these is set and there is no home folder.
    """
    if chosen := os.environ.get("CUELIGHT_CACHE"):
        return Path(chosen).absolute()
    # The XDG standard requires relative paths to be ignored.
    if (xdg := os.environ.get("XDG_CACHE_HOME")) and Path(xdg).is_absolute():
        return Path(xdg) / "cuelight"
    try:
        return Path.home() / ".cache" / "cuelight"
    except RuntimeError as error:
        raise ModelUnavailable("no home folder was found for models: set CUELIGHT_CACHE to a folder") from error


def built_once(name: str, source: str, build: Build, waiting: Callable[[], None]) -> Path:
    """Return the folder `models/<name>` of the cache; build it if it is absent, damaged or from another `source`.

    `source` is the SHA-256 of the model's source. `build` runs in at most one process at a time; `waiting` is called
    before a wait for another process. Raises `ModelUnavailable` if the cache cannot be written, and the errors of
    `build`; no folder is left behind then.
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
    """Return whether `folder` was built from `source`, and every file has the size that its manifest names."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT or manifest["source"] != source:
            return False
        return all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # absent, or not a manifest of this cache
        return False


def _rebuild(folder: Path, source: str, build: Build, exclusive: bool) -> None:
    if exclusive:
        # No other process builds this name now, so such a folder was left by a process that was killed.
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
    """Move `model` to `folder`, in place of a damaged or outdated folder; keep an equal one of another process."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        model.rename(folder)
    except OSError:
        if not is_whole(folder, source):
            raise


@contextlib.contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock file; yields whether it excludes other processes. A lock ends with its process."""
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
