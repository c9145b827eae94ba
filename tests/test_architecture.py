"""The folders are the architecture: allowed imports, public names, and how large functions and files may be.

The rules are functions from source text to complaints, so that a planted violation shows that each rule works.
Circles, floors and names are those of the package as it is installed; `benchmarks/structure/` reads them.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Set
from fnmatch import fnmatch
from pathlib import Path

import msgspec
import pytest
from benchmark_modules import ROOT, benchmark

import cuelight

imports = benchmark("structure.imports")
figures = benchmark("structure.figures")

MODULES = imports.read_modules(ROOT)
FOLDERS = {"messages": "cuelight.messages", "actors": "cuelight.actors", "runtime": "cuelight"}

TOP_LEVEL = {
    *(".ci", ".clang-format", ".git", ".github", ".gitignore"),
    *("CHANGELOG.md", "LICENSE", "Makefile", "README.md", "pyproject.toml"),
    *("actors", "benchmarks", "docs", "examples", "messages", "runtime", "tests"),
}
FUNCTION_LINES_MAX = 70
FILE_CODE_LINES_MAX = 400

LEVELS = (
    (
        *("errors", "models", "config", "status", "stream", "chat", "journal", "core", "engine", "testing", "simulate"),
        *("cli", "__main__"),
    ),
    ("kernel.placement", "kernel.journal", "kernel.simulation"),
)
"""Modules and packages below `cuelight`, lowest first: each may import the earlier ones only."""

ABOVE_PLACEMENT = ("cuelight.kernel", "cuelight.kernel.child", "cuelight.kernel.driver", "cuelight.kernel.system")
"""The modules of the kernel itself that may import its packages."""

# Known violations, one set for each rule. An entry that is no longer needed fails the test, too.
KNOWN_IN_CIRCLES: Set[str] = set()
KNOWN_PACKAGES_IN_CIRCLES: Set[str] = set()
KNOWN_COMPONENTS_IN_CIRCLES: Set[str] = set()
KNOWN_FLOORS: Set[str] = set()
KNOWN_CLASS_NAMES: Set[str] = set()
KNOWN_LONG_FILES: Set[str] = {
    "test_engine.py", "test_model.py", "test_actor.py", "test_system.py", "test_journal.py",
    "test_placement.py", "test_simulation.py", "test_supervision.py",
    "test_native_attention.py", "test_native_loading.py", "test_policies.py", "test_process_executor.py",
    "test_reload.py", "test_replay.py", "test_resume.py", "test_recovery.py",
}  # fmt: skip

TOKENIZERS = ("cuelight.actors.intake", "cuelight.actors.detokenizer")
CONVERTER = "cuelight.actors.executor.model.gguf"
"""The GGUF converter, which makes tokenizers, too. The store runs it as a program."""

Rule = Callable[[str, ast.Module], Iterator[str]]


def sources(*folders: str) -> dict[str, Path]:
    """The package's modules by name, `__init__` files under their package's."""
    chosen = [ROOT / folder for folder in folders or FOLDERS]
    return {name: module.path for name, module in MODULES.items() if any(module.path.is_relative_to(f) for f in chosen)}


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def imported(tree: ast.Module) -> Iterator[str]:
    """Every imported name in full: `from a import b` gives `a.b`, since b may be a module."""
    return (name for name, _, _ in imports.imported_names(tree))


def layers(module: str, tree: ast.Module) -> Iterator[str]:
    """messages and kernel import themselves, the kernel also the log; an actor both and itself; the root all."""
    if within(module, "cuelight.messages"):
        allowed = ["cuelight.messages"]
    elif within(module, "cuelight.kernel"):
        allowed = ["cuelight.kernel"]
    elif within(module, "cuelight.actors"):
        allowed = ["cuelight.messages", "cuelight.kernel", ".".join(module.split(".")[:3])]
    else:
        allowed = ["cuelight"]
    for name in imported(tree):
        if name.startswith(".") or within(name, "actors", "messages", "runtime"):
            yield f"{module} imports {name}: say cuelight.… in full"
        elif within(name, "cuelight") and not within(name, *allowed):
            yield f"{module} imports {name}"


def floors(module: str, tree: ast.Module) -> Iterator[str]:
    """A package imports those below it. Of the kernel's modules, `system` starts actors in other processes."""
    for name in imported(tree):
        for names in LEVELS:
            packages = [f"cuelight.{level}" for level in names]
            own = next((level for level, package in enumerate(packages) if within(module, package)), None)
            if own is not None and within(name, *packages[own + 1 :]):
                yield f"{module} imports {name}"
        if module in ABOVE_PLACEMENT or not within(module, "cuelight.kernel"):
            continue
        packages = [f"cuelight.{level}" for level in LEVELS[1]]
        if within(name, *packages) and not within(module, *packages):
            yield f"{module} imports {name}"


