"""Incremental text against one decode of everything, and stop strings against a search in the whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from cuelight.actors.detokenizer.decoder import Decoder, load_decoder
from cuelight.actors.detokenizer.text import IncrementalText, StopMatcher

CORPUS = [
    "hello world, the tide is high",
    "two ships — three ports",
    "día naïve 😀 😀 日本語",
    "  spaced   out\n\tlines",
]
TEXTS = ["hello world", "naïve día 😀😀", "日本語 tide", "  a\n\n b ", "🏳️‍🌈 flag", "é"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["<end>"])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece(*decoder: decoders.Decoder) -> Tokenizer:
    """As Llama 2's: spaces as U+2581, bytes for what the vocabulary lacks, one leading space dropped."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "h", "e", "l", "o", "▁h", "el", "lo", "hello", "▁hello", "▁▁", "é", "�", "▁w", ",", "日"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocabulary, merges=[("▁", "h"), ("e", "l"), ("l", "o")], unk_token="<unk>")
    model.byte_fallback = True
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("<s>", special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(list(decoder))
    return tokenizer


def word_piece() -> Tokenizer:
    pieces = ["[UNK]", "hello", "##s", "world", ",", "n't", "do"]
    tokenizer = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def word_end() -> Tokenizer:
    pieces = ["a</w>", "b", "c</w>", "d"]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


TOKENIZERS = {
    "byte-level": byte_level(),
    "byte-fallback-strip": sentencepiece(
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ),
    "byte-fallback": sentencepiece(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
    "metaspace": sentencepiece(decoders.ByteFallback(), decoders.Metaspace()),
    "word-piece": word_piece(),
    "word-end": word_end(),
}
DECODERS = {
    name: Decoder(lambda ids, tokenizer=tokenizer: tokenizer.decode(ids), tokenizer.get_vocab())
    for name, tokenizer in TOKENIZERS.items()
}
BYTE_LEVEL = DECODERS["byte-level"]
BYTE_FALLBACK = DECODERS["byte-fallback-strip"]


def pieces_of(decoder: Decoder, token_ids: Sequence[int]) -> list[str]:
    text = IncrementalText(decoder, decoder.byte_tokens)
    return [*(text.push((token_id,)) for token_id in token_ids), text.finish()]


@st.composite
def streams(draw: st.DrawFn) -> tuple[str, list[int]]:
    """A tokenizer and tokens for it: random ids, ids it does not know, runs of few, and real text, mixed."""
    name = draw(st.sampled_from(sorted(TOKENIZERS)))
    tokenizer = TOKENIZERS[name]
    size = tokenizer.get_vocab_size()
    few = st.sampled_from(draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=3)))
    part = st.one_of(
        st.lists(st.integers(0, size + 3), max_size=20),
        st.lists(few, max_size=40),
        st.sampled_from(TEXTS).map(lambda text: tokenizer.encode(text).ids),
    )
    return name, [token_id for ids in draw(st.lists(part, max_size=5)) for token_id in ids]


