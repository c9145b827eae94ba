"""The options of a request: which there are, their types, their ranges and how they go together. No prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Final, Never

import msgspec

from cuelight.actors.intake.refusal import Refused, UnknownOption, number, wrong_type
from cuelight.actors.intake.service import SERVICE_OPTIONS, parse_service
from cuelight.messages.request import Refusal, Sampling, Service

STOPS_MAX: Final = 16
STOP_CHARS_MAX: Final = 1024
STOP_TOKENS_MAX: Final = 1024

_INTEGER_MAX: Final = 2**63 - 1
_SEED_MIN: Final = -(2**63)
_SEED_MASK: Final = 2**64 - 1
SAMPLING_OPTIONS: Final = Sampling.__struct_fields__
_SAMPLING_DEFAULTS: Final = msgspec.structs.asdict(Sampling())


def parse_options(options: Mapping[str, object]) -> tuple[Sampling, Service]:
    """Turn the options of a request, by name, into plain Python types; the vocabulary and the tenants are not known.

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
    """Turn options by name, all of them `SAMPLING_OPTIONS`, into a sampling: plain types, its seed in 64 bits.

    A stop may be one string or a list. Raises `Refused` as `parse_options`.
    """
    fields = {**_SAMPLING_DEFAULTS, **options}
    max_tokens = _integer(fields, "max_tokens", least=1)
    min_tokens = _integer(fields, "min_tokens", least=0)
    if min_tokens > max_tokens:
        _refuse_sampling(f"min_tokens is {min_tokens}, more than max_tokens, which is {max_tokens}")
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
        _refuse_sampling(f"{name} is too large")


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
        _refuse_sampling(f"stop has {len(stops)} strings; there can be {STOPS_MAX}")
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
        _refuse_sampling(f"{name} has a lone surrogate, so it can never be found in text")
    return str(stop)


def _stop_token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        wrong_type("stop_token_ids", "a list of token ids", value)
    if len(value) > STOP_TOKENS_MAX:
        _refuse_sampling(f"stop_token_ids has {len(value)} ids; there can be {STOP_TOKENS_MAX}")
    token_ids = tuple([_as_integer(f"stop_token_ids[{index}]", token_id) for index, token_id in enumerate(value)])
    for token_id in token_ids:
        if token_id < 0:
            _refuse_stop_token(token_id, "not negative")
    return token_ids


def _refuse_stop_token(token_id: int, limit: str) -> Never:
    raise Refused(Refusal.TOKEN_OUT_OF_RANGE, f"stop_token_ids has {number(token_id)}; ids are {limit}")


def _refuse_sampling(reason: str) -> Never:
    raise Refused(Refusal.BAD_SAMPLING, reason)
