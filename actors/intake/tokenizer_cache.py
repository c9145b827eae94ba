"""Cache the tokenizer that transformers builds from a model folder, so that later starts need no torch.

Runs as a program: `python -m cuelight.actors.intake.tokenizer_cache SOURCE FOLDER`. transformers chooses the class that
reads a folder, and the class may change the tokenizer, so its result is cached and the folder's files are not read
directly.
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
"""Prompts that the original and the cached tokenizer must encode alike before the cached one is used."""


class NotCacheable(Exception):
    """The tokenizer must be loaded through transformers at each start. The message gives the reason."""


def cache_tokenizer(source: Path, folder: Path) -> None:
    """Write the tokenizer of the model in `source` to the existing `folder`.

    Raises `NotCacheable`, or what loading raises.
    """
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise NotCacheable(f"{type(tokenizer).__name__} is a tokenizer written in Python")
    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        raise NotCacheable(f"{type(tokenizer).__name__} overrides apply_chat_template")
    original = PromptEncoder.of(tokenizer)
    try:
        tokenizer.backend_tokenizer.save(str(folder / TOKENIZER_FILE))
        template = None if tokenizer.chat_template is None else tokenizer.get_chat_template()
    except Exception as error:  # parts in Python cannot be saved; several templates may lack a default
        raise NotCacheable(str(error)) from error
    chat = ChatTemplate(template, dict(tokenizer.special_tokens_map), bool(tokenizer.split_special_tokens))
    (folder / CHAT_FILE).write_bytes(msgspec.json.encode(chat))
    kept = PromptEncoder.load_cached(folder)
    for prompt in (*TEXTS, *CHATS):
        if _outcome(original, prompt) != _outcome(kept, prompt):
            raise NotCacheable(f"the cached tokenizer encodes {prompt!r} differently")


def _outcome(encoder: PromptEncoder, prompt: str | Conversation) -> object:
    try:
        return encoder.encode(prompt, sys.maxsize)
    except Exception as error:  # if the template refuses a conversation, both must give the same error
        return str(error)


def main(arguments: list[str]) -> int:
    """Cache the tokenizer of `SOURCE` in `FOLDER`, or write the reason there if it cannot be cached."""
    source, folder = map(Path, arguments)
    try:
        cache_tokenizer(source, folder)
    except NotCacheable as reason:
        (folder / REFUSAL_FILE).write_text(f"{reason}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
