"""What intake hears: submissions and cancellations from clients, facts from the detokenizer and the scheduler."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from cuelight.messages.address import Address
from cuelight.messages.client import ClientMessage
from cuelight.messages.request import Prompt, RequestId, Sampling, Service
from cuelight.messages.scheduler import FailRequest, SetPolicy


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Serve this prompt. Answered once: `Accepted` or `Rejected`; an accepted request ends with one `End`.

    It has the prompt, and the service, of the request `sample_of`, another sample of which it is to draw. Harmless where the
    request is known already. One that was accepted before intake was lost is not refused for want of room. One that
    goes on from an earlier time has had `output` tokens so far.
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
    """After `Ready`, clients have sent again all that they still wait for."""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The client has left. Not answered; harmless for a request that is over."""

    request_id: RequestId


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The detokenizer answers `Open`: tokens of this request now have somewhere to go."""

    request_id: RequestId


class DetokenizerStarted(msgspec.Struct, frozen=True, tag=True):
    """The detokenizer is new: it is told to `Open` every stream again, then `Reopened`, with its `life`."""

    life: int


class SchedulerStarted(msgspec.Struct, frozen=True, tag=True):
    """The scheduler is new. Intake asks the detokenizer for `Streams`, and answers `RestoreState`, with its `life`."""

    life: int


class Streams(msgspec.Struct, frozen=True, tag=True):
    """The detokenizer answers `GetStreams`: the output tokens of each stream that has not ended."""

    histories: tuple[tuple[RequestId, tuple[int, ...]], ...]


class SetTenants(msgspec.Struct, frozen=True, tag=True):
    """From now on requests are accepted of these tenants alone; None is any. Not answered."""

    names: tuple[str, ...] | None


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The detokenizer has ended these requests' streams: they no longer count against the queue limit."""

    request_ids: tuple[RequestId, ...]


class CapacityChanged(msgspec.Struct, frozen=True, tag=True):
    """The executor is ready. No request may hold more than `token_capacity` tokens, prompt and output together.

    `context_length` is that of the model which has taken over; None where it is still the first one.
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
