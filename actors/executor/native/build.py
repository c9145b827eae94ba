"""Build of the native kernels: one shared library, compiled on first use and cached in a folder.

This module chooses the compiler, its command line and the library's name, which depends on all of the library's inputs.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cuelight.kernel import get_logger

log = get_logger("cuelight.executor")

SOURCES = Path(__file__).parent

FLAGS = ("-O3", "-fno-math-errno", "-std=c++17", "-fPIC", "-pthread")
"""Without -march, since each kernel has variants for several instruction sets and selects one at run time."""

COMPILERS = ("c++", "g++", "clang++")

ERROR_LINES = 12
"""Last lines of a failed compiler's output that are part of the error."""

COMPILE_SECONDS_MAX = 300.0

LIBRARIES_KEPT = 8
"""Number of most recently used libraries that stay in the folder. Other versions recompile if they need more."""


class NoNativeCode(Exception):
    """The native kernels cannot be compiled or loaded; the message says why."""


_lock = threading.Lock()
_loaded: ctypes.CDLL | None = None


def load_native(folder: Path | None = None) -> ctypes.CDLL:
    """Return the library with the kernels, compiled into `folder` unless cached there.

    The first call loads the library for the whole process. Without a folder, or if writing to it fails, which is
    logged, the library is compiled for this process only. Blocks, for seconds if it compiles. Raises `NoNativeCode`.
    """
    global _loaded  # noqa: PLW0603 - one library per process, since it has a pool of threads
    with _lock:
        if _loaded is None:
            _loaded = _library(folder)
        return _loaded


def _library(folder: Path | None) -> ctypes.CDLL:
    compiler = find_compiler()
    name = native_name(compiler)
    if folder is not None and (found := _found(folder, name)) is not None:
        return found
    try:
        with tempfile.TemporaryDirectory(prefix="cuelight-") as scratch:
            compiled = compile_into(Path(scratch), compiler)
            if folder is not None and (kept := _keep(compiled, folder, name)) is not None:
                with contextlib.suppress(OSError):  # the folder may be mounted noexec
                    return ctypes.CDLL(str(kept))
            return ctypes.CDLL(str(compiled))
    except OSError as error:
        raise NoNativeCode(f"the native kernels cannot be written to a temporary folder or loaded: {error}") from error


def _found(folder: Path, name: str) -> ctypes.CDLL | None:
    """Load the cached library and update its time of use; None if there is none.

    Damaged files are removed, since loading one would crash the process.
    """
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{name}-*.so"):
            if path.name != _kept_name(name, path):
                path.unlink(missing_ok=True)
                continue
            with contextlib.suppress(OSError):  # the cache may belong to another user
                os.utime(path)
            return ctypes.CDLL(str(path))
    return None


def _keep(compiled: Path, folder: Path, name: str) -> Path | None:
    """Copy the library to `folder` and return its path; None, with a warning in the log, if that fails.

    The file is synced and renamed into place, so that it is complete even after a power failure, or if several
    processes write it at once.
    """
    kept = folder / _kept_name(name, compiled)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{kept.name}.", suffix=".partial", dir=folder) as scratch:
            copy = Path(shutil.copy(compiled, scratch))
            with copy.open("r+b") as file:
                os.fsync(file.fileno())
            copy.replace(kept)
    except OSError as error:
        log.warning("native_code_not_kept", folder=str(folder), reason=str(error))
        return None
    _remove_old(folder, kept)
    return kept


def _kept_name(name: str, library: Path) -> str:
    """Return the file name, which contains a hash of the library, so that damage is detected before loading it."""
    return f"{name}-{hashlib.sha256(library.read_bytes()).hexdigest()[:16]}.so"


def _remove_old(folder: Path, compiled: Path) -> None:
    """Remove all but the most recently used libraries, and temporary folders of compilations that were killed.

    Processes that have loaded a removed library are not affected.
    """
    used: dict[Path, float] = {}
    for path in folder.glob("native-*"):
        with contextlib.suppress(OSError):  # another process may have removed it
            used[path] = path.stat().st_mtime
    libraries = sorted((path for path in used if path.suffix == ".so"), key=used.__getitem__, reverse=True)
    for old in libraries[LIBRARIES_KEPT:]:
        with contextlib.suppress(OSError):
            old.unlink()
    for partial, seconds in used.items():
        if partial.suffix == ".partial" and seconds < used.get(compiled, 0) - 2 * COMPILE_SECONDS_MAX:
            shutil.rmtree(partial, ignore_errors=True)


def find_compiler() -> list[str]:
    """Return the compiler's command: `$CXX`, else the first of `COMPILERS` installed. Raises `NoNativeCode`."""
    try:
        configured = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise NoNativeCode(f"$CXX is no command: {error}") from error
    candidates = [configured] if configured else [[name] for name in COMPILERS]
    for command in candidates:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    names = ", ".join(command[0] for command in candidates)
    raise NoNativeCode(f"no C++ compiler: looked for {names}")


def native_name(compiler: list[str]) -> str:
    """Return the prefix of the library's name, a hash of sources, flags, machine and compiler version."""
    digest = hashlib.sha256()
    for part in (_run([*compiler, "--version"]), " ".join([*compiler[1:], *FLAGS]), platform.machine()):
        digest.update(f"{part}\0".encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(f"{source.name}\0".encode() + source.read_bytes() + b"\0")
    return f"native-{digest.hexdigest()[:24]}"


def compile_into(scratch: Path, compiler: list[str]) -> Path:
    """Compile the sources in parallel, link them, and return the library in `scratch`. Raises `NoNativeCode`."""

    def one(source: Path) -> str:
        target = str(scratch / f"{source.stem}.o")
        _run([*compiler, *FLAGS, "-c", str(source), "-o", target])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        objects = list(workers.map(one, sorted(SOURCES.glob("*.cpp"))))
    linked = scratch / "native.so"
    _run([*compiler, "-shared", "-pthread", *objects, "-o", str(linked)])
    if not linked.is_file():
        raise NoNativeCode(f"{compiler[0]} succeeded without writing {linked.name}")
    return linked


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=COMPILE_SECONDS_MAX,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNativeCode(f"the compiler {command[0]} does not run: {error}") from error
    if done.returncode != 0:
        last = "\n".join(done.stdout.strip().splitlines()[-ERROR_LINES:])
        raise NoNativeCode(f"{command[0]} failed with status {done.returncode}:\n{last}")
    return done.stdout
