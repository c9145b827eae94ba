"""The executor of a history: around a device without weights, it fails, dies and hangs as the history's seed says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from cuelight.actors.executor.actor import Executor, ExecutorInbox
from cuelight.actors.executor.device import Device, DeviceLost
from cuelight.actors.executor.stub import StubBatch, StubDevice, hashed_token, stub_host
from cuelight.config import EngineConfig
from cuelight.kernel import Context, Role
from cuelight.kernel.faults import SimulatedKill
from cuelight.messages.address import Address
from cuelight.messages.executor import ExecuteStep
from cuelight.messages.request import BlockCopies, CopyKind, ExecutorId, RequestId
from cuelight.messages.scheduler import SchedulerMessage, StepDone, StepFailed
from cuelight.stub_model import END_TOKEN

ALPHABET: Final = b"abcdefg "

POISONS: Final = ("loses the device", "has its process killed", "hangs")
"""What a step with the poisonous request in it does to the executor."""


@dataclass
class Mischief:
    """What goes wrong with the executor, beside what the simulation does to it; and what has."""

    chance: random.Random
    fails: float = 0.0
    """How often a step raises."""
    loses: float = 0.0
    """How often a step takes the device with it."""
    hangs: float = 0.0
    """How often a step never ends."""
    misloads: float = 0.0
    """How often loading the model fails, once all has started."""
    dies_saving: float = 0.0
    """How often it dies when it has been told to save blocks: before it has, or before anybody hears that it has."""
    fits: int | None = None
    """So many tokens of a step fit in the device's memory; None is any."""
    is_started: bool = False
    poison: RequestId | None = None
    poison_does: str = POISONS[0]
    failures: int = 0
    hung: int = 0
    poisoned: int = 0
    complaints: list[str] = field(default_factory=list)
    """What the steps had wrong: the executor would answer for it as for any failure."""

    def strikes(self, rate: float) -> bool:
        """Draw."""
        return rate > 0 and self.chance.random() < rate

    def meets_poison(self, step: ExecuteStep) -> bool:
        """Whether the poisonous request is in the step."""
        is_there = any(chunk.request_id == self.poison for chunk in step.chunks)
        self.poisoned += is_there
        return is_there


def next_token(token_ids: Sequence[int]) -> int:
    """A letter or, less often, the end: a pure function of all tokens before it."""
    number = hashed_token(token_ids, 4 * len(ALPHABET))
    return END_TOKEN if number == 0 else ALPHABET[number % len(ALPHABET)]


def build_flaky(
    config: EngineConfig,
    mischief: Mischief,
    remains: Remains,
    scheduler: Role[SchedulerMessage],
    executor_id: ExecutorId,
    context: Context[ExecutorInbox],
) -> Executor[StubBatch]:
    """The executor of this life, with what those before it have left in host memory."""
    load = partial(_load, config, mischief, remains)
    return FlakyExecutor(context, load, context.find(scheduler), executor_id, mischief, remains)


def _load(config: EngineConfig, mischief: Mischief, remains: Remains) -> Device[StubBatch]:
    if mischief.is_started and mischief.strikes(mischief.misloads):
        raise OSError("the weights cannot be read")
    remains.inherit()
    return FlakyDevice(config, mischief, remains)


class Remains:
    """Host memory that outlives the executors of a role: mostly, and but for what they were just saving there."""

    def __init__(self, config: EngineConfig, chance: random.Random) -> None:
        self._chance = chance
        self._block_size = config.block_size
        self.contents: list[int | None] = [None] * (config.host_block_count * config.block_size)
        self.number = 0
        self._runs: dict[tuple[int, int], int] = {}
        self._saving: list[tuple[int, slice, list[int | None]]] = []
        """What was to be there with which step that is run, where, and what was there before."""

    def inherit(self) -> None:
        """Another executor has it."""
        if not self.number or self._chance.random() < 0.1:
            self.number = self._chance.getrandbits(40) + 1
            self.contents[:] = [None] * len(self.contents)
        for _, place, before in reversed(self._saving):
            self.contents[place] = self._chance.choice(
                (self.contents[place], before, [None] * len(before), before[:1] + self.contents[place][1:])
            )
        self._saving.clear()

    def save(self, slots: Sequence[int]) -> None:
        """Blocks are about to be copied here, for the step that is run next."""
        for slot in slots:
            place = slice(slot * self._block_size, (slot + 1) * self._block_size)
            self._saving.append((len(self._runs) + 1, place, self.contents[place]))

    def run(self, step: ExecuteStep) -> None:
        """A step is run, and all copies before it have been made."""
        self._runs[step.epoch, step.step] = len(self._runs) + 1

    def answered(self, done: StepDone) -> None:
        """Somebody may know that a step is done."""
        run = self._runs[done.epoch, done.step]
        self._saving = [each for each in self._saving if each[0] > run]


