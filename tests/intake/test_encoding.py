"""Prompts as token ids, compared with transformers: small tokenizers made here, and the default model's own."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from small_tokenizers import CHAT, PLENTY, TEXTS, byte_level, fallback, reference
from tokenizers import (
    AddedToken,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
)
from transformers import AutoTokenizer

from cuelight.actors.intake.errors import Refused
from cuelight.actors.intake.tokenizer import PromptEncoder, TextBound, text_bound
from cuelight.messages.request import Conversation, Prompt, Refusal, Turn


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_encoded_like_transformers(text: str) -> None:
    assert PromptEncoder.of(reference()).encode(text, PLENTY) == tuple(reference()(text).input_ids)


def test_conversation_is_rendered_up_to_the_assistants_turn() -> None:
    messages = [{"role": turn.role, "content": turn.content} for turn in CHAT.turns]
    expected = reference().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    token_ids = PromptEncoder.of(reference()).encode(CHAT, PLENTY)
    assert token_ids == tuple(expected)
    assert byte_level().decode(token_ids).endswith("assistant:")


def test_token_ids_stay_unchanged() -> None:
    assert PromptEncoder.of(reference()).encode((3, 1, 2), PLENTY) == (3, 1, 2)


def test_truncation_and_padding_of_a_tokenizer_are_not_applied() -> None:
    tokenizer = reference()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=100)
    text = "hello two worlds"
    assert PromptEncoder.of(tokenizer).encode(text, PLENTY) == tuple(reference()(text).input_ids)


@pytest.mark.parametrize(
    ("encoder", "prompt", "refusal", "words"),
    [
        (PromptEncoder.of(reference()), Conversation((Turn("tool", "x"),)), Refusal.BAD_MESSAGE, "no tools here"),
        (PromptEncoder.of(reference("{{ nothing.at.all }}")), CHAT, Refusal.BAD_MESSAGE, "'nothing' is undefined"),
        (PromptEncoder.of(reference(None)), CHAT, Refusal.BAD_MESSAGE, "has no chat template"),
        (PromptEncoder.of(reference()), "\ud800", Refusal.BAD_PROMPT, "lone surrogate"),
        (PromptEncoder.of(reference()), Conversation((Turn("user", "\ud800"),)), Refusal.BAD_PROMPT, "lone surrogate"),
    ],
)
def test_invalid_prompts_are_refused(encoder: PromptEncoder, prompt: Prompt, refusal: Refusal, words: str) -> None:
    with pytest.raises(Refused) as caught:
        encoder.encode(prompt, PLENTY)
    assert caught.value.refusal is refusal
    assert words in caught.value.reason


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    encoder = PromptEncoder.of(reference())
    longest = max(map(len, byte_level().get_vocab()))
    assert len(encoder.encode("<start>" * 10, 10)) == 11, "text that might have fitted is encoded"
    for prompt in ("x" * (10 * longest + 1), Conversation((Turn("user", "x" * (10 * longest + 1)),))):
        with pytest.raises(Refused, match="cannot fit in 10 tokens") as caught:
            encoder.encode(prompt, 10)
        assert caught.value.refusal is Refusal.PROMPT_TOO_LONG


def test_two_threads_encode_at_once() -> None:
    encoder = PromptEncoder.of(reference())
    prompts = [*TEXTS, CHAT] * 40
    expected = [encoder.encode(prompt, PLENTY) for prompt in prompts]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda prompt: encoder.encode(prompt, PLENTY), prompts)) == expected


def test_text_bound_exists_only_if_no_text_can_vanish() -> None:
    assert text_bound(byte_level()) == TextBound(max(map(len, byte_level().get_vocab())))
    assert text_bound(fallback()) == TextBound(len("<0x00>"))
    assert text_bound(fallback(every_byte=False)) is None, "unknown text is fused into one token"

    composed = byte_level()
    composed.normalizer = normalizers.NFC()
    assert text_bound(composed) == TextBound(4 * max(map(len, composed.get_vocab())))

    for vanishing in (normalizers.Strip(), normalizers.Replace("  ", " "), normalizers.StripAccents()):
        shrinking = byte_level()
        shrinking.normalizer = vanishing
        assert text_bound(shrinking) is None

    splitting = byte_level()
    splitting.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert text_bound(splitting) is None

    stripping = byte_level()
    stripping.add_special_tokens([AddedToken("<strip>", rstrip=True)])
    assert text_bound(stripping) is None

    assert text_bound(Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))) is None


@pytest.mark.parametrize("missing", ["\x04\x1f", "z"])
def test_characters_missing_in_a_vocabulary_do_not_count(missing: str) -> None:
    lacking = byte_level()
    names = {pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(char)[0][0] for char in missing}
    state = json.loads(lacking.to_str())
    state["model"]["vocab"] = {token: i for token, i in state["model"]["vocab"].items() if token not in names}
    lacking = Tokenizer.from_str(json.dumps(state))
    assert lacking.encode(missing * 50, add_special_tokens=False).ids == []
    bound = text_bound(lacking)
    assert bound is not None
    assert bound.vanishing == missing
    assert not bound.exceeded_by(missing * 5000, token_limit=1)
    assert bound.exceeded_by(missing * 5000 + "a" * (bound.token_chars_max + 1), token_limit=1)


def test_folder_is_loaded_like_transformers(tmp_path: Path) -> None:
    reference().save_pretrained(tmp_path)
    encoder = PromptEncoder.load(tmp_path)
    assert encoder.encode(CHAT, PLENTY) == PromptEncoder.of(reference()).encode(CHAT, PLENTY)


@pytest.mark.model
def test_prompts_of_the_default_model(model_folder: Path) -> None:
    encoder = PromptEncoder.load(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>", "def f(x):\n    return x ** 2\n"]:
        assert encoder.encode(text, PLENTY) == tuple(tokenizer(text).input_ids)
    for chat in (
        CHAT,
        Conversation((Turn("user", "hi"),)),
        Conversation((Turn("user", "hi"), Turn("assistant", "ho"), Turn("user", "<|im_end|>"))),
    ):
        messages = [{"role": turn.role, "content": turn.content} for turn in chat.turns]
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert encoder.encode(chat, PLENTY) == tuple(expected)
    with pytest.raises(Refused, match="cannot fit"):
        encoder.encode("tide " * 20_000, 1_000)
    assert encoder.encode("\x04" * 100_000, 1_000) == (), "its vocabulary has no such byte"
