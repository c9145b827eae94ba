"""What several tests need: actors without a loop, driven by a seeded stage in any order their mailboxes allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, Never, TypeVar

from cuelight.actors.cache.actor import CacheManager
from cuelight.actors.executor.actor import Executor
from cuelight.actors.executor.device import Pending
from cuelight.actors.executor.stub import StubDevice, hashed_token
from cuelight.actors.scheduler.actor import Scheduler
from cuelight.actors.scheduler.outbox import ExecutorRoles, Peers
from cuelight.actors.scheduler.planning import StepLimits
from cuelight.kernel import Actor, ExitCause, Role, Terminated, Timer
from cuelight.messages import detokenizer, intake, observer
from cuelight.messages.cache import CacheMessage
from cuelight.messages.executor import ExecutorMessage
from cuelight.messages.request import FinishReason, RequestId, Sampling, Service
from cuelight.messages.scheduler import Abort, Admit, Closed, RestoreState, SetPolicy, StepDone, StopMatched

M = TypeVar("M")
T = TypeVar("T")


class Recorder(Generic[M]):
    """An address that keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[M] = []

    def tell(self, message: M, /) -> None:
        self.messages.append(message)

    def take(self) -> list[M]:
        """What has come since the last time."""
        messages, self.messages = self.messages, []
        return messages


def finished(result: StepDone | Pending[StepDone]) -> StepDone:
    """What a device has made of a step, once it has."""
    return result if isinstance(result, StepDone) else result.wait()


class VirtualClock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def call_later(self, delay: float, callback: Callable[[], object], /) -> Timer:
        raise NotImplementedError("no test needs timers on this clock")


class StageTimer:
    def __init__(self, timers: list[StageTimer], at: float, fire: Callable[[], None]) -> None:
        self._timers, self.at, self.fire = timers, at, fire
        timers.append(self)

    def cancel(self) -> None:
        if self in self._timers:
            self._timers.remove(self)


class Stage:
    """Delivers messages one at a time: the next mailbox is drawn from the seed, each mailbox is in order."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.clock = VirtualClock()
        self._queues: dict[str, deque[Callable[[], None]]] = {}
        self._timers: list[StageTimer] = []

    def post(self, queue: str, delivery: Callable[[], None]) -> None:
        self._queues.setdefault(queue, deque()).append(delivery)

    def drop(self, queue: str) -> None:
        """Whatever waits there will not happen."""
        self._queues.pop(queue, None)

    def after(self, seconds: float, fire: Callable[[], None]) -> Timer:
        return StageTimer(self._timers, self.clock.seconds + seconds, fire)

    def step(self) -> bool:
        """Deliver one message, or let time pass to the next timer; False when there is neither."""
        busy = [name for name, queue in self._queues.items() if queue]
        if not busy:
            if not self._timers:
                return False
            self.clock.seconds = max(self.clock.seconds, min(timer.at for timer in self._timers))
        self.clock.seconds += 0.001
        for timer in [timer for timer in self._timers if timer.at <= self.clock.seconds]:
            if timer in self._timers:  # it may have been cancelled by the one before
                self._timers.remove(timer)
                timer.fire()
        if not busy:
            return True
        self._queues[self.chance.choice(busy)].popleft()()
        return True


class StageAddress(Generic[M]):
    """An actor's address on a stage."""

    def __init__(self, stage: Stage, name: str) -> None:
        self._stage, self.name = stage, name
        self.actor: Actor[M] | None = None

    def tell(self, message: M, /) -> None:
        self._stage.post(self.name, lambda: self._deliver(message))

    def _deliver(self, message: M) -> None:
        assert self.actor is not None
        self.actor.handle(message)


class StageContext(Generic[M]):
    """What an actor gets in place of a kernel context; workers run their jobs when the stage draws them."""

    def __init__(self, stage: Stage, ref: StageAddress[M]) -> None:
        self._stage = stage
        self.ref, self.clock, self.chance = ref, stage.clock, stage.chance

    def after(self, seconds: float, message: M) -> Timer:
        return self._stage.after(seconds, lambda: self.ref.tell(message))

    def watch(self, role: Role[Never]) -> None:
        """On a stage nobody dies by himself: see `Core.lose_executor`."""

    def worker(self, name: str) -> StageWorker[M]:
        return StageWorker(self._stage, f"{self.ref.name} {name}", self.ref)


