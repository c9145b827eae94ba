"""What several tests need: addresses that keep what they receive, and a simulated engine without clients."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, Never, TypeVar

from cuelight.actors.executor.device import Pending
from cuelight.actors.executor.stub import StubDevice, hashed_token
from cuelight.config import EngineConfig
from cuelight.core.stub_model import stub_parts
from cuelight.kernel import Actor, Ended, Event, ExitCause, Timer
from cuelight.kernel.simulation.faults import SimulatedCrash
from cuelight.messages import detokenizer, intake, observer
from cuelight.messages.cache import CacheMessage
from cuelight.messages.executor import ExecutorMessage, GetExecutorState
from cuelight.messages.request import FinishReason, RequestId, Sampling, Service
from cuelight.messages.scheduler import Abort, Admit, SchedulerMessage, SetPolicy, StepDone, StopMatched
from cuelight.models.folder import ModelFacts
from cuelight.simulate import client as oracle
from cuelight.simulate.engine import DetokenizerStandIn, IntakeStandIn, SimulatedEngine, stand_ins_without_clients

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


class FailingDevice(StubDevice):
    """A stub whose steps raise when `fault(step)` says so."""

    def __init__(self, block_count: int, block_size: int, fault: Callable[[object], bool]) -> None:
        super().__init__(block_count, block_size)
        self._fault = fault

    def run(self, batch):  # type: ignore[no-untyped-def]  # as the base
        if self._fault(batch.step):
            raise RuntimeError("a step that fails")
        return super().run(batch)


class Replaceable(Actor[M]):
    """An actor in whose place a test can put another object, and which a test can crash."""

    def __init__(self, actor: Actor[M]) -> None:
        self.actor = actor
        self.crash: SimulatedCrash | None = None

    def started(self) -> None:
        self.actor.started()

    def handle(self, message: M) -> None:
        if self.crash is not None:
            raise self.crash
        self.actor.handle(message)


class Slot(Generic[M]):
    """An actor's address and, over all its lives, its place in the core."""

    def __init__(self, engine: SimulatedEngine, name: str, places: dict[str, Replaceable[Never]]) -> None:
        self._engine, self._name, self._places = engine, name, places

    def tell(self, message: M, /) -> None:
        self._engine.simulation.find(self._engine.role(self._name)).tell(message)

    @property
    def place(self) -> Replaceable[Never]:
        return self._places[self._name]

    @property
    def actor(self) -> Actor[M]:
        return self.place.actor

    @actor.setter
    def actor(self, actor: Actor[M]) -> None:
        self.place.actor = actor


