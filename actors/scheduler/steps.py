"""The step loop: requests the next step's blocks from the cache manager, sends the step, and handles both answers.

One round is Reserve → Granted → ExecuteStep, or ExecuteStep alone when no blocks are needed. Up to `steps_in_flight`
steps run or wait at the executor, so that planning overlaps with the device's work.
"""

from __future__ import annotations

from collections.abc import Callable

from cuelight.actors.scheduler import recovery
from cuelight.actors.scheduler.in_flight import BlockRequests, InFlightSteps
from cuelight.actors.scheduler.outbox import Outbox
from cuelight.actors.scheduler.request import Request
from cuelight.actors.scheduler.state import SchedulerState
from cuelight.kernel import get_logger
from cuelight.messages import cache, executor
from cuelight.messages.address import Address
from cuelight.messages.request import FailureCause, FinishReason
from cuelight.messages.scheduler import ExecutorReady, Grant, Granted, StepDone, StepFailed

log = get_logger("cuelight.scheduler")


class StepLoop:
    """Sends steps of decodes, then prefills, within the token budget; the policy orders service and preemption.

    No step is planned while there is no pool or before the state is open. `on_step` is called with the time at which
    each step finishes.
    """

    def __init__(
        self,
        state: SchedulerState,
        steps: InFlightSteps,
        block_requests: BlockRequests,
        outbox: Outbox,
        to_cache: Address[cache.CacheMessage],
        on_step: Callable[[float], None],
        now: Callable[[], float],
    ) -> None:
        self._state = state
        self._steps = steps
        self._block_requests = block_requests
        self._outbox = outbox
        self._cache = to_cache
        self._on_step = on_step
        self._now = now

    @property
    def is_busy(self) -> bool:
        """Whether a `Reserve` or a step is in flight."""
        return self._block_requests.asked is not None or bool(self._steps)

    def plan(self, *, admit: bool) -> None:
        """Send steps while there is room, until blocks must be requested or no step can be planned."""
        while self._state.is_serving and self._block_requests.asked is None and self._steps.has_room:
            claimant = self._make_room() if admit else None
            following = self._state.plan_round(admit=admit, claimant=claimant)
            if following.growths or following.admitted:
                self._block_requests.ask(
                    following, self._state.running, self._state.generation, self._steps.copies_done
                )
            elif not self._send(following.plan):
                return

    def end_what_is_stuck(self) -> None:
        """Fail requests while some are live, none is in flight and no step can be planned (rule `liveness`)."""
        while self._state.is_serving and self._state.requests and not self.is_busy:
            self._state.end_stuck()
            self._outbox.announce()
            self.plan(admit=True)

    def granted(self, granted: Granted) -> None:
        """Take the granted blocks; preempt if a running request was refused, else send the step that fits."""
        state = self._state
        if (asked := self._block_requests.answered(granted)) is None:
            return
        self._steps.copy(granted.copies, granted.round)
        for grant in granted.grants:
            self._take(grant, asked[grant.request_id])
        is_stale = state.generation != self._block_requests.generation
        for request_id in granted.deferred:
            if (deferred := state.requests.get(request_id)) is not None:
                state.defer(deferred, is_stale=is_stale)
        short = [r for i in granted.refused if (r := state.requests.get(i)) and r.incarnation == asked[i]]
        if any(request.running for request in short):
            state.preempt_last()
            self._outbox.flush_released()
            # The same round must not admit the preempted request again (rule `running-first`).
            self.plan(admit=False)
        else:
            is_all_deferred = bool(granted.deferred) and self._block_requests.candidates <= set(granted.deferred)
            self._go_on(short, is_stale=is_stale, is_all_deferred=is_all_deferred)

    def _go_on(self, short: list[Request], *, is_stale: bool, is_all_deferred: bool) -> None:
        """Send the step that fits after an answer in which no running request was refused.

        `short` are the refused requests; `is_all_deferred` if every candidate was deferred.
        """
        state = self._state
        state.close_gate(short[0] if short and not is_stale else None)
        if short and state.find_claim() is not None:
            self.plan(admit=True)
            return
        if short and short[0].is_protected and not is_stale:
            state.make_no_more_room(short[0])
        # If every candidate was deferred, the next in line are tried before this step is sent.
        if short or not is_all_deferred:
            self._send(state.plan_within_blocks())
        if short and not is_stale and not state.running and not self._steps:
            # No request runs, so every block is free: a request that does not fit now never will (rule `liveness`).
            reason = "the request does not fit the block pool"
            state.end(short[0], FinishReason.FAILED, reason, FailureCause.NO_ROOM)
            state.close_gate(None)  # the pool may hold the next request

    def step_done(self, done: StepDone) -> None:
        """Apply the result of the oldest step in flight."""
        if (plan := self._steps.finished(done)) is None:
            return
        self._on_step(self._now())
        self._state.step_done(plan, done)

    def step_failed(self, failed: StepFailed) -> None:
        """Void every step of the epoch and recompute the running requests."""
        if (plan := self._steps.failed(failed)) is None:
            return
        log.warning("step_failed", epoch=failed.epoch, step=failed.step, requests=len(plan), error=failed.error)
        self._state.step_failed(plan, failed)
        self._steps.forget_batch(contents_lost=failed.contents_lost)
        if failed.contents_lost:
            self._lose_blocks("a step failed")
            self._reset_cache()

    def executor_ready(self, ready: ExecutorReady) -> None:
        """Start planning for this executor, whose pool is empty."""
        if self._state.pool is not None:
            self._lose_blocks("the executor was replaced")
        self._state.set_pool(ready)
        self._steps.begin_life(ready.life, ready.seconds)
        self._reset_cache()

    def executor_lost(self) -> list[Request]:
        """Stop planning until an executor is ready. Return the requests of the steps that were in flight."""
        present = [request for plan in self._steps for request, _, _ in plan]
        self._steps.end_life()
        self._state.set_pool(None)
        self._lose_blocks("the executor was lost")
        return present

    def cache_lost(self) -> None:
        """Preempt every running request and reset the new cache manager, which is empty."""
        self._block_requests.end_life()
        self._lose_blocks("the cache manager was lost")
        self._reset_cache()

    def switch_executor(self, to: Address[executor.ExecutorMessage], eos_token_ids: frozenset[int]) -> None:
        """Send later steps to another executor, whose model ends an output with one of these tokens."""
        self._lose_blocks("another model takes over")
        self._steps.send_to(to)
        self._state.set_end_tokens(eos_token_ids)
        self._state.set_pool(None)

    def _make_room(self) -> Request | None:
        """Preempt at most one request for another tenant's share. Return the claimant, or None without one."""
        pair = self._state.find_claim()
        if pair is None or not self._state.has_tokens_left(without=pair[1]):
            return None
        claimant, victim = pair
        self._state.make_room(claimant, victim)
        self._outbox.flush_released()
        return claimant

    def _send(self, plan: list[tuple[Request, int]]) -> bool:
        """Send a step to the executor, unless it is empty or may not be in flight beside the others."""
        if not plan or not recovery.may_be_in_flight(plan, self._steps):
            return False
        self._state.count_step(sum([count for _, count in plan]))
        self._steps.send(plan)
        return True

    def _take(self, grant: Grant, incarnation: int) -> None:
        """Give a request its granted blocks, unless it ended or was preempted after the `Reserve`."""
        request = self._state.requests.get(grant.request_id)
        if request is not None and request.incarnation == incarnation:
            self._state.take_blocks(grant)
        elif grant.request_id in self._block_requests.candidates:
            # A request that ended while it waited has not released these blocks. For one that ended or lost its blocks
            # while it ran, the Release follows the Reserve and covers them.
            self._state.return_blocks(grant)

    def _lose_blocks(self, why: str) -> None:
        self._state.lose_blocks(why)
        self._steps.void()
        self._block_requests.void()

    def _reset_cache(self) -> None:
        """Send `Reset` to the cache manager, if there is a pool."""
        if (pool := self._state.pool) is not None:
            self._cache.tell(cache.Reset(pool.block_count, pool.block_size, pool.host, self._steps.copies_done))
