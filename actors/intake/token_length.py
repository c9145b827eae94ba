"""How few tokens a text can have, so that text far too long is refused without being tokenized."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# What these do to a text never makes it shorter, nor hides a part of it from the model.
_KEEPING = frozenset({"Sequence", "ByteLevel", "Digits", "Split", "Metaspace", "Prepend", "NFC"})
# Unicode: no canonical composition makes one character of more than four.
_COMPOSED_CHARS_MAX = 4


@dataclass(frozen=True)
class TextBound:
    """No token stands for more than `token_chars_max` characters; those in `vanishing` have no token at all."""

    token_chars_max: int
    vanishing: str = ""

    def exceeded_by(self, text: str, token_limit: int) -> bool:
        """Whether `text` certainly has more than `token_limit` tokens."""
        chars_max = token_limit * self.token_chars_max
        return len(text) > chars_max and len(text) - sum(map(text.count, self.vanishing)) > chars_max


def text_bound(tokenizer: Tokenizer) -> TextBound | None:
    """The bound for a tokenizer; None for one that may swallow any amount of text.

    Such are those that strip or rewrite text, drop what they do not know, or fuse it into one unknown token.
    """
    state = json.loads(tokenizer.to_str())
    steps = [*_nested(state["normalizer"]), *_nested(state["pre_tokenizer"])]
    kinds = {step["type"] for step in steps}
    if not all(_keeps(step) for step in steps):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"]):
        return None
    vanishing = _vanishing(state["model"], is_byte_level="ByteLevel" in kinds)
    if vanishing is None:
        return None
    longest = max(map(len, tokenizer.get_vocab()))
    return TextBound(longest * (_COMPOSED_CHARS_MAX if "NFC" in kinds else 1), vanishing)


def _nested(step: dict[str, object] | None) -> Iterator[dict[str, object]]:
    """A normalizer's or pre-tokenizer's steps, sequences opened."""
    if step is None:
        return
    yield step
    for name in ("normalizers", "pretokenizers"):
        inner = step.get(name)
        if isinstance(inner, list):
            for item in inner:
                yield from _nested(item)


def _keeps(step: dict[str, object]) -> bool:
    if step["type"] == "Replace":
        pattern, content = step["pattern"], step["content"]
        source = pattern.get("String") if isinstance(pattern, dict) else None
        return isinstance(source, str) and isinstance(content, str) and len(content) >= len(source)
    return step["type"] in _KEEPING and step.get("behavior") != "Removed"


def _vanishing(model: dict[str, object], *, is_byte_level: bool) -> str | None:
    """The characters without a token: at most ASCII ones, or else None.

    A byte-level vocabulary drops each byte it lacks. Trained on real text it may well lack a control character, or the
    first byte of a rare plane, whose characters then keep their other bytes.
    """
    vocabulary = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict):
        return None
    if is_byte_level:
        names = _byte_level_names()
        if any(names[byte] not in vocabulary for byte in range(0x80, 0xC0)):
            return None
        return "".join(chr(byte) for byte in range(0x80) if names[byte] not in vocabulary)
    if not model.get("byte_fallback") or any(f"<0x{byte:02X}>" not in vocabulary for byte in range(256)):
        return None
    return ""


def _byte_level_names() -> list[str]:
    """The character that stands for each byte: itself where it prints, else the next from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
