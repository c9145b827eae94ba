"""Cached tokenizers, loaded without transformers, compared with transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small_tokenizers import CHAT, PLENTY, TEXTS, byte_level, fallback, reference
from tokenizers import AddedToken, Tokenizer, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cuelight.actors.detokenizer.decoder import load_cached_decoder, load_decoder
from cuelight.actors.intake import tokenizer_cache as keeping
from cuelight.actors.intake.errors import Refused
from cuelight.actors.intake.tokenizer import REFUSAL_FILE, TOKENIZER_FILE, PromptEncoder
from cuelight.actors.intake.tokenizer_cache import NotCacheable, cache_tokenizer
from cuelight.messages.request import Conversation, Turn
from cuelight.models import tokenizer_cache as kept_tokenizer

CHATS = [
    CHAT,
    Conversation((Turn("user", "hi"),)),
    Conversation((Turn("user", " {{ bos_token }} <turn>\n"), Turn("assistant", "ho\n"), Turn("user", "<start>"))),
]
TEMPLATES = {
    "plain": "{% for m in messages %}{{ m.role }}:{{ m['content'] }}\n{% endfor %}{{ '>' if add_generation_prompt }}",
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{{ pad_token }}{% endfor %}",
    "what is not there": "{{ unk_token }}{{ tools is none }}{{ documents is none }}{{ nothing is defined }}",
    "loop controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% break %}{% endfor %}",
    "tojson": "{{ messages | tojson(indent=1) }}{{ '<é>' | tojson }}{{ messages[0] | tojson(separators=(',', ':')) }}",
    "namespace": "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}",
    "blocks": "  {%- if true %}\n   {{ messages[0].content | trim }}\n  {% endif %}\n{# note #}\nend\n",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "the date": "{{ strftime_now('%Y') | length }}{{ date_string is defined }}",
    "refuses all": "{{ raise_exception('never ' ~ messages[0].role) }}",
    "not safe": "{{ messages.append(1) }}",
    "no such name": "{{ nothing.at.all }}",
    "no template at all": "{% for",
}


def outcome(encoder: PromptEncoder, prompt: str | Conversation) -> object:
    try:
        return encoder.encode(prompt, PLENTY)
    except Refused as refused:
        return refused.reason


def same(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> PromptEncoder:
    """Cache the tokenizer and check that the cached one encodes and decodes like the folder's; return its encoder."""
    source, kept = tmp_path / "source", tmp_path / "kept"
    tokenizer.save_pretrained(source)
    kept.mkdir()
    cache_tokenizer(source, kept)
    original, encoder = PromptEncoder.load(source), PromptEncoder.load_cached(kept)
    for prompt in [*TEXTS, *CHATS]:
        assert outcome(encoder, prompt) == outcome(original, prompt)
    decode, decode_kept = load_decoder(source), load_cached_decoder(kept / TOKENIZER_FILE)
    assert decode_kept.byte_tokens == decode.byte_tokens
    for text in TEXTS:
        token_ids = [*encoder.encode(text, PLENTY), 10_000]
        assert decode_kept(token_ids) == decode(token_ids)
    return encoder


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_rendered_like_transformers(name: str, tmp_path: Path) -> None:
    tokenizer = reference(TEMPLATES[name])
    tokenizer.pad_token, tokenizer.eos_token = "<turn>", "<start>"
    encoder = same(tokenizer, tmp_path)
    if name not in ("refuses all", "not safe", "no such name", "no template at all"):
        expected = tokenizer.apply_chat_template(
            [{"role": turn.role, "content": turn.content} for turn in CHAT.turns],
            add_generation_prompt=True,
            return_dict=False,
        )
        assert encoder.encode(CHAT, PLENTY) == tuple(expected)


def stripping() -> Tokenizer:
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<strip>", lstrip=True, rstrip=True), AddedToken("day", normalized=True)])
    return backend


def ending() -> Tokenizer:
    backend = byte_level()
    start = backend.token_to_id("<start>")
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing("<start> $A <start>", special_tokens=[("<start>", start)]),
        ]
    )
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    return backend


@pytest.mark.parametrize("make", [byte_level, fallback, stripping, ending])
@pytest.mark.parametrize("split_special_tokens", [False, True])
def test_tokenizers_of_many_kinds_are_cached(
    make: Callable[[], Tokenizer], split_special_tokens: bool, tmp_path: Path
) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make(), clean_up_tokenization_spaces=True, split_special_tokens=split_special_tokens
    )
    same(tokenizer, tmp_path)


def test_several_templates_need_a_default(tmp_path: Path) -> None:
    tokenizer = reference()
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "other": "x"}
    same(tokenizer, tmp_path)
    tokenizer.chat_template = {"one": "x", "other": "x"}
    tokenizer.save_pretrained(tmp_path / "none")
    with pytest.raises(NotCacheable, match="no default"):
        cache_tokenizer(tmp_path / "none", tmp_path / "kept")


class Odd(PreTrainedTokenizerFast):
    """A tokenizer that overrides `apply_chat_template`."""

    def apply_chat_template(self, *_: object, **__: object) -> str:  # type: ignore[override]
        return "odd"


