"""The executor: the device and all that lives on it. Knows rows and blocks; not queues, policy or text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, Never, TypeAlias, TypeVar, assert_never

import msgspec

from cuelight.actors.executor.device import Device
from cuelight.kernel import Actor, Context, Worker, get_logger
from cuelight.messages.address import Address
from cuelight.messages.executor import ExecuteStep
from cuelight.messages.observer import LoadFailed
from cuelight.messages.request import HostTier
from cuelight.messages.scheduler import ExecutorReady, StepDone, StepFailed

B = TypeVar("B")

log = get_logger("cuelight.executor")


class _Loaded(msgspec.Struct, frozen=True, tag=True):
    """The device is there."""

    block_count: int
    block_size: int
    host: HostTier = HostTier()


class _LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """There will be no device."""

    error: str


class _Prepared(msgspec.Struct, frozen=True, tag=True):
    """The step's batch is laid out, behind those of the steps before."""

    step: ExecuteStep


class _Ended(msgspec.Struct, frozen=True, tag=True):
    """The step is over; the answer is due."""

    reply_to: Address[StepDone | StepFailed]
    outcome: StepDone | StepFailed


ExecutorInbox: TypeAlias = ExecuteStep | _Loaded | _LoadFailed | _Prepared | _Ended


class Executor(Generic[B], Actor[ExecutorInbox]):
    """Two threads in a row: while the device runs one step, the next one's batch is prepared.

    The device and its batches stay with the threads; the handlers see neither, so a recorded inbox replays without.
    """

    def __init__(
        self,
        context: Context[ExecutorInbox],
        load: Callable[[], Device[B]],
        scheduler: Address[ExecutorReady],
        observer: Address[LoadFailed],
    ) -> None:
        self._load = load
        self._scheduler = scheduler
        self._observer = observer
        self._preparing: Worker[ExecutorInbox] = context.worker("prepare")
        self._running: Worker[ExecutorInbox] = context.worker("device")
        self._device: Device[B] | None = None
        self._prepared: deque[Callable[[], StepDone]] = deque()
        self._void_epoch = -1
        self._copying = False  # and still true after a copy that failed

    def started(self) -> None:
        self._running.submit(self._load_device, done=lambda loaded: loaded, failed=_load_failure)

    def handle(self, message: ExecutorInbox) -> None:
        match message:
            case ExecuteStep():
                self._preparing.submit(
                    partial(self._prepare, message),
                    done=lambda _: _Prepared(message),
                    failed=partial(self._failure, message),
                )
            case _Prepared(step):
                self._running.submit(
                    partial(self._run, step),
                    done=partial(_Ended, step.reply_to),
                    failed=partial(self._failure, step),
                )
            case _Ended(reply_to, outcome):
                reply_to.tell(outcome)
            case _Loaded(block_count, block_size, host):
                self._scheduler.tell(ExecutorReady(block_count, block_size, host))
            case _LoadFailed(error):
                self._observer.tell(LoadFailed(error))
            case _:
                assert_never(message)

    def _load_device(self) -> _Loaded:
        """On the device thread."""
        device = self._device = self._load()
        host = device.host
        log.info(
            "device_loaded",
            block_count=device.block_count,
            block_size=device.block_size,
            host_block_count=host.block_count,
            move_seconds=host.move_seconds,
            recompute_seconds=host.recompute_seconds,
        )
        return _Loaded(device.block_count, device.block_size, host)

    def _prepare(self, step: ExecuteStep) -> None:
        """On the thread beside it. A step that cannot be prepared fails when its turn comes: its copies are due too."""
        assert self._device is not None, "no step is sent before ExecutorReady"
        try:
            batch = self._device.prepare(step)
        except BaseException as error:
            self._prepared.append(partial(_raise, error))
        else:
            self._prepared.append(partial(self._device.run, batch))

    def _run(self, step: ExecuteStep) -> StepDone | StepFailed:
        """On the device thread. After a failed step the rest of its epoch stands on sand, and only copies blocks."""
        assert self._device is not None
        run = self._prepared.popleft()
        self._copying = True
        for copies in step.copies:
            self._device.copy(copies)
        self._copying = False
        if step.epoch == self._void_epoch:
            return StepFailed(step.epoch, step.step, "an earlier step of this epoch failed")
        return run()

    def _failure(self, step: ExecuteStep, error: Exception) -> _Ended:
        """On the device thread."""
        self._void_epoch = step.epoch
        log.error("step_raised", epoch=step.epoch, step=step.step, copying=self._copying, exc_info=error)
        return _Ended(step.reply_to, StepFailed(step.epoch, step.step, repr(error), contents_lost=self._copying))


def _raise(error: BaseException) -> Never:
    raise error


def _load_failure(error: Exception) -> _LoadFailed:
    """On the device thread."""
    log.error("load_failed", error=repr(error))
    return _LoadFailed(str(error) or repr(error))
