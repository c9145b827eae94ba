"""The folders are the architecture: who imports whom, what the package shows, and how large its pieces may be.

The rules are functions from source text to complaints, so that a planted offence can show that each of them bites.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import msgspec
import pytest

import cuelight
from cuelight.config import EngineConfig, EngineOptions, SamplingOptions
from cuelight.messages.request import Sampling

ROOT = Path(__file__).parent.parent
FOLDERS = {"messages": "cuelight.messages", "actors": "cuelight.actors", "runtime": "cuelight"}

TOP_LEVEL = {
    *(".ci", ".git", ".github", ".gitignore", "CHANGELOG.md", "LICENSE", "Makefile", "README.md", "pyproject.toml"),
    *("actors", "benchmarks", "docs", "examples", "messages", "runtime", "tests"),
}
FUNCTION_LINES_MAX = 70

TOKENIZERS = ("cuelight.actors.intake", "cuelight.actors.detokenizer")
CONVERTER = "cuelight.actors.executor.model.gguf"
"""The converter makes tokenizers out of what a GGUF file holds; nobody imports it, it runs as a program."""

Rule = Callable[[str, ast.Module], Iterator[str]]


def sources(*folders: str) -> dict[str, Path]:
    """The package's modules by name, `__init__` files under their package's."""
    modules = {}
    for folder in folders or FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            modules[".".join([FOLDERS[folder], *parts]).removesuffix(".__init__")] = path
    return modules


@cache  # for all rules
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def imported(tree: ast.Module) -> Iterator[str]:
    """Every imported name in full: `from a import b` gives `a.b`, since b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def layers(module: str, tree: ast.Module) -> Iterator[str]:
    """messages and kernel know themselves, the kernel also the log; an actor knows both and itself; the root all."""
    if within(module, "cuelight.messages"):
        allowed = ["cuelight.messages"]
    elif within(module, "cuelight.kernel"):
        allowed = ["cuelight.kernel", "cuelight.log"]
    elif within(module, "cuelight.actors"):
        allowed = ["cuelight.messages", "cuelight.kernel", ".".join(module.split(".")[:3])]
    else:
        allowed = ["cuelight"]
    for name in imported(tree):
        if name.startswith(".") or within(name, "actors", "messages", "runtime"):
            yield f"{module} imports {name}: say cuelight.… in full"
        elif within(name, "cuelight") and not within(name, *allowed):
            yield f"{module} imports {name}"


def libraries(module: str, tree: ast.Module) -> Iterator[str]:
    """Each heavy library has its place."""
    for name in imported(tree):
        library, _, member = name.partition(".")
        if library == "torch":
            allowed = within(module, "cuelight.actors.executor")
        elif library == "tokenizers" or (library == "transformers" and "Tokenizer" in member):
            allowed = within(module, *TOKENIZERS, CONVERTER)
        elif library == "transformers":
            allowed = within(module, "cuelight.actors.executor.model", *TOKENIZERS)
        elif library == "huggingface_hub":
            allowed = module == "cuelight.model_hub"
        else:
            continue
        if not allowed:
            yield f"{module} imports {name}"


def time_and_chance(module: str, tree: ast.Module) -> Iterator[str]:
    """Actors and kernel get their clock and their chance from outside; only the loop's clock knows the machine's."""
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
    """Every module with code, public class and public function says what it is."""
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
    """An actor's `handle` never awaits, and its match ends in `assert_never`, so that no message is forgotten."""
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
def test_the_package_keeps(rule: Rule) -> None:
    complaints = []
    for module, path in sources().items():
        complaints += rule(module, parsed(path))
    assert not complaints, "\n".join(complaints)


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
        (libraries, "cuelight.engine", "import torch"),
        (libraries, "cuelight.actors.scheduler.actor", "from torch import nn"),
        (libraries, "cuelight.actors.executor.model.loading", "from transformers import AutoTokenizer"),
        (libraries, "cuelight.actors.executor.runner", "import tokenizers"),
        (libraries, "cuelight.store", "from transformers import AutoConfig"),
        (libraries, "cuelight.store", "import huggingface_hub"),
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
def test_the_rule_catches(rule: Rule, module: str, text: str) -> None:
    assert list(rule(module, ast.parse(text)))


def test_the_examples_are_short_and_documented() -> None:
    for path in sorted((ROOT / "examples").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), f"{path.name} has no docstring"
        assert not list(short(path.name, tree))


def test_the_top_level_holds_nothing_else() -> None:
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


def test_the_public_names_are_these() -> None:
    names = ["Chat", "Chunk", "Engine", "EngineError", "EngineStats", "Health", "Result", "Stream", "model_path"]
    assert sorted(cuelight.__all__) == names
    assert set(names) <= set(dir(cuelight))
    assert all(getattr(cuelight, name).__name__ == name for name in names)
    with pytest.raises(AttributeError, match="no attribute 'Enigne'"):
        cuelight.Enigne  # noqa: B018


HEAVY = {"torch", "transformers", "tokenizers", "huggingface_hub", "gguf", "structlog"}
"""Not to be loaded by an import, which each child process of ours does too."""


@pytest.mark.parametrize(
    "modules",
    [
        list(sources("messages")),
        [name for name in sources("runtime") if within(name, "cuelight.kernel")],
        ["cuelight.engine", "cuelight.cli", "cuelight.chat", "cuelight.store", "cuelight.testing"],
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


def test_the_options_for_type_checkers_are_those_there_are() -> None:
    assert typing.get_type_hints(EngineOptions) == typing.get_type_hints(EngineConfig)
    assert list(typing.get_type_hints(SamplingOptions)) == list(Sampling.__struct_fields__)
    # The docstring lists them as well.
    described = [line.split(":")[0].strip() for line in (EngineConfig.__doc__ or "").splitlines() if ":" in line]
    assert ["Args", *(field.name for field in fields(EngineConfig))] == described
