"""Turns a prompt into token ids exactly as transformers does. Knows nothing of queues, limits of the engine or actors.

May be used from two threads at once: nothing here changes after loading.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Self

from cuelight.actors.intake.prompts import check_text
from cuelight.actors.intake.refusal import Refused
from cuelight.actors.intake.token_length import text_bound
from cuelight.messages.request import Conversation, Prompt, Refusal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptEncoder:
    """A model's tokenizer and chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer if isinstance(tokenizer, PreTrainedTokenizerFast) else None
        self._bound = None
        if self._backend is not None:
            # Set once what transformers would set at each call, which no other thread may be encoding during.
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = tokenizer.split_special_tokens
            self._bound = text_bound(self._backend)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load the tokenizer of a Hugging Face model folder. Takes seconds; raises what transformers raises."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(folder, local_files_only=True))

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
        if self._tokenizer.chat_template is None:
            raise Refused(Refusal.BAD_MESSAGE, "this model has no chat template; give it text or token ids")
        messages = [{"role": turn.role, "content": turn.content} for turn in conversation.turns]
        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program of its own and may raise anything
            reason = f"the model's chat template refuses this conversation: {error}"
            raise Refused(Refusal.BAD_MESSAGE, reason) from error
        return str(text)

    def _encode(self, text: str, token_limit: int, *, add_special_tokens: bool) -> tuple[int, ...]:
        if self._bound is not None and self._bound.exceeded_by(text, token_limit):
            reason = f"the prompt has {len(text)} characters, which cannot fit the {token_limit} tokens there are"
            raise Refused(Refusal.PROMPT_TOO_LONG, reason)
        if self._backend is not None:
            return tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        return tuple(self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids)
