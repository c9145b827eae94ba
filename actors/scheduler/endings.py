"""Requests that have ended, until the detokenizer has confirmed it: it may be lost with what it had not told yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from cuelight.messages.detokenizer import RequestEnded
from cuelight.messages.request import RequestId

Ending: TypeAlias = tuple[RequestEnded, tuple[int, ...]]


class UnconfirmedEnds:
    """How each of them ended, and with what output."""

    def __init__(self) -> None:
        self._endings: dict[RequestId, Ending] = {}

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._endings

    def __len__(self) -> int:
        return len(self._endings)

    def add(self, ended: RequestEnded, output: tuple[int, ...]) -> None:
        """It has ended."""
        self._endings[ended.request_id] = ended, output

    def of(self, request_id: RequestId) -> Ending:
        """How this one ended."""
        return self._endings[request_id]

    def all(self) -> tuple[Ending, ...]:
        """Those not confirmed, oldest first."""
        return tuple(self._endings.values())

    def close(self, request_ids: Iterable[RequestId]) -> None:
        """These are confirmed."""
        for request_id in request_ids:
            self._endings.pop(request_id, None)
