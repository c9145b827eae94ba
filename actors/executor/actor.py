"""The executor actor: runs steps on a device. Its messages carry rows and blocks, without queues, policy or text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Never, TypeAlias, TypeVar, assert_never

import msgspec

from cuelight.actors.executor.device import Device, DeviceLost, Pending
from cuelight.actors.executor.options import LoadPhases
from cuelight.kernel import Actor, Context, Worker, get_logger
from cuelight.messages.address import Address
from cuelight.messages.executor import ExecuteStep, ExecutorMessage, GetExecutorState
from cuelight.messages.request import FIRST_EXECUTOR, ExecutorId, HostTier
from cuelight.messages.scheduler import ExecutorFailed, ExecutorLoading, ExecutorReady, StepDone, StepFailed

B = TypeVar("B")

log = get_logger("cuelight.executor")


class _DeviceLoaded(msgspec.Struct, frozen=True, tag=True):
    """The device is loaded."""

    block_count: int
    block_size: int
    host: HostTier = HostTier()
    phases: tuple[tuple[str, float], ...] = ()


class _PhaseBegun(msgspec.Struct, frozen=True, tag=True):
    """Loading the device has begun a phase."""

    name: str


class _DeviceLoadFailed(msgspec.Struct, frozen=True, tag=True):
    """Loading the device has failed."""

    error: str


class _Prepared(msgspec.Struct, frozen=True, tag=True):
    """The step's batch is laid out and queued behind the batches of earlier steps."""

    step: ExecuteStep


class _Launched(msgspec.Struct, frozen=True, tag=True):
    """The step is enqueued on the device. `outcome` is None if the result is pending and must be read."""

    epoch: int
    step: int
    reply_to: Address[StepDone | StepFailed]
    outcome: StepDone | StepFailed | None


class _Read(msgspec.Struct, frozen=True, tag=True):
    """The outcome of a step has been read."""

    reply_to: Address[StepDone | StepFailed]
    outcome: StepDone | StepFailed


class _Lost(msgspec.Struct, frozen=True, tag=True):
    """The device has become unusable."""

    error: str


ExecutorInbox: TypeAlias = (
    ExecutorMessage | _PhaseBegun | _DeviceLoaded | _DeviceLoadFailed | _Prepared | _Launched | _Read | _Lost
)


@dataclass(frozen=True)
class _UnreadStep:
    """The pending copies of one step, and its pending result, or the result itself if already decided."""

    copies: list[Pending[None]]
    result: Pending[StepDone] | StepDone | StepFailed


