"""Write the option lists that are derived from the classes which define the options.

    python .ci/options.py [FILE ...]    # runtime/config.py and docs/options.md by default

A file has regions, each between a line with `[[options CLASS]]` and a line with `[[end]]`. A region of a Markdown file
becomes a table of the class's fields (name, type, default, and the string below the field), a region of a Python file
the fields of a TypedDict. Reads source text; imports no part of the package.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {"EngineConfig": "runtime/config.py", "Sampling": "messages/request.py", "Service": "messages/request.py"}
TARGETS = ("runtime/config.py", "docs/options.md")

ACCEPTED = {"tuple[str, ...]": "str | Sequence[str]", "tuple[int, ...]": "Sequence[int]"}
"""Types that clients may pass, where a field has another type once the option has been read."""

REGION = re.compile(
    r"^([^\S\n]*)([^\n]*\[\[options (\w+)\]\][^\n]*\n)(.*?)(^[^\n]*\[\[end\]\])", re.MULTILINE | re.DOTALL
)


class Option(NamedTuple):
    """One field of a class, as its source has it."""

    name: str
    type: str
    default: str
    meaning: str


def options(class_name: str) -> Iterator[Option]:
    """The fields of a class in order. Raises ValueError for a field without a default or without a string below it."""
    source = (ROOT / SOURCES[class_name]).read_text(encoding="utf-8")
    (found,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == class_name]
    for field, below in zip_longest(found.body, found.body[1:]):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        default = field.value and ast.get_source_segment(source, field.value)
        meaning = ast.literal_eval(below.value) if isinstance(below, ast.Expr) else None
        if not default or not isinstance(meaning, str):
            raise ValueError(
                f"{class_name}.{field.target.id} needs a default, and a string below that says its meaning"
            )
        yield Option(field.target.id, ast.unparse(field.annotation), default, " ".join(meaning.split()))


def table(class_name: str) -> str:
    """A Markdown table of a class's options."""
    rows = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for option in options(class_name):
        kind = ACCEPTED.get(option.type, option.type).replace("|", "\\|")
        rows.append(f"| `{option.name}` | `{kind}` | `{option.default}` | {option.meaning} |")
    return "".join([f"{row}\n" for row in rows])


def typed_fields(class_name: str, indent: str) -> str:
    """The fields of a TypedDict with a class's options."""
    fields = [f"{option.name}: {ACCEPTED.get(option.type, option.type)}" for option in options(class_name)]
    return "".join([f"{indent}{field}\n" for field in fields])


def derived(path: Path) -> str:
    """The text of a file with all its regions written anew."""

    def region(match: re.Match[str]) -> str:
        indent, begin, class_name, _, end = match.groups()
        body = typed_fields(class_name, indent) if path.suffix == ".py" else f"\n{table(class_name)}\n"
        return f"{indent}{begin}{body}{end}"

    return REGION.sub(region, path.read_text(encoding="utf-8"))


def main() -> None:
    """Write the files named on the command line."""
    for path in [Path(name) for name in sys.argv[1:]] or [ROOT / name for name in TARGETS]:
        path.write_text(derived(path), encoding="utf-8")


if __name__ == "__main__":
    main()
