"""Tokenize prompts exactly as transformers does.

Encoders may be used from two threads at once: they do not change after loading.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias, cast

import msgspec

from cuelight.actors.intake.errors import Refused
from cuelight.actors.intake.parsing import check_text
from cuelight.messages.request import Conversation, Prompt, Refusal

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILE, CHAT_FILE = "tokenizer.json", "chat.json"
"""The files of a cached tokenizer; `tokenizer_cache` writes them."""

REFUSAL_FILE = "refused.txt"
"""Written instead of these files, with the reason, if the tokenizer cannot be cached."""

_Encode: TypeAlias = Callable[[str, bool], Sequence[int]]
"""Returns the token ids of a text, with or without the special tokens that the tokenizer adds."""
_Render: TypeAlias = Callable[[Conversation], str]


class ChatTemplate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The chat template of a cached tokenizer, if it has one, and the special tokens that the template names.

    With `split_special_tokens`, text that looks like a special token is tokenized as plain text.
    """

    template: str | None
    variables: dict[str, str]
    split_special_tokens: bool

    def render(self, conversation: Conversation) -> str:
        """Render a conversation as transformers does, up to the assistant's turn. Raises what the template raises."""
        from transformers.utils.chat_template_utils import render_jinja_template

        # The cast is needed because the function is annotated as returning one text.
        render = cast(Callable[..., tuple[list[str], object]], render_jinja_template)
        rendered, _ = render(
            conversations=[_messages(conversation)],
            chat_template=self.template,
            add_generation_prompt=True,
            **self.variables,
        )
        return rendered[0]


class PromptEncoder:
    """A model's tokenizer and chat template; `render` is None where there is no template."""

    def __init__(self, encode: _Encode, render: _Render | None, bound: TextBound | None) -> None:
        self._encode_text, self._render_chat, self._bound = encode, render, bound

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Wrap a tokenizer that transformers has loaded."""
        from transformers import PreTrainedTokenizerFast

        def render(conversation: Conversation) -> str:
            return str(
                tokenizer.apply_chat_template(_messages(conversation), add_generation_prompt=True, tokenize=False)
            )

        def encode(text: str, add_special_tokens: bool) -> Sequence[int]:
            ids: Sequence[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids
            return ids

        chat = None if tokenizer.chat_template is None else render
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            backend = tokenizer.backend_tokenizer
            return cls(_encoder(backend, tokenizer.split_special_tokens), chat, text_bound(backend))
        return cls(encode, chat, None)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load the tokenizer of a Hugging Face model folder. Takes seconds; raises what transformers raises."""
        from transformers import AutoTokenizer

        return cls.of(AutoTokenizer.from_pretrained(folder, local_files_only=True))

    @classmethod
    def load_cached(cls, folder: Path) -> Self:
        """Load the tokenizer that `tokenizer_cache` wrote to `folder`, without torch. Raises what reading it raises."""
        from tokenizers import Tokenizer

        backend: Tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        chat = msgspec.json.decode((folder / CHAT_FILE).read_bytes(), type=ChatTemplate)
        if chat.template is None:
            return cls(_encoder(backend, chat.split_special_tokens), None, text_bound(backend))
        # Import now, which takes half a second, rather than at the first conversation.
        import transformers.utils.chat_template_utils  # noqa: F401

        return cls(_encoder(backend, chat.split_special_tokens), chat.render, text_bound(backend))

    def encode(self, prompt: Prompt, token_limit: int) -> tuple[int, ...]:
        """Return the prompt's token ids.

        Text is encoded with the special tokens that the tokenizer adds, a conversation is rendered by the chat template
        up to the assistant's turn, and ids are returned as they are.

        Raises `Refused`: BAD_PROMPT for text without a UTF-8 form, BAD_MESSAGE if the model has no chat template or the
        template refuses the conversation, PROMPT_TOO_LONG for text whose length alone proves that it has more than
        `token_limit` tokens. A prompt that is only slightly too long is encoded all the same.
        """
        check_text(prompt)
        if isinstance(prompt, str):
            return self._encode(prompt, token_limit, add_special_tokens=True)
        if isinstance(prompt, Conversation):
            return self._encode(self._render(prompt), token_limit, add_special_tokens=False)
        return prompt

    def _render(self, conversation: Conversation) -> str:
        if self._render_chat is None:
            raise Refused(Refusal.BAD_MESSAGE, "this model has no chat template; pass text or token ids instead")
        try:
            return self._render_chat(conversation)
        except Exception as error:  # a template is a program and may raise anything
            reason = f"the model's chat template refuses this conversation: {error}"
            raise Refused(Refusal.BAD_MESSAGE, reason) from error

    def _encode(self, text: str, token_limit: int, *, add_special_tokens: bool) -> tuple[int, ...]:
        if self._bound is not None and self._bound.exceeded_by(text, token_limit):
            reason = f"the prompt has {len(text)} characters, which cannot fit in {token_limit} tokens"
            raise Refused(Refusal.PROMPT_TOO_LONG, reason)
        return tuple(self._encode_text(text, add_special_tokens))


def _encoder(backend: Tokenizer, split_special_tokens: bool) -> _Encode:
    # transformers sets these at each call, which is not safe while another thread encodes; here they are set once.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = split_special_tokens

    def encode(text: str, add_special_tokens: bool) -> Sequence[int]:
        ids: Sequence[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    return encode


def _messages(conversation: Conversation) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in conversation.turns]


# Steps that never shorten a text nor drop a part of it.
_KEEPING = frozenset({"Sequence", "ByteLevel", "Digits", "Split", "Metaspace", "Prepend", "NFC"})
# Unicode: canonical composition joins at most four characters into one.
_COMPOSED_CHARS_MAX = 4


@dataclass(frozen=True)
class TextBound:
    """A lower bound on the tokens of a text.

    No token covers more than `token_chars_max` characters; the characters in `vanishing` have no token.
    """

    token_chars_max: int
    vanishing: str = ""

    def exceeded_by(self, text: str, token_limit: int) -> bool:
        """Return whether `text` certainly has more than `token_limit` tokens."""
        chars_max = token_limit * self.token_chars_max
        return len(text) > chars_max and len(text) - sum(map(text.count, self.vanishing)) > chars_max


def text_bound(tokenizer: Tokenizer) -> TextBound | None:
    """Return the bound for a tokenizer, or None if it may drop or merge any amount of text.

    A tokenizer does so if it strips or rewrites text, drops unknown text, or fuses it into one unknown token.
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
    """Yield the steps of a normalizer or pre-tokenizer, including those inside sequences."""
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
    """Return the characters without a token; None if there may be others than ASCII characters.

    A byte-level vocabulary drops each byte that it lacks. A vocabulary trained on real text may lack a control
    character, or the first byte of a rare plane, whose characters then keep their other bytes.
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
    """Return the character for each byte: the byte's own if printable, otherwise the next one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
