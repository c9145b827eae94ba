"""Readability of a checkout in figures, as Markdown.

    python -m benchmarks.structure [--root CHECKOUT] [--before REV] [--trace] [--lists] [--json FILE]
    python -m benchmarks.structure --markers FOLDER

`--before` adds the figures of a revision, `--trace` the modules that a request and a step pass in a stub engine,
`--lists` the names behind the counts. `--markers` prints the markers in a folder, as `tests/test_voice.py` finds them.

Lines are without blanks, comments and docstrings unless they are called raw; a function's lines are those from `def`
to its end. Marker words are counted in docstrings, comments and pages, openers among docstrings and comments.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import tarfile
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.structure.figures import Figures, Number, measure, source_files
from benchmarks.structure.prose import complaints

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Measure, print, and write the figures if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to measure (this one)")
    parser.add_argument("--before", metavar="REV", help="a revision of the checkout to compare with")
    parser.add_argument("--trace", action="store_true", help="run a stub engine and count the modules passed")
    parser.add_argument("--lists", action="store_true", help="print the names behind the counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file, too")
    parser.add_argument("--markers", metavar="FOLDER", help="print the markers of a folder instead")
    asked = parser.parse_args()
    root: Path = asked.root.resolve()
    if asked.markers is not None:
        for path in source_files(root):
            if path.is_relative_to(root / asked.markers):
                for complaint in complaints(path, root):
                    print(complaint)
        return
    now = measure(root, traced=asked.trace)
    before = measure_revision(root, asked.before, traced=asked.trace) if asked.before else None
    print_package(now, before)
    print_folders(now, before)
    if asked.lists:
        for name, entries in now.lists.items():
            print(f"\n{name}:\n", *(f"- {entry}" for entry in entries), sep="\n")
    if asked.json is not None:
        document = asdict(now) | ({"before": asdict(before)} if before else {})
        asked.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def measure_revision(root: Path, revision: str, *, traced: bool) -> Figures:
    """The figures of a revision of the repository at `root`."""
    command = ["git", "archive", "--format=tar", revision]
    archive = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
        return measure(Path(folder), traced=traced)


def print_package(now: Figures, before: Figures | None) -> None:
    """One line for each figure of the package as a whole."""
    print("| package | before | now |\n| --- | ---: | ---: |" if before else "| package | now |\n| --- | ---: |")
    for name in {**(before.package if before else {}), **now.package}:
        columns = [figures.package.get(name) for figures in (before, now) if figures]
        print(f"| {name} | " + " | ".join(_shown(value) for value in columns) + " |")


COLUMNS = {
    "files": ("files",),
    "median file (raw)": ("median file", "median file, raw"),
    "largest file (raw)": ("largest file", "largest file, raw"),
    "functions": ("functions",),
    "median, p95, largest function": ("median function", "p95 function", "largest function"),
    "words": ("words of prose",),
    "marker words per 1,000": ("marker words per 1,000",),
    "openers, %": ("openers, %",),
}


def print_folders(now: Figures, before: Figures | None) -> None:
    """One line for each folder; where a figure differs from before, both stand there with an arrow between."""
    print("\n| folder | " + " | ".join(COLUMNS) + " |\n| --- |" + " ---: |" * len(COLUMNS))
    for folder in sorted({**(before.folders if before else {}), **now.folders}):
        cells = []
        for names in COLUMNS.values():
            new = _cell(now, folder, names)
            old = _cell(before, folder, names) if before else new
            cells.append(new if old == new else f"{old} → {new}")
        print(f"| {folder} | " + " | ".join(cells) + " |")


def _cell(figures: Figures, folder: str, names: tuple[str, ...]) -> str:
    row = figures.folders.get(folder, {})
    values = [_shown(row.get(name)) for name in names]
    if names[-1].endswith("raw"):
        return f"{values[0]} ({values[1]})"
    return ", ".join(values)


def _shown(value: Number | None) -> str:
    return "-" if value is None else f"{value:,}"


if __name__ == "__main__":
    main()
