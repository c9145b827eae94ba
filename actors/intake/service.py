"""How a request may ask to be served: tenant, priority, deadlines and cache salt, their types and ranges."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from numbers import Integral, Real
from typing import Final, Never

import msgspec

from cuelight.actors.intake.refusal import Refused, number, wrong_type
from cuelight.messages.request import Refusal, Service

SERVICE_OPTIONS: Final = Service.__struct_fields__
NAME_CHARS_MAX: Final = 256
PRIORITY_MAX: Final = 1_000_000

_SERVICE_DEFAULTS: Final = msgspec.structs.asdict(Service())


def parse_service(options: Mapping[str, object]) -> Service:
    """Turn options by name, all of them `SERVICE_OPTIONS`, into a valid service. Raises `Refused`."""
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
    """Raise `Refused` for a tenant that is not one of `tenants`, None being any: UNKNOWN_TENANT."""
    if tenants is not None and tenant not in tenants:
        raise Refused(Refusal.UNKNOWN_TENANT, f"{tenant!r} is no tenant here; say which with tenant=...")


def _name(fields: Mapping[str, object], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        wrong_type(name, "a name", value)
    if len(value) > NAME_CHARS_MAX:
        _refuse_service(f"{name} has {len(value)} characters; there can be {NAME_CHARS_MAX}")
    try:
        value.encode()
    except UnicodeEncodeError:
        _refuse_service(f"{name} {value!r} has a lone surrogate, which no encoding of text allows")
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
        _refuse_service(f"{name} is {seconds}; a deadline must lie ahead")
    return seconds


def _refuse_service(reason: str) -> Never:
    raise Refused(Refusal.BAD_SERVICE, reason)
