"""Why requests wait: the obstacles to admission over time, and the events of each request. Bounded in size.

A waiting request has no events of its own; it waits because of the obstacles to any admission meanwhile.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Final

from cuelight.actors.scheduler.request import Request
from cuelight.messages.request import RequestId
from cuelight.messages.scheduler import Explanation, Occurrence

OBSTACLES_MAX: Final = 256
EVENTS_MAX: Final = 64
ENDED_MAX: Final = 1024


class Timeline:
    """The last obstacles to admission, the last events of live requests, and the timelines of the last to end."""

    def __init__(self) -> None:
        self._obstacles: deque[tuple[float, str]] = deque(maxlen=OBSTACLES_MAX)
        self._events: dict[RequestId, deque[tuple[float, str, str]]] = {}
        self._ended: OrderedDict[RequestId, Explanation] = OrderedDict()

    def obstacle(self, why: str, now: float) -> None:
        """Store the reason why no request is admitted from now on; "" when one was admitted."""
        if why != (self._obstacles[-1][1] if self._obstacles else ""):
            self._obstacles.append((now, why))

    def note(self, request: Request, what: str, why: str, now: float) -> None:
        """Add an event to a request, unless it equals the last one."""
        events = self._events.setdefault(request.request_id, deque(maxlen=EVENTS_MAX))
        if not events or events[-1][1:] != (what, why):
            events.append((now, what, why))

    def end(self, request: Request, state: str, why: str, now: float) -> None:
        """Add the end of a request. Its timeline is kept among the last `ENDED_MAX`."""
        self.note(request, state, why, now)
        self._ended[request.request_id] = self.explain(request, state)
        del self._events[request.request_id]
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def ended(self, request_id: RequestId) -> Explanation:
        """Return the timeline of a request that has ended; "unknown" if it is not kept."""
        return self._ended.get(request_id) or Explanation(request_id, "unknown", ())

    def explain(self, request: Request, state: str) -> Explanation:
        """Return a request's timeline so far, with the obstacles to admission while it waited."""
        events = list(self._events.get(request.request_id, ()))
        timeline = [Occurrence(at - request.arrived_at, what, why) for at, what, why in events]
        for since, until in _waits(request, events):
            for began, why in self._shut(since, until):
                timeline.append(Occurrence(max(began, since) - request.arrived_at, "kept waiting", why))
        return Explanation(request.request_id, state, tuple(sorted(timeline, key=lambda each: each.seconds)))

    def _shut(self, since: float, until: float) -> Iterator[tuple[float, str]]:
        """Yield obstacles in effect between `since` and `until`, the latest first, each after its start time."""
        ended = math.inf
        for began, why in reversed(self._obstacles):
            if ended <= since:
                return
            if why and began < until:
                yield began, why
            ended = began


def _waits(request: Request, events: list[tuple[float, str, str]]) -> list[tuple[float, float]]:
    """Return the intervals that a request spent in the queue."""
    waits: list[tuple[float, float]] = []
    # If the first events were dropped, the time before the remaining ones is unknown.
    since: float | None = request.arrived_at if len(events) < EVENTS_MAX else None
    for at, what, _ in events:
        if what == "preempted":
            since = at
        elif since is not None and what != "deferred":
            waits.append((since, at))
            since = None
    if since is not None:
        waits.append((since, math.inf))
    return waits