@dataclass(frozen=True)
class _Overheard:
    """Where a step's answer goes."""

    to: Address[StepDone | StepFailed]
    remains: Remains

    def tell(self, message: StepDone | StepFailed, /) -> None:
        if isinstance(message, StepDone):
            self.remains.answered(message)
        self.to.tell(message)


class FlakyExecutor(Executor[StubBatch]):
    """An executor that sometimes hears of a step and does nothing any more, or is killed over it."""

    def __init__(
        self,
        context: Context[ExecutorInbox],
        load: Callable[[], Device[StubBatch]],
        scheduler: Address[SchedulerMessage],
        executor_id: ExecutorId,
        mischief: Mischief,
        remains: Remains,
    ) -> None:
        super().__init__(context, load, scheduler, executor_id)
        self._mischief = mischief
        self._remains = remains
        self._hangs = False
        self._dies_in: int | None = None

    def handle(self, message: ExecutorInbox) -> None:
        """As an executor, unless it hangs."""
        mischief = self._mischief
        if isinstance(message, ExecuteStep) and not self._hangs and message.life == self._life:
            if mischief.poison_does == "has its process killed" and mischief.meets_poison(message):
                raise SimulatedKill
            is_poison = mischief.poison_does == "hangs" and mischief.meets_poison(message)
            self._hangs = is_poison or mischief.strikes(mischief.hangs)
            mischief.hung += self._hangs
            if mischief.dies_saving and any(copies.copying is CopyKind.SAVE for copies in message.copies):
                self._dies_in = mischief.chance.randrange(4) if mischief.strikes(mischief.dies_saving) else None
            message = msgspec.structs.replace(message, reply_to=_Overheard(message.reply_to, self._remains))
        if self._dies_in is not None:
            if self._dies_in == 0:
                raise SimulatedKill
            self._dies_in -= 1
        if not self._hangs:
            super().handle(message)


class FlakyDevice(StubDevice):
    """A stub whose steps sometimes raise, before they have done their work or after."""

    def __init__(self, config: EngineConfig, mischief: Mischief, remains: Remains) -> None:
        assert config.block_count is not None
        host = msgspec.structs.replace(stub_host(config.host_block_count), memory=remains.number)
        super().__init__(config.block_count, config.block_size, next_token, host)
        self._mischief = mischief
        self._remains = remains
        self._host_slots = remains.contents
        self._is_lost = False

    def run(self, batch: StubBatch) -> StepDone:
        """As a stub's, unless it fails; once lost, it stays so."""
        mischief = self._mischief
        is_poison = mischief.poison_does == "loses the device" and mischief.meets_poison(batch.step)
        self._is_lost = self._is_lost or is_poison or mischief.strikes(mischief.loses)
        self._check_found()
        if mischief.fits is not None and sum(chunk.token_count for chunk in batch.step.chunks) > mischief.fits:
            raise MemoryError("the device's memory is full")
        self._remains.run(batch.step)
        fails = mischief.strikes(mischief.fails)
        if fails and mischief.chance.random() < 0.5:
            self._fail()
        try:
            done = super().run(batch)
        except Exception as error:
            mischief.complaints.append(f"step {batch.step.step}: {type(error).__name__}: {error}")
            raise
        if fails:
            self._fail()
        return done

    def copy(self, copies: BlockCopies) -> None:
        """As a stub's, unless it fails, and then nobody knows what is in the blocks."""
        self._check_found()
        if copies.copying is CopyKind.SAVE:
            self._remains.save(copies.targets)
        try:
            super().copy(copies)
        except Exception as error:
            self._mischief.complaints.append(f"{copies}: {type(error).__name__}: {error}")
            raise
        if self._mischief.strikes(self._mischief.fails / 4):
            self._fail()

    def _check_found(self) -> None:
        if self._is_lost:
            raise DeviceLost("an unspecified launch failure")

    def _fail(self) -> None:
        self._mischief.failures += 1
        raise RuntimeError("the device failed")
