"""Limits on requests: their number and length, the defaults filled in at admission, and the completion rate."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from cuelight.actors.intake.errors import Refused
from cuelight.messages.request import Refusal, Sampling, Service


@dataclass(frozen=True)
class AdmissionLimits:
    """The limits that intake applies to requests.

    `context_length` counts tokens, prompt and output together; `queue_limit` counts live requests. `tenants` names
    the tenants whose requests are accepted; None accepts any. Isolated tenants share no prefixes.
    """

    vocab_size: int
    context_length: int
    queue_limit: int
    tenants: tuple[str, ...] | None = None
    isolate_tenants: bool = False

    def check_length(self, prompt_tokens: int, token_capacity: int) -> None:
        """Refuse a prompt that can never fit with one token of output (rule `reject-impossible`). Raises `Refused`."""
        if prompt_tokens == 0:
            raise Refused(Refusal.EMPTY_PROMPT, "the prompt has no tokens")
        for limit, whose in (
            (self.context_length, "the model's context"),
            (token_capacity, "the engine's whole block pool"),
        ):
            if prompt_tokens + 1 > limit:
                reason = f"the prompt has {prompt_tokens} tokens and needs one more for output; {whose} holds {limit}"
                raise Refused(Refusal.PROMPT_TOO_LONG, reason)

    def settled(self, sampling: Sampling, token_limit: int, random_bits: Callable[[int], int]) -> Sampling:
        """Return `sampling` with a seed, from `random_bits` if it has none, and with numbers clipped to the limits."""
        max_tokens = min(sampling.max_tokens, token_limit)
        return msgspec.structs.replace(
            sampling,
            max_tokens=max_tokens,
            min_tokens=min(sampling.min_tokens, max_tokens),
            top_k=sampling.top_k if sampling.top_k < self.vocab_size else 0,
            seed=random_bits(64) if sampling.seed is None else sampling.seed,
        )

    def isolated(self, service: Service) -> Service:
        """Return `service`, with a salt that no other tenant can have if tenants are isolated."""
        if not self.isolate_tenants:
            return service
        salt = f"{len(service.tenant)} {service.tenant} {service.cache_salt}"
        return msgspec.structs.replace(service, cache_salt=salt)


def check_room(live: int, count: int, queue_limit: int, completions: CompletionRate) -> None:
    """Raise `Refused` if `live` requests leave no room for `count` more: QUEUE_FULL, with a retry time if known."""
    if (excess := live + count - queue_limit) > 0:
        reason = f"{live} requests are live, and the queue limit is {queue_limit}"
        raise Refused(Refusal.QUEUE_FULL, reason, completions.seconds_for(excess))


WINDOW: Final = 64


class CompletionRate:
    """The rate of completions, from the times at which the last 64 requests finished."""

    def __init__(self) -> None:
        self._moments: deque[float] = deque(maxlen=WINDOW)

    def note(self, count: int, now: float) -> None:
        """Record that `count` requests finished at time `now`."""
        self._moments.extend([now] * count)

    def seconds_for(self, count: int) -> float | None:
        """Estimate the seconds until `count` more requests finish; None without a measurable rate."""
        if len(self._moments) < 2 or self._moments[-1] == self._moments[0]:
            return None
        return count * (self._moments[-1] - self._moments[0]) / (len(self._moments) - 1)
