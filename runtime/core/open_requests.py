"""The open requests of an engine, kept as they were submitted, to be sent again to a new intake."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, ValuesView

import msgspec

from cuelight import errors
from cuelight.journal.restore import RestoredRequest
from cuelight.kernel import ActorCrashed
from cuelight.messages.address import Address
from cuelight.messages.detokenizer import Histories
from cuelight.messages.intake import Cancel, IntakeMessage, ResendComplete, SetTenants, Streams, Submit
from cuelight.messages.request import FinishReason, RequestId
from cuelight.messages.scheduler import RestoreState, SetPolicy
from cuelight.stream import Inbox

_STATE_MESSAGES = (RestoreState, Histories, Streams)
"""The messages from which a new actor restores its state, and so may meet the request that crashed the actor before."""


class OpenRequests:
    """Requests from their submission to their end, oldest first, and the present policy and tenants."""

    def __init__(self, ended_max: int = 0, recent_seconds: float = 0.0) -> None:
        """`unfinished` returns up to `ended_max` requests that ended within `recent_seconds`, too."""
        self.next_id = 1
        self._recent_seconds = recent_seconds
        self._ended: deque[tuple[Submit, Inbox]] = deque(maxlen=ended_max)
        self._inboxes: dict[RequestId, Inbox] = {}
        self._submits: dict[RequestId, Submit] = {}
        self._orders: dict[type, SetTenants | SetPolicy] = {}

    def add(self, inbox: Inbox, submit: Submit) -> None:
        """Add a request that is about to be sent to intake."""
        self._inboxes[inbox.request_id] = inbox
        self._submits[inbox.request_id] = submit

    def remove(self, inbox: Inbox) -> None:
        """Remove a request that has ended."""
        self._inboxes.pop(inbox.request_id, None)
        submit = self._submits.pop(inbox.request_id, None)
        if (
            submit is not None
            and inbox.end is not None
            and inbox.end.reason in (FinishReason.STOP, FinishReason.LENGTH)
        ):
            self._ended.append((submit, inbox))

    def new_id(self) -> RequestId:
        """Return an id that no other request has."""
        request_id, self.next_id = RequestId(self.next_id), self.next_id + 1
        return request_id

    def unfinished(self, now: float) -> tuple[int, tuple[RestoredRequest, ...]]:
        """Return what a resuming process needs: the next id, and the requests that are open or ended recently."""
        recent = [each for each in self._ended if now - (each[1].ended_at or now) <= self._recent_seconds]
        over = [_restored(*each, now) for each in recent]
        live = [_restored(submit, self._inboxes[request_id], now) for request_id, submit in self._submits.items()]
        return self.next_id, (*over, *(each for each in live if not self._inboxes[each.request_id].over))

    def order(self, order: SetTenants | SetPolicy) -> None:
        """Keep the policy or the tenants for `resend`, in place of those before."""
        self._orders[type(order)] = order

    def resend(self, intake: Address[IntakeMessage]) -> None:
        """Send the policy, the tenants and all open requests to a new intake."""
        for order in self._orders.values():
            intake.tell(order)
        for request_id, submit in list(self._submits.items()):
            inbox = self._inboxes[request_id]
            output = tuple(inbox.token_ids) or submit.output
            intake.tell(msgspec.structs.replace(submit, is_accepted=inbox.is_accepted, output=output))
            if inbox.cancelled:
                intake.tell(Cancel(request_id))
        intake.tell(ResendComplete())

    def fail(self, reason: Callable[[], errors.EngineError]) -> None:
        """Fail all requests, each with a new exception from `reason`."""
        for inbox in list(self._inboxes.values()):
            inbox.fail(reason())

    def get(self, request_id: RequestId) -> Inbox | None:
        """Return the inbox of a request; None if it is not open."""
        return self._inboxes.get(request_id)

    def values(self) -> ValuesView[Inbox]:
        """Return the inboxes of all open requests."""
        return self._inboxes.values()

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._inboxes

    def __len__(self) -> int:
        return len(self._inboxes)


def _restored(submit: Submit, inbox: Inbox, now: float) -> RestoredRequest:
    return RestoredRequest(
        submit.request_id,
        submit.prompt,
        submit.sampling,
        submit.service,
        max(tuple(inbox.token_ids), submit.output, key=len),
        now - inbox.submitted_at,
        is_over=inbox.end is not None,
        is_accepted=inbox.is_accepted,
    )


class FaultAttribution:
    """Finds the request whose messages crash an actor: two crashes in a row over one request are that request's fault.

    A single crash over a request is attributed to no request.
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[RequestId, type]] = {}

    def at_fault(self, crash: ActorCrashed) -> RequestId | None:
        """Return the request at fault, if the actor's previous crash was over the same request and kind of message.

        A crash over a message that restores the actor's state is attributed to the request of the crash before.
        """
        kind, before = type(crash.message), self._before.pop(crash.actor, None)
        if before is not None and kind in _STATE_MESSAGES:
            return before[0]
        request_id = _request_of(crash.message)
        if request_id is None:
            return None
        if before == (request_id, kind):
            return request_id
        self._before[crash.actor] = request_id, kind
        return None


def _request_of(message: object) -> RequestId | None:
    """Return the id of the only request that a message refers to; None for any other message."""
    several: object = getattr(message, "request_ids", None)
    request_id: object = getattr(message, "request_id", None)
    if request_id is None and isinstance(several, tuple) and len(several) == 1:
        (request_id,) = several
    return RequestId(request_id) if isinstance(request_id, int) else None
