"""Modules of `benchmarks/`, for the tests of what they count."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = next(path for path in Path(__file__).parents if (path / "pyproject.toml").exists())
FOLDER = ROOT / "benchmarks"


def benchmark(name: str) -> ModuleType:
    """Import `benchmarks.{name}` without the checkout on the path, which would make two of each class."""
    if "benchmarks" not in sys.modules:
        spec = importlib.util.spec_from_file_location("benchmarks", FOLDER / "__init__.py")
        assert spec is not None and spec.loader is not None
        sys.modules["benchmarks"] = package = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    return importlib.import_module(f"benchmarks.{name}")
