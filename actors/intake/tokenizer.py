"""Turns a prompt into token ids exactly as transformers does. Knows nothing of queues, limits of the engine or actors.

May be used from two threads at once: nothing here changes after loading.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias, cast

import msgspec

from cuelight.actors.intake.prompts import check_text
from cuelight.actors.intake.refusal import Refused
from cuelight.actors.intake.token_length import TextBound, text_bound
from cuelight.messages.request import Conversation, Prompt, Refusal

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILE, CHAT_FILE = "tokenizer.json", "chat.json"
"""The files of a cached tokenizer: see `keeping`."""

REFUSAL_FILE = "refused.txt"
"""Written instead of these files: why the tokenizer cannot be cached."""

_Encode: TypeAlias = Callable[[str, bool], Sequence[int]]
"""Token ids of a text, with or without the special tokens that the tokenizer adds."""
_Render: TypeAlias = Callable[[Conversation], str]


class ChatTemplate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a cached tokenizer renders a conversation: its chat template, if it has one, and the special tokens that
    the template knows by their names. `split_special_tokens`: text that looks like a special token is none."""

    template: str | None
    variables: dict[str, str]
    split_special_tokens: bool

    def render(self, conversation: Conversation) -> str:
        """As transformers renders it, up to where the assistant speaks. Raises what the template raises."""
        from transformers.utils.chat_template_utils import render_jinja_template

        # It is annotated as giving one text.
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
        """Of a tokenizer that transformers has loaded."""
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
        """Load what `keeping` has written to this folder, which needs no torch. Raises what a bad file raises."""
        from tokenizers import Tokenizer

        backend: Tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        chat = msgspec.json.decode((folder / CHAT_FILE).read_bytes(), type=ChatTemplate)
        if chat.template is None:
            return cls(_encoder(backend, chat.split_special_tokens), None, text_bound(backend))
        # Half a second that the first conversation need not wait for.
        import transformers.utils.chat_template_utils  # noqa: F401

        return cls(_encoder(backend, chat.split_special_tokens), chat.render, text_bound(backend))

    def encode(self, prompt: Prompt, token_limit: int) -> tuple[int, ...]:
        """The prompt's token ids: text with the special tokens that the tokenizer adds, a conversation through the
        chat template and up to where the assistant speaks, ids as they are.

        Raises `Refused`: BAD_PROMPT for text without a UTF-8 form, BAD_MESSAGE where the chat template refuses the
        conversation or there is none, PROMPT_TOO_LONG for text of which it is plain, before any work, that it has
        more than `token_limit` tokens. A prompt that is only a little too long is encoded all the same.
        """
        check_text(prompt)
        if isinstance(prompt, str):
            return self._encode(prompt, token_limit, add_special_tokens=True)
        if isinstance(prompt, Conversation):
            return self._encode(self._render(prompt), token_limit, add_special_tokens=False)
        return prompt

    def _render(self, conversation: Conversation) -> str:
        if self._render_chat is None:
            raise Refused(Refusal.BAD_MESSAGE, "this model has no chat template; give it text or token ids")
        try:
            return self._render_chat(conversation)
        except Exception as error:  # a template is a program of its own and may raise anything
            reason = f"the model's chat template refuses this conversation: {error}"
            raise Refused(Refusal.BAD_MESSAGE, reason) from error

    def _encode(self, text: str, token_limit: int, *, add_special_tokens: bool) -> tuple[int, ...]:
        if self._bound is not None and self._bound.exceeded_by(text, token_limit):
            reason = f"the prompt has {len(text)} characters, which cannot fit the {token_limit} tokens there are"
            raise Refused(Refusal.PROMPT_TOO_LONG, reason)
        return tuple(self._encode_text(text, add_special_tokens))


def _encoder(backend: Tokenizer, split_special_tokens: bool) -> _Encode:
    # Set once what transformers would set at each call, which no other thread may be encoding during.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = split_special_tokens

    def encode(text: str, add_special_tokens: bool) -> Sequence[int]:
        ids: Sequence[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    return encode


def _messages(conversation: Conversation) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in conversation.turns]
