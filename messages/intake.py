"""Messages to intake: submissions and cancellations from clients, reports from the detokenizer and the scheduler."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from cuelight.messages.address import Address
from cuelight.messages.client import ClientMessage
from cuelight.messages.request import Prompt, RequestId, Sampling, Service
from cuelight.messages.scheduler import FailRequest, SetPolicy


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Serve this prompt. Answered once: `Accepted` or `Rejected`; an accepted request ends with one `End`.

    With `sample_of`, the request is another sample of that request, with the same prompt and service. Has no effect if
    the request is known already. A request that an earlier life of intake accepted (`is_accepted`) is not refused for a
    full queue. A resumed request has its earlier `output` tokens.
    """

    request_id: RequestId
    prompt: Prompt
    sampling: Sampling
    reply_to: Address[ClientMessage]
    service: Service = Service()
    sample_of: RequestId | None = None
    is_accepted: bool = False
    output: tuple[int, ...] = ()


class ResendComplete(msgspec.Struct, frozen=True, tag=True):
    """After `Ready`, clients have sent every request again that they still wait for."""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The client has left. Not answered; ignored for a request that has ended."""

    request_id: RequestId


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Open`: the request's stream is open, and its tokens may be sent."""

    request_id: RequestId


class DetokenizerStarted(msgspec.Struct, frozen=True, tag=True):
    """The detokenizer is new. Intake sends it `Open` for every stream again, then `Reopened` with its `life`."""

    life: int


class SchedulerStarted(msgspec.Struct, frozen=True, tag=True):
    """The scheduler is new. Intake gets `Streams` from the detokenizer and answers `RestoreState` with its `life`."""

    life: int


class Streams(msgspec.Struct, frozen=True, tag=True):
    """The answer to `GetStreams`: the output tokens of each stream that has not ended."""

    histories: tuple[tuple[RequestId, tuple[int, ...]], ...]


class SetTenants(msgspec.Struct, frozen=True, tag=True):
    """Accept later requests of these tenants only; None accepts any tenant. Not answered."""

    names: tuple[str, ...] | None


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The detokenizer has ended these requests' streams: they no longer count against the queue limit."""

    request_ids: tuple[RequestId, ...]


class CapacityChanged(msgspec.Struct, frozen=True, tag=True):
    """The executor is ready. No request may hold more than `token_capacity` tokens, prompt and output together.

    `context_length` is that of the model that took over in a reload; None before the first reload.
    """

    token_capacity: int
    context_length: int | None = None


IntakeMessage: TypeAlias = (
    Submit
    | ResendComplete
    | Cancel
    | FailRequest
    | SetTenants
    | SetPolicy
    | Opened
    | Finished
    | CapacityChanged
    | DetokenizerStarted
    | SchedulerStarted
    | Streams
)
