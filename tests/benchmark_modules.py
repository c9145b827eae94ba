"""The benchmarks as modules, for the tests that run them or share their code."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent.parent / "benchmarks"


def benchmark(name: str) -> ModuleType:
    """Import `benchmarks.<name>` without the checkout on the path, which would make a second copy of each class."""
    if "benchmarks" not in sys.modules:
        spec = importlib.util.spec_from_file_location("benchmarks", FOLDER / "__init__.py")
        assert spec is not None and spec.loader is not None
        sys.modules["benchmarks"] = package = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    return importlib.import_module(f"benchmarks.{name}")
