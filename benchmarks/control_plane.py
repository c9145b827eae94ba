"""The scheduler and the cache manager of an engine between stand-ins for its other actors: a cast without a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Never, Protocol, TypeVar

from cuelight.actors.cache.actor import CacheManager
from cuelight.actors.scheduler.actor import Scheduler, SchedulerInbox
from cuelight.actors.scheduler.outbox import Peers
from cuelight.actors.scheduler.planning import StepLimits
from cuelight.kernel import Actor, ActorSpec, Context, Role
from cuelight.messages import cache, detokenizer, executor, intake, scheduler
from cuelight.messages.address import Address
from cuelight.messages.observer import ObserverMessage
from cuelight.messages.request import RequestId

M = TypeVar("M")


class Wrap(Protocol):
    """Puts an actor inside another, or leaves it as it is."""

    def __call__(self, actor: Actor[M], name: str, /) -> Actor[M]: ...


def as_it_is(actor: Actor[M], _name: str, /) -> Actor[M]:
    """Leaves it as it is."""
    return actor


class Sink(Actor[object]):
    """Hears everything and does nothing."""

    def handle(self, message: object) -> None:
        """Do nothing."""


class Blank(Actor[intake.IntakeMessage]):
    """An intake that remembers nothing, which is all that the first scheduler asks of it."""

    def __init__(self, to_scheduler: Address[scheduler.RestoreState]) -> None:
        self._scheduler = to_scheduler

    def handle(self, message: intake.IntakeMessage) -> None:
        """Answer a scheduler that begins."""
        if isinstance(message, intake.SchedulerStarted):
            self._scheduler.tell(scheduler.RestoreState(message.life, None, (), (), ()))


class Confirming(Actor[detokenizer.DetokenizerMessage]):
    """Confirms every end that the actor within has heard of, as a detokenizer does."""

    def __init__(self, inner: Actor[detokenizer.DetokenizerMessage], to_scheduler: Address[scheduler.Closed]) -> None:
        self._inner = inner
        self._scheduler = to_scheduler

    def handle(self, message: detokenizer.DetokenizerMessage) -> None:
        """Pass it on."""
        self._inner.handle(message)
        if isinstance(message, detokenizer.RequestEnded):
            self._scheduler.tell(scheduler.Closed((message.request_id,)))


class Rows:
    """What an executor keeps of its rows where there is no model: how many tokens each has yet to compute."""

    def __init__(self) -> None:
        self._left: dict[RequestId, int] = {}

    def compute(self, step: executor.ExecuteStep) -> tuple[RequestId, ...]:
        """Those for whom this step samples a token, since it reaches their last."""
        left = self._left
        for request_id in step.ended:
            del left[request_id]
        for row in step.rows:
            left[row.request_id] = len(row.token_ids) - row.computed_tokens
        for chunk in step.chunks:
            left[chunk.request_id] -= chunk.token_count
        return tuple(chunk.request_id for chunk in step.chunks if left[chunk.request_id] <= 0)


@dataclass(frozen=True)
class ControlPlane:
    """What such a cast is made of. `capacity` is that of every mailbox, in messages."""

    limits: StepLimits
    watermark_fraction: float
    policy: scheduler.SetPolicy
    capacity: int
    observer: Address[ObserverMessage]

    @property
    def scheduler(self) -> Role[SchedulerInbox]:
        """To whom requests are told, after `ExecutorReady`."""
        urgent = (scheduler.Admit, scheduler.Abort, scheduler.RestoreState)
        return Role("scheduler", scheduler.SchedulerMessage, self.capacity, urgent)

    def cast(
        self,
        build_executor: Callable[[Context[object]], Actor[executor.ExecutorMessage]],
        detokenizer_stand_in: Actor[detokenizer.DetokenizerMessage],
        wrap: Wrap = as_it_is,
    ) -> list[ActorSpec[Never]]:
        """The parts, with scheduler and cache manager put through `wrap`."""
        to_detokenizer: Role[detokenizer.DetokenizerMessage]
        to_detokenizer = Role("detokenizer", detokenizer.DetokenizerMessage, self.capacity)
        to_intake: Role[intake.IntakeMessage] = Role("intake", intake.IntakeMessage, self.capacity)
        to_executor: Role[executor.ExecutorMessage] = Role("executor", executor.ExecutorMessage, self.capacity)
        to_cache: Role[cache.CacheMessage] = Role("cache", cache.CacheMessage, self.capacity)

        def build_scheduler(context: Context[SchedulerInbox]) -> Actor[SchedulerInbox]:
            peers = Peers(
                cache=context.find(to_cache),
                executor=context.find(to_executor),
                detokenizer=context.find(to_detokenizer),
                intake=context.find(to_intake),
                observer=self.observer,
            )
            return wrap(Scheduler(context, self.limits, frozenset(), peers, self.policy), "scheduler")

        return [
            ActorSpec(to_detokenizer, lambda context: Confirming(detokenizer_stand_in, context.find(self.scheduler))),
            ActorSpec(to_intake, lambda context: Blank(context.find(self.scheduler))),
            ActorSpec(to_executor, build_executor),
            ActorSpec(to_cache, lambda _: wrap(CacheManager(self.observer, self.watermark_fraction), "cache")),
            ActorSpec(self.scheduler, build_scheduler),
        ]
