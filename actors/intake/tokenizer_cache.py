"""Caches what transformers makes of a model folder's tokenizer, for starts without transformers' loader and torch.

Runs as a program: `python -m cuelight.actors.intake.tokenizer_cache SOURCE FOLDER`. Only transformers has the rule by
which a folder names its tokenizer class, so the built tokenizer is cached rather than the folder's own files.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cuelight.actors.intake.tokenizer import CHAT_FILE, REFUSAL_FILE, TOKENIZER_FILE, ChatTemplate, PromptEncoder
from cuelight.messages.request import Conversation, Turn

TEXTS = ("", " two ships,\n\tno  wind - 2026", "día 😀 日本 \u0301 İ ﬁ", "[INST]<s></s><|im_end|><unk>")
CHATS = (
    Conversation((Turn("user", " hello\n"),)),
    Conversation(
        (Turn("system", "be brief"), Turn("user", "two"), Turn("assistant", "ships "), Turn("user", "where?"))
    ),
)
"""Both forms of a tokenizer must agree on these before one is cached for the other."""


class NotCacheable(Exception):
    """The tokenizer must be loaded through transformers each time; the message says why."""


def cache_tokenizer(source: Path, folder: Path) -> None:
    """Write the tokenizer of the model in `source` to the existing `folder`. Raises NotKept, or what loading raises."""
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise NotCacheable(f"{type(tokenizer).__name__} is a tokenizer written in Python")
    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        raise NotCacheable(f"{type(tokenizer).__name__} has a way of its own to write conversations down")
    original = PromptEncoder.of(tokenizer)
    try:
        tokenizer.backend_tokenizer.save(str(folder / TOKENIZER_FILE))
        template = None if tokenizer.chat_template is None else tokenizer.get_chat_template()
    except Exception as error:  # parts written in Python cannot be saved; of several templates none may be the default
        raise NotCacheable(str(error)) from error
    chat = ChatTemplate(template, dict(tokenizer.special_tokens_map), bool(tokenizer.split_special_tokens))
    (folder / CHAT_FILE).write_bytes(msgspec.json.encode(chat))
    kept = PromptEncoder.load_cached(folder)
    for prompt in (*TEXTS, *CHATS):
        if _outcome(original, prompt) != _outcome(kept, prompt):
            raise NotCacheable(f"what was kept reads {prompt!r} in another way")


def _outcome(encoder: PromptEncoder, prompt: str | Conversation) -> object:
    try:
        return encoder.encode(prompt, sys.maxsize)
    except Exception as error:  # a template may refuse any conversation: then both must
        return str(error)


def main(arguments: list[str]) -> int:
    """Keep the tokenizer of `SOURCE` in `FOLDER`, or write there why that is not possible."""
    source, folder = map(Path, arguments)
    try:
        cache_tokenizer(source, folder)
    except NotCacheable as reason:
        (folder / REFUSAL_FILE).write_text(f"{reason}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
