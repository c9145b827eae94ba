"""The voice is plain technical English: the markers of another one are banned, folder by folder.

Marker words anywhere in prose: `whoever`, `nobody`, `somebody`, `so many`. A docstring does not open with It, They,
These, Those, Of, So, What or Who. `python -m benchmarks.structure --markers FOLDER` prints what a folder still has.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmark_modules import ROOT, benchmark

figures = benchmark("structure.figures")
prose = benchmark("structure.prose")

DONE = [
    "benchmarks/structure",
    "tests/helpers/benchmark_modules.py",
    "tests/test_architecture.py",
    "tests/benchmarks/test_structure.py",
    "tests/test_voice.py",
]
"""Folders and files without markers, each with everything below it."""


def marked(place: str) -> list[str]:
    """`path:line: marker: text` of each marker in a folder or file."""
    paths = [path for path in figures.source_files(ROOT) if path.is_relative_to(ROOT / place)]
    assert paths, f"{place} holds no Python, C++ or Markdown file"
    return [complaint for path in paths for complaint in prose.complaints(path, ROOT)]


@pytest.mark.parametrize("place", DONE)
def test_prose_is_free_of_markers(place: str) -> None:
    assert not (found := marked(place)), "\n".join(found)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.py", '"""It counts."""', "a.py:1: opens with It: It counts."),
        ("a.py", 'class A:\n    """\n    Of a request.\n    """', "a.py:2: opens with Of: Of a request."),
        ("a.py", 'x = 1\n"""What counts."""', "a.py:2: opens with What: What counts."),
        ("a.py", 'def f():\n    """Count.\n\n    For whoever asks.\n    """', "a.py:4: whoever: For whoever asks."),
        ("a.py", "x = 1  # nobody's", "a.py:1: nobody: nobody's"),
        ("a.py", "# not\n# Somebody's", "a.py:2: somebody: Somebody's"),
        ("a.py", "# there are so\n# many", "a.py:1: so many: there are so"),
        ("a.py", "x = 1  # noqa: F401  # for so many", "a.py:1: so many: for so many"),
        ("a.py", 'raise ValueError(f"{x} is nobody")', "a.py:1: nobody: is nobody"),
        ("a.py", 'error = errors.Refused("so many")', "a.py:1: so many: so many"),
        ("a.py", 'assert x, "nobody"', "a.py:1: nobody: nobody"),
        ("a.py", 'log.info("stopped", by="somebody")', "a.py:1: somebody: somebody"),
        ("a.py", 'parser.add_argument("x", help="for whoever")', "a.py:1: whoever: for whoever"),
        ("a.py", "def test_nobody_waits(): ...", "a.py:1: nobody: test nobody waits"),
        ("a.h", "// x\n/* whoever */ int x;", "a.h:2: whoever: whoever"),
        ("a.cpp", '"//"; // so many', "a.cpp:1: so many: so many"),
        ("a.md", "# Title\n\nSo many.", "a.md:3: so many: So many."),
    ],
)
def test_marker_is_found(name: str, text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert list(prose.complaints(tmp_path / name, tmp_path)) == [complaint]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", '"""Item. It may open a later sentence."""'),
        ("a.py", "# It may open a comment."),
        ("a.py", 'x = "nobody"'),
        ("a.py", "def nobody(): ..."),
        ("a.py", '"""Ban `nobody` in prose."""'),
        ("a.cpp", 'auto x = "// nobody";'),
        ("a.md", "It may open a paragraph.\n\n```python\nnobody\n```"),
    ],
)
def test_other_text_has_no_marker(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert list(prose.complaints(tmp_path / name, tmp_path)) == []
