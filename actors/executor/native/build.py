"""The native kernels as one shared library, compiled on first use and kept in a folder.

Owns the compiler's command line and the library's name. Knows nothing of what the kernels compute.
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
"""No -march: each kernel has forms for several instruction sets and chooses at run time."""

COMPILERS = ("c++", "g++", "clang++")

ERROR_LINES = 12
"""So much of what a failing compiler says is passed on."""

COMPILE_SECONDS_MAX = 300.0

LIBRARIES_KEPT = 8
"""Those used last: an older one is compiled again if another version of ours still wants it."""


class NoNativeCode(Exception):
    """The native kernels cannot be had here; the text says why in a sentence."""


_lock = threading.Lock()
_loaded: ctypes.CDLL | None = None


def load_native(folder: Path | None = None) -> ctypes.CDLL:
    """The kernels, compiled into `folder` unless they are there already; the first call decides for the process.

    Without a folder, or where it cannot be written, which is logged, they are compiled for this process alone. Takes
    seconds when it compiles. Raises `NoNativeCode`.
    """
    global _loaded  # noqa: PLW0603 - one library per process: it owns the process's threads
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
                with contextlib.suppress(OSError):  # a place from which nothing may be run
                    return ctypes.CDLL(str(kept))
            return ctypes.CDLL(str(compiled))
    except OSError as error:
        raise NoNativeCode(f"the native kernels found no place: {error}") from error


def _found(folder: Path, name: str) -> ctypes.CDLL | None:
    """What was kept there, which counts as used now. A damaged one is removed: it would bring the process down."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{name}-*.so"):
            if path.name != _kept_name(name, path):
                path.unlink(missing_ok=True)
                continue
            with contextlib.suppress(OSError):  # another user's cache: then its owner's use is what counts
                os.utime(path)
            return ctypes.CDLL(str(path))
    return None


def _keep(compiled: Path, folder: Path, name: str) -> Path | None:
    """Where the library lies for later processes now; None where there is no room for it.

    The name comes into being complete, whoever else makes it too, and if the power fails now.
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
    """It says what is in the file, so that one with damaged pages is known without running it."""
    return f"{name}-{hashlib.sha256(library.read_bytes()).hexdigest()[:16]}.so"


def _remove_old(folder: Path, compiled: Path) -> None:
    """Remove all but the last used libraries, and what compilations have left behind that were killed.

    A process that has a library loaded keeps it: a removed file stays for those who have it open, and where the system
    does not allow that, it is not removed.
    """
    used: dict[Path, float] = {}
    for path in folder.glob("native-*"):
        with contextlib.suppress(OSError):  # someone else has just removed it
            used[path] = path.stat().st_mtime
    libraries = sorted((path for path in used if path.suffix == ".so"), key=used.__getitem__, reverse=True)
    for old in libraries[LIBRARIES_KEPT:]:
        with contextlib.suppress(OSError):
            old.unlink()
    for partial, seconds in used.items():
        if partial.suffix == ".partial" and seconds < used.get(compiled, 0) - 2 * COMPILE_SECONDS_MAX:
            shutil.rmtree(partial, ignore_errors=True)


def find_compiler() -> list[str]:
    """The compiler's command: `$CXX`, else the first that is installed of `COMPILERS`. Raises `NoNativeCode`."""
    try:
        asked = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise NoNativeCode(f"$CXX is no command: {error}") from error
    candidates = [asked] if asked else [[name] for name in COMPILERS]
    for command in candidates:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    names = ", ".join(command[0] for command in candidates)
    raise NoNativeCode(f"no C++ compiler: looked for {names}")


def native_name(compiler: list[str]) -> str:
    """How a library's name begins: otherwise for other sources, flags, machine or compiler, so none is out of date."""
    digest = hashlib.sha256()
    for part in (_run([*compiler, "--version"]), " ".join([*compiler[1:], *FLAGS]), platform.machine()):
        digest.update(f"{part}\0".encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(f"{source.name}\0".encode() + source.read_bytes() + b"\0")
    return f"native-{digest.hexdigest()[:24]}"


def compile_into(scratch: Path, compiler: list[str]) -> Path:
    """Compile every source, several at once, and link them; the library lies in `scratch`. Raises `NoNativeCode`."""

    def one(source: Path) -> str:
        target = str(scratch / f"{source.stem}.o")
        _run([*compiler, *FLAGS, "-c", str(source), "-o", target])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        objects = list(workers.map(one, sorted(SOURCES.glob("*.cpp"))))
    linked = scratch / "native.so"
    _run([*compiler, "-shared", "-pthread", *objects, "-o", str(linked)])
    if not linked.is_file():
        raise NoNativeCode(f"{compiler[0]} compiles nothing")
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
