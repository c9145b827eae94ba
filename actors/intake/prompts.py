"""What a prompt may be. Knows types and shapes; knows nothing of sampling, tokenizers or queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TypeGuard

from cuelight.actors.intake.refusal import Refused, kind, number
from cuelight.messages.request import Conversation, Prompt, Refusal, Turn

_FORMS = "a prompt is text, a list of messages or a list of token ids"
_KEYS = ("role", "content")
_TEMPLATE_CHARS = 24  # about what a chat template writes around one message


def parse_prompt(raw: object) -> Prompt:
    """Turn what a caller wrote into a prompt: text, a conversation, a list of messages (mappings or turns) for one, or
    a list of token ids.

    Raises `Refused`: EMPTY_PROMPT for an empty list, BAD_MESSAGE for a message that is not a role and a content,
    WRONG_TYPE for anything else. Text that may have no tokens, and the range of ids, are not looked at here.
    """
    if isinstance(raw, str):
        return raw
    if isinstance(raw, Conversation):
        return Conversation(_turns(raw.turns))
    if not isinstance(raw, list | tuple):
        raise Refused(Refusal.WRONG_TYPE, f"{_FORMS}, not {kind(raw)}")
    if not raw:
        raise Refused(Refusal.EMPTY_PROMPT, "the prompt is empty")
    if isinstance(raw[0], Mapping | Turn):
        return Conversation(_turns(raw))
    return _token_ids(raw)


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise `Refused` for the first id that is not in the vocabulary."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        index, bad = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        reason = f"token {index} of the prompt is {number(bad)}; ids go from 0 to {vocab_size - 1}"
        raise Refused(Refusal.TOKEN_OUT_OF_RANGE, reason)


def check_text(prompt: Prompt) -> None:
    """Raise `Refused` for text that has no UTF-8 form: a tokenizer could not read it."""
    if isinstance(prompt, str):
        _check_encodable(prompt, "the prompt")
    elif isinstance(prompt, Conversation):
        for index, turn in enumerate(prompt.turns):
            _check_encodable(turn.role, f"the role of message {index}")
            _check_encodable(turn.content, f"the content of message {index}")


def text_length(prompt: Prompt) -> int:
    """About how many characters there are to tokenize."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, Conversation):
        return sum(_TEMPLATE_CHARS + len(turn.content) for turn in prompt.turns)
    return 0


def _check_encodable(text: str, where: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"{where} has a lone surrogate at character {error.start}, which no encoding of text allows"
        raise Refused(Refusal.BAD_PROMPT, reason) from None


def _token_ids(items: Sequence[object]) -> tuple[int, ...]:
    if _all_ints(items):
        return tuple(items)
    token_ids = []
    for index, item in enumerate(items):
        if type(item) is int:
            token_ids.append(item)
        elif isinstance(item, bool) or not isinstance(item, Integral):
            raise Refused(Refusal.WRONG_TYPE, f"{_FORMS}; item {index} of this one is {kind(item)}")
        else:
            token_ids.append(int(item))
    return tuple(token_ids)


def _all_ints(items: Sequence[object]) -> TypeGuard[Sequence[int]]:
    """The usual case, of which there may be millions: no step of Python for each."""
    return set(map(type, items)) == {int}


def _turns(items: object) -> tuple[Turn, ...]:
    if not isinstance(items, list | tuple):
        raise Refused(Refusal.WRONG_TYPE, f"a conversation is a list of messages, not {kind(items)}")
    if not items:
        raise Refused(Refusal.EMPTY_PROMPT, "the conversation is empty")
    return tuple([_turn(index, item) for index, item in enumerate(items)])


def _turn(index: int, item: object) -> Turn:
    if isinstance(item, Turn):
        return _checked_turn(index, item.role, item.content)
    if not isinstance(item, Mapping):
        raise Refused(Refusal.WRONG_TYPE, f"message {index} is {kind(item)}, not a mapping with role and content")
    for key in _KEYS:
        if key not in item:
            raise Refused(Refusal.BAD_MESSAGE, f"message {index} has no {key!r}")
    for key in item:
        if key not in _KEYS:
            reason = f"message {index} has a key {key!r}; a message has a role and a content"
            raise Refused(Refusal.BAD_MESSAGE, reason)
    return _checked_turn(index, item["role"], item["content"])


def _checked_turn(index: int, role: object, content: object) -> Turn:
    # A struct's fields are not checked when it is made, so a turn is looked at like any mapping.
    if not isinstance(role, str) or not role:
        found = "empty" if role == "" else kind(role)
        raise Refused(Refusal.BAD_MESSAGE, f"the role of message {index} is {found}, not a name such as 'user'")
    if not isinstance(content, str):
        raise Refused(Refusal.BAD_MESSAGE, f"the content of message {index} is {kind(content)}, not text")
    return Turn(role, content)
