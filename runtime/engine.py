"""The public `Engine`: start it, send requests, read its statistics, stop it.

Starting and stopping the actors is in `core/lifecycle.py`, the requests of an engine in `core/requests.py`, the change
of models in `core/reload.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Self, TypeVar, Unpack

import msgspec

from cuelight import errors
from cuelight.chat import Chat
from cuelight.config import EngineConfig, EngineOptions, RequestOptions, check_policy, shown
from cuelight.core.availability import Availability, check_timeout
from cuelight.core.lifecycle import Lifecycle, RunningEngine
from cuelight.core.loaders import FolderLoader, ModelLoader, PartsLoader
from cuelight.core.parts import EngineParts
from cuelight.core.reload import Running, check_running
from cuelight.kernel import ActorStopped, AskTimeout, System, ask
from cuelight.messages.cache import ForgetPrefixes
from cuelight.messages.intake import SetTenants
from cuelight.messages.request import RequestId
from cuelight.messages.scheduler import Explain, Explanation, SetPolicy
from cuelight.models.progress import Progress
from cuelight.models.store import DEFAULT_MODEL
from cuelight.status import NO_STATS, EngineStats, Health
from cuelight.stream import Result, Stream

B = TypeVar("B")

CONTROL_MESSAGES_MAX = 32
"""Length of a mailbox from which on `explain`, `set_policy` and `forget_prefixes` raise EngineBusy."""


class Engine:
    """An inference engine that serves one model inside the running event loop.

    Use it as an async context manager, or call `start` and `stop`. An engine starts once, and is used in the thread and
    the event loop that started it.

    Args:
        model: a built-in name, a Hugging Face folder, a `.gguf` file, or a hub id.
        progress: show progress on standard error while the model is fetched, converted and loaded.
        loader: a source of models that replaces `model`'s names, for tests and embedders.
        options: the fields of `EngineConfig`.

    Raises:
        ConfigError: an option has an unknown name or a value that cannot work.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = DEFAULT_MODEL,
        *,
        progress: bool = False,
        loader: ModelLoader | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self._config = config = EngineConfig.of(options)
        self._availability = Availability()
        loader = loader or FolderLoader(model, progress=progress)
        self._lifecycle = Lifecycle(str(model), config, loader, Progress(progress), self._availability)

    @classmethod
    def from_parts(
        cls,
        name: str,
        load: Callable[[EngineConfig], EngineParts[B]],
        load_next: Callable[[str, EngineConfig], EngineParts[B]] | None = None,
        **options: Unpack[EngineOptions],
    ) -> Self:
        """Return an engine that is built from parts instead of a model's folder.

        Args:
            name: the model's name, for logs and errors.
            load: returns the parts; called on a thread during `start`.
            load_next: returns the parts of the model that `reload` names, and raises ModelUnavailable for an unknown
                name; called on a thread. Without it, `reload` fails.
            options: the fields of `EngineConfig`; `executor="auto"` means `"thread"` here.

        Raises:
            ConfigError: an option has an unknown name or a value that cannot work.
        """
        if options.get("executor", "auto") == "auto":  # not every `load_device` can be sent to a process
            options["executor"] = "thread"
        return cls(name, loader=PartsLoader(name, load, load_next), **options)

    async def start(self) -> None:
        """Find and load the model, start the actors, and accept requests.

        Loading has no time limit; the current phase is logged as a warning once a minute.

        Raises:
            ModelUnavailable: the model cannot be found, fetched or loaded.
            ConfigError: the journal cannot be created or resumed, or the executor cannot be sent to a process.
            EngineClosed: the engine was started before, or was stopped during the start.
            EngineBroken: an actor could not be built, or crashed too often during the start.
        """
        await self._lifecycle.start()

    async def stop(self) -> None:
        """Fail every unfinished request with EngineClosed, stop the actors, and free all resources.

        Does nothing the second time.

        Raises:
            EngineUnavailable: called in another thread or event loop than the engine's.
        """
        if self._availability.is_open:
            self._availability.check_here()
        await self._lifecycle.stop()

    async def drain(self, timeout_seconds: float) -> int:
        """Refuse new requests, finish those that run or wait, then stop.

        New requests fail with EngineDraining. Requests that are unfinished after `timeout_seconds` fail with
        EngineClosed. A call of `generate_many` that has begun may submit all of its prompts. `stop` ends a drain at
        once; cancelling this call ends the drain, and the engine accepts requests again.

        Returns:
            The number of requests that did not finish in time.

        Raises:
            ConfigError: `timeout_seconds` is not a number above 0.
            EngineDraining: another drain is in progress; it continues.
            EngineUnavailable: the engine is not started, closed, or broken, or breaks during the drain.
        """
        seconds = check_timeout(timeout_seconds)
        self._availability.check()
        self._availability.check_not_draining()
        return await self._lifecycle.drain(seconds)

    async def reload(self, model: str | os.PathLike[str], *, running: Running = "finish") -> None:
        """Replace the model by other weights, or by another model with the same tokenizer, without dropping a request.

        The new model is loaded while the present one serves, so there must be memory for both. Returns when the new
        model has taken over. A reload that fails or is cancelled has no effect.

        Args:
            model: as for `Engine`.
            running: `"finish"` finishes running requests with the present model, while requests that have not begun
                wait for the new one. `"recompute"` switches at once: the new model recomputes each running request's
                tokens and continues from them.

        Raises:
            ModelUnavailable: the new model cannot be found or loaded, or its executor died.
            ModelMismatch: the new model has another vocabulary, tokenizer or chat template, or its context is too
                short for a request.
            ConfigError: `running` is neither `"finish"` nor `"recompute"`.
            ReloadBusy: another reload is in progress.
            EngineDraining: a drain is in progress.
            EngineUnavailable: the engine is not started, closed, or broken.
        """
        recompute = check_running(running)
        self._availability.check()
        self._availability.check_not_draining()
        await self._running.models.change(model, recompute, self._availability.check)

    def resume(self, request_id: int, position: int = 0, *, tenant: str = "") -> Stream:
        """Return the stream of a request that an earlier process had accepted.

        For an engine with the options `journal` and `resume`. The request has been running since the engine's start; it
        is cancelled after `resume_seconds` unless it is resumed. Leaving the stream cancels the request, as with
        `stream`.

        Args:
            request_id: the request's id in the earlier process, see `unclaimed`.
            position: the number of output tokens that the client already has; iteration starts after them, while
                `result()` returns the whole output.
            tenant: the tenant that submitted the request.

        Raises:
            UnknownRequest: the id is unknown, or `resume_seconds` have passed.
            RequestTaken: the request was resumed before.
            WrongTenant: the request belongs to another tenant.
            BadPosition: `position` is negative, or beyond the output so far.
            WrongType: an argument has the wrong type.
            EngineUnavailable: the engine is not started, closed, or broken.
        """
        for name, value, kind in (
            ("request_id", request_id, int),
            ("position", position, int),
            ("tenant", tenant, str),
        ):
            if not isinstance(value, kind) or isinstance(value, bool):
                raise errors.WrongType(f"{name} must be of type {kind.__name__}, not {type(value).__name__}")
        self._availability.check()
        if position < 0:
            raise errors.BadPosition(f"position must be at least 0, not {shown(position)}")
        return self._running.requests.resume(RequestId(request_id), position, tenant)

    @property
    def unclaimed(self) -> tuple[int, ...]:
        """The ids of an earlier process's requests that `resume` can still return."""
        running = self._lifecycle.running
        return () if running is None else running.requests.unclaimed

    @property
    def _running(self) -> RunningEngine:
        """The engine's running parts. Raises EngineUnavailable unless the engine serves."""
        self._availability.check_open()
        assert self._lifecycle.running is not None, "an engine that serves has running parts"
        return self._lifecycle.running

    @property
    def system(self) -> System | None:
        """The actor system, for inspection; None before the model has been found."""
        return None if self._lifecycle.running is None else self._lifecycle.running.system

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def stream(self, prompt: object, **options: Unpack[RequestOptions]) -> Stream:
        """Submit a request and return its stream.

        The request runs from now on, whether or not the stream is read. Errors that are found later, such as a prompt
        that is too long, are raised by the stream.

        Args:
            prompt: text, a list of chat messages (`{"role": …, "content": …}`), or a list of token ids.
            options: the fields of `Sampling` and `Service`, such as `max_tokens` or `tenant`.

        Raises:
            RequestRejected: the prompt or an option is invalid, or the queue is full; see `cuelight.errors`.
            EngineUnavailable: the engine is not started, draining, closed, or broken.
        """
        requests = self._running.requests
        return requests.send(requests.read(prompt, options))

    async def generate(self, prompt: object, **options: Unpack[RequestOptions]) -> Result:
        """Submit a request and return its whole output.

        Cancelling this call cancels the request.

        Raises:
            RequestRejected: the prompt or an option is invalid, or the queue is full; see `cuelight.errors`.
            RequestFailed: the request was accepted and then failed.
            EngineUnavailable: the engine is not started, draining, closed, or broken.
        """
        return await self.stream(prompt, **options).result()

    def samples(self, prompt: object, count: int, **options: Unpack[RequestOptions]) -> list[Stream]:
        """Submit one prompt `count` times and return a stream for each sample.

        The prompt is computed once, and the samples share its blocks. Each sample is a request of its own and ends on
        its own. With `seed`, sample number n, counted from 0, has the seed `seed + n`.

        Raises:
            WrongType: `count` is not an integer.
            BadSampling: `count` is not from 1 to `queue_limit`.
            RequestRejected: as for `stream`; no sample is submitted then.
            EngineUnavailable: the engine is not started, draining, closed, or broken.
        """
        if not isinstance(count, int) or isinstance(count, bool):
            raise errors.WrongType(f"count must be of type int, not {type(count).__name__}")
        limit = self._config.queue_limit
        if not 1 <= count <= limit:
            raise errors.BadSampling(f"count must be from 1 to the queue limit, {limit}, not {shown(count)}")
        requests = self._running.requests
        return requests.samples(requests.read(prompt, options, count), count)

    async def generate_many(
        self, prompts: Iterable[object], *, progress: bool = False, **options: Unpack[RequestOptions]
    ) -> list[Result]:
        """Serve many prompts and return their results in the same order.

        Every prompt is parsed before the first is submitted. At most twice `running_max` requests, and at most half of
        `queue_limit`, are open at once, so that a long list leaves room for other requests. The first error cancels the
        remaining requests and is raised.

        Args:
            prompts: prompts as for `stream`.
            progress: show a progress bar on standard error.
            options: the options of every request, as for `stream`.

        Raises:
            RequestRejected: a prompt or an option is invalid, or the queue is full.
            RequestFailed: a request was accepted and then failed.
            EngineUnavailable: the engine is not started, draining, closed, or broken.
        """
        try:
            listed = None if isinstance(prompts, str | bytes) else iter(prompts)
        except TypeError:  # annotated as an Iterable, without being one
            listed = None
        if listed is None:
            raise errors.WrongType(f"prompts must be an iterable of prompts, not of type {type(prompts).__name__}")
        return await self._running.requests.serve_all(tuple(listed), options, progress=progress)

    def chat(self, system: str | None = None, **options: Unpack[RequestOptions]) -> Chat:
        """Return a new conversation, whose earlier turns precede each prompt.

        Args:
            system: the system message, or None for none.
            options: the options of every answer, as for `stream`; `Chat.say` may override them.
        """
        return Chat(lambda turns, merged: self.stream(turns, **merged), system, options)

    def stats(self) -> EngineStats:
        """Return the present number of requests and blocks, and totals since the start; all zero before the start.

        Never raises.
        """
        running = self._lifecycle.running
        return NO_STATS if running is None else running.board.stats()

    def health(self) -> Health:
        """Return the engine's state, its recent crashes, and the duration of its last recovery. Never raises."""
        return self._lifecycle.health.snapshot()

    def forget_prefixes(self) -> None:
        """Remove all prefixes from the prefix cache; running requests are not affected.

        Raises:
            EngineBusy: too many messages wait in the actors' mailboxes.
            EngineUnavailable: the engine is not started, closed, or broken.
        """
        self._check_room()
        self._running.system.find(self._running.roles.cache).tell(ForgetPrefixes())

    def set_policy(
        self, policy: str, *, aging_seconds: float = 10.0, tenant_weights: Mapping[str, float] | None = None
    ) -> None:
        """Change the scheduling policy, for waiting requests too; no request is dropped.

        The arguments have the meaning of the options of the same names in `EngineConfig`. Without `tenant_weights`, any
        tenant is served.

        Raises:
            ConfigError: the policy is unknown, or an argument is invalid.
            EngineBusy: too many messages wait in the actors' mailboxes.
            EngineUnavailable: the engine is not started, closed, or broken.
        """
        check_policy(policy, aging_seconds, tenant_weights)
        self._check_room()
        weights = tuple((tenant_weights or {}).items())
        tenants = SetTenants(None if tenant_weights is None else tuple(tenant_weights))
        intake = self._running.system.find(self._running.roles.intake)
        for order in (tenants, SetPolicy(policy, float(aging_seconds), weights)):
            self._lifecycle.open_requests.order(order)
            intake.tell(order)

    async def explain(self, request_id: int, timeout_seconds: float = 10.0) -> Explanation:
        """Return a request's timeline: when it was admitted, preempted or ended, and the reasons for its waits.

        Timelines of the last 1,024 ended requests are kept. An id without a timeline has the state `"unknown"`.

        Args:
            request_id: the id of the request, as `Stream.request_id` has it.
            timeout_seconds: the longest time to wait for the scheduler's answer.

        Raises:
            WrongType: `request_id` is not an integer.
            EngineBusy: too many messages wait in the actors' mailboxes, or the scheduler did not answer in time.
            EngineUnavailable: the engine is not started, closed, or broken.
        """
        if not isinstance(request_id, int) or isinstance(request_id, bool):
            raise errors.WrongType(f"request_id must be of type int, not {type(request_id).__name__}")
        self._check_room()
        try:
            scheduler = self._running.system.find(self._running.roles.scheduler)
            answer: Explanation = await ask(scheduler, partial(Explain, RequestId(request_id)), timeout_seconds)
        except (ActorStopped, AskTimeout) as error:
            self._availability.check()  # the engine may have stopped meanwhile
            raise errors.EngineBusy(
                f"no answer within {shown(timeout_seconds)} s from the scheduler: try again"
            ) from error
        if answer.state == "unknown" and request_id in self._lifecycle.open_requests:  # still in intake
            return msgspec.structs.replace(answer, state="waiting")
        return answer

    def _check_room(self) -> None:
        """Raise EngineBusy where a mailbox has little room: capacities are computed from the messages of requests."""
        self._availability.check()
        mailboxes = self._running.system.statistics()
        if max(mailboxes[name].length for name in ("cache", "scheduler", "intake")) >= CONTROL_MESSAGES_MAX:
            raise errors.EngineBusy(
                f"an actor's mailbox holds {CONTROL_MESSAGES_MAX} or more messages: try again in a moment"
            )
