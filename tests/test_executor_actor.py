"""The executor's shell around a stub device: on a stage, where every order of events is possible, and in a system."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import pytest
from support import FailingDevice, Recorder, Stage, StageAddress, StageContext

from cuelight.actors.executor.actor import Executor
from cuelight.actors.executor.stub import StubBatch, StubDevice, hashed_token
from cuelight.kernel import Part, Role, System
from cuelight.messages.executor import Chunk, ExecuteStep, ExecutorMessage, Row
from cuelight.messages.observer import LoadFailed, ObserverMessage
from cuelight.messages.request import RequestId, Sampling
from cuelight.messages.scheduler import ExecutorReady, StepDone, StepFailed

PROMPT = (5, 6, 7)

M = TypeVar("M")


def step(epoch: int, number: int, reply_to: Recorder[StepDone | StepFailed], *, enters: bool = False) -> ExecuteStep:
    """One row whose prompt is computed in the step it enters in, and which decodes in the others."""
    rows = (Row(RequestId(1), PROMPT, len(PROMPT), 0, (1, 2, 3, 4), Sampling()),) if enters else ()
    chunk = Chunk(RequestId(1), len(PROMPT) if enters else 1)
    return ExecuteStep(epoch, number, (), rows, (), (chunk,), reply_to)


def tokens(count: int) -> list[int]:
    known = list(PROMPT)
    for _ in range(count):
        known.append(hashed_token(known, 1000))
    return known[len(PROMPT) :]


class Staged:
    """An executor on a stage; the test is its scheduler and its observer."""

    def __init__(self, seed: int, load: Callable[[], StubDevice]) -> None:
        self.stage = Stage(seed)
        self.scheduler: Recorder[ExecutorReady] = Recorder()
        self.observer: Recorder[ObserverMessage] = Recorder()
        self.replies: Recorder[StepDone | StepFailed] = Recorder()
        self.ref = StageAddress(self.stage, "executor")
        self.ref.actor = Executor(StageContext(self.stage, self.ref), load, self.scheduler, self.observer)
        self.ref.actor.started()

    def settle(self) -> None:
        while self.stage.step():
            pass

    def run_steps(self, count: int, epoch: int = 0) -> None:
        for number in range(count):
            self.ref.tell(step(epoch, number, self.replies, enters=number == 0))
        self.settle()


def test_a_loaded_device_is_announced_with_its_pool() -> None:
    staged = Staged(0, lambda: StubDevice(40, 16))
    assert staged.scheduler.messages == [], "loading is done on a thread, not by the constructor"
    staged.settle()
    assert staged.scheduler.messages == [ExecutorReady(block_count=40, block_size=16)]
    assert staged.observer.messages == []


@pytest.mark.parametrize(("error", "text"), [(OSError("no weights"), "no weights"), (KeyError(), "KeyError()")])
def test_a_failed_load_is_told_to_the_observer_alone(error: Exception, text: str) -> None:
    def load() -> StubDevice:
        raise error

    staged = Staged(0, load)
    staged.settle()
    assert staged.observer.messages == [LoadFailed(text)]
    assert staged.scheduler.messages == []


@pytest.mark.parametrize("seed", range(20))
def test_every_step_is_answered_in_order(seed: int) -> None:
    staged = Staged(seed, lambda: StubDevice(8, 4))
    staged.settle()
    staged.run_steps(6)
    assert [(m.epoch, m.step) for m in staged.replies.messages] == [(0, number) for number in range(6)]
    assert [m.token_ids[0] for m in staged.replies.messages if isinstance(m, StepDone)] == tokens(6)


@pytest.mark.parametrize("seed", range(20))
def test_after_a_step_that_raises_the_rest_of_its_epoch_is_void(seed: int) -> None:
    device = FailingDevice(8, 4, lambda step: step.epoch == 0 and step.step == 2)  # type: ignore[attr-defined]
    staged = Staged(seed, lambda: device)
    staged.settle()
    staged.run_steps(5)
    first, second, failed, *void = staged.replies.messages
    assert isinstance(first, StepDone)
    assert isinstance(second, StepDone)
    assert failed == StepFailed(0, 2, "RuntimeError('a step that fails')")
    assert [(type(m), m.epoch, m.step) for m in void] == [(StepFailed, 0, 3), (StepFailed, 0, 4)]
    assert device.steps == 2, "what comes after a failed step is not run"
    staged.replies.messages.clear()
    staged.run_steps(3, epoch=1)
    assert [m.token_ids[0] for m in staged.replies.messages if isinstance(m, StepDone)] == tokens(3)


class BadPreparation(StubDevice):
    """Cannot lay out step 1 of epoch 0."""

    def prepare(self, step: ExecuteStep) -> StubBatch:
        if (step.epoch, step.step) == (0, 1):
            raise ValueError("cannot lay it out")
        return super().prepare(step)


@pytest.mark.parametrize("seed", range(20))
def test_a_step_that_cannot_be_prepared_fails_and_voids_what_follows(seed: int) -> None:
    device = BadPreparation(8, 4)
    staged = Staged(seed, lambda: device)
    staged.settle()
    staged.run_steps(4)
    replies = {m.step: m for m in staged.replies.messages}
    assert len(staged.replies.messages) == 4, "each step is answered once"
    assert replies[1] == StepFailed(0, 1, "ValueError('cannot lay it out')")
    assert all(isinstance(replies[number], StepFailed) for number in (2, 3))
    staged.replies.messages.clear()
    staged.run_steps(2, epoch=1)
    assert [m.token_ids[0] for m in staged.replies.messages if isinstance(m, StepDone)] == tokens(2)


async def test_in_a_system_steps_run_off_the_loop_and_answers_come_in_order() -> None:
    loop_thread = threading.get_ident()
    threads: set[int] = set()

    class Watched(StubDevice):
        def run(self, batch: StubBatch) -> StepDone:
            threads.add(threading.get_ident())
            return super().run(batch)

    ready: asyncio.Future[ExecutorReady] = asyncio.get_running_loop().create_future()
    answers: asyncio.Queue[StepDone | StepFailed] = asyncio.Queue()
    scheduler: _Through[ExecutorReady] = _Through(ready.set_result)
    replies: _Through[StepDone | StepFailed] = _Through(answers.put_nowait)
    role = Role("executor", ExecutorMessage, capacity=16)
    part = Part(role, lambda context: Executor(context, lambda: Watched(20, 4), scheduler, Recorder()))
    async with asyncio.timeout(60), System([part]) as system:
        assert (await ready).block_count == 20
        for number in range(8):
            system.find(role).tell(step(0, number, replies, enters=number == 0))
        done = [await answers.get() for _ in range(8)]
    assert [m.token_ids[0] for m in done if isinstance(m, StepDone)] == tokens(8)
    assert len(threads) == 1
    assert loop_thread not in threads


async def test_in_a_system_a_failed_load_and_a_failed_step_are_messages_and_the_actor_lives() -> None:
    told: asyncio.Queue[object] = asyncio.Queue()
    address: _Through[object] = _Through(told.put_nowait)

    def broken() -> StubDevice:
        raise OSError("no weights")

    role = Role("executor", ExecutorMessage, capacity=16)
    part = Part(role, lambda context: Executor(context, broken, address, address))
    async with asyncio.timeout(60), System([part], on_failure=told.put_nowait):
        assert await told.get() == LoadFailed("no weights")

    device = FailingDevice(20, 4, lambda step: step.epoch == 0)  # type: ignore[attr-defined]
    part = Part(role, lambda context: Executor(context, lambda: device, address, address))
    async with asyncio.timeout(60), System([part], on_failure=told.put_nowait) as system:
        assert isinstance(await told.get(), ExecutorReady)
        for epoch in (0, 1):
            system.find(role).tell(step(epoch, 0, address, enters=True))
        assert isinstance(await told.get(), StepFailed)
        assert isinstance(await told.get(), StepDone)
    assert told.empty()


class _Through(Generic[M]):
    """An address that hands what it is told to a function."""

    def __init__(self, hear: Callable[[M], object]) -> None:
        self._hear = hear

    def tell(self, message: M, /) -> None:
        self._hear(message)
