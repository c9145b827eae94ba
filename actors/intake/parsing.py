"""Parse and check a caller's prompt, service options and sampling options.

Checks of the vocabulary and the tenants are functions of their own, which intake calls with the engine's values.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from numbers import Integral, Real
from typing import Final, Never, TypeGuard

import msgspec

from cuelight.actors.intake.errors import Refused, UnknownOption, kind, number, wrong_type
from cuelight.messages.request import Conversation, Prompt, Refusal, Sampling, Service, Turn

_FORMS = "a prompt is text, a list of messages or a list of token ids"
_KEYS = ("role", "content")
_TEMPLATE_CHARS = 24  # about what a chat template writes around one message


def parse_prompt(raw: object) -> Prompt:
    """Convert a caller's argument into a prompt.

    Accepts text, a conversation, a list of messages (mappings or turns), or a list of token ids. Raises `Refused`:
    EMPTY_PROMPT for an empty list, BAD_MESSAGE for a message without exactly a role and a content, WRONG_TYPE for
    anything else. Does not check whether text has tokens, nor the range of ids.
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
    """Raise `Refused` for the first id outside the vocabulary: TOKEN_OUT_OF_RANGE."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        index, bad = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        reason = f"token {index} of the prompt is {number(bad)}; ids go from 0 to {vocab_size - 1}"
        raise Refused(Refusal.TOKEN_OUT_OF_RANGE, reason)


def check_text(prompt: Prompt) -> None:
    """Raise `Refused` for text without a UTF-8 form, which a tokenizer cannot read: BAD_PROMPT."""
    if isinstance(prompt, str):
        _check_encodable(prompt, "the prompt")
    elif isinstance(prompt, Conversation):
        for index, turn in enumerate(prompt.turns):
            _check_encodable(turn.role, f"the role of message {index}")
            _check_encodable(turn.content, f"the content of message {index}")


def text_length(prompt: Prompt) -> int:
    """Estimate the number of characters to tokenize; 0 for token ids."""
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
        reason = f"{where} has a lone surrogate at character {error.start}, which cannot be encoded as UTF-8"
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
    """Return whether all items are plain ints, without a Python step per item: a prompt may have many."""
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
    # msgspec does not check a struct's fields at construction, so a turn is checked like a mapping.
    if not isinstance(role, str) or not role:
        found = "empty" if role == "" else kind(role)
        raise Refused(Refusal.BAD_MESSAGE, f"the role of message {index} is {found}, not a name such as 'user'")
    if not isinstance(content, str):
        raise Refused(Refusal.BAD_MESSAGE, f"the content of message {index} is {kind(content)}, not text")
    return Turn(role, content)


SERVICE_OPTIONS: Final = Service.__struct_fields__
NAME_CHARS_MAX: Final = 256
PRIORITY_MAX: Final = 1_000_000

_SERVICE_DEFAULTS: Final = msgspec.structs.asdict(Service())


def parse_service(options: Mapping[str, object]) -> Service:
    """Convert options, whose names are in `SERVICE_OPTIONS`, into a valid service. Raises `Refused`."""
    fields = {**_SERVICE_DEFAULTS, **options}
    tenant, cache_salt = _name(fields, "tenant"), _name(fields, "cache_salt")
    priority = fields["priority"]
    if isinstance(priority, bool) or not isinstance(priority, Integral):
        wrong_type("priority", "an integer", priority)
    level = int(priority)
    if abs(level) > PRIORITY_MAX:
        _refuse_service(f"priority is {number(level)}; it must be within {PRIORITY_MAX} of 0")
    return Service(tenant, level, _seconds(fields, "queue_seconds"), _seconds(fields, "deadline_seconds"), cache_salt)


def check_tenant(tenant: str, tenants: Container[str] | None) -> None:
    """Raise `Refused` for a tenant that is not in `tenants`: UNKNOWN_TENANT. None accepts any tenant."""
    if tenants is not None and tenant not in tenants:
        raise Refused(Refusal.UNKNOWN_TENANT, f"unknown tenant {tenant!r}; pass one of the engine's with tenant=...")


def _name(fields: Mapping[str, object], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        wrong_type(name, "a name", value)
    if len(value) > NAME_CHARS_MAX:
        _refuse_service(f"{name} has {len(value)} characters; at most {NAME_CHARS_MAX} are allowed")
    try:
        value.encode()
    except UnicodeEncodeError:
        _refuse_service(f"{name} {value!r} has a lone surrogate, which cannot be encoded as UTF-8")
    return str(value)


def _seconds(fields: Mapping[str, object], name: str) -> float | None:
    value = fields[name]
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        wrong_type(name, "a number of seconds or None", value)
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not 0 < seconds < math.inf:
        _refuse_service(f"{name} is {seconds}; it must be positive and finite")
    return seconds


def _refuse_service(reason: str) -> Never:
    raise Refused(Refusal.BAD_SERVICE, reason)


STOPS_MAX: Final = 16
STOP_CHARS_MAX: Final = 1024
STOP_TOKENS_MAX: Final = 1024

_INTEGER_MAX: Final = 2**63 - 1
_SEED_MIN: Final = -(2**63)
_SEED_MASK: Final = 2**64 - 1
SAMPLING_OPTIONS: Final = Sampling.__struct_fields__
_SAMPLING_DEFAULTS: Final = msgspec.structs.asdict(Sampling())


def parse_options(options: Mapping[str, object]) -> tuple[Sampling, Service]:
    """Convert a request's options by name into plain Python types, without the vocabulary and the tenants.

    Raises `UnknownOption`, or `Refused`: WRONG_TYPE, BAD_SAMPLING, BAD_SERVICE, or TOKEN_OUT_OF_RANGE for a negative
    stop token.
    """
    known = (*SAMPLING_OPTIONS, *SERVICE_OPTIONS)
    for name in options:
        if name not in known:
            raise UnknownOption(name, known)
    service = {name: value for name, value in options.items() if name in SERVICE_OPTIONS}
    sampling = {name: value for name, value in options.items() if name in SAMPLING_OPTIONS}
    return parse_sampling(sampling), parse_service(service)


def check_stop_tokens(sampling: Sampling, vocab_size: int) -> None:
    """Raise `Refused` for a stop token outside the vocabulary: TOKEN_OUT_OF_RANGE."""
    for token_id in sampling.stop_token_ids:
        if token_id >= vocab_size:
            _refuse_stop_token(token_id, f"from 0 to {vocab_size - 1}")


def parse_sampling(options: Mapping[str, object]) -> Sampling:
    """Convert options, whose names are in `SAMPLING_OPTIONS`, into a sampling: plain types, its seed in 64 bits.

    `stop` may be one string or a list. Raises `Refused` as `parse_options` does.
    """
    fields = {**_SAMPLING_DEFAULTS, **options}
    max_tokens = _integer(fields, "max_tokens", least=1)
    min_tokens = _integer(fields, "min_tokens", least=0)
    if min_tokens > max_tokens:
        _refuse_sampling(f"min_tokens is {min_tokens}; it must be at most max_tokens, which is {max_tokens}")
    temperature = _real(fields, "temperature")
    if not (math.isfinite(temperature) and temperature >= 0):
        _refuse_sampling(f"temperature is {temperature}; it must be 0 (greedy) or a positive number")
    top_p = _real(fields, "top_p")
    if not 0 < top_p <= 1:
        _refuse_sampling(f"top_p is {top_p}; it must be above 0 and at most 1")
    ignore_eos = fields["ignore_eos"]
    if not isinstance(ignore_eos, bool):
        wrong_type("ignore_eos", "True or False", ignore_eos)
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=_integer(fields, "top_k", least=0),
        top_p=top_p,
        seed=_seed(fields["seed"]),
        stop=_stops(fields["stop"]),
        stop_token_ids=_stop_token_ids(fields["stop_token_ids"]),
        ignore_eos=ignore_eos,
    )


def _integer(fields: Mapping[str, object], name: str, least: int) -> int:
    value = _as_integer(name, fields[name])
    if not least <= value <= _INTEGER_MAX:
        _refuse_sampling(f"{name} is {number(value)}; it must be at least {least} and below 2**63")
    return value


def _as_integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        wrong_type(name, "an integer", value)
    return int(value)


def _real(fields: Mapping[str, object], name: str) -> float:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, Real):
        wrong_type(name, "a number", value)
    try:
        return float(value)
    except OverflowError:
        _refuse_sampling(f"{name} is too large for a float")


def _seed(value: object) -> int | None:
    if value is None:
        return None
    seed = _as_integer("seed", value)
    if not _SEED_MIN <= seed <= _SEED_MASK:
        _refuse_sampling(f"seed is {number(seed)}; it must fit in 64 bits")
    return seed & _SEED_MASK


def _stops(value: object) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, list | tuple):
        wrong_type("stop", "a string or a list of strings", value)
    if len(stops) > STOPS_MAX:
        _refuse_sampling(f"stop has {len(stops)} strings; at most {STOPS_MAX} are allowed")
    return tuple([_stop(index, stop) for index, stop in enumerate(stops)])


def _stop(index: int, stop: object) -> str:
    name = f"stop[{index}]"
    if not isinstance(stop, str):
        wrong_type(name, "a string", stop)
    if not 0 < len(stop) <= STOP_CHARS_MAX:
        _refuse_sampling(f"{name} has {len(stop)} characters; it must have 1 to {STOP_CHARS_MAX}")
    try:
        stop.encode()
    except UnicodeEncodeError:
        _refuse_sampling(f"{name} has a lone surrogate, which cannot occur in output text")
    return str(stop)


def _stop_token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        wrong_type("stop_token_ids", "a list of token ids", value)
    if len(value) > STOP_TOKENS_MAX:
        _refuse_sampling(f"stop_token_ids has {len(value)} ids; at most {STOP_TOKENS_MAX} are allowed")
    token_ids = tuple([_as_integer(f"stop_token_ids[{index}]", token_id) for index, token_id in enumerate(value)])
    for token_id in token_ids:
        if token_id < 0:
            _refuse_stop_token(token_id, "not negative")
    return token_ids


def _refuse_stop_token(token_id: int, limit: str) -> Never:
    raise Refused(Refusal.TOKEN_OUT_OF_RANGE, f"stop_token_ids has {number(token_id)}; ids are {limit}")


def _refuse_sampling(reason: str) -> Never:
    raise Refused(Refusal.BAD_SAMPLING, reason)
