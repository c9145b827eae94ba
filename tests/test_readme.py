"""The README and the pages of docs/ match the code: Python blocks run as they stand, names and charts are current."""

from __future__ import annotations

import ast
import asyncio
import inspect
import logging
import re
import shutil
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest
import structlog
import transformers
from tiny_models import GROUPED, save

import cuelight.messages
from cuelight import Engine, errors
from cuelight.cli import commands as cli
from cuelight.models import store

ROOT = Path(__file__).parents[1]
PAGES = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/guide.md", "docs/errors.md", "docs/models.md", "docs/limits.md", "docs/options.md")
}
README = PAGES["README.md"]


def blocks() -> Iterator[tuple[str, CodeType]]:
    """Each Python block as text and as code, compiled so that a traceback names the page's own lines."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    for name, page in PAGES.items():
        for match in re.finditer(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
            padding = "\n" * page.count("\n", 0, match.start(1))
            yield match[1], compile(padding + match[1], name, "exec", flags=flags, dont_inherit=True)


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    logger = logging.getLogger("cuelight")
    level, handlers = logger.level, list(logging.root.handlers)
    yield
    logger.setLevel(level)
    logging.root.handlers[:] = handlers
    structlog.reset_defaults()


@pytest.fixture
def small_models(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the built-in models by small ones with the default model's tokens: the blocks open many engines."""
    save(transformers.LlamaConfig(**{**GROUPED, "vocab_size": 49_152, "max_position_embeddings": 2048}), tmp_path)
    for pattern in ("*token*", "chat_template*"):
        for file in model_folder.glob(pattern):
            shutil.copy(file, tmp_path)
    monkeypatch.setattr(store, "_built_in", lambda *_: tmp_path)


@pytest.mark.model
@pytest.mark.usefixtures("logging_as_before", "one_thread", "small_models")
def test_python_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    programs = [code for text, code in blocks() if "asyncio.run(" in text]
    excerpts = [code for text, code in blocks() if "asyncio.run(" not in text]
    assert len(programs) >= 1 and len(excerpts) >= 7
    for code in programs:
        exec(code, {"__name__": "readme"})

    async def run_excerpts() -> None:
        async with Engine() as engine:
            for code in excerpts:
                coroutine = eval(code, {"__name__": "readme", "engine": engine, "Engine": Engine, "asyncio": asyncio})
                if code.co_flags & inspect.CO_COROUTINE:
                    await coroutine

    asyncio.run(run_excerpts())
    assert "BadSampling: temperature is -1.0; it must be" in capsys.readouterr().out


def test_every_error_is_named() -> None:
    names = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.EngineError)
    ]
    assert len(names) > 15
    assert [name for name in names if not re.search(rf"\b{name}\b", PAGES["docs/errors.md"])] == []


def test_chart_is_that_of_the_messages() -> None:
    assert cuelight.messages.__doc__ is not None
    chart = cuelight.messages.__doc__.split("```")[1].strip("\n")
    assert chart in README


def test_every_option_of_the_command_is_named() -> None:
    guide = PAGES["docs/guide.md"]
    parser: ArgumentParser = cli._parser()
    (commands,) = [action for action in parser._actions if action.dest == "COMMAND" or action.choices]
    assert commands.choices is not None
    for name in commands.choices:
        assert f"`cuelight {name}`" in guide
    for name, command in dict(commands.choices).items():
        for action in command._actions:
            for option in action.option_strings:
                if option not in ("-h", "--help"):
                    assert f"`{option}`" in guide, f"cuelight {name} {option} is not in docs/guide.md"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"`make (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"the Makefile has no target {target}"


def test_links_and_named_files_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
        for target in re.findall(r"`((?:actors|messages|runtime|tests|examples|benchmarks|docs)/[\w./]*)`", text):
            assert (ROOT / target).exists(), f"{page.name} names {target}"


def test_cited_rules_exist_in_docs() -> None:
    rules = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    written = set(re.findall(r"^- \*\*([a-z0-9-]+)\*\*", rules, re.MULTILINE))
    cited: set[str] = set()
    unknown: list[str] = []
    for folder in ("actors", "messages", "runtime", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for names in re.findall(r"[Rr]ules? ((?:`[a-z0-9-]+`(?:, | and )?)+)", text):
                cited |= set(re.findall(r"`([a-z0-9-]+)`", names))
            unknown += [
                test
                for test in re.findall(r"def test_rule_(\w+)", text)
                if not test.startswith(tuple(rule.replace("-", "_") for rule in written))
            ]
    assert cited and cited <= written, sorted(cited - written)
    assert not unknown