def libraries(module: str, tree: ast.Module) -> Iterator[str]:
    """Allow each heavy library only in the modules that need it."""
    for name in imported(tree):
        library, _, member = name.partition(".")
        if library == "torch":
            allowed = within(module, "cuelight.actors.executor")
        elif library == "tokenizers" or (library == "transformers" and "Tokenizer" in member):
            allowed = within(module, *TOKENIZERS, CONVERTER)
        elif library == "transformers":
            allowed = within(module, "cuelight.actors.executor.model", *TOKENIZERS)
        elif library == "huggingface_hub":
            allowed = module == "cuelight.models.hub"
        else:
            continue
        if not allowed:
            yield f"{module} imports {name}"


def time_and_chance(module: str, tree: ast.Module) -> Iterator[str]:
    """Take clock and randomness from outside in actors and kernel; only the loop's clock reads the machine's."""
    if not within(module, "cuelight.actors", "cuelight.kernel"):
        return
    chance = {"random.Random"} if within(module, "cuelight.kernel") else set()
    for name in imported(tree):
        if within(name, "time") and module == "cuelight.kernel.clock":
            continue
        if within(name, "time", "datetime", "secrets", "uuid") or (within(name, "random") and name != "random"):
            yield f"{module} imports {name}"
        elif name == "random" and not chance:
            yield f"{module} imports random: take it from the context"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            is_chance = within(text, "random", "os.urandom") and text not in chance
            is_time = text.endswith(".time")
            if is_chance or is_time:
                yield f"{module} uses {text}"


def documented(module: str, tree: ast.Module) -> Iterator[str]:
    """Require a docstring of every module with code, public class and public function."""
    if tree.body and not ast.get_docstring(tree):
        yield f"{module} has no docstring"
    named = (node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef))
    for node in named:
        if not node.name.startswith("_") and not ast.get_docstring(node):
            yield f"{module}.{node.name} has no docstring"


