"""The figures of a checkout's readability, on a small checkout with a known flaw of each kind, and on this one."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from benchmark_modules import ROOT, benchmark

imports = benchmark("structure.imports")
figures = benchmark("structure.figures")

FILES = {
    "pyproject.toml": """
        [tool.setuptools.package-dir]
        "cuelight" = "runtime"
        "cuelight.messages" = "messages"
        """,
    "README.md": "Two words.\n",
    "messages/__init__.py": "",
    "messages/cache.py": '"""Messages."""\n\nclass Hold: ...\n',
    "runtime/__init__.py": "",
    "runtime/errors.py": "from typing import TypeAlias\n\nHold: TypeAlias = int\nAlias: TypeAlias = int\n",
    "runtime/core/__init__.py": "",
    "runtime/core/life.py": """
        from cuelight import errors
        from cuelight.core import parts


        class Life:
            '''It lives.'''

            def start(self) -> None:
                from cuelight.journal.record import Record
        """,
    "runtime/core/parts.py": "import cuelight.messages.cache\n",
    "runtime/journal/__init__.py": "",
    "runtime/journal/record.py": """
        from typing import TYPE_CHECKING

        if TYPE_CHECKING:
            from cuelight.core.life import Life


        class Record:
            name: str
            '''Whoever reads it.'''


        class Life: ...  # nobody's
        """,
    "runtime/native/kv.h": '#pragma once\n// A cache.\n#include "isa.h"\nint kv();  // not "a string\n',
    "runtime/native/isa.h": "/* Two\n   lines. */\nint isa();\n",
    "runtime/native/forms.h": '#include "kv.h"\n#include KERNEL\n',
    "runtime/native/kv.cpp": '#define CUE_KERNEL "kv_kernel.h"\n#include "forms.h"\n',
    "runtime/native/kv_kernel.h": "",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).lstrip("\n"))
    return tmp_path


def test_modules_have_their_installed_names(checkout: Path) -> None:
    assert set(imports.read_modules(checkout)) == {
        *("cuelight", "cuelight.errors", "cuelight.messages", "cuelight.messages.cache"),
        *("cuelight.core", "cuelight.core.life", "cuelight.core.parts", "cuelight.journal", "cuelight.journal.record"),
    }


def test_imports_of_every_kind_make_a_cycle(checkout: Path) -> None:
    modules = imports.read_modules(checkout)
    found = imports.imports(modules)
    (circle,) = imports.circles(imports.graph((one.importer, one.imported) for one in found))
    assert circle == ["cuelight.core.life", "cuelight.journal.record"]
    assert [one.kind for one in imports.inside(circle, found)] == ["function", "typing"]
    units = imports.graph((imports.unit(i.importer, modules), imports.unit(i.imported, modules)) for i in found)
    assert imports.circles(units) == [["cuelight.core", "cuelight.journal"]]
    assert imports.unit("cuelight.errors", modules) == "cuelight.errors"
    assert imports.only_importers(modules, found)["cuelight.messages.cache"] == "cuelight.core.parts"


def test_header_included_by_each_form_belongs_to_its_component(checkout: Path) -> None:
    assert imports.includes(checkout) == {"kv": {"isa", "forms"}, "forms": {"kv"}}
    assert imports.circles(imports.includes(checkout)) == [["forms", "kv"]]


def test_name_shared_by_classes_is_ambiguous(checkout: Path) -> None:
    homes = imports.type_homes(imports.read_modules(checkout))
    assert {name for name, at in homes.items() if len(at) > 1} == {"Hold", "Life"}
    assert "Alias" not in homes


def test_lines_of_code_are_without_blanks_comments_and_docstrings(checkout: Path) -> None:
    counts = {name: figures.code_line_count(checkout / name) for name in FILES}
    assert counts["runtime/core/life.py"] == 5
    assert counts["runtime/journal/record.py"] == 6
    assert counts["runtime/native/kv.h"] == 3
    assert counts["runtime/native/isa.h"] == 1
    assert counts["README.md"] == 0


def test_figures_of_a_checkout(checkout: Path) -> None:
    measured = figures.measure(checkout, traced=False)
    assert measured.package["import circles"] == 1
    assert measured.package["C++ include circles"] == 1
    assert measured.package["class names used more than once"] == 2
    assert measured.package["README words"] == 2
    assert measured.lists["import circles"] == ["cuelight.core.life - cuelight.journal.record (1 function, 1 typing)"]
    assert measured.folders["runtime/core"]["openers, %"] == 100.0
    assert measured.folders["runtime/journal"]["marker words per 1,000"] == 500.0
    assert measured.folders["runtime/core"]["largest function"] == 2
    assert measured.folders["runtime/native (C++)"]["words of prose"] == 7


def test_checkout_without_an_engine_is_not_traced(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.trace(checkout) == {}
    assert "not traced" in capsys.readouterr().err


def test_request_and_step_pass_the_actors_they_need() -> None:
    traced = figures.trace(ROOT)
    assert {"cuelight.engine", "cuelight.actors.intake.actor", "cuelight.actors.detokenizer.actor"} <= {
        *traced["a request"]
    }
    assert {"cuelight.actors.scheduler.actor", "cuelight.actors.cache.actor", "cuelight.actors.executor.actor"} <= {
        *traced["any step"]
    }
    assert {*traced["every step"]} < {*traced["any step"]}
    assert not any(name.startswith("cuelight.actors.detokenizer") for name in traced["any step"])
