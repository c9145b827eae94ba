"""Another executor that is to take over: whether it is there, who must be done before, and whether all fit it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

from cuelight.actors.scheduler.outbox import ExecutorRoles, Peers
from cuelight.actors.scheduler.tracked import Request
from cuelight.kernel import Context, Role, Terminated, get_logger
from cuelight.messages.address import Address
from cuelight.messages.executor import ExecutorMessage, GetExecutorState
from cuelight.messages.observer import Switched, SwitchFailed
from cuelight.messages.request import ExecutorId
from cuelight.messages.scheduler import ExecutorFailed, ExecutorLoading, ExecutorReady, Switch

M = TypeVar("M")

log = get_logger("cuelight.scheduler")


class ExecutorSwitch(Generic[M]):
    """One switch at a time, from the word that an executor is loading until it has taken over or never will."""

    def __init__(self, context: Context[M], roles: ExecutorRoles | None) -> None:
        self._context = context
        self._roles = roles
        self._asked: Switch | None = None
        self._ready: ExecutorReady | None = None
        self._given_up: set[ExecutorId] = set()
        """Executors that will not take over: an order for one of them was sent before that was known."""

    def ask(self, switch: Switch, reply_to: Address[ExecutorLoading | ExecutorReady | ExecutorFailed]) -> None:
        """This one is to take over. Nothing is asked twice of a scheduler, but of its next life it may be."""
        if self._asked is not None:
            if not self.concerns(switch.executor_id):
                switch.reply_to.tell(SwitchFailed(switch.executor_id, "another executor is to take over already"))
            return
        if switch.executor_id in self._given_up:
            return
        try:
            role = self._role(switch.executor_id)
            self._context.watch(role)
        except KeyError:
            switch.reply_to.tell(SwitchFailed(switch.executor_id, "there is no such executor"))
            return
        self._asked = switch
        self._context.find(role).tell(GetExecutorState(reply_to))  # it may have been ready before this life began
        log.info("switch_asked", executor_id=switch.executor_id, recompute=switch.recompute)

    def concerns(self, executor_id: ExecutorId) -> bool:
        """Whether this is the one that is to take over."""
        return self._asked is not None and self._asked.executor_id == executor_id

    def is_death(self, death: Terminated) -> bool:
        """Whether the one that is to take over has died."""
        return self._asked is not None and death.actor == self._role(self._asked.executor_id).name

    def fail(self, reason: str, *, is_mismatch: bool = False) -> None:
        """It will not take over; the one that is there has heard nothing of it."""
        asked, self._asked, self._ready = self._asked, None, None
        assert asked is not None, "there is one that could"
        self._given_up.add(asked.executor_id)
        log.warning("switch_failed", executor_id=asked.executor_id, reason=reason)
        asked.reply_to.tell(SwitchFailed(asked.executor_id, reason, is_mismatch))

    def found_ready(self, ready: ExecutorReady, requests: Iterable[Request]) -> None:
        """It is there. If one of the requests that it would be given does not fit, it will not take over."""
        if self._ready is None or self._ready.life != ready.life:
            self._ready = ready
            self.check(requests)

    def check(self, requests: Iterable[Request]) -> None:
        """Whether it could serve those of these requests that it would be given: else it will not take over at all."""
        if (limit := self.token_limit) is None:
            return
        for request in requests:
            if (self.recomputes or not has_begun(request)) and request.token_limit > limit:
                reason = f"request {request.request_id} may come to {request.token_limit} tokens, and it holds {limit}"
                self.fail(reason, is_mismatch=True)
                return

    @property
    def token_limit(self) -> int | None:
        """What a request may hold at the one that is ready to take over; None where there is none."""
        if self._asked is None or self._ready is None:
            return None
        return min(self._asked.context_length, (self._ready.block_count - 1) * self._ready.block_size)

    @property
    def recomputes(self) -> bool:
        """Whether it takes over at once, and computes again what runs."""
        return self._asked is not None and self._asked.recompute

    @property
    def holds_new_requests(self) -> bool:
        """Whether those that have not begun wait for the one that is ready, until all others are done."""
        return self._ready is not None and not self.recomputes

    def is_due(self, requests: Iterable[Request]) -> bool:
        """Whether it may take over now."""
        return self._ready is not None and (self.recomputes or not any(map(has_begun, requests)))

    def take(self) -> tuple[Switch, ExecutorReady]:
        """It takes over."""
        asked, ready = self._asked, self._ready
        assert asked is not None and ready is not None, "it is due"
        self._asked = self._ready = None
        return asked, ready

    def peers(self, switch: Switch, before: Peers) -> Peers:
        """The same, with another executor."""
        role = self._role(switch.executor_id)
        kill = None if before.kill_executor is None else partial(self._context.kill, role)
        executor = self._context.find(role)
        return replace(before, executor=executor, executor_id=switch.executor_id, kill_executor=kill)

    def _role(self, executor_id: ExecutorId) -> Role[ExecutorMessage]:
        if self._roles is None:
            raise KeyError(executor_id)
        return self._roles[executor_id]


def has_begun(request: Request) -> bool:
    """Whether it runs, or did: what it computes belongs to the executor that is there."""
    return request.running or request.preemptions > 0


def confirm(switch: Switch) -> None:
    """It has taken over."""
    log.info("switched", executor_id=switch.executor_id)
    switch.reply_to.tell(Switched(switch.executor_id))
