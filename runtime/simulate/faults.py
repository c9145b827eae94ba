"""The executor of a simulated run: a device without weights, and the failures, deaths and hangs of a `FaultPlan`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import msgspec

from cuelight.actors.executor.actor import Executor, ExecutorInbox
from cuelight.actors.executor.device import Device, DeviceLost
from cuelight.actors.executor.stub import StubBatch, StubDevice, hashed_token, stub_host
from cuelight.config import POLICIES, EngineConfig
from cuelight.core.stub_model import END_TOKEN
from cuelight.kernel import Context, Role
from cuelight.kernel.simulation.faults import Faults, SimulatedKill
from cuelight.messages.address import Address
from cuelight.messages.executor import ExecuteStep
from cuelight.messages.request import BlockCopies, CopyKind, ExecutorId, RequestId
from cuelight.messages.scheduler import SchedulerMessage, StepDone, StepFailed

ALPHABET: Final = b"abcdefg "

POISON_EFFECTS: Final = ("loses the device", "has its process killed", "hangs")
"""The effects that a step with the poisonous request can have on the executor."""


@dataclass
class FaultPlan:
    """The rates and the counts of the executor's faults; those of the simulation are in `Faults`."""

    rng: random.Random
    step_failure_rate: float = 0.0
    """Fraction of steps that raise."""
    device_loss_rate: float = 0.0
    """Fraction of steps that lose the device."""
    hang_rate: float = 0.0
    """Fraction of steps that never end."""
    load_failure_rate: float = 0.0
    """Fraction of loads of the model that fail, once the engine has started."""
    save_death_rate: float = 0.0
    """Fraction of steps with saved blocks after which the executor dies: before the copies, or before its answer."""
    step_tokens_max: int | None = None
    """Tokens of a step that fit in the device's memory; None is no limit."""
    is_started: bool = False
    poison: RequestId | None = None
    poison_effect: str = POISON_EFFECTS[0]
    failed_steps: int = 0
    hang_count: int = 0
    device_errors: list[str] = field(default_factory=list)
    """Exceptions of the stub device itself: bugs, which the executor reports like any failed step."""

    def draws(self, rate: float) -> bool:
        """Return whether a fault of this rate happens now."""
        return rate > 0 and self.rng.random() < rate

    def holds_poison(self, step: ExecuteStep) -> bool:
        """Return whether the step computes the poisonous request."""
        return any(chunk.request_id == self.poison for chunk in step.chunks)


def next_token(token_ids: Sequence[int]) -> int:
    """Return a letter or, less often, the end token: a pure function of all tokens before."""
    number = hashed_token(token_ids, 4 * len(ALPHABET))
    return END_TOKEN if number == 0 else ALPHABET[number % len(ALPHABET)]


def build_faulty_executor(
    config: EngineConfig,
    plan: FaultPlan,
    memory: SurvivingMemory,
    scheduler: Role[SchedulerMessage],
    executor_id: ExecutorId,
    context: Context[ExecutorInbox],
) -> Executor[StubBatch]:
    """Build the executor of one life over the host memory that earlier lives have left."""
    load = partial(_load, config, plan, memory)
    return FaultyExecutor(context, load, context.find(scheduler), executor_id, plan, memory)


def _load(config: EngineConfig, plan: FaultPlan, memory: SurvivingMemory) -> Device[StubBatch]:
    if plan.is_started and plan.draws(plan.load_failure_rate):
        raise OSError("the weights cannot be read")
    memory.inherit()
    return FaultyDevice(config, plan, memory)


