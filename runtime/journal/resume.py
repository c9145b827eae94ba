"""Requests restored from an earlier process: their submission, and the claims of their clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from cuelight import errors
from cuelight.config import shown
from cuelight.journal.restore import RestoredRequest
from cuelight.messages.intake import Submit
from cuelight.messages.request import RequestId, Service
from cuelight.stream import Inbox

LATE_SECONDS: Final = 0.001
"""Time left to a restored request whose deadline has passed: above 0, so that it is accepted and then expires."""


class UnclaimedRequests:
    """The restored requests, running or ended, that no client has resumed yet."""

    def __init__(self, cancel: Callable[[RequestId], None]) -> None:
        self._cancel = cancel
        self._waiting: dict[RequestId, tuple[Inbox, RestoredRequest]] = {}
        self._taken: set[RequestId] = set()

    def add(self, inbox: Inbox, restored: RestoredRequest) -> None:
        """Add a restored request, which a client may `take` from now on."""
        self._waiting[restored.request_id] = inbox, restored

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        """The ids of the requests that no client has resumed."""
        return tuple(self._waiting)

    def take(self, request_id: RequestId, position: int, tenant: str) -> Inbox:
        """Return the inbox of a restored request and remove the request.

        Raises UnknownRequest, RequestTaken, WrongTenant or BadPosition; the request can still be taken then.
        """
        if request_id in self._taken:
            raise errors.RequestTaken(f"request {request_id} was resumed before: a request has one stream")
        if request_id not in self._waiting:
            raise errors.UnknownRequest(f"no request {shown(request_id)} can be resumed: see `Engine.unclaimed`")
        inbox, restored = self._waiting[request_id]
        if restored.service.tenant != tenant:
            raise errors.WrongTenant(f"request {request_id} does not belong to tenant {shown(tenant)}")
        known = max(len(inbox.token_ids), len(restored.output))
        if position > known:
            raise errors.BadPosition(
                f"position must be at most {known}, the output tokens of request {request_id} so far, "
                f"not {shown(position)}"
            )
        del self._waiting[request_id]
        self._taken.add(request_id)
        return inbox

    def give_up(self) -> None:
        """Cancel the requests that no client has resumed and that still run, and forget all that were not resumed."""
        waiting, self._waiting = self._waiting, {}
        for request_id, (inbox, _) in waiting.items():
            if not inbox.over:
                inbox.cancelled = True
                self._cancel(request_id)


def submission(restored: RestoredRequest, inbox: Inbox) -> Submit:
    """Return the message that submits a restored request, with the time that remains until its deadlines."""
    service, age = restored.service, restored.seconds_ago
    queue_seconds = None if restored.output else _left(service.queue_seconds, age)
    service = msgspec.structs.replace(
        service, queue_seconds=queue_seconds, deadline_seconds=_left(service.deadline_seconds, age)
    )
    return Submit(
        restored.request_id,
        restored.prompt,
        restored.sampling,
        inbox,
        service if not restored.is_over else Service(service.tenant, cache_salt=service.cache_salt),
        is_accepted=True,
        output=restored.output,
    )


def _left(seconds: float | None, age: float) -> float | None:
    return None if seconds is None else max(LATE_SECONDS, seconds - age)
