"""Options are written once, in the classes that define them; the lists made from these classes are up to date."""

from __future__ import annotations

import importlib.util
import typing
from pathlib import Path

import pytest
from benchmark_modules import ROOT

from cuelight.config import EngineConfig, EngineOptions, RequestOptions
from cuelight.messages.request import Sampling, Service

spec = importlib.util.spec_from_file_location("write_options", ROOT / ".ci/options.py")
assert spec is not None and spec.loader is not None
write_options = importlib.util.module_from_spec(spec)
spec.loader.exec_module(write_options)


@pytest.mark.parametrize("name", write_options.TARGETS)
def test_derived_lists_are_up_to_date(name: str) -> None:
    path = ROOT / name
    assert write_options.derived(path) == path.read_text(encoding="utf-8"), "run `python .ci/options.py`"


def test_typed_options_have_the_fields_of_their_classes() -> None:
    assert typing.get_type_hints(EngineOptions) == typing.get_type_hints(EngineConfig)
    assert typing.get_type_hints(RequestOptions).keys() == {*Sampling.__struct_fields__, *Service.__struct_fields__}


def test_every_class_has_a_table_in_the_documentation() -> None:
    text = (ROOT / "docs/options.md").read_text(encoding="utf-8")
    for name in write_options.SOURCES:
        for option in write_options.options(name):
            assert f"| `{option.name}` |" in text


@pytest.mark.parametrize(
    ("field", "complaint"),
    [
        ("seats: int", "EngineConfig.seats needs"),
        ("seats: int = 3", "EngineConfig.seats needs"),
        ("seats: int = 3\n    rows: int = 2\n    'Rows.'", "EngineConfig.seats needs"),
    ],
)
def test_option_without_default_or_meaning_is_an_error(
    field: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime/config.py").write_text(f"class EngineConfig:\n    {field}\n", encoding="utf-8")
    monkeypatch.setattr(write_options, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=complaint):
        list(write_options.options("EngineConfig"))


def test_table_is_written_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- [[options Service]] -->\nold\n<!-- [[end]] -->\nAfter.\n", encoding="utf-8")
    text = write_options.derived(page)
    assert text.startswith("Before.\n<!-- [[options Service]] -->\n\n| option |")
    assert text.endswith("\n\n<!-- [[end]] -->\nAfter.\n")
    assert '| `cache_salt` | `str` | `""` | Salt' in text and "old" not in text
