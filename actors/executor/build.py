"""Functions that build an executor, importable by another process. Importing this module imports no decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from cuelight.actors.executor.actor import Executor, ExecutorInbox
from cuelight.actors.executor.device import Device
from cuelight.actors.executor.host_memory import HostMemoryClaim, HostMemoryFile
from cuelight.actors.executor.options import current_phases
from cuelight.kernel import Context, Role
from cuelight.messages.request import ExecutorId
from cuelight.messages.scheduler import SchedulerMessage

if TYPE_CHECKING:
    from cuelight.actors.executor.batch import Batch
    from cuelight.actors.executor.options import LoadOptions

B = TypeVar("B")


def build_executor(
    load: Callable[..., Device[B]],
    host_memory: HostMemoryFile | None,
    scheduler: Role[SchedulerMessage],
    executor_id: ExecutorId,
    context: Context[ExecutorInbox],
) -> Executor[B]:
    """Return an executor that loads its device with `load`, called with a claim on `host_memory`, if that is given.

    Bound to its arguments, this function is picklable if `load` is a function of a module.
    """
    load = load if host_memory is None else partial(load, host_memory.claim())
    return Executor(context, load, context.find(scheduler), executor_id)


def load_model(options: LoadOptions, host_memory: HostMemoryClaim | None = None) -> Device[Batch]:
    """Load the model onto its device. Imports the decoder on the first call. Blocks. Raises CannotLoad."""
    with current_phases(options.now)("imports"):
        from cuelight.actors.executor import loading

    return loading.load_device(replace(options, host_memory=host_memory))
