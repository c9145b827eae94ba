"""Model loaders: they find an engine's first model, and the models that a reload names."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Never, Protocol, TypeAlias, TypeVar

from cuelight import errors
from cuelight.actors.executor.build import load_model
from cuelight.actors.executor.host_memory import HostMemoryFile
from cuelight.config import EngineConfig
from cuelight.core.parts import (
    ActiveExecutor,
    EngineParts,
    Roles,
    actor_specs,
    executor_spec,
    lasting_memory,
    load_options,
    load_parts,
)
from cuelight.journal.origin import Origin
from cuelight.kernel import ActorSpec, Recipient, WorkerThread
from cuelight.messages.executor import ExecutorMessage
from cuelight.messages.observer import ObserverMessage
from cuelight.messages.request import ExecutorId
from cuelight.models.folder import Fingerprint, fingerprint, read_facts
from cuelight.models.store import model_path

B = TypeVar("B")

BuildActors: TypeAlias = Callable[
    [EngineConfig, Roles, Recipient[ObserverMessage], ActiveExecutor], tuple[ActorSpec[Never], ...]
]
BuildExecutor: TypeAlias = Callable[[ExecutorId, Roles], ActorSpec[ExecutorMessage]]


@dataclass(frozen=True)
class FoundModel:
    """The model that an engine starts with, and how to build the five actors that serve it."""

    origin: Origin
    build_actors: BuildActors


@dataclass(frozen=True)
class NextModel:
    """A model that a reload names, and how to build the executor that serves it."""

    origin: Origin
    build_executor: BuildExecutor
    lasting: HostMemoryFile | None = None


class ModelLoader(Protocol):
    """A source of models; the executor loads their weights. Both methods block and raise ModelUnavailable."""

    def find(self, config: EngineConfig) -> FoundModel:
        """Return the engine's first model."""

    def find_next(self, model: object, config: EngineConfig) -> NextModel:
        """Return the model that a reload names."""


class FolderLoader:
    """Models from Hugging Face folders, by any name that `model_path` accepts."""

    def __init__(self, model: str | os.PathLike[str], *, progress: bool) -> None:
        self._model = model
        self._progress = progress

    def find(self, config: EngineConfig) -> FoundModel:
        """Fetch and convert the model where needed, and read its facts and tokenizer."""
        folder = model_path(self._model, progress=self._progress)
        parts = load_parts(folder, config)
        origin = Origin(str(self._model), folder, config, parts.facts, fingerprint(folder))
        return FoundModel(origin, partial(actor_specs, parts))

    def find_next(self, model: object, config: EngineConfig) -> NextModel:
        """Read the facts of another model, whose tokenizer is that of the first."""
        folder = model_path(model)  # type: ignore[arg-type]  # raises ModelUnavailable for other types
        facts = read_facts(folder)
        load, lasting = partial(load_model, load_options(folder, config, facts)), lasting_memory(config)
        origin = Origin(str(model), folder, config, facts, fingerprint(folder))
        return NextModel(origin, partial(executor_spec, load, lasting, config), lasting)


class PartsLoader(Generic[B]):
    """Models from functions that return parts, for tests and embedders. `load_next` raises ModelUnavailable."""

    def __init__(
        self,
        name: str,
        load: Callable[[EngineConfig], EngineParts[B]],
        load_next: Callable[[str, EngineConfig], EngineParts[B]] | None = None,
    ) -> None:
        self._name = name
        self._load = load
        self._load_next = load_next

    def find(self, config: EngineConfig) -> FoundModel:
        """Call `load`."""
        parts = self._load(config)
        origin = Origin(self._name, None, config, parts.facts, Fingerprint(self._name, self._name))
        return FoundModel(origin, partial(actor_specs, parts))

    def find_next(self, model: object, config: EngineConfig) -> NextModel:
        """Call `load_next`. Raises ModelUnavailable without one."""
        if self._load_next is None:
            raise errors.ModelUnavailable(
                f"no other model than {self._name!r}: this engine was made from parts, without `load_next`"
            )
        parts = self._load_next(str(model), config)
        origin = Origin(str(model), None, config, parts.facts, Fingerprint(self._name, str(model)))
        return NextModel(origin, partial(executor_spec, parts.load_device, parts.lasting, config), parts.lasting)


T = TypeVar("T")


async def in_thread(work: Callable[[], T], too_late: Callable[[T], object] = lambda _: None) -> T:
    """Run blocking `work` on a thread of its own, and return its result once the thread has ended.

    Cancelling this does not interrupt `work`; its result is passed to `too_late`.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def done(result: T) -> None:
        if outcome.done():
            too_late(result)
        else:
            outcome.set_result(result)

    def failed(error: Exception) -> None:
        if not outcome.done():
            outcome.set_exception(error)

    worker = WorkerThread[Callable[[], None]]("cuelight load", lambda settle: settle(), loop)
    worker.submit(work, done=lambda result: partial(done, result), failed=lambda error: partial(failed, error))
    worker.close()
    try:
        return await outcome
    finally:
        if not outcome.cancelled():  # a cancelled caller does not wait for the thread
            await worker.ended()
