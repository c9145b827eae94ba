"""The package under its installed names: modules, imports, circles, class names, and the includes of the C++ files."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

ImportKind: TypeAlias = Literal["module", "function", "typing"]
"""Where an import stands: at the module's level, inside a function, or under `if TYPE_CHECKING`."""


@dataclass(frozen=True)
class Module:
    """A Python file of the package."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


@dataclass(frozen=True)
class Import:
    """One import of a module of the package by another."""

    importer: str
    imported: str
    kind: ImportKind
    line: int


def package_folders(root: Path) -> dict[str, str]:
    """The installed name of each source folder, as `pyproject.toml` maps them."""
    setuptools = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    return {folder: package for package, folder in setuptools["package-dir"].items()}


def read_modules(root: Path) -> dict[str, Module]:
    """Every module of the checkout at `root` by its installed name, `__init__` files under their package's."""
    modules = {}
    for folder, package in package_folders(root).items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            name = ".".join([package, *parts]).removesuffix(".__init__")
            modules[name] = Module(name, path, ast.parse(path.read_text(encoding="utf-8")))
    return modules


def imported_names(tree: ast.AST) -> Iterator[tuple[str, ImportKind, int]]:
    """Each imported name in full, with its kind and line: `from a import b` gives `a.b`, since b may be a module."""
    yield from _imported_names(tree, "module")


def _imported_names(parent: ast.AST, kind: ImportKind) -> Iterator[tuple[str, ImportKind, int]]:
    for node in ast.iter_child_nodes(parent):
        match node:
            case ast.Import():
                yield from ((alias.name, kind, node.lineno) for alias in node.names)
            case ast.ImportFrom():
                source = "." * node.level + (node.module or "")
                yield from ((f"{source}.{alias.name}", kind, node.lineno) for alias in node.names)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from _imported_names(node, "function")
            case ast.If() if ast.unparse(node.test).endswith("TYPE_CHECKING"):
                yield from _imported_names(node, "typing")
            case _:
                yield from _imported_names(node, kind)


def imports(modules: Mapping[str, Module]) -> list[Import]:
    """Every import of one module of the package by another, of whatever kind."""
    found = []
    for module in modules.values():
        for name, kind, line in imported_names(module.tree):
            parts = name.split(".")
            prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
            imported = next((prefix for prefix in prefixes if prefix in modules), None)
            if imported is not None and imported != module.name:
                found.append(Import(module.name, imported, kind, line))
    return found


def graph(edges: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """The targets of each node. An edge from a node to itself is left out."""
    targets: defaultdict[str, set[str]] = defaultdict(set)
    for source, target in edges:
        if source != target:
            targets[source].add(target)
    return dict(targets)


def circles(targets: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node, each sorted."""
    reached = {node: _reachable(node, targets) for node in targets}
    found = {
        tuple(sorted(other for other in reached[node] if node in reached.get(other, ())))
        for node in targets
        if node in reached[node]
    }
    return sorted(list(circle) for circle in found)


def _reachable(node: str, targets: Mapping[str, Iterable[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [node]
    while waiting:
        new = set(targets.get(waiting.pop(), ())) - seen
        seen |= new
        waiting += new
    return seen


def inside(circle: Iterable[str], found: Iterable[Import]) -> list[Import]:
    """The imports between the members of a circle."""
    members = set(circle)
    return [one for one in found if one.importer in members and one.imported in members]


def unit(name: str, modules: Mapping[str, Module]) -> str:
    """The package of a module where that package has no sub-packages; otherwise the module itself.

    In a package with sub-packages the modules beside them stand on different floors: `cuelight.errors` below
    `cuelight.core`, `cuelight.engine` above it.
    """
    package = name if modules[name].is_package else name.rpartition(".")[0]
    has_sub_packages = any(
        other.is_package and other.name.rpartition(".")[0] == package and other.name != package
        for other in modules.values()
    )
    return name if has_sub_packages else package


def type_homes(modules: Mapping[str, Module]) -> dict[str, list[str]]:
    """The modules that define a class, by the name of the class; a module is listed once for each definition.

    A type alias counts as a definition where a class has its name too.
    """
    classes, aliases = defaultdict(list), defaultdict(list)
    for module in modules.values():
        for node in ast.walk(module.tree):
            match node:
                case ast.ClassDef(name=name):
                    classes[name].append(module.name)
                case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias")):
                    aliases[name].append(module.name)
    return {name: [*homes, *aliases[name]] for name, homes in classes.items()}


def only_importers(modules: Mapping[str, Module], found: Iterable[Import]) -> dict[str, str]:
    """The importer of each module that exactly one other module of the package imports."""
    importers = graph((one.imported, one.importer) for one in found)
    return {name: next(iter(by)) for name, by in sorted(importers.items()) if len(by) == 1 and name in modules}


INCLUDE = re.compile(r'^\s*#\s*(?:include|define\s+\w*KERNEL)\s+"([^"]+)"', re.MULTILINE)
"""An include, or the definition of the header that `foreach_isa.h` includes in the name of its includer."""


def includes(root: Path) -> dict[str, set[str]]:
    """The C++ components that each C++ component includes; `x.h`, `x.cpp` and `x_kernel.h` are one component."""
    files = [path for folder in package_folders(root) for path in sorted((root / folder).rglob("*.[ch]*"))]
    files = [path for path in files if path.suffix in {".cpp", ".h"}]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    return graph(
        (_component(path), _component(path.parent / name))
        for path, text in texts.items()
        for name in INCLUDE.findall(text)
    )


def _component(path: Path) -> str:
    return path.stem.removesuffix("_kernel")