class StageWorker(Generic[M]):
    def __init__(self, stage: Stage, name: str, ref: StageAddress[M]) -> None:
        self._stage, self._name, self._ref = stage, name, ref

    def submit(self, work: Callable[[], T], done: Callable[[T], M], failed: Callable[[Exception], M]) -> None:
        def job() -> None:
            try:
                message = done(work())
            except AssertionError:
                raise  # a broken invariant fails the test
            except Exception as error:
                message = failed(error)
            self._ref.tell(message)

        self._stage.post(self._name, job)


class FailingDevice(StubDevice):
    """A stub whose steps raise when `fault(step)` says so."""

    def __init__(self, block_count: int, block_size: int, fault: Callable[[object], bool]) -> None:
        super().__init__(block_count, block_size)
        self._fault = fault

    def run(self, batch):  # type: ignore[no-untyped-def]  # as the base
        if self._fault(batch.step):
            raise RuntimeError("a step that fails")
        return super().run(batch)


class Confirming(Recorder[detokenizer.DetokenizerMessage]):
    """A detokenizer that has no streams, and confirms every end."""

    def __init__(self, scheduler: StageAddress[object]) -> None:
        super().__init__()
        self._scheduler = scheduler

    def tell(self, message: detokenizer.DetokenizerMessage, /) -> None:
        super().tell(message)
        if isinstance(message, detokenizer.RequestEnded):
            self._scheduler.tell(Closed((message.request_id,)))


