"""The ledger: every request that intake has let in and that has not finished, with what was told of it, verbatim."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from cuelight.messages.address import Address
from cuelight.messages.client import ClientMessage
from cuelight.messages.detokenizer import Open, RequestEnded
from cuelight.messages.request import FailureCause, FinishReason, RequestId, Sampling, Service, Usage
from cuelight.messages.scheduler import Admit, RestoreState, SetPolicy


class RequestStage(Enum):
    """How far a request has come."""

    ENCODING = auto()
    """Its prompt is becoming tokens."""
    OPENING = auto()
    """Its stream is being opened."""
    ADMITTED = auto()
    """The scheduler has it."""
    CLOSING = auto()
    """It was cancelled before the scheduler heard of it, and its stream is being ended."""


@dataclass(slots=True)
class LiveRequest:
    """A request in the ledger. It stays there until it is refused, or until its stream has ended."""

    client: Address[ClientMessage]
    sampling: Sampling
    service: Service
    submitted_at: float
    sample_of: RequestId | None = None
    is_accepted: bool = False
    output: tuple[int, ...] = ()
    stage: RequestStage = RequestStage.ENCODING
    token_ids: tuple[int, ...] = ()
    is_aborted: bool = False
    """It was cancelled, or it has failed."""
    error: str = ""
    """Why it has failed."""
    samples: list[RequestId] = field(default_factory=list)
    """Other requests with the same prompt, which wait until it has become tokens."""
    open: Open | None = None
    admit: Admit | None = None

    def ending(self, request_id: RequestId) -> RequestEnded:
        """How it ends without the scheduler."""
        reason, failure = FinishReason.CANCELLED, None
        if self.error:
            reason, failure = FinishReason.FAILED, FailureCause.ACTOR_CRASHES
        usage = Usage(prompt_tokens=len(self.token_ids))
        return RequestEnded(request_id, reason, usage, 0.0, 0, self.error, failure=failure)


class Ledger(dict[RequestId, LiveRequest]):
    """Requests in the order in which they came."""

    def restore_state(
        self,
        life: int,
        policy: SetPolicy | None,
        histories: tuple[tuple[RequestId, tuple[int, ...]], ...],
        *,
        has_served: bool,
    ) -> RestoreState:
        """What the scheduler of this life, which is new, must know."""
        admitted = [live for live in self.values() if live.stage is RequestStage.ADMITTED]
        return RestoreState(
            life,
            policy,
            tuple([live.admit for live in admitted if live.admit is not None]),
            tuple([live.admit.request_id for live in admitted if live.admit is not None and live.is_aborted]),
            histories,
            has_served,
        )