class SurvivingMemory:
    """Host memory that survives the executors of a role, except by chance, and except blocks that were being saved."""

    def __init__(self, config: EngineConfig, rng: random.Random) -> None:
        self._rng = rng
        self._block_size = config.block_size
        self.contents: list[int | None] = [None] * (config.host_block_count * config.block_size)
        self.number = 0
        self._runs: dict[tuple[int, int], int] = {}
        self._saving: list[tuple[int, slice, list[int | None]]] = []
        """Copies that no answer has confirmed: the step they belong to, their slots, and the contents before."""

    def inherit(self) -> None:
        """Pass the memory on to the next executor: draw the contents that the unconfirmed copies have left."""
        if not self.number or self._rng.random() < 0.1:
            self.number = self._rng.getrandbits(40) + 1
            self.contents[:] = [None] * len(self.contents)
        for _, place, before in reversed(self._saving):
            self.contents[place] = self._rng.choice(
                (self.contents[place], before, [None] * len(before), before[:1] + self.contents[place][1:])
            )
        self._saving.clear()

    def save(self, slots: Sequence[int]) -> None:
        """Note that blocks are about to be copied to these slots, before the next step."""
        for slot in slots:
            place = slice(slot * self._block_size, (slot + 1) * self._block_size)
            self._saving.append((len(self._runs) + 1, place, self.contents[place]))

    def run(self, step: ExecuteStep) -> None:
        """Note that a step runs, after all its copies."""
        self._runs[step.epoch, step.step] = len(self._runs) + 1

    def answered(self, done: StepDone) -> None:
        """Forget the copies that the answer to a step confirms."""
        run = self._runs[done.epoch, done.step]
        self._saving = [each for each in self._saving if each[0] > run]


@dataclass(frozen=True)
class _AnswerTap:
    """The `reply_to` of a step: passes the answer to the host memory first."""

    to: Address[StepDone | StepFailed]
    memory: SurvivingMemory

    def tell(self, message: StepDone | StepFailed, /) -> None:
        if isinstance(message, StepDone):
            self.memory.answered(message)
        self.to.tell(message)


class FaultyExecutor(Executor[StubBatch]):
    """An executor that hangs or is killed at a step, according to its plan."""

    def __init__(
        self,
        context: Context[ExecutorInbox],
        load: Callable[[], Device[StubBatch]],
        scheduler: Address[SchedulerMessage],
        executor_id: ExecutorId,
        plan: FaultPlan,
        memory: SurvivingMemory,
    ) -> None:
        super().__init__(context, load, scheduler, executor_id)
        self._plan = plan
        self._memory = memory
        self._hangs = False
        self._dies_in: int | None = None

    def handle(self, message: ExecutorInbox) -> None:
        """Handle a message as an executor does, unless a drawn fault hangs or kills it."""
        plan = self._plan
        if isinstance(message, ExecuteStep) and not self._hangs and message.life == self._life:
            if plan.poison_effect == "has its process killed" and plan.holds_poison(message):
                raise SimulatedKill
            is_poison = plan.poison_effect == "hangs" and plan.holds_poison(message)
            self._hangs = is_poison or plan.draws(plan.hang_rate)
            plan.hang_count += self._hangs
            if plan.save_death_rate and any(copies.copying is CopyKind.SAVE for copies in message.copies):
                self._dies_in = plan.rng.randrange(4) if plan.draws(plan.save_death_rate) else None
            message = msgspec.structs.replace(message, reply_to=_AnswerTap(message.reply_to, self._memory))
        if self._dies_in is not None:
            if self._dies_in == 0:
                raise SimulatedKill
            self._dies_in -= 1
        if not self._hangs:
            super().handle(message)


class FaultyDevice(StubDevice):
    """A stub device whose steps sometimes raise, before or after their work."""

    def __init__(self, config: EngineConfig, plan: FaultPlan, memory: SurvivingMemory) -> None:
        assert config.block_count is not None
        host = msgspec.structs.replace(stub_host(config.host_block_count), memory=memory.number)
        super().__init__(config.block_count, config.block_size, next_token, host)
        self._plan = plan
        self._memory = memory
        self._host_slots = memory.contents
        self._is_lost = False

    def run(self, batch: StubBatch) -> StepDone:
        """Run a step as the stub does, unless a drawn fault raises. A lost device stays lost."""
        plan = self._plan
        is_poison = plan.poison_effect == "loses the device" and plan.holds_poison(batch.step)
        self._is_lost = self._is_lost or is_poison or plan.draws(plan.device_loss_rate)
        self._check_found()
        tokens = sum(chunk.token_count for chunk in batch.step.chunks)
        if plan.step_tokens_max is not None and tokens > plan.step_tokens_max:
            raise MemoryError("the device's memory is full")
        self._memory.run(batch.step)
        fails = plan.draws(plan.step_failure_rate)
        if fails and plan.rng.random() < 0.5:
            self._fail()
        try:
            done = super().run(batch)
        except Exception as error:
            plan.device_errors.append(f"step {batch.step.step}: {type(error).__name__}: {error}")
            raise
        if fails:
            self._fail()
        return done

    def copy(self, copies: BlockCopies) -> None:
        """Copy blocks as the stub does; raise if drawn, then the contents of the target blocks are undefined."""
        self._check_found()
        if copies.copying is CopyKind.SAVE:
            self._memory.save(copies.targets)
        try:
            super().copy(copies)
        except Exception as error:
            self._plan.device_errors.append(f"{copies}: {type(error).__name__}: {error}")
            raise
        if self._plan.draws(self._plan.step_failure_rate / 4):
            self._fail()

    def _check_found(self) -> None:
        if self._is_lost:
            raise DeviceLost("an unspecified launch failure")

    def _fail(self) -> None:
        self._plan.failed_steps += 1
        raise RuntimeError("the device failed")


