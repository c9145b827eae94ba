"""When requests expire: one heap of moments and one timer for the earliest, however many requests there are."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from cuelight.actors.scheduler.tracked import Request
from cuelight.kernel import Timer


class RequestDeadlines:
    """Requests by the moment at which one of their deadlines comes, until they are forgotten."""

    def __init__(self, wake_after: Callable[[float], Timer]) -> None:
        self._wake_after = wake_after
        self._live: dict[int, Request] = {}
        self._moments: list[tuple[float, int]] = []
        self._timer: Timer | None = None
        self._timer_at = math.inf

    def add(self, request: Request, now: float) -> None:
        """Remember its deadlines, if it has any."""
        for moment in {request.queue_deadline, request.deadline} - {math.inf}:
            self._live[request.number] = request
            heapq.heappush(self._moments, (moment, request.number))
        self._set_timer(now)

    def forget(self, request: Request) -> None:
        """It is over. A deadline far ahead is not kept until it comes."""
        if self._live.pop(request.number, None) is not None and len(self._moments) > 4 * len(self._live) + 64:
            self._moments = [place for place in self._moments if place[1] in self._live]
            heapq.heapify(self._moments)

    def due(self, now: float) -> list[Request]:
        """Those for whom a moment has come; the caller looks which, and whether it still matters."""
        self._timer_at = math.inf
        late: list[Request] = []
        while self._moments and self._moments[0][0] <= now:
            _, number = heapq.heappop(self._moments)
            if (request := self._live.get(number)) is not None:
                late.append(request)
        self._set_timer(now)
        return late

    def _set_timer(self, now: float) -> None:
        if not self._moments or self._moments[0][0] >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._moments[0][0]
        self._timer = self._wake_after(max(0.0, self._timer_at - now))
