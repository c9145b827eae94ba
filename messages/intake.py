"""What intake hears: submissions and cancellations from clients, facts from the detokenizer and the scheduler."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from cuelight.messages.address import Address
from cuelight.messages.client import ClientMessage
from cuelight.messages.request import Prompt, RequestId, Sampling, Service


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Serve this prompt. Answered once: `Accepted` or `Rejected`; an accepted request ends with one `End`.

    It has the prompt, and the service, of the request `like`, another sample of which it is to draw.
    """

    request_id: RequestId
    prompt: Prompt
    sampling: Sampling
    reply_to: Address[ClientMessage]
    service: Service = Service()
    like: RequestId | None = None


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The client has left. Not answered; harmless for a request that is unknown or over."""

    request_id: RequestId


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The detokenizer answers `Open`: tokens of this request now have somewhere to go."""

    request_id: RequestId


class SetTenants(msgspec.Struct, frozen=True, tag=True):
    """From now on requests are accepted of these tenants alone; None is any. Not answered."""

    names: tuple[str, ...] | None


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The scheduler is done with these requests: they no longer count against the queue limit."""

    request_ids: tuple[RequestId, ...]


class Serving(msgspec.Struct, frozen=True, tag=True):
    """The executor is ready. No request may hold more than `token_capacity` tokens, prompt and output together."""

    token_capacity: int


IntakeMessage: TypeAlias = Submit | Cancel | SetTenants | Opened | Finished | Serving