def short(module: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if (length := node.end_lineno - node.lineno + 1) > FUNCTION_LINES_MAX:
                yield f"{module}.{node.name} has {length} lines"


def handlers(module: str, tree: ast.Module) -> Iterator[str]:
    """Require that an actor's `handle` never awaits and that its match ends in `assert_never`."""
    for actor in ast.walk(tree):
        if not isinstance(actor, ast.ClassDef) or not any(ast.unparse(b).startswith("Actor[") for b in actor.bases):
            continue
        name = f"{module}.{actor.name}"
        methods = {node.name: node for node in actor.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        handle = methods.get("handle")
        if not isinstance(handle, ast.FunctionDef):
            yield f"{name} has no synchronous handle"
        elif not any(_is_closed(node) for node in ast.walk(handle)):
            yield f"{name}.handle does not end in assert_never"


def _is_closed(node: ast.AST) -> bool:
    return isinstance(node, ast.match_case) and "assert_never" in ast.unparse(node.body[0])


RULES: tuple[Rule, ...] = (layers, libraries, time_and_chance, documented, short, handlers)


@pytest.mark.parametrize("rule", RULES)
def test_package_keeps_the_rule(rule: Rule) -> None:
    complaints = [complaint for module in MODULES.values() for complaint in rule(module.name, module.tree)]
    assert not complaints, "\n".join(complaints)


def check(found: Mapping[str, str], known: Set[str]) -> None:
    """Fail on violations that are not known, naming each, and on known ones that no longer occur."""
    new = sorted({found[name] for name in found.keys() - known})
    assert new == []
    gone = sorted(known - found.keys())
    assert gone == [], "no longer violated: remove from the set of known ones"


def described(circles: list[list[str]]) -> dict[str, str]:
    """The circle of each member."""
    return {member: f"circle: {' - '.join(circle)}" for circle in circles for member in circle}


@pytest.mark.parametrize(("found", "known"), [({"a": "a"}, set()), ({}, {"a"}), ({"a": "a"}, {"b"})])
def test_known_violations_are_exact(found: dict[str, str], known: set[str]) -> None:
    check({"c": "c"}, {"c"})
    with pytest.raises(AssertionError):
        check(found, known)


IMPORTS = imports.imports(MODULES)


def test_modules_have_no_import_cycles() -> None:
    """Imports at the module's level, inside a function and for type checkers only all count."""
    graph = imports.graph((found.importer, found.imported) for found in IMPORTS)
    check(described(imports.circles(graph)), KNOWN_IN_CIRCLES)


def test_packages_have_no_import_cycles() -> None:
    unit = {name: imports.unit(name, MODULES) for name in MODULES}
    graph = imports.graph((unit[found.importer], unit[found.imported]) for found in IMPORTS)
    check(described(imports.circles(graph)), KNOWN_PACKAGES_IN_CIRCLES)


def test_cpp_components_have_no_include_cycles() -> None:
    check(described(imports.circles(imports.includes(ROOT))), KNOWN_COMPONENTS_IN_CIRCLES)


def test_packages_import_only_lower_levels() -> None:
    complaints = {complaint: complaint for m in MODULES.values() for complaint in floors(m.name, m.tree)}
    check(complaints, KNOWN_FLOORS)


def test_levels_name_modules_of_the_package() -> None:
    """An entry that names no module would allow everything. Holds once `cuelight.core` is a package."""
    if "cuelight.core" in MODULES:
        assert [name for names in LEVELS for name in names if f"cuelight.{name}" not in MODULES] == []


def test_class_names_are_unique() -> None:
    homes = imports.type_homes(MODULES)
    check({name: f"{name}: {', '.join(at)}" for name, at in homes.items() if len(at) > 1}, KNOWN_CLASS_NAMES)


def test_files_are_short() -> None:
    python = [path for path in figures.source_files(ROOT) if path.suffix == ".py"]
    lines = {path: figures.code_line_count(path) for path in python}
    long = {
        path.name: f"{path.relative_to(ROOT)}: {count} lines"
        for path, count in lines.items()
        if count > FILE_CODE_LINES_MAX
    }
    check(long, KNOWN_LONG_FILES)


ACTOR = "class A(Actor[int]):\n"


@pytest.mark.parametrize(
    ("rule", "module", "text"),
    [
        (layers, "cuelight.messages.cache", "from cuelight.kernel import Ref"),
        (layers, "cuelight.kernel.ref", "import cuelight.messages.cache"),
        (layers, "cuelight.kernel.ref", "from cuelight import errors"),
        (layers, "cuelight.actors.cache.pool", "from cuelight.actors.scheduler.planning import plan_step"),
        (layers, "cuelight.actors.cache.pool", "from cuelight.actors import scheduler"),
        (layers, "cuelight.actors.cache.pool", "def f():\n    from cuelight.errors import EngineError"),
        (layers, "cuelight.engine", "from messages.cache import Reserve"),
        (layers, "cuelight.engine", "from . import errors"),
        (floors, "cuelight.models.store", "from cuelight.config import EngineConfig"),
        (floors, "cuelight.journal.resume", "def f():\n    from cuelight.core import lifecycle"),
        (floors, "cuelight.core.lifecycle", "if TYPE_CHECKING:\n    from cuelight.engine import Engine"),
        (floors, "cuelight.engine", "from cuelight.cli.commands import main"),
        (floors, "cuelight.kernel.journal.replay", "from cuelight.kernel.simulation.virtual import VirtualClock"),
        (floors, "cuelight.kernel.ref", "from cuelight.kernel.placement.wire import Wire"),
        (libraries, "cuelight.engine", "import torch"),
        (libraries, "cuelight.actors.scheduler.actor", "from torch import nn"),
        (libraries, "cuelight.actors.executor.model.loading", "from transformers import AutoTokenizer"),
        (libraries, "cuelight.actors.executor.runner", "import tokenizers"),
        (libraries, "cuelight.models.store", "from transformers import AutoConfig"),
        (libraries, "cuelight.models.store", "import huggingface_hub"),
        (time_and_chance, "cuelight.actors.scheduler.actor", "import time"),
        (time_and_chance, "cuelight.actors.scheduler.actor", "import random"),
        (time_and_chance, "cuelight.actors.scheduler.actor", "from datetime import datetime"),
        (time_and_chance, "cuelight.kernel.system", "import random\nrandom.random()"),
        (time_and_chance, "cuelight.kernel.system", "from random import choice"),
        (time_and_chance, "cuelight.kernel.mailbox", "loop.time()"),
        (documented, "cuelight.engine", "x = 1"),
        (documented, "cuelight.engine", '"""It."""\nclass Engine: ...'),
        (documented, "cuelight.engine", '"""It."""\nasync def serve(): ...'),
        (short, "cuelight.engine", "def f():\n" + "    pass\n" * FUNCTION_LINES_MAX),
        (handlers, "cuelight.actors.cache.actor", ACTOR + "    pass"),
        (handlers, "cuelight.actors.cache.actor", ACTOR + "    async def handle(self, m): assert_never(m)"),
        (handlers, "cuelight.actors.cache.actor", ACTOR + "    def handle(self, m): print(m)"),
    ],
)
def test_each_rule_catches_its_violation(rule: Rule, module: str, text: str) -> None:
    assert list(rule(module, ast.parse(text)))


def test_examples_are_short_and_documented() -> None:
    for path in sorted((ROOT / "examples").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), f"{path.name} has no docstring"
        assert not list(short(path.name, tree))


def test_top_level_holds_nothing_else() -> None:
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").split()]
    names = {path.name for path in ROOT.iterdir()}
    assert {name for name in names - TOP_LEVEL if not any(fnmatch(name, pattern) for pattern in ignored)} == set()


def test_pyproject_lists_every_package() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert sorted(setuptools["packages"]) == sorted(
        name for name, path in sources().items() if path.name == "__init__.py"
    )
    assert setuptools["package-dir"] == {package: folder for folder, package in FOLDERS.items()}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path} is in no package"


@pytest.mark.parametrize("module", [name for name in sources() if not name.endswith(".__main__")])
def test_every_module_can_be_imported(module: str) -> None:
    importlib.import_module(module)


def test_public_names_are_exact() -> None:
    names = ["Chat", "Chunk", "Engine", "EngineError", "EngineStats", "Health", "Result", "Stream", "model_path"]
    assert sorted(cuelight.__all__) == names
    assert set(names) <= set(dir(cuelight))
    assert all(getattr(cuelight, name).__name__ == name for name in names)
    with pytest.raises(AttributeError, match="no attribute 'Enigne'"):
        cuelight.Enigne  # noqa: B018


HEAVY = {"torch", "transformers", "tokenizers", "huggingface_hub", "gguf", "structlog"}
"""Libraries that `import cuelight` must not load: each child process imports it, too."""


@pytest.mark.parametrize(
    "modules",
    [
        list(sources("messages")),
        [name for name in sources("runtime") if within(name, "cuelight.kernel")],
        [
            "cuelight.engine",
            "cuelight.cli.commands",
            "cuelight.cli.terminal",
            "cuelight.models.store",
            "cuelight.testing",
        ],
    ],
    ids=["messages", "kernel", "engine"],
)
def test_importing_loads_no_heavy_library(modules: list[str]) -> None:
    program = (
        f"import sys, importlib\nfor name in {['cuelight', *modules]!r}: importlib.import_module(name)\n"
        f"print(*sys.modules.keys() & {HEAVY!r})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


def test_messages_are_frozen() -> None:
    structs = [
        value
        for name in sources("messages")
        for value in vars(importlib.import_module(name)).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct)
    ]
    assert len(structs) > 20
    assert [struct.__name__ for struct in structs if not struct.__struct_config__.frozen] == []
