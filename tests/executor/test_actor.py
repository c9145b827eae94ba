"""The executor actor around a stub device: in a simulation, which draws the order of events, and in a system."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
import pytest
from support import FailingDevice, Recorder

from cuelight.actors.executor.actor import Executor, ExecutorInbox
from cuelight.actors.executor.device import DeviceLost
from cuelight.actors.executor.options import current_phases
from cuelight.actors.executor.stub import StubBatch, StubDevice, hashed_token, stub_host
from cuelight.kernel import ActorSpec, Context, Role, System
from cuelight.kernel.simulation.simulator import Simulation
from cuelight.messages.address import Address
from cuelight.messages.executor import ExecuteStep, ExecutorMessage, GetExecutorState, Row, RowChunk
from cuelight.messages.request import FIRST_EXECUTOR, BlockCopies, CopyKind, HostTier, RequestId, Sampling
from cuelight.messages.scheduler import ExecutorFailed, ExecutorLoading, ExecutorReady, StepDone, StepFailed

PROMPT = (5, 6, 7)
LOADING = ExecutorLoading("loading the model")

M = TypeVar("M")


def step(
    epoch: int, number: int, reply_to: Address[StepDone | StepFailed], life: int, *, enters: bool = False
) -> ExecuteStep:
    """One row whose prompt is computed in the step it enters in, and which decodes in the others."""
    rows = (Row(RequestId(1), PROMPT, len(PROMPT), 0, (1, 2, 3, 4), Sampling()),) if enters else ()
    chunk = RowChunk(RequestId(1), len(PROMPT) if enters else 1)
    return ExecuteStep(epoch, number, life, (), rows, (), (chunk,), reply_to)


def tokens(count: int) -> list[int]:
    known = list(PROMPT)
    for _ in range(count):
        known.append(hashed_token(known, 1000))
    return known[len(PROMPT) :]


EXECUTOR: Role[ExecutorInbox] = Role("executor", ExecutorMessage, capacity=100)


class Staged:
    """An executor alone in a simulation, just started; the test is its scheduler."""

    def __init__(self, seed: int, load: Callable[[], StubDevice]) -> None:
        self.scheduler: Recorder[ExecutorLoading | ExecutorReady | ExecutorFailed] = Recorder()
        self.replies: Recorder[StepDone | StepFailed] = Recorder()
        self.life = 0

        def build(context: Context[object]) -> Executor[StubBatch]:
            self.actor = Executor(context, load, self.scheduler)
            return self.actor

        self.simulation = Simulation([ActorSpec(EXECUTOR, build)], seed, record=False)
        self.ref = self.simulation.find(EXECUTOR)
        self.simulation.step()

    def settle(self) -> None:
        self.simulation.run()
        for message in self.scheduler.messages:
            if isinstance(message, ExecutorReady):
                self.life = message.life

    def run_steps(self, count: int, epoch: int = 0) -> None:
        for number in range(count):
            self.ref.tell(step(epoch, number, self.replies, self.life, enters=number == 0))
        self.settle()


def settled(seed: int, load: Callable[[], StubDevice]) -> Staged:
    staged = Staged(seed, load)
    staged.settle()
    return staged


def test_loaded_device_is_announced_with_its_pool() -> None:
    def load() -> StubDevice:
        staged.simulation.clock.call_later(2.5, lambda: None)
        staged.simulation.clock.jump()
        return StubDevice(40, 16)

    staged = Staged(0, load)
    assert staged.scheduler.take() == [LOADING], "loading is done on a thread, not by the constructor"
    staged.settle()
    (ready,) = staged.scheduler.take()
    assert isinstance(ready, ExecutorReady)
    assert (ready.block_count, ready.block_size, ready.executor_id) == (40, 16, FIRST_EXECUTOR)
    assert ready.seconds == 2.5, "the time from the start to the end of loading"


@pytest.mark.parametrize("seed", range(6))
def test_loading_phases_are_reported_as_they_begin_and_timed(seed: int) -> None:
    looks = iter(range(100))

    def load() -> StubDevice:
        phases = current_phases(lambda: float(next(looks)))
        with phases("read"), phases("pack"):
            pass
        with current_phases(lambda: float(next(looks)))("read"):
            pass
        return StubDevice(40, 16)

    staged = settled(seed, load)
    *before, ready = staged.scheduler.take()
    told = [ExecutorLoading(f"loading the model: {name}") for name in ("read", "pack", "read")]
    # The thread that reports a phase and the one that loads run in any order, and late phases are not reported.
    assert before == [LOADING, *told[: len(before) - 1]]
    assert isinstance(ready, ExecutorReady)
    assert ready.phases == (("pack", 1.0), ("read", 4.0))
    load()
    assert staged.scheduler.take() == [], "only loads that are part of a start report phases"


def test_executor_reports_its_state_whenever_requested() -> None:
    staged = Staged(0, lambda: StubDevice(40, 16))
    report: GetExecutorState = GetExecutorState(staged.scheduler)
    staged.actor.handle(report)
    staged.settle()
    staged.actor.handle(report)
    first, second, ready, again = staged.scheduler.messages
    assert first == second == LOADING
    assert isinstance(ready, ExecutorReady) and ready == again


def test_each_life_has_a_number_and_ignores_messages_for_others() -> None:
    lives = []
    for seed in (1, 2):
        staged = settled(seed, lambda: StubDevice(8, 4))
        lives.append(staged.life)
        staged.ref.tell(step(0, 0, staged.replies, staged.life + 1, enters=True))
        staged.settle()
        assert staged.replies.take() == []
        staged.run_steps(2)
        assert len(staged.replies.messages) == 2
    assert lives[0] != lives[1]


def test_lost_device_ends_the_executors_life() -> None:
    class Lost(StubDevice):
        def run(self, batch: StubBatch) -> StepDone:
            raise DeviceLost("a sticky error")

    staged = settled(0, lambda: Lost(8, 4))
    staged.run_steps(1)
    assert isinstance(error := getattr(staged.simulation.failure, "__cause__", None), DeviceLost)
    assert str(error) == "a sticky error"
    assert staged.replies.messages == [], "a watcher receives Terminated"


def test_step_without_memory_fails_with_the_reason() -> None:
    class Full(StubDevice):
        def run(self, batch: StubBatch) -> StepDone:
            raise MemoryError("no room")

    staged = settled(0, lambda: Full(8, 4))
    staged.run_steps(1)
    (failed,) = staged.replies.messages
    assert isinstance(failed, StepFailed) and failed.out_of_memory and not failed.contents_lost


def test_costs_of_host_memory_are_announced_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    host = HostTier(5, move_seconds=0.25, recompute_seconds=0.125)
    staged = Staged(0, lambda: StubDevice(40, 16, host=host))
    with caplog.at_level(logging.INFO, "cuelight"):
        staged.settle()
    ready = staged.scheduler.messages[-1]
    assert isinstance(ready, ExecutorReady) and ready.host == host
    (line,) = [record.getMessage() for record in caplog.records if "device_loaded" in record.getMessage()]
    assert "host_block_count=5 move_seconds=0.25 recompute_seconds=0.125" in line


@pytest.mark.parametrize(("error", "text"), [(OSError("no weights"), "no weights"), (KeyError(), "KeyError()")])
def test_failed_load_is_reported(error: Exception, text: str) -> None:
    def load() -> StubDevice:
        raise error

    staged = settled(0, load)
    assert staged.scheduler.messages == [LOADING, ExecutorFailed(text)]


@pytest.mark.parametrize("seed", range(20))
def test_every_step_is_answered_in_order(seed: int) -> None:
    staged = settled(seed, lambda: StubDevice(8, 4))
    staged.run_steps(6)
    assert [(m.epoch, m.step) for m in staged.replies.messages] == [(0, number) for number in range(6)]
    assert [m.token_ids[0] for m in staged.replies.messages if isinstance(m, StepDone)] == tokens(6)


@pytest.mark.parametrize("seed", range(20))
def test_step_that_raises_voids_the_rest_of_its_epoch(seed: int) -> None:
    device = FailingDevice(8, 4, lambda step: step.epoch == 0 and step.step == 2)  # type: ignore[attr-defined]
    staged = settled(seed, lambda: device)
    staged.run_steps(5)
    first, second, failed, *void = staged.replies.messages
    assert isinstance(first, StepDone)
    assert isinstance(second, StepDone)
    assert failed == StepFailed(0, 2, "RuntimeError('a step that fails')")
    assert [(type(m), m.epoch, m.step) for m in void] == [(StepFailed, 0, 3), (StepFailed, 0, 4)]
    assert device.steps == 2, "steps after a failed step are not run"
    staged.replies.messages.clear()
    staged.run_steps(3, epoch=1)
    assert [m.token_ids[0] for m in staged.replies.messages if isinstance(m, StepDone)] == tokens(3)


class BadPreparation(StubDevice):
    """A device that cannot lay out step 1 of epoch 0."""

    def prepare(self, step: ExecuteStep) -> StubBatch:
        if (step.epoch, step.step) == (0, 1):
            raise ValueError("cannot lay it out")
        return super().prepare(step)


@pytest.mark.parametrize("seed", range(20))
def test_step_that_cannot_be_prepared_fails_and_voids_later_steps(seed: int) -> None:
    device = BadPreparation(8, 4)
    staged = settled(seed, lambda: device)
    staged.run_steps(4)
    assert [m.step for m in staged.replies.messages] == [0, 1, 2, 3], "each step is answered once, in order"
    sound, failed, *void = staged.replies.messages
    assert isinstance(sound, StepDone)
    assert failed == StepFailed(0, 1, "ValueError('cannot lay it out')")
    assert all(isinstance(message, StepFailed) for message in void)
    staged.replies.messages.clear()
    staged.run_steps(2, epoch=1)
    assert [m.token_ids[0] for m in staged.replies.messages if isinstance(m, StepDone)] == tokens(2)


class Copier(StubDevice):
    """Records its work, and fails at the work named: "prepare 1", "run 2", "save 3", "load 3"."""

    def __init__(self, *failing: str) -> None:
        super().__init__(20, 4, host=stub_host(8))
        self.done: list[str] = []
        self.failing = failing

    def prepare(self, step: ExecuteStep) -> StubBatch:
        self._fail(f"prepare {step.step}")
        return super().prepare(step)

    def copy(self, copies: BlockCopies) -> None:
        (number,) = copies.targets if copies.copying is CopyKind.SAVE else copies.sources
        self._do(f"{copies.copying} {number}")
        super().copy(copies)

    def run(self, batch: StubBatch) -> StepDone:
        self._do(f"run {batch.step.step}")
        return super().run(batch)

    def _do(self, what: str) -> None:
        self._fail(what)
        self.done.append(what)

    def _fail(self, what: str) -> None:
        if what in self.failing:
            raise OSError(f"cannot {what}")


def run_copying_steps(seed: int, device: Copier, steps: int = 4) -> tuple[Staged, list[StepDone | StepFailed]]:
    """Run steps that each save a block to the host block of their number and load that to another block of the pool."""
    staged = settled(seed, lambda: device)
    for number in range(steps):
        save = BlockCopies(CopyKind.SAVE, (1,), (number,))
        load = BlockCopies(CopyKind.LOAD, (number,), (10 + number,))
        plain = step(0, number, staged.replies, staged.life, enters=number == 0)
        staged.ref.tell(msgspec.structs.replace(plain, copies=(save, load)))
    staged.settle()
    return staged, staged.replies.take()


@pytest.mark.parametrize("seed", range(20))
def test_copies_of_a_step_are_made_in_order_before_it_runs(seed: int) -> None:
    device = Copier()
    _, replies = run_copying_steps(seed, device)
    assert device.done == [f"{what} {number}" for number in range(4) for what in ("save", "load", "run")]
    assert [m.token_ids[0] for m in replies if isinstance(m, StepDone)] == tokens(4)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("failing", ["run 1", "prepare 1"])
def test_copies_of_failed_and_void_steps_are_made(failing: str, seed: int) -> None:
    device = Copier(failing)
    _, replies = run_copying_steps(seed, device)
    assert device.done == [
        *("save 0", "load 0", "run 0"),
        *("save 1", "load 1", "save 2", "load 2", "save 3", "load 3"),
    ]
    void = "an earlier step of this epoch failed"
    assert isinstance(replies[0], StepDone), "earlier steps are not affected"
    assert replies[1:] == [
        StepFailed(0, 1, f"OSError('cannot {failing}')"),
        StepFailed(0, 2, void),
        StepFailed(0, 3, void),
    ]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("failing", ["save 1", "load 1"])
def test_copy_that_fails_loses_the_contents_and_voids_the_epoch(failing: str, seed: int) -> None:
    device = Copier(failing)
    staged, replies = run_copying_steps(seed, device)
    assert [done for done in device.done if done.startswith("run")] == ["run 0"]
    void = "an earlier step of this epoch failed"
    assert isinstance(replies[0], StepDone)
    assert replies[1:] == [
        StepFailed(0, 1, f"OSError('cannot {failing}')", contents_lost=True),
        StepFailed(0, 2, void),
        StepFailed(0, 3, void),
    ]
    staged.run_steps(3, epoch=1)
    assert [m.token_ids[0] for m in staged.replies.messages if isinstance(m, StepDone)] == tokens(3)


@pytest.mark.parametrize("seed", range(20))
def test_failed_copy_of_a_void_step_is_reported(seed: int) -> None:
    staged, replies = run_copying_steps(seed, Copier("run 1", "load 2", "run 3"))
    assert [m.contents_lost for m in replies if isinstance(m, StepFailed)] == [False, True, False]
    staged.run_steps(1, epoch=1)
    assert isinstance(staged.replies.messages[0], StepDone)


class Later(Generic[M]):
    """Work of an asynchronous device: done at the latest when `wait()` is called."""

    def __init__(self, device: LateCopier, work: Callable[[], M]) -> None:
        self._device, self._work = device, work
        self._result: M | None = None
        self._error: Exception | None = None
        device.line.append(self)

    def do(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:  # work behind a failed step may fail in any way
            self._error = error

    def wait(self) -> M:
        self._device.catch_up(self)
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set by the work


class LateCopier(Copier):
    """An asynchronous `Copier`: failures are raised by `wait()`. Work named in `at_once` is not put off."""

    def __init__(self, *failing: str, seed: int, at_once: tuple[str, ...] = ()) -> None:
        super().__init__(*failing)
        self.line: list[Later[object]] = []
        self._chance, self._at_once = random.Random(seed), at_once

    def catch_up(self, last: Later[object] | None = None) -> None:
        """Do all work in line up to `last`, or a random part of it."""
        count = self._chance.randint(0, len(self.line))
        while self.line and (last in self.line if last is not None else count > 0):
            count -= 1
            self.line.pop(0).do()

    def copy(self, copies: BlockCopies) -> Later[None]:  # type: ignore[override]  # the base class answers at once
        self.catch_up()
        return Later(self, lambda: Copier.copy(self, copies))

    def run(self, batch: StubBatch) -> StepDone | Later[StepDone]:  # type: ignore[override]
        if f"run {batch.step.step}" in self._at_once:
            while self.line:
                self.line.pop(0).do()
            return super().run(batch)
        self.catch_up()
        return Later(self, lambda: Copier.run(self, batch))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("at_once", [(), ("run 1",), ("run 0", "run 2")])
def test_asynchronous_device_gets_the_next_step_before_the_last_is_awaited(at_once: tuple[str, ...], seed: int) -> None:
    device = LateCopier(seed=seed, at_once=at_once)
    _, replies = run_copying_steps(seed, device)
    assert device.done == [f"{what} {number}" for number in range(4) for what in ("save", "load", "run")]
    assert [m.step for m in replies] == [0, 1, 2, 3], "answered in order, whichever step is done first"
    assert [m.token_ids[0] for m in replies if isinstance(m, StepDone)] == tokens(4)


def test_step_is_launched_while_the_previous_one_is_awaited() -> None:
    device = LateCopier(seed=0)
    staged = settled(0, lambda: device)
    launched: list[int] = []
    run = device.run
    device.run = lambda batch: (launched.append(batch.step.step), run(batch))[1]  # type: ignore[method-assign]
    device.catch_up = lambda last=None: (  # type: ignore[method-assign]
        None if last is None or launched == [0, 1] else staged.stage.step(),
        LateCopier.catch_up(device, last),
    )[1]
    staged.run_steps(2)
    assert launched == [0, 1]
    assert [m.token_ids[0] for m in staged.replies.messages if isinstance(m, StepDone)] == tokens(2)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("at_once", [(), ("run 2",), ("run 0", "run 1")])
@pytest.mark.parametrize("failing", ["run 1", "prepare 1"])
def test_late_failure_voids_later_steps_and_no_earlier_one(failing: str, at_once: tuple[str, ...], seed: int) -> None:
    device = LateCopier(failing, seed=seed, at_once=at_once)
    staged, replies = run_copying_steps(seed, device)
    void = "an earlier step of this epoch failed"
    assert isinstance(replies[0], StepDone)
    assert replies[1:] == [
        StepFailed(0, 1, f"OSError('cannot {failing}')"),
        StepFailed(0, 2, void),
        StepFailed(0, 3, void),
    ]
    copied = [done for done in device.done if not done.startswith("run")]
    assert copied == [f"{what} {number}" for number in range(4) for what in ("save", "load")], "copies are made"
    assert device.line == [], "every launched step is awaited"
    device.failing = ()
    staged.run_steps(3, epoch=1)
    assert [m.token_ids[0] for m in staged.replies.messages if isinstance(m, StepDone)] == tokens(3)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("failing", [("save 1",), ("load 1",), ("load 1", "run 1"), ("run 0", "save 1")])
@pytest.mark.parametrize("at_once", [(), ("run 1",)])
def test_copy_that_fails_late_loses_the_contents(at_once: tuple[str, ...], failing: tuple[str, ...], seed: int) -> None:
    device = LateCopier(*failing, seed=seed, at_once=at_once)
    staged, replies = run_copying_steps(seed, device)
    assert isinstance(replies[0], StepFailed if "run 0" in failing else StepDone)
    copy = next(what for what in failing if not what.startswith("run"))
    assert replies[1] == StepFailed(0, 1, f"OSError('cannot {copy}')", contents_lost=True)
    assert [m.contents_lost for m in replies[2:] if isinstance(m, StepFailed)] == [False, False]
    device.failing = ()
    staged.run_steps(3, epoch=1)
    assert [m.token_ids[0] for m in staged.replies.messages if isinstance(m, StepDone)] == tokens(3)


async def test_system_runs_steps_off_the_loop_and_answers_in_order() -> None:
    loop_thread = threading.get_ident()
    threads: set[int] = set()

    class Watched(StubDevice):
        def copy(self, copies: BlockCopies) -> None:
            threads.add(threading.get_ident())
            super().copy(copies)

        def run(self, batch: StubBatch) -> StepDone:
            threads.add(threading.get_ident())
            return super().run(batch)

    ready: asyncio.Future[ExecutorReady] = asyncio.get_running_loop().create_future()
    answers: asyncio.Queue[StepDone | StepFailed] = asyncio.Queue()
    scheduler: _Through[object] = _Through(
        lambda message: ready.set_result(message) if isinstance(message, ExecutorReady) else None
    )
    replies: _Through[StepDone | StepFailed] = _Through(answers.put_nowait)
    part = ActorSpec(EXECUTOR, lambda context: Executor(context, lambda: Watched(20, 4), scheduler))
    async with asyncio.timeout(60), System([part]) as system:
        life = (await ready).life
        for number in range(8):
            fork = BlockCopies(CopyKind.FORK, (5,), (6,))
            plain = step(0, number, replies, life, enters=number == 0)
            system.find(EXECUTOR).tell(msgspec.structs.replace(plain, copies=(fork,)))
        done = [await answers.get() for _ in range(8)]
    assert [m.token_ids[0] for m in done if isinstance(m, StepDone)] == tokens(8)
    assert len(threads) == 1
    assert loop_thread not in threads


async def test_system_gets_failed_load_and_failed_step_as_messages() -> None:
    told: asyncio.Queue[object] = asyncio.Queue()
    address: _Through[object] = _Through(told.put_nowait)

    def broken() -> StubDevice:
        raise OSError("no weights")

    part = ActorSpec(EXECUTOR, lambda context: Executor(context, broken, address))
    async with asyncio.timeout(60), System([part], on_failure=told.put_nowait):
        assert await told.get() == LOADING
        assert await told.get() == ExecutorFailed("no weights")

    device = FailingDevice(20, 4, lambda step: step.epoch == 0)  # type: ignore[attr-defined]
    part = ActorSpec(EXECUTOR, lambda context: Executor(context, lambda: device, address))
    async with asyncio.timeout(60), System([part], on_failure=told.put_nowait) as system:
        assert await told.get() == LOADING
        ready = await told.get()
        assert isinstance(ready, ExecutorReady)
        for epoch in (0, 1):
            system.find(EXECUTOR).tell(step(epoch, 0, address, ready.life, enters=True))
        assert isinstance(await told.get(), StepFailed)
        assert isinstance(await told.get(), StepDone)
    assert told.empty()


class _Through(Generic[M]):
    """An address that passes each message to a function."""

    def __init__(self, hear: Callable[[M], object]) -> None:
        self._hear = hear

    def tell(self, message: M, /) -> None:
        self._hear(message)