class Core:
    """Scheduler, cache manager and executor (a stub) on a stage; the test is intake and detokenizer."""

    def __init__(
        self,
        seed: int,
        *,
        device: StubDevice,
        token_budget: int = 64,
        running_max: int = 16,
        steps_in_flight: int = 2,
        watermark: float = 0.0,
        eos: frozenset[int] = frozenset(),
        policy: SetPolicy = SetPolicy("fcfs"),  # noqa: B008  # frozen
        long_prefill_tokens: int = 2**63,
        kill_executor: Callable[[str], None] | None = None,
        restarts_max: int = 8,
    ) -> None:
        self.stage = Stage(seed)
        self.device = device
        self.intake: Recorder[intake.IntakeMessage] = Recorder()
        self.observer: Recorder[observer.ObserverMessage] = Recorder()
        self.scheduler = StageAddress(self.stage, "scheduler")
        self.detokenizer = Confirming(self.scheduler)
        self.cache = StageAddress(self.stage, "cache")
        self.executor = StageAddress(self.stage, "executor")
        self._watermark = watermark
        self.cache.actor = CacheManager(self.observer, watermark)
        self._begin_executor()
        peers = Peers(self.cache, self.executor, self.detokenizer, self.intake, self.observer)
        self.scheduler.actor = Scheduler(
            StageContext(self.stage, self.scheduler),
            StepLimits(token_budget, running_max, steps_in_flight, long_prefill_tokens, restarts_max=restarts_max),
            eos,
            replace(
                peers,
                cache_role=Role("cache", CacheMessage, 1),
                executor_roles=ExecutorRoles(Role("executor", ExecutorMessage, 1)),
                kill_executor=kill_executor,
            ),
            policy,
        )
        self.scheduler.actor.started()
        (started,) = self.intake.take()
        assert isinstance(started, intake.SchedulerStarted)
        self.scheduler.actor.handle(RestoreState(started.life, None, (), (), ()))
        self.executor.actor.started()

    def lose_executor(
        self,
        error: str,
        device: StubDevice | None = None,
        cause: ExitCause = ExitCause.CRASHED,
        killed_by: str = "",
    ) -> None:
        """Its life ends, with all that its threads were doing; another one begins, with another device."""
        self.device = device or StubDevice(self.device.block_count, self.device.block_size)
        for queue in ("executor prepare", "executor device"):
            self.stage.drop(queue)
        self._own.actor = _Dead()
        self._begin_executor()
        self.scheduler.tell(Terminated("executor", f"actor 'executor' died: {error}", True, cause, killed_by))
        self.executor.actor.started()

    def _begin_executor(self) -> None:
        # What it tells itself, through an address of this life, dies with it.
        self._own = StageAddress(self.stage, "executor")
        load = partial(_same, self.device)
        self._own.actor = self.executor.actor = Executor(StageContext(self.stage, self._own), load, self.scheduler)

    def lose_cache(self) -> None:
        """Its life ends, and another one begins."""
        self.cache.actor = CacheManager(self.observer, self._watermark)
        self.scheduler.tell(Terminated("cache", "actor 'cache' died: of a test", True, ExitCause.CRASHED))

    def admit(
        self,
        request_id: int,
        prompt: Sequence[int],
        sampling: Sampling,
        token_limit: int = 10_000,
        service: Service = Service(),  # noqa: B008  # frozen
        sample_of: int | None = None,
    ) -> None:
        capacity = (self.device.block_count - 1) * self.device.block_size
        limit = min(token_limit, capacity)
        now = self.stage.clock.now()
        first = None if sample_of is None else RequestId(sample_of)
        self.scheduler.tell(Admit(RequestId(request_id), tuple(prompt), sampling, limit, service, now, first))

    def abort(self, request_id: int) -> None:
        self.scheduler.tell(Abort(RequestId(request_id)))

    def stop_matched(self, request_id: int, output_tokens: int) -> None:
        self.scheduler.tell(StopMatched(RequestId(request_id), output_tokens))

    def run(self, steps_max: int = 1_000_000) -> None:
        """Until nothing is left to deliver."""
        for _ in range(steps_max):
            if not self.stage.step():
                return
        raise AssertionError("the core never comes to rest")

    def outputs(self) -> dict[int, list[int]]:
        """Every request's tokens, as the detokenizer heard them."""
        out: dict[int, list[int]] = {}
        for message in self.detokenizer.messages:
            if isinstance(message, detokenizer.TokensReady):
                for request_id, token_id in zip(message.request_ids, message.token_ids, strict=True):
                    out.setdefault(request_id, []).append(token_id)
        return out

    def ends(self) -> dict[int, detokenizer.RequestEnded]:
        """How each request ended; one that ended twice fails the test."""
        ends: dict[int, detokenizer.RequestEnded] = {}
        for message in self.detokenizer.messages:
            if isinstance(message, detokenizer.RequestEnded):
                assert message.request_id not in ends, "a request ends once"
                ends[message.request_id] = message
        return ends

    def blocks(self) -> observer.BlockFigures:
        return [m for m in self.observer.messages if isinstance(m, observer.BlockFigures)][-1]

    def figures(self) -> observer.RequestFigures:
        return [m for m in self.observer.messages if isinstance(m, observer.RequestFigures)][-1]


class _Dead(Actor[object]):
    """Hears no more."""

    def handle(self, message: object) -> None: ...


def _same(device: StubDevice) -> StubDevice:
    return device


def expected_output(
    prompt: Sequence[int], sampling: Sampling, eos: frozenset[int] = frozenset(), token_limit: int = 10_000
) -> tuple[list[int], FinishReason]:
    """What a stub must produce for a request alone: the slow, obvious path."""
    tokens = list(prompt)
    limit = min(sampling.max_tokens, token_limit - len(prompt))
    while True:
        token_id = hashed_token(tokens, 1000)
        tokens.append(token_id)
        count = len(tokens) - len(prompt)
        ends = token_id in sampling.stop_token_ids or (token_id in eos and not sampling.ignore_eos)
        if ends and count >= sampling.min_tokens:
            return tokens[len(prompt) :], FinishReason.STOP
        if count >= limit:
            return tokens[len(prompt) :], FinishReason.LENGTH
