"""Requests that go on from an earlier process: who may pick which of them up, and until when."""

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
"""What is left to a request whose deadline passed while nobody lived: enough to be told so."""


class UnclaimedRequests:
    """Those that nobody has picked up yet, running or over."""

    def __init__(self, cancel: Callable[[RequestId], None]) -> None:
        self._cancel = cancel
        self._waiting: dict[RequestId, tuple[Inbox, RestoredRequest]] = {}
        self._taken: set[RequestId] = set()

    def add(self, inbox: Inbox, restored: RestoredRequest) -> None:
        """It goes on, for whoever asks for it."""
        self._waiting[restored.request_id] = inbox, restored

    @property
    def request_ids(self) -> tuple[RequestId, ...]:
        """Of those that wait to be picked up."""
        return tuple(self._waiting)

    def take(self, request_id: RequestId, position: int, tenant: str) -> Inbox:
        """Pick one up. Raises UnknownRequest, RequestTaken, WrongTenant, BadPosition, and nothing has happened then."""
        if request_id in self._taken:
            raise errors.RequestTaken(f"request {request_id} has been picked up already")
        if request_id not in self._waiting:
            raise errors.UnknownRequest(f"no request {shown(request_id)} waits to be picked up")
        inbox, restored = self._waiting[request_id]
        if restored.service.tenant != tenant:
            raise errors.WrongTenant(f"request {request_id} is not one of tenant {shown(tenant)}")
        known = max(len(inbox.token_ids), len(restored.output))
        if position > known:
            raise errors.BadPosition(
                f"request {request_id} has come to {known} tokens, and not to {shown(position)} yet"
            )
        del self._waiting[request_id]
        self._taken.add(request_id)
        return inbox

    def give_up(self) -> None:
        """Nobody will come any more: whoever still runs is cancelled, and all are forgotten."""
        waiting, self._waiting = self._waiting, {}
        for request_id, (inbox, _) in waiting.items():
            if not inbox.over:
                inbox.cancelled = True
                self._cancel(request_id)


def submission(restored: RestoredRequest, inbox: Inbox) -> Submit:
    """The same request once more, with what is left of its time."""
    service, gone = restored.service, restored.seconds_ago
    queue_seconds = None if restored.output else _left(service.queue_seconds, gone)
    service = msgspec.structs.replace(
        service, queue_seconds=queue_seconds, deadline_seconds=_left(service.deadline_seconds, gone)
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


def _left(seconds: float | None, gone: float) -> float | None:
    return None if seconds is None else max(LATE_SECONDS, seconds - gone)