class Executor(Generic[B], Actor[ExecutorInbox]):
    """A pipeline of three threads: prepare the batch of the next step, run the step on the device, read its results.

    Only the threads use the device and its batches; the handlers use neither, so a recorded inbox replays without a
    device.
    """

    def __init__(
        self,
        context: Context[ExecutorInbox],
        load: Callable[[], Device[B]],
        scheduler: Address[ExecutorLoading | ExecutorReady | ExecutorFailed],
        executor_id: ExecutorId = FIRST_EXECUTOR,
    ) -> None:
        self._load = load
        self._scheduler = scheduler
        self._id = executor_id
        self._clock = context.clock
        self._life = context.chance.getrandbits(32)
        self._began = 0.0
        self._state: ExecutorLoading | ExecutorReady | ExecutorFailed = ExecutorLoading("loading the model", self._id)
        self._preparing: Worker[ExecutorInbox] = context.worker("prepare")
        self._running: Worker[ExecutorInbox] = context.worker("device")
        self._reading: Worker[ExecutorInbox] = context.worker("read")
        self._unread = 0  # steps submitted to the reading thread and not yet answered
        self._device: Device[B] | None = None
        self._prepared: deque[Callable[[], StepDone | Pending[StepDone]]] = deque()
        self._unread_steps: deque[_UnreadStep] = deque()
        self._void = (-1, 0)  # epoch and number of a failed step: later steps of the epoch are void
        self._copying = False  # stays True after a copy that failed

    def started(self) -> None:
        self._began = self._clock.now()
        self._scheduler.tell(self._state)
        self._running.submit(self._load_device, done=lambda loaded: loaded, failed=_load_failure)

    def handle(self, message: ExecutorInbox) -> None:
        match message:
            case ExecuteStep(life=life) if life != self._life:
                log.debug("step_of_another_life", epoch=message.epoch, step=message.step)
            case ExecuteStep():
                self._preparing.submit(
                    partial(self._prepare, message),
                    done=lambda _: _Prepared(message),
                    failed=partial(self._launch_failed, message),
                )
            case _Prepared(step):
                self._running.submit(
                    partial(self._launch, step),
                    done=partial(_Launched, step.epoch, step.step, step.reply_to),
                    failed=partial(self._launch_failed, step),
                )
            case _Launched():
                self._launched(message)
            case _Read(reply_to, outcome):
                self._unread -= 1
                reply_to.tell(outcome)
            case _Lost(error):
                raise DeviceLost(error)
            case _PhaseBegun(name):
                if isinstance(self._state, ExecutorLoading):  # the device thread may have finished loading first
                    self._state = ExecutorLoading(f"loading the model: {name}", self._id)
                    self._scheduler.tell(self._state)
            case _DeviceLoaded(block_count, block_size, host, phases):
                seconds = self._clock.now() - self._began
                self._state = ExecutorReady(block_count, block_size, host, self._life, seconds, self._id, phases)
                self._scheduler.tell(self._state)
            case _DeviceLoadFailed(error):
                self._state = ExecutorFailed(error, self._id)
                self._scheduler.tell(self._state)
            case GetExecutorState(reply_to):
                reply_to.tell(self._state)
            case _:
                assert_never(message)

    def _launched(self, step: _Launched) -> None:
        outcome = step.outcome
        if outcome is not None and not self._unread:
            step.reply_to.tell(outcome)
            return
        self._unread += 1  # steps are answered in order, so a finished step waits for the unread steps before it
        self._reading.submit(
            partial(self._read, step) if outcome is None else lambda: outcome,
            done=partial(_Read, step.reply_to),
            failed=partial(self._read_failed, step),
        )

    def _load_device(self) -> _DeviceLoaded:
        """Load the device. Runs on the device thread."""
        phases = LoadPhases(self._phase_begun)
        with phases.as_current():
            device = self._device = self._load()
        host = device.host
        log.info(
            "device_loaded",
            block_count=device.block_count,
            block_size=device.block_size,
            host_block_count=host.block_count,
            move_seconds=host.move_seconds,
            recompute_seconds=host.recompute_seconds,
            **phases.facts(),
        )
        return _DeviceLoaded(device.block_count, device.block_size, host, tuple(phases.seconds.items()))

    def _phase_begun(self, name: str) -> None:
        """Report the phase through the reading thread, idle while loading. Runs on the thread that loads."""
        self._reading.submit(lambda: name, done=_PhaseBegun, failed=_load_failure)

    def _prepare(self, step: ExecuteStep) -> None:
        """Prepare the batch of a step. Runs on the preparing thread.

        An error is raised later, when the step is launched, because the step's copies must be made even so.
        """
        assert self._device is not None, "no step is sent before ExecutorReady"
        try:
            batch = self._device.prepare(step)
        except BaseException as error:
            self._prepared.append(partial(_raise, error))
        else:
            self._prepared.append(partial(self._device.run, batch))

    def _launch(self, step: ExecuteStep) -> StepDone | StepFailed | None:
        """Copy the step's blocks and run its batch; None if the outcome is pending. Runs on the device thread.

        After a failed step the later steps of its epoch are void: their blocks are copied, their batches dropped.
        """
        assert self._device is not None
        run = self._prepared.popleft()
        self._copying = True
        copies = [pending for each in step.copies if (pending := self._device.copy(each)) is not None]
        self._copying = False
        result: StepDone | StepFailed | Pending[StepDone]
        try:
            result = _void(step) if self._is_void(step) else run()
        except DeviceLost:
            raise
        except Exception as error:
            result = self._fail(step, error, contents_lost=False)  # `_read` reports contents lost if a copy fails too
        if isinstance(result, StepDone | StepFailed) and not copies:
            return result
        self._unread_steps.append(_UnreadStep(copies, result))
        return None

    def _launch_failed(self, step: ExecuteStep, error: Exception) -> _Launched | _Lost:
        """Convert an error of `_launch` to a message. Runs on the device thread."""
        if isinstance(error, DeviceLost):
            return _Lost(str(error))
        failed = self._fail(step, error, contents_lost=self._copying)
        return _Launched(step.epoch, step.step, step.reply_to, failed)

    def _read(self, step: _Launched) -> StepDone | StepFailed:
        """Wait for the step's copies and result. Runs on the reading thread.

        The device has finished the step afterwards, even if copies or the result fail.
        """
        unread = self._unread_steps.popleft()
        errors = [error for copies in unread.copies if (error := _error_of(copies)) is not None]
        outcome: StepDone | StepFailed
        try:
            outcome = unread.result if isinstance(unread.result, StepDone | StepFailed) else unread.result.wait()
        except DeviceLost:
            raise
        except Exception as error:
            outcome = _void(step) if self._is_void(step) else self._fail(step, error, contents_lost=False)
        if errors:
            return self._fail(step, errors[0], contents_lost=True)
        return _void(step) if self._is_void(step) else outcome

    def _read_failed(self, step: _Launched, error: Exception) -> _Read | _Lost:
        """Convert an error of `_read` to a message. Runs on the reading thread."""
        if isinstance(error, DeviceLost):
            return _Lost(str(error))
        return _Read(step.reply_to, self._fail(step, error, contents_lost=False))

    def _is_void(self, step: ExecuteStep | _Launched) -> bool:
        epoch, number = self._void
        return step.epoch == epoch and step.step > number

    def _fail(self, step: ExecuteStep | _Launched, error: Exception, *, contents_lost: bool) -> StepFailed:
        """Void the later steps of the epoch and return the failure. Runs on the device or the reading thread."""
        self._void = (step.epoch, step.step)
        log.error("step_raised", epoch=step.epoch, step=step.step, copying=contents_lost, exc_info=error)
        is_full = isinstance(error, MemoryError)
        return StepFailed(step.epoch, step.step, repr(error), contents_lost=contents_lost, out_of_memory=is_full)


def _void(step: ExecuteStep | _Launched) -> StepFailed:
    return StepFailed(step.epoch, step.step, "an earlier step of this epoch failed")


def _error_of(pending: Pending[None]) -> Exception | None:
    try:
        pending.wait()
    except Exception as error:
        return error
    return None


def _raise(error: BaseException) -> Never:
    raise error


def _load_failure(error: Exception) -> _DeviceLoadFailed:
    """Log an error of `_load_device` and convert it to a message. Runs on the device thread."""
    log.error("load_failed", error=repr(error))
    return _DeviceLoadFailed(str(error) or repr(error))