def letters(raw: bytes) -> list[int]:
    """One byte-level token for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + rank) for rank, byte in enumerate(others)}
    return [TOKENIZERS["byte-level"].token_to_id(names[byte]) for byte in raw]


def bytes_of(raw: bytes) -> list[int]:
    return [TOKENIZERS["byte-fallback"].token_to_id(f"<0x{byte:02X}>") for byte in raw]


@settings(deadline=None)
@given(streams())
@example(("byte-fallback-strip", [*bytes_of("é".encode()), *bytes_of(b"\xe2"), 260]))
@example(("byte-fallback-strip", [1, 258, 1, 258, *[1] * 40, 268]))
def test_pieces_joined_equal_one_decode(stream: tuple[str, list[int]]) -> None:
    name, token_ids = stream
    assert "".join(pieces_of(DECODERS[name], token_ids)) == DECODERS[name](token_ids)


@settings(deadline=None)
@given(streams(), st.data())
def test_how_tokens_are_grouped_changes_nothing(stream: tuple[str, list[int]], data: st.DataObject) -> None:
    name, token_ids = stream
    decoder = DECODERS[name]
    cut = data.draw(st.integers(0, len(token_ids)))
    text = IncrementalText(decoder, decoder.byte_tokens)
    grouped = [text.push(token_ids[:cut]), text.push(()), text.push(token_ids[cut:]), text.finish()]
    assert "".join(grouped) == decoder(token_ids)


@settings(deadline=None)
@given(streams())
def test_what_was_given_is_always_a_prefix(stream: tuple[str, list[int]]) -> None:
    name, token_ids = stream
    whole = DECODERS[name](token_ids)
    given_text = ""
    for piece in pieces_of(DECODERS[name], token_ids):
        given_text += piece
        assert whole.startswith(given_text)


@settings(deadline=None)
@given(streams())
def test_only_the_last_replacement_character_is_held_back(stream: tuple[str, list[int]]) -> None:
    token_ids = [token_id % TOKENIZERS["byte-level"].get_vocab_size() for token_id in stream[1]]
    given_text = ""
    for index, piece in enumerate(pieces_of(BYTE_LEVEL, token_ids)[:-1]):
        given_text += piece
        assert given_text == BYTE_LEVEL(token_ids[: index + 1]).removesuffix("\ufffd")


def test_a_character_appears_when_its_last_byte_does() -> None:
    token_ids = letters("🦀éa".encode())
    assert pieces_of(BYTE_LEVEL, token_ids) == ["", "", "", "🦀", "", "é", "a", ""]


def test_half_a_character_at_the_end_comes_out_as_a_replacement() -> None:
    assert pieces_of(BYTE_LEVEL, letters("a🦀".encode()[:-1])) == ["a", "", "", "", "\ufffd"]


def test_bytes_that_are_no_text_still_stream() -> None:
    assert pieces_of(BYTE_LEVEL, letters(b"\x80" * 200)) == ["", *["\ufffd"] * 200]
    assert pieces_of(BYTE_LEVEL, letters(b"\x80a\xf0\xf0a")) == ["", "\ufffda", "", "\ufffd", "\ufffda", ""]


def test_a_run_of_fallback_bytes_is_held_until_it_ends() -> None:
    letter = TOKENIZERS["byte-fallback"].token_to_id("a")
    assert pieces_of(BYTE_FALLBACK, [*bytes_of("é\n".encode()), letter]) == ["", "", "", "é\na", ""]
    assert pieces_of(BYTE_FALLBACK, bytes_of("é".encode() + b"\xe2")) == ["", "", "", "\ufffd\ufffd\ufffd"]


def test_a_leading_space_is_dropped_once_even_behind_a_special_token() -> None:
    special, hello = 1, TOKENIZERS["byte-fallback"].token_to_id("▁hello")
    assert pieces_of(BYTE_FALLBACK, [special, hello, special, hello]) == ["", "hello", "", " hello", ""]


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@pytest.mark.parametrize("kind", ["mixed", "same", "skipped", "continuation"])
def test_the_work_per_token_does_not_grow(name: str, kind: str) -> None:
    decoder = DECODERS[name]
    size = TOKENIZERS[name].get_vocab_size()
    decoded = 0

    def counting(token_ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(token_ids)
        return decoder(token_ids)

    patterns: dict[str, Callable[[int], int]] = {
        "mixed": lambda i: (i * 7919) % size,
        "same": lambda i: size - 1,
        "skipped": lambda i: size + 5,
        "continuation": lambda i: letters(b"\x80")[0] if name == "byte-level" else min(2 + 0x80, size - 1),
    }
    text = IncrementalText(counting, decoder.byte_tokens)
    for index in range(2000):
        text.push((patterns[kind](index),))
    text.finish()
    assert decoded <= 2000 * 25


def test_a_decoder_that_rewrites_given_text_neither_stalls_nor_grows() -> None:
    def shrinking(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return "".join(chr(97 + (len(token_ids) + i) % 26) for i in range(len(token_ids)))

    longest = 0
    text = IncrementalText(shrinking)
    pieces = [text.push((index,)) for index in range(500)]
    assert longest < 60
    assert sum(map(len, pieces)) > 400


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    assert BYTE_LEVEL([-1, 10**12, 2**40]) == ""
    assert pieces_of(BYTE_LEVEL, [-1, TOKENIZERS["byte-level"].token_to_id("a"), 10**12]) == ["", "a", "", ""]


def test_byte_names_are_bytes_only_where_the_tokenizer_decodes_them_so() -> None:
    assert len(BYTE_FALLBACK.byte_tokens) == 256
    assert not BYTE_LEVEL.byte_tokens
    plain = Tokenizer(models.WordLevel({"<0x80>": 0}, unk_token="<0x80>"))
    assert not Decoder(plain.decode, plain.get_vocab()).byte_tokens


def expected(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """By the definition: the stop string that is complete first ends the text, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@settings(deadline=None)
@given(
    st.lists(st.text("abé😀", max_size=4), max_size=12),
    st.lists(st.text("abé😀", min_size=1, max_size=5), max_size=4),
)
@example(["ab", "c", "d"], ["abcd", "bc"])
@example(["aaa", "ab"], ["aab"])
def test_stops_do_not_depend_on_the_pieces(pieces: list[str], stops: list[str]) -> None:
    whole, is_match = expected("".join(pieces), stops)
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        assert whole.startswith(shown)
        if matcher.matched:
            break
    shown += matcher.finish()
    assert (shown, matcher.matched) == (whole, is_match)


@settings(deadline=None)
@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_no_more_is_held_back_than_may_be_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(character) for character in text if not matcher.matched)
    if not matcher.matched:
        held = text[len(shown) :]
        partial = {text[cut:] for cut in range(len(text)) if any(stop.startswith(text[cut:]) for stop in stops)}
        assert held == max(partial, key=len, default="")


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        (("STOP",), ["go S", "TO", "P on"], ["go ", "", ""]),
        (("STOP",), ["go S", "TO", "RY"], ["go ", "", "STORY"]),
        (("\n\n", "###"), ["a\n", "#", "\n\nb"], ["a", "\n", "#"]),
        (("日本",), ["x日", "日本"], ["x", "日"]),
        (("longer than the text",), ["long", "er"], ["", ""]),
        (("b", "ab"), ["xa", "b"], ["x", ""]),
        ((), ["anything"], ["anything"]),
    ],
)
def test_stop_examples(stops: tuple[str, ...], pieces: list[str], shown: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert [matcher.feed(piece) for piece in pieces] == shown


@pytest.mark.model
def test_the_default_models_text(model_folder: object) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(model_folder)
    decoder = load_decoder(model_folder)
    for source in [*TEXTS, "<|im_start|>user\nhi<|im_end|>", "日本語 👩‍👩‍👧 \u0301 2026\r\n"]:
        token_ids = reference(source).input_ids
        plain = reference.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert "".join(pieces_of(decoder, token_ids)) == decoder(token_ids) == plain
