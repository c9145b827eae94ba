"""Parsing of prompts and sampling options, and the texts of refusals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
import numpy as np
import pytest

from cuelight.actors.intake.errors import Refused, UnknownOption
from cuelight.actors.intake.parsing import (
    check_stop_tokens,
    check_text,
    check_token_ids,
    parse_options,
    parse_prompt,
    parse_sampling,
    text_length,
)
from cuelight.messages.request import Conversation, Prompt, Refusal, Sampling, Service, Turn

VOCAB_SIZE = 100


class Name(str):
    """A subclass of str."""


@pytest.mark.parametrize(
    ("raw", "prompt"),
    [
        ("hello", "hello"),
        ("", ""),
        ([1, 2], (1, 2)),
        ((np.int64(3), 4), (3, 4)),
        ([{"role": "user", "content": ""}], Conversation((Turn("user", ""),))),
        (
            (Turn("system", "s"), MappingProxyType({"content": "c", "role": "user"})),
            Conversation((Turn("system", "s"), Turn("user", "c"))),
        ),
        (Conversation((Turn("user", "c"),)), Conversation((Turn("user", "c"),))),
    ],
)
def test_valid_prompts_are_parsed(raw: object, prompt: object) -> None:
    parsed = parse_prompt(raw)
    assert parsed == prompt
    assert msgspec.msgpack.encode(parsed), "plain types only"


@pytest.mark.parametrize(
    ("raw", "refusal", "words"),
    [
        ([], Refusal.EMPTY_PROMPT, "empty"),
        ((), Refusal.EMPTY_PROMPT, "empty"),
        (None, Refusal.WRONG_TYPE, "not None"),
        (b"bytes", Refusal.WRONG_TYPE, "type bytes"),
        (7, Refusal.WRONG_TYPE, "type int"),
        (iter([1, 2]), Refusal.WRONG_TYPE, "list_iterator"),
        ({"role": "user", "content": "x"}, Refusal.WRONG_TYPE, "type dict"),
        (np.array([1, 2]), Refusal.WRONG_TYPE, "ndarray"),
        (["one", "two"], Refusal.WRONG_TYPE, "item 0 of this one is of type str"),
        ([1, True], Refusal.WRONG_TYPE, "item 1 of this one is of type bool"),
        ([1, 2.0], Refusal.WRONG_TYPE, "item 1 of this one is of type float"),
        ([1, {"role": "user", "content": "x"}], Refusal.WRONG_TYPE, "item 1"),
        ([Turn("user", "x"), 5], Refusal.WRONG_TYPE, "message 1 is of type int"),
        ([{"content": "x"}], Refusal.BAD_MESSAGE, "message 0 has no 'role'"),
        ([Turn("user", "x"), {"role": "user"}], Refusal.BAD_MESSAGE, "message 1 has no 'content'"),
        ([{"role": "user", "content": "x", "nmae": 1}], Refusal.BAD_MESSAGE, "message 0 has a key 'nmae'"),
        ([{"role": "", "content": "x"}], Refusal.BAD_MESSAGE, "role of message 0 is empty"),
        ([{"role": 3, "content": "x"}], Refusal.BAD_MESSAGE, "role of message 0 is of type int"),
        ([{"role": "user", "content": None}], Refusal.BAD_MESSAGE, "content of message 0 is None"),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            Refusal.BAD_MESSAGE,
            "content of message 0 is of type list",
        ),
        (Conversation(()), Refusal.EMPTY_PROMPT, "empty"),
        (Conversation(5), Refusal.WRONG_TYPE, "type int"),  # type: ignore[arg-type]
        (Conversation((1, 2)), Refusal.WRONG_TYPE, "message 0 is of type int"),  # type: ignore[arg-type]
        (Conversation((Turn("", "x"),)), Refusal.BAD_MESSAGE, "role of message 0 is empty"),
        ((Turn("user", 5),), Refusal.BAD_MESSAGE, "content of message 0 is of type int"),  # type: ignore[arg-type]
    ],
)
def test_invalid_prompts_are_refused(raw: object, refusal: Refusal, words: str) -> None:
    with pytest.raises(Refused) as caught:
        parse_prompt(raw)
    assert caught.value.refusal is refusal
    assert words in caught.value.reason


@pytest.mark.parametrize(
    ("prompt", "where"),
    [
        ("ok \ud83d", "the prompt has a lone surrogate at character 3"),
        (Conversation((Turn("user", "ok"), Turn("user", "\udc00"))), "the content of message 1"),
        (Conversation((Turn("\udc00", "ok"),)), "the role of message 0"),
    ],
)
def test_lone_surrogates_are_refused(prompt: Prompt, where: str) -> None:
    with pytest.raises(Refused, match=where) as caught:
        check_text(prompt)
    assert caught.value.refusal is Refusal.BAD_PROMPT


def test_all_unicode_characters_are_text() -> None:
    check_text("a\x00é😀\U0010ffff\n")
    check_text(Conversation((Turn("user", "日本"),)))
    check_text((1, 2))


@pytest.mark.parametrize("bad", [-1, VOCAB_SIZE, pytest.param(10**5000, id="huge")])
def test_token_ids_outside_the_vocabulary_are_named(bad: int) -> None:
    check_token_ids((0, VOCAB_SIZE - 1), VOCAB_SIZE)
    with pytest.raises(Refused, match=r"token 1 of the prompt is .*; ids go from 0 to 99") as caught:
        check_token_ids((5, bad, -7), VOCAB_SIZE)
    assert caught.value.refusal is Refusal.TOKEN_OUT_OF_RANGE


def test_text_length_counts_the_characters_to_tokenize() -> None:
    turn = Turn("user", "x")
    assert text_length("12345") == 5
    assert text_length((1, 2, 3)) == 0
    assert text_length(Conversation((turn,) * 10)) > text_length(Conversation((turn,))) > 1


ACCEPTED: list[tuple[Mapping[str, object], Mapping[str, object]]] = [
    ({}, {}),
    ({"max_tokens": np.int32(5), "temperature": 1}, {"max_tokens": 5, "temperature": 1.0}),
    ({"temperature": np.float32(0.5), "top_p": 1}, {"temperature": 0.5, "top_p": 1.0}),
    ({"min_tokens": 256, "top_k": 0}, {"min_tokens": 256}),
    ({"stop": "END"}, {"stop": ("END",)}),
    ({"stop": ["a", Name("b")]}, {"stop": ("a", "b")}),
    ({"stop": []}, {"stop": ()}),
    ({"stop_token_ids": [np.int64(7), 99]}, {"stop_token_ids": (7, 99)}),
    ({"seed": None}, {"seed": None}),
    ({"seed": 0}, {"seed": 0}),
    ({"seed": -1}, {"seed": 2**64 - 1}),
    ({"seed": 2**64 - 1}, {"seed": 2**64 - 1}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
]


@pytest.mark.parametrize(("options", "fields"), ACCEPTED)
def test_valid_sampling_options_are_parsed(options: Mapping[str, object], fields: Mapping[str, object]) -> None:
    parsed = parse_sampling(options)
    expected = msgspec.convert(fields, Sampling)
    assert parsed == expected
    assert parse_options(options) == (expected, Service())
    check_stop_tokens(parsed, VOCAB_SIZE)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(parsed), type=Sampling)
    assert decoded == parsed, "plain types that cross a process boundary"
    assert type(parsed.temperature) is float


WRONG_TYPE, BAD, RANGE = Refusal.WRONG_TYPE, Refusal.BAD_SAMPLING, Refusal.TOKEN_OUT_OF_RANGE
REFUSED = [
    ("max_tokens", "3", WRONG_TYPE, "max_tokens must be an integer, and it is of type str"),
    ("max_tokens", True, WRONG_TYPE, "max_tokens must be an integer, and it is of type bool"),
    ("max_tokens", 3.0, WRONG_TYPE, "of type float"),
    ("max_tokens", None, WRONG_TYPE, "it is None"),
    ("max_tokens", 0, BAD, "max_tokens is 0; it must be at least 1"),
    pytest.param("max_tokens", -(10**5000), BAD, "bits; it must be at least 1", id="huge"),
    ("max_tokens", 2**63, BAD, "below 2**63"),
    ("min_tokens", -1, BAD, "min_tokens is -1"),
    ("min_tokens", 257, BAD, "min_tokens is 257; it must be at most max_tokens, which is 256"),
    ("temperature", "hot", WRONG_TYPE, "temperature must be a number"),
    ("temperature", False, WRONG_TYPE, "temperature must be a number"),
    ("temperature", 1j, WRONG_TYPE, "of type complex"),
    ("temperature", -0.1, BAD, "temperature is -0.1"),
    ("temperature", math.nan, BAD, "temperature is nan"),
    ("temperature", math.inf, BAD, "temperature is inf"),
    ("temperature", 10**400, BAD, "temperature is too large"),
    ("top_p", 0, BAD, "top_p is 0.0"),
    ("top_p", 1.01, BAD, "top_p is 1.01"),
    ("top_p", math.nan, BAD, "top_p is nan"),
    ("top_k", -1, BAD, "top_k is -1"),
    ("top_k", 1.5, WRONG_TYPE, "top_k must be an integer"),
    ("seed", 2**64, BAD, "seed is 18446744073709551616"),
    ("seed", -(2**63) - 1, BAD, "64 bits"),
    ("seed", "1", WRONG_TYPE, "seed must be an integer"),
    ("stop", 5, WRONG_TYPE, "stop must be a string or a list of strings"),
    ("stop", None, WRONG_TYPE, "it is None"),
    ("stop", ["a", 5], WRONG_TYPE, "stop[1] must be a string"),
    ("stop", "", BAD, "stop[0] has 0 characters"),
    ("stop", ["a", ""], BAD, "stop[1] has 0 characters"),
    ("stop", ["a" * 1025], BAD, "stop[0] has 1025 characters"),
    ("stop", ["a"] * 17, BAD, "stop has 17 strings"),
    ("stop", ["\ud800"], BAD, "lone surrogate"),
    ("stop_token_ids", 5, WRONG_TYPE, "stop_token_ids must be a list of token ids"),
    ("stop_token_ids", [1, "2"], WRONG_TYPE, "stop_token_ids[1] must be an integer"),
    ("stop_token_ids", [-1], RANGE, "stop_token_ids has -1"),
    ("stop_token_ids", [1] * 1025, BAD, "stop_token_ids has 1025 ids"),
    ("ignore_eos", 1, WRONG_TYPE, "ignore_eos must be True or False"),
]


@pytest.mark.parametrize(("name", "value", "refusal", "words"), REFUSED)
def test_invalid_sampling_options_are_refused(name: str, value: object, refusal: Refusal, words: str) -> None:
    with pytest.raises(Refused) as caught:
        parse_options({name: value})
    assert caught.value.refusal is refusal
    assert words in caught.value.reason


def test_stop_tokens_are_checked_once_the_vocabulary_is_known() -> None:
    sampling = parse_sampling({"stop_token_ids": [VOCAB_SIZE]})
    with pytest.raises(Refused, match="from 0 to 99") as caught:
        check_stop_tokens(sampling, VOCAB_SIZE)
    assert caught.value.refusal is RANGE


def test_unknown_option_is_named_with_the_valid_ones() -> None:
    with pytest.raises(UnknownOption, match=r"'max_new_tokens'; .* are max_tokens, .*ignore_eos, tenant") as caught:
        parse_options({"max_tokens": 0, "max_new_tokens": 5})
    assert caught.value.name == "max_new_tokens"
