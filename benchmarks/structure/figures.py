"""The figures of one checkout: sizes and prose of each folder, and what holds of the package as a whole."""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from benchmarks.structure import imports, prose

Number: TypeAlias = int | float

OTHER_FOLDERS = ("tests", "benchmarks", "examples", "docs", ".github")
CPP = (".cpp", ".h")
FAILURE_LINES = 5


@dataclass
class Figures:
    """The figures that `python -m benchmarks.structure` prints and writes."""

    package: dict[str, Number] = field(default_factory=dict)
    folders: dict[str, dict[str, Number]] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class File:
    """Sizes and prose of a file."""

    path: Path
    code_lines: int
    raw_lines: int
    functions: list[int]
    """Lines of each function, from `def` to its end."""
    passages: list[prose.Passage]


def measure(root: Path, *, traced: bool) -> Figures:
    """Read the checkout at `root`, and run its stub engine where `traced`."""
    folders = defaultdict(list)
    inside: list[File] = []
    native: list[File] = []
    package_roots = [root / folder for folder in imports.package_folders(root)]
    for path in source_files(root):
        file = read_file(path)
        folders[_label(path.relative_to(root))].append(file)
        if any(path.is_relative_to(folder) for folder in package_roots):
            (native if path.suffix in CPP else inside).append(file)
    figures = Figures(folders={label: _sizes(files) | _voice(files) for label, files in sorted(folders.items())})
    figures.package |= {"code lines, Python and C++": sum(file.code_lines for file in [*inside, *native])}
    figures.package |= _sizes(inside) | _voice([*inside, *native])
    _add_imports(figures, root)
    readme = (root / "README.md").read_text(encoding="utf-8")
    figures.package |= {"README words": len(readme.split()), "README lines": len(readme.splitlines())}
    if traced:
        for name, modules in trace(root).items():
            figures.package[f"modules passed by {name}"] = len(modules)
            figures.lists[f"modules passed by {name}"] = modules
    return figures


def source_files(root: Path) -> list[Path]:
    """The Python, C++ and Markdown files of a checkout, in the folders that hold some."""
    folders = [*imports.package_folders(root), *OTHER_FOLDERS]
    found = [path for folder in folders for path in sorted((root / folder).rglob("*"))]
    return [path for path in [*found, *sorted(root.glob("*.md"))] if path.suffix in {".py", ".md", *CPP}]


def read_file(path: Path) -> File:
    """Sizes and prose of a Python, C++ or Markdown file."""
    text = path.read_text(encoding="utf-8")
    functions = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(ast.parse(text if path.suffix == ".py" else ""))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return File(path, code_line_count(path), len(text.splitlines()), functions, prose.passages(path))


def code_line_count(path: Path) -> int:
    """Lines of a Python or C++ file without blanks, comments and docstrings; 0 for a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return len(python_code_lines(text))
    if path.suffix in CPP:
        return sum(1 for line in prose.without_cpp_comments(text).splitlines() if line.strip())
    return 0


def python_code_lines(text: str) -> set[int]:
    """The numbers of the lines that are not blank and hold more than a comment or a docstring."""
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in prose.docstring_nodes(ast.parse(text)):
        lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _label(path: Path) -> str:
    folder = path.parent.as_posix()
    if path.suffix in CPP:
        return f"{folder} (C++)"
    return "README and other pages" if folder == "." else folder


def _sizes(files: Sequence[File]) -> dict[str, Number]:
    sizes: dict[str, Number] = {"files": len(files)}
    for suffix, values in (
        ("", [file.code_lines for file in files if file.code_lines]),
        (", raw", [file.raw_lines for file in files if file.raw_lines]),
    ):
        if values:
            sizes |= {f"median file{suffix}": round(statistics.median(values)), f"largest file{suffix}": max(values)}
    if lengths := sorted(length for file in files for length in file.functions):
        sizes |= {
            "functions": len(lengths),
            "median function": round(statistics.median(lengths)),
            "p95 function": lengths[round(0.95 * (len(lengths) - 1))],
            "largest function": lengths[-1],
        }
    return sizes


def _voice(files: Iterable[File]) -> dict[str, Number]:
    """Marker words in docstrings, comments and pages; openers among docstrings and comments."""
    passages = [one for file in files for one in file.passages if one.kind in {"docstring", "comment", "text"}]
    words = sum(one.words for one in passages)
    marked = sum(len(one.marked_words()) for one in passages)
    opening = [one for one in passages if one.kind != "text"]
    opened = sum(1 for one in opening if one.opener)
    return {
        "words of prose": words,
        "marker words per 1,000": round(1000 * marked / words, 1) if words else 0.0,
        "openers, %": round(100 * opened / len(opening), 1) if opening else 0.0,
    }


def _add_imports(figures: Figures, root: Path) -> None:
    modules = imports.read_modules(root)
    found = imports.imports(modules)
    lists = {
        "import circles": list(_described_circles(found)),
        "C++ include circles": [" - ".join(circle) for circle in imports.circles(imports.includes(root))],
        "class names used more than once": [
            f"{name}: {', '.join(homes)}"
            for name, homes in sorted(imports.type_homes(modules).items())
            if len(homes) > 1
        ],
        "modules with one importer": [
            f"{name} ← {importer}" for name, importer in imports.only_importers(modules, found).items()
        ],
    }
    figures.lists |= lists
    figures.package |= {name: len(entries) for name, entries in lists.items()}


def _described_circles(found: Sequence[imports.Import]) -> Iterator[str]:
    for circle in imports.circles(imports.graph((one.importer, one.imported) for one in found)):
        kinds = Counter(one.kind for one in imports.inside(circle, found))
        yield f"{' - '.join(circle)} ({', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))})"


def trace(root: Path) -> dict[str, list[str]]:
    """The modules that `path.py` prints for the checkout at `root`; none, with a notice, if its engine does not run."""
    with tempfile.TemporaryDirectory() as folder:
        for source, package in sorted(imports.package_folders(root).items(), key=lambda pair: len(pair[1])):
            target = Path(folder, *package.split("."))
            shutil.copytree(root / source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        program = [sys.executable, "-P", str(Path(__file__).with_name("path.py"))]
        environment = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        notice = "\n".join(done.stderr.splitlines()[-FAILURE_LINES:])
        print(f"not traced: the stub engine of {root} did not run\n{notice}", file=sys.stderr)
        return {}
    traced: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return traced