def test_tokenizer_that_cannot_be_cached_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    reference().save_pretrained(source)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: Odd(tokenizer_object=byte_level()))
    with pytest.raises(NotCacheable, match="Odd overrides apply_chat_template"):
        cache_tokenizer(source, tmp_path)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: object())
    assert keeping.main([str(source), str(tmp_path)]) == 0
    assert "written in Python" in (tmp_path / REFUSAL_FILE).read_text()
    monkeypatch.undo()
    monkeypatch.setattr(PromptEncoder, "load_cached", lambda _: PromptEncoder.of(reference("other")))
    with pytest.raises(NotCacheable, match=r"encodes .* differently"):
        cache_tokenizer(source, tmp_path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tokenizer files of a model folder, with an empty cache, as in a process without torch."""
    monkeypatch.setenv("CUELIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_tokenizer, "_has_torch", lambda: False)
    source = tmp_path / "source"
    reference().save_pretrained(source)
    return source


def test_tokenizer_is_made_once_and_then_cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def keep_here(source: Path, into: Path) -> None:
        made.append(source)
        cache_tokenizer(source, into)

    monkeypatch.setattr(kept_tokenizer, "_keep", keep_here)
    monkeypatch.setattr(PromptEncoder, "load", lambda _: pytest.fail("loaded through transformers"))
    for _ in range(2):
        encoder, decode = kept_tokenizer.load_tokenizer(folder)
        assert encoder.encode(CHAT, PLENTY) == PromptEncoder.of(reference()).encode(CHAT, PLENTY)
        assert decode(encoder.encode("hello world", PLENTY)) == "hello world"
        assert made == [folder]
    state = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").write_text("new {{ messages[0].content }}")
    (folder / "tokenizer_config.json").write_text(json.dumps(state, indent=7))
    encoder, _ = kept_tokenizer.load_tokenizer(folder)
    assert made == [folder, folder], "another file, another tokenizer"
    assert encoder.encode(CHAT, PLENTY) == encoder.encode("new be brief", PLENTY)[1:]
    assert len(list((folder.parent / "cache" / "models").glob("tokenizer-*"))) == 2, (
        "the current one and a lock; the old one is removed"
    )


@pytest.mark.parametrize("trouble", ["refused", "failed", "no cache", "no process"])
def test_transformers_loads_a_tokenizer_that_is_not_cached(
    trouble: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs: list[object] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        runs.append(command)
        if trouble == "no process":
            raise OSError("no more of them")
        if trouble == "refused":
            (Path(command[-1]) / REFUSAL_FILE).write_text("it is odd")
        return subprocess.CompletedProcess(command, int(trouble == "failed"), "", "Trace\nValueError: odd")

    monkeypatch.setattr(kept_tokenizer.subprocess, "run", run)
    if trouble == "no cache":
        (folder.parent / "file").write_text("")
        monkeypatch.setenv("CUELIGHT_CACHE", str(folder.parent / "file" / "cache"))
    why = {"refused": "it is odd", "failed": "ValueError: odd", "no cache": "cannot be used", "no process": "no more"}
    for _ in range(2):
        encoder, _ = kept_tokenizer.load_tokenizer(folder)
        assert encoder.encode(CHAT, PLENTY) == PromptEncoder.of(reference()).encode(CHAT, PLENTY)
        assert why[trouble] in caplog.text
    assert len(runs) == {"refused": 1, "failed": 2, "no cache": 0, "no process": 2}[trouble]


def test_nothing_is_cached_if_torch_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_tokenizer, "_has_torch", lambda: True)
    monkeypatch.setattr(kept_tokenizer, "_keep", lambda *_: pytest.fail("cached though torch is loaded"))
    kept_tokenizer.load_tokenizer(folder)


WITHOUT_TORCH = """
import sys
from pathlib import Path
from cuelight.models.tokenizer_cache import load_tokenizer
from cuelight.messages.request import Conversation, Turn
for _ in range(2):
    encoder, decode = load_tokenizer(Path(sys.argv[1]))
    print(list(encoder.encode(Conversation((Turn("user", "hi"),)), 100)), decode(encoder.encode("hello world", 100)))
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "safetensors"}))
"""


def test_process_loads_no_torch_for_its_tokenizer(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(folder)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"CUELIGHT_CACHE": str(folder.parent / "cache")},
    )
    ids = list(PromptEncoder.of(reference()).encode(Conversation((Turn("user", "hi"),)), PLENTY))
    assert done.stdout.splitlines() == [f"{ids} hello world"] * 2 + ["[]"]


@pytest.mark.model
def test_tokenizer_of_the_default_model_is_cached(model_folder: Path, tmp_path: Path) -> None:
    cache_tokenizer(model_folder, tmp_path)
    tokenizer, encoder = AutoTokenizer.from_pretrained(model_folder), PromptEncoder.load_cached(tmp_path)
    decode = load_cached_decoder(tmp_path / TOKENIZER_FILE)
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>", "def f(x):\n    return x ** 2\n"]:
        token_ids = tokenizer(text).input_ids
        assert encoder.encode(text, PLENTY) == tuple(token_ids)
        assert decode(token_ids) == tokenizer.decode(token_ids, skip_special_tokens=True)
    for chat in CHATS:
        assert outcome(encoder, chat) == outcome(PromptEncoder.of(tokenizer), chat)