ACTORS: Final = ("detokenizer", "executor", "cache", "scheduler", "intake")


def draw_config(rng: random.Random) -> EngineConfig:
    """Draw the options of a small engine, which reaches its limits soon."""
    config = EngineConfig(
        token_budget=rng.choice((3, 16, 64, 512)),
        running_max=rng.choice((1, 3, 16)),
        queue_limit=rng.choice((4, 100, 100)),
        block_size=rng.choice((1, 4, 16)),
        block_count=rng.choice((16, 32, 64, 1000)),
        watermark_fraction=rng.choice((0.0, 0.01, 0.2)),
        steps_in_flight=rng.choice((1, 2, 3)),
        host_block_count=rng.choice((0, 8, 64)),
        policy=rng.choice(POLICIES),
        isolate_tenants=rng.random() < 0.2,
        executor=rng.choice(("thread", "process")),
        restarts_max=50,
    )
    return with_tight_pool(config) if rng.random() < 0.3 else config


def with_tight_pool(config: EngineConfig) -> EngineConfig:
    """Return the options with a pool so small that blocks are saved to and loaded from host memory all the time."""
    return replace(config, running_max=16, block_size=4, block_count=16, host_block_count=64)


def draw_fault_plan(rng: random.Random, config: EngineConfig, request_count: int) -> FaultPlan:
    """Draw the executor's faults; only an executor in a process, which can be killed, hangs."""
    plan = FaultPlan(rng, step_failure_rate=rng.choice((0.0, 0.0, 0.05, 0.3)))
    if rng.random() < 0.3:
        plan.device_loss_rate = rng.choice((0.01, 0.1))
    if rng.random() < 0.2:
        plan.step_tokens_max = rng.choice((1, 2, 10, 40))
    if config.host_block_count:
        plan.save_death_rate = rng.choice((0.0, 0.0, 0.05, 0.3))
    is_apart = config.executor == "process"
    if is_apart and rng.random() < 0.3:
        plan.hang_rate = rng.choice((0.01, 0.1))
    if is_apart and rng.random() < 0.3:
        plan.load_failure_rate = 0.3
    if rng.random() < 0.2:
        plan.poison = RequestId(int(rng.random() * request_count))
        plan.poison_effect = rng.choice(POISON_EFFECTS if is_apart else POISON_EFFECTS[:1])
    return plan


def draw_message_faults(rng: random.Random) -> Faults:
    """Draw the simulation's faults: crashes, kills and delays at any message."""
    return Faults(
        crash=rng.choice((0.0, 0.0, 0.003, 0.01, 0.03)),
        kill=rng.choice((0.0, 0.0, 0.01, 0.05)),
        delay_seconds_max=rng.choice((0.0, 0.001, 0.1)),
    )


def draw_kills(rng: random.Random) -> dict[int, str]:
    """Draw the actors to kill, by the number of a delivery: often in a row, so that one dies while another restarts."""
    kills: dict[int, str] = {}
    for _ in range(rng.choice((0, 0, 1, 3, 8))):
        delivery = int(rng.random() * rng.choice((30, 300, 3000)))
        for _ in range(rng.choice((1, 1, 2, 4))):
            kills[delivery] = rng.choice(ACTORS)
            delivery += 1 + int(rng.random() * 12)
    return kills
