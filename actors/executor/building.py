"""How an executor comes to be, wherever it lives: functions that another process can import. Loads nothing itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from cuelight.actors.executor.actor import Executor, ExecutorInbox
from cuelight.actors.executor.device import Device
from cuelight.actors.executor.lasting import Claim, LastingMemory
from cuelight.actors.executor.phases import phases_of_start
from cuelight.kernel import Context, Role
from cuelight.messages.request import ExecutorId
from cuelight.messages.scheduler import SchedulerMessage

if TYPE_CHECKING:
    from cuelight.actors.executor.batch import Batch
    from cuelight.actors.executor.options import LoadOptions

B = TypeVar("B")


def build_executor(
    load: Callable[..., Device[B]],
    lasting: LastingMemory | None,
    scheduler: Role[SchedulerMessage],
    executor_id: ExecutorId,
    context: Context[ExecutorInbox],
) -> Executor[B]:
    """The executor of this life, whose device `load` gives, from its claim on `lasting` memory if there is some.

    With `load` bound to a function of a module, picklable.
    """
    load = load if lasting is None else partial(load, lasting.claim())
    return Executor(context, load, context.find(scheduler), executor_id)


def load_model(options: LoadOptions, lasting: Claim | None = None) -> Device[Batch]:
    """The model on its device. Imports whatever decodes it only now. Blocks. Raises CannotLoad."""
    with phases_of_start(options.now)("imports"):
        from cuelight.actors.executor import loading

    return loading.load_device(replace(options, lasting=lasting))