class Core:
    """Scheduler, cache manager and executor (a stub) of a simulated engine; the test is intake and detokenizer.

    Each step takes a millisecond. An assertion of the device fails the test; another exception fails the step.
    """

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
        restarts_max: int = 8,
        new_device: Callable[[], StubDevice] | None = None,
        executor: str = "thread",
        restores: bool = True,
    ) -> None:
        self.device = device
        self.new_device = new_device or (lambda: StubDevice(device.block_count, device.block_size))
        """Makes the device of each executor but the first."""
        self.kills: list[str] = []
        """Why executors were killed."""
        self.chance = random.Random(seed)
        self.intake: Recorder[intake.IntakeMessage] = Recorder()
        self.observer: Recorder[observer.ObserverMessage] = Recorder()
        self.detokenizer: Recorder[detokenizer.DetokenizerMessage] = Recorder()
        config = EngineConfig(
            executor=executor,
            token_budget=token_budget,
            running_max=running_max,
            queue_limit=1000,
            block_size=device.block_size,
            block_count=device.block_count,
            watermark_fraction=watermark,
            steps_in_flight=steps_in_flight,
            restarts_max=restarts_max,
            long_prefill_tokens=long_prefill_tokens,
            policy=policy.name,
            aging_seconds=policy.aging_seconds,
            tenant_weights=dict(policy.weights) or None,
        )
        parts = stub_parts(config)
        places: dict[str, Replaceable[Never]] = {}

        def place(actor: Actor[M], name: str, /) -> Actor[M]:
            places[name] = placed = Replaceable(actor)
            return placed

        self._next_device: StubDevice | None = device
        self._complaints: list[AssertionError] = []
        self.engine = SimulatedEngine(
            seed,
            config,
            self.observer,
            parts=replace(parts, facts=ModelFacts(2**31, 10_000, tuple(eos)), load_device=self._load),
            stand_ins=stand_ins_without_clients(
                config, intake_receives=self.intake.tell, detokenizer_receives=self.detokenizer.tell
            ),
            wrap=place,
            tap=self._see,
        )
        self.scheduler: Slot[SchedulerMessage] = Slot(self.engine, "scheduler", places)
        self.cache: Slot[CacheMessage] = Slot(self.engine, "cache", places)
        self.executor: Slot[ExecutorMessage] = Slot(self.engine, "executor", places)
        intake_actor = self.engine.actors["intake"]
        assert isinstance(intake_actor, IntakeStandIn)
        intake_actor.answers = restores

    def now(self) -> float:
        return self.engine.now()

    def step(self) -> bool:
        """Let a millisecond pass and one thing happen; False where nothing can."""
        self.engine.pass_time(0.001)
        happened = self.engine.step()
        if self._complaints:
            raise self._complaints[0]
        return happened

    def confirm_nothing(self) -> None:
        """Let the detokenizer confirm no end from now on."""
        actor = self.engine.actors["detokenizer"]
        assert isinstance(actor, DetokenizerStandIn)
        actor.confirms = False

    def lose_executor(self, error: str, device: StubDevice | None = None, *, is_killed: bool = False) -> None:
        """End the executor's life, by a crash or by a kill from outside; the next one has another device."""
        self._next_device = device or self._next_device
        deaths = self.engine.deaths["executor"]
        if not is_killed:
            self.executor.place.crash = SimulatedCrash(error)
            self.executor.tell(GetExecutorState(Recorder()))
        while self.engine.deaths["executor"] == deaths:
            if is_killed:
                self.kill_executor(error)  # which does nothing between two lives
            assert self.step()

    def kill_executor(self, reason: str) -> None:
        """Kill the executor from outside."""
        self.engine.simulation.kill(self.engine.role("executor"), reason)

    def lose_cache(self) -> None:
        """End the cache manager's life; another one begins."""
        self.engine.simulation.kill(self.engine.role("cache"), "of a test")
        while not self.engine.deaths["cache"]:
            assert self.step()

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
        first = None if sample_of is None else RequestId(sample_of)
        self.scheduler.tell(Admit(RequestId(request_id), tuple(prompt), sampling, limit, service, self.now(), first))

    def abort(self, request_id: int) -> None:
        self.scheduler.tell(Abort(RequestId(request_id)))

    def stop_matched(self, request_id: int, output_tokens: int) -> None:
        self.scheduler.tell(StopMatched(RequestId(request_id), output_tokens))

    def run(self, steps_max: int = 1_000_000) -> None:
        """Until nothing is left to deliver."""
        for _ in range(steps_max):
            if not self.step():
                return
        raise AssertionError("the core never comes to rest")

    def outputs(self) -> dict[int, list[int]]:
        """Every request's tokens, as the detokenizer received them."""
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

    def _load(self) -> StubDevice:
        self.device, self._next_device = self._next_device or self.new_device(), None
        for name in ("prepare", "copy", "run"):
            setattr(self.device, name, partial(self._checked, getattr(self.device, name)))
        return self.device

    def _checked(self, method: Callable[[T], object], argument: T) -> object:
        try:
            return method(argument)
        except AssertionError as error:  # which the executor would answer for as for any failure
            self._complaints.append(error)
            raise

    def _see(self, event: Event) -> None:
        if isinstance(event, Ended) and event.actor == "executor" and event.cause is ExitCause.KILLED:
            self.kills.append(event.error.partition("it was killed: ")[2])


def expected_output(
    prompt: Sequence[int], sampling: Sampling, eos: frozenset[int] = frozenset(), token_limit: int = 10_000
) -> tuple[list[int], FinishReason]:
    """What a stub must produce for a request alone."""
    tokens, _, reason = oracle.expected_output(
        prompt, sampling, token_limit, next_token=lambda token_ids: hashed_token(token_ids, 1000), end_tokens=eos
    )
    return tokens, reason
