"""A request in the scheduler, and the deadlines of all requests. Quantities are tokens, never blocks."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from cuelight.kernel import Timer
from cuelight.messages.cache import Admission, Filled
from cuelight.messages.scheduler import Admit


class Request:
    """One live request.

    ```
    token_ids   [ prompt ………… | output ……… ]  and `pending` more that steps in flight are sampling
    computed    [ K/V confirmed …… ]
    scheduled   [ K/V confirmed or being computed …… ]
    capacity    [ slots in its block table ……………………………… ]
    ```
    `incarnation` counts how often the request lost its blocks, and marks answers from before a loss. No two requests
    share an incarnation, as an ended request may be admitted again under the same id.
    """

    __slots__ = (
        "_admission",
        "admitted_at",
        "arrived_at",
        "block_ids",
        "cached_tokens",
        "capacity",
        "charged_tokens",
        "computed",
        "crashes",
        "deadline",
        "has_failed",
        "in_batch",
        "incarnation",
        "is_over",
        "is_protected",
        "kills_alone",
        "number",
        "output_limit",
        "pending",
        "preemptions",
        "prefill_tokens",
        "prompt_tokens",
        "queue_deadline",
        "queued_seconds",
        "reported",
        "request_id",
        "running",
        "running_seconds",
        "salt",
        "sample_of",
        "sampled_since_crash",
        "sampling",
        "scheduled",
        "service",
        "suspect",
        "token_ids",
        "token_limit",
    )

    def __init__(self, number: int, admit: Admit) -> None:
        """`number` is the request's place in the order of arrival."""
        token_ids, sampling = admit.token_ids, admit.sampling
        self.number = number
        self.request_id = admit.request_id
        self.service = admit.service
        self.arrived_at = admit.submitted_at
        self.queue_deadline = _after(self.arrived_at, admit.service.queue_seconds)
        self.deadline = _after(self.arrived_at, admit.service.deadline_seconds)
        self.token_ids = [*token_ids, *admit.output]
        self.prompt_tokens = len(token_ids)
        self.output_limit = min(sampling.max_tokens, admit.token_limit - len(token_ids))
        self.token_limit = len(token_ids) + self.output_limit
        assert self.output_limit > 0, "intake admits only requests with room for an output token"
        self.sampling = sampling
        self.sample_of = admit.sample_of
        self.salt = admit.service.cache_salt.encode()
        self.admitted_at = 0.0
        self.running_seconds = 0.0
        self.queued_seconds: float | None = None
        self.cached_tokens = 0
        # Prompt tokens that the tenant was charged for or that were cached.
        self.charged_tokens = 0
        # A resumed request counts as preempted, so that it is admitted before requests without output.
        self.preemptions = 1 if admit.output else 0
        # Whether the request runs alone until it has sampled, and whether the reason is a failed step.
        self.suspect = False
        self.has_failed = False
        # Deaths of the executor with this request in flight; those by a kill from outside while it ran alone. Both
        # return to 0 once it has sampled some tokens.
        self.crashes = 0
        self.kills_alone = 0
        self.sampled_since_crash = 0
        self.incarnation = number << 32
        self.is_over = False
        self.pending = 0
        self._admission: Admission | None = None
        self._lose_blocks()

    def limit_to(self, token_limit: int) -> None:
        """Lower the token limit to `token_limit`, but leave room for one output token, so that the request can end."""
        self.token_limit = max(min(self.token_limit, token_limit), self.prompt_tokens + 1)
        self.output_limit = self.token_limit - self.prompt_tokens

    def _lose_blocks(self) -> None:
        self.running = False
        # Whether another request was preempted for it; then it is not preempted for another tenant's share.
        self.is_protected = False
        self.in_batch = False
        self.scheduled = 0
        self.computed = 0
        self.capacity = 0
        self.reported = 0
        self.prefill_tokens = 0
        self.block_ids: list[int] = []

    @property
    def output_tokens(self) -> int:
        """Number of known output tokens."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def output(self) -> tuple[int, ...]:
        """The known output tokens."""
        return tuple(self.token_ids[self.prompt_tokens :])

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 is a decode, 0 means that nothing is left to compute.

        Nothing is left once every token the request may produce is known or being sampled (rule `no-useless-step`).
        """
        known = len(self.token_ids) + self.pending
        return 0 if known >= self.token_limit else known - self.scheduled

    def admission(self) -> Admission:
        """Return the request's `Admission` with all known tokens. Cached until the tokens change."""
        if self._admission is None or len(self._admission.token_ids) != len(self.token_ids):
            self._admission = Admission(self.request_id, tuple(self.token_ids), self.salt, self.sample_of)
        return self._admission

    def admit(self, cached_tokens: int, now: float) -> None:
        """Start running with granted blocks, which hold `cached_tokens` computed tokens."""
        self.running = True
        self.scheduled = self.computed = cached_tokens
        self.reported = self.prefill_tokens = len(self.token_ids)
        self._admission = None
        self.charged_tokens = max(self.charged_tokens, min(cached_tokens, self.prompt_tokens))
        self.admitted_at = now
        if self.queued_seconds is None:
            self.queued_seconds = now - self.arrived_at
            self.cached_tokens = cached_tokens

    def extend(self, block_ids: Sequence[int], token_capacity: int) -> None:
        """Append blocks to the block table. The executor receives them with the next step."""
        self.block_ids.extend(block_ids)
        self.capacity = token_capacity

    def stop_running(self, now: float) -> None:
        """Stop running, and add the time since the admission to `running_seconds`."""
        self.running = False
        self.running_seconds += now - self.admitted_at

    def evict(self, now: float) -> None:
        """Lose the blocks. Every known token will be computed again; tokens in flight still arrive."""
        self.stop_running(now)
        self.incarnation += 1
        self._lose_blocks()

    def slots(self) -> int:
        """Return the token slots that the request holds, or, while it waits, the least it would hold."""
        return self.capacity or len(self.token_ids)

    def filled(self) -> Filled:
        """Return the computed tokens not yet reported to the cache manager, and mark them reported."""
        unreported = tuple(self.token_ids[self.reported : self.computed])
        self.reported = max(self.reported, self.computed)
        return Filled(self.request_id, self.computed, unreported)

    def stop_at(self, output_tokens: int) -> None:
        """Drop output beyond the `output_tokens`-th token, where the text ended."""
        del self.token_ids[self.prompt_tokens + output_tokens :]
        # Reported tokens stay reported: they were computed, and the cache manager's counts never fall.
        self.computed = min(self.computed, max(self.reported, len(self.token_ids)))


def _after(start: float, seconds: float | None) -> float:
    return math.inf if seconds is None else start + seconds


class RequestDeadlines:
    """The deadlines of live requests, with one timer for the earliest."""

    def __init__(self, wake_after: Callable[[float], Timer]) -> None:
        self._wake_after = wake_after
        self._live: dict[int, Request] = {}
        self._moments: list[tuple[float, int]] = []
        self._timer: Timer | None = None
        self._timer_at = math.inf

    def add(self, request: Request, now: float) -> None:
        """Add the deadlines of a request, if it has any."""
        for moment in {request.queue_deadline, request.deadline} - {math.inf}:
            self._live[request.number] = request
            heapq.heappush(self._moments, (moment, request.number))
        self._set_timer(now)

    def forget(self, request: Request) -> None:
        """Remove the deadlines of a request that has ended, before they come."""
        if self._live.pop(request.number, None) is not None and len(self._moments) > 4 * len(self._live) + 64:
            self._moments = [place for place in self._moments if place[1] in self._live]
            heapq.heapify(self._moments)

    def due(self, now: float) -> list[Request]:
        """Return requests with a deadline that has come. The caller checks which one, and whether it still applies."""
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
