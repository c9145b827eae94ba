"""The executor: the device and all that lives on it. Knows rows and blocks; not queues, policy or text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeAlias, TypeVar, assert_never

import msgspec

from cuelight.actors.executor.device import Device
from cuelight.kernel import Actor, Context, Worker, get_logger
from cuelight.messages.address import Address
from cuelight.messages.executor import ExecuteStep
from cuelight.messages.observer import LoadFailed
from cuelight.messages.scheduler import ExecutorReady, StepDone, StepFailed

B = TypeVar("B")

log = get_logger("cuelight.executor")


class _Loaded(msgspec.Struct, Generic[B], frozen=True):
    device: Device[B]


class _LoadFailed(msgspec.Struct, frozen=True):
    error: Exception


class _Prepared(msgspec.Struct, Generic[B], frozen=True):
    step: ExecuteStep
    batch: B


class _Ended(msgspec.Struct, frozen=True):
    step: ExecuteStep
    outcome: StepDone | StepFailed


ExecutorInbox: TypeAlias = ExecuteStep | _Loaded[B] | _LoadFailed | _Prepared[B] | _Ended


class Executor(Actor[ExecutorInbox[B]]):
    """Two threads in a row: while the device runs one step, the next one's batch is prepared."""

    def __init__(
        self,
        context: Context[ExecutorInbox[B]],
        load: Callable[[], Device[B]],
        scheduler: Address[ExecutorReady],
        observer: Address[LoadFailed],
    ) -> None:
        self._load = load
        self._scheduler = scheduler
        self._observer = observer
        self._preparing: Worker[ExecutorInbox[B]] = context.worker("prepare")
        self._running: Worker[ExecutorInbox[B]] = context.worker("device")
        self._device: Device[B] | None = None
        self._void_epoch = -1

    def started(self) -> None:
        self._running.submit(self._load, done=_Loaded, failed=_LoadFailed)

    def handle(self, message: ExecutorInbox[B]) -> None:
        match message:
            case ExecuteStep():
                assert self._device is not None, "no step is sent before ExecutorReady"
                self._preparing.submit(
                    partial(self._device.prepare, message),
                    done=partial(_Prepared, message),
                    failed=partial(self._failure, message),
                )
            case _Prepared(step, batch):
                self._running.submit(
                    partial(self._run, step, batch), done=partial(_Ended, step), failed=partial(self._failure, step)
                )
            case _Ended(step, outcome):
                step.reply_to.tell(outcome)
            case _Loaded(device):
                self._device = device
                self._scheduler.tell(ExecutorReady(device.block_count, device.block_size))
            case _LoadFailed(error):
                log.error("load_failed", error=repr(error))
                self._observer.tell(LoadFailed(str(error) or repr(error)))
            case _:
                assert_never(message)

    def _run(self, step: ExecuteStep, batch: B) -> StepDone | StepFailed:
        """On the device thread. After a failed step the rest of its epoch stands on sand and is not run."""
        assert self._device is not None
        if step.epoch == self._void_epoch:
            return StepFailed(step.epoch, step.step, "an earlier step of this epoch failed")
        try:
            return self._device.run(batch)
        except Exception:
            self._void_epoch = step.epoch
            raise

    def _failure(self, step: ExecuteStep, error: Exception) -> _Ended:
        """On the thread that failed."""
        self._void_epoch = step.epoch
        log.error("step_raised", epoch=step.epoch, step=step.step, exc_info=error)
        return _Ended(step, StepFailed(step.epoch, step.step, repr(error)))
