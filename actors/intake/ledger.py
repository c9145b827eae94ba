"""The ledger: every request that intake has accepted and that has not finished, with the messages sent about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from cuelight.messages.address import Address
from cuelight.messages.client import ClientMessage
from cuelight.messages.detokenizer import Open, RequestEnded
from cuelight.messages.request import FailureCause, FinishReason, RequestId, Sampling, Service, Usage
from cuelight.messages.scheduler import Admit, RestoreState, SetPolicy


class RequestStage(Enum):
    """The stages of a request in the ledger."""

    ENCODING = auto()
    """The prompt is being tokenized."""
    OPENING = auto()
    """The detokenizer is opening the stream."""
    ADMITTED = auto()
    """`Admit` was sent to the scheduler."""
    CLOSING = auto()
    """The request was cancelled or failed before its admission, and the detokenizer is closing the stream."""


@dataclass(slots=True)
class LiveRequest:
    """A request in the ledger, from its submission until it is refused or its stream has ended."""

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
    """Whether the request was cancelled or has failed."""
    error: str = ""
    """Why the request has failed; empty if it has not."""
    samples: list[RequestId] = field(default_factory=list)
    """Requests with the same prompt, which take its token ids once it is tokenized."""
    open: Open | None = None
    admit: Admit | None = None

    def ending(self, request_id: RequestId) -> RequestEnded:
        """Return the end of a request that the scheduler never received: cancelled, or failed with `error`."""
        reason, failure = FinishReason.CANCELLED, None
        if self.error:
            reason, failure = FinishReason.FAILED, FailureCause.ACTOR_CRASHES
        usage = Usage(prompt_tokens=len(self.token_ids))
        return RequestEnded(request_id, reason, usage, 0.0, 0, self.error, failure=failure)


class Ledger(dict[RequestId, LiveRequest]):
    """Live requests in order of arrival."""

    def restore_state(
        self,
        life: int,
        policy: SetPolicy | None,
        histories: tuple[tuple[RequestId, tuple[int, ...]], ...],
        *,
        has_served: bool,
    ) -> RestoreState:
        """Return the message that restores a new scheduler, whose life is `life`."""
        admitted = [live for live in self.values() if live.stage is RequestStage.ADMITTED]
        return RestoreState(
            life,
            policy,
            tuple([live.admit for live in admitted if live.admit is not None]),
            tuple([live.admit.request_id for live in admitted if live.admit is not None and live.is_aborted]),
            histories,
            has_served,
        )
