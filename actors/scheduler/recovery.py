"""What was lost with the executor or the cache manager, how long it takes to come back, and when it is hopeless."""

from __future__ import annotations

from cuelight.actors.scheduler.outbox import Peers
from cuelight.messages import observer


class RecoveryTracker:
    """From a loss to the first step after it. Deaths of the executor with no step in between are counted."""

    def __init__(self, peers: Peers, restarts_max: int) -> None:
        self._observer = peers.observer
        self._kill_executor = peers.kill_executor
        self._restarts_max = restarts_max
        self._lost_at: float | None = None
        self._ready_at = 0.0
        self._load_seconds = 0.0
        self._deaths = 0
        self._has_given_up = False

    def replaced(self, peers: Peers) -> None:
        """Another executor has taken over, which answers for its own deaths alone."""
        self._kill_executor = peers.kill_executor
        self._deaths = 0

    def lost(self, reason: str, now: float) -> None:
        """Every block is gone."""
        if self._lost_at is None:
            self._lost_at = self._ready_at = now
            self._load_seconds = 0.0
        self._observer.tell(observer.Recovering(reason))

    def died(self, reason: str, *, is_explained: bool) -> None:
        """The executor's life is over; where that is explained, what brought it down will do so no more."""
        self._deaths = 0 if is_explained else self._deaths + 1
        if self._deaths > self._restarts_max:
            self.give_up(f"the executor has died {self._deaths} times and computed nothing in between; {reason}")

    def give_up(self, reason: str) -> None:
        """There is no hope."""
        if not self._has_given_up:
            self._has_given_up = True
            self._observer.tell(observer.GaveUp(reason))

    def ready(self, load_seconds: float, now: float) -> None:
        """There is an executor; one that outlived the loss has loaded before."""
        self._ready_at = now
        self._load_seconds = min(load_seconds, now - self._lost_at) if self._lost_at is not None else 0.0

    def advanced(self, now: float) -> None:
        """A step is done."""
        self._deaths = 0
        self.settle(now)

    def settle(self, now: float) -> None:
        """All is as before the loss, as far as anybody needs it."""
        if self._lost_at is not None:
            start_seconds = max(0.0, self._ready_at - self._lost_at - self._load_seconds)
            self._observer.tell(observer.Recovered(start_seconds, self._load_seconds, now - self._ready_at))
            self._lost_at = None

    def kill(self, reason: str) -> bool:
        """End the executor's life, if that can be done."""
        if self._kill_executor is None:
            return False
        self._kill_executor(reason)
        return True
