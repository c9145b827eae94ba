"""The engine as its users see it: open it, send requests, read its figures, close it.

What it opens and closes is in `lifecycle.py`, what becomes of requests in `submissions.py`.
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
"""As many messages may wait for the scheduler, or for intake, when it is asked to explain or to change its policy."""


class Engine:
    """One model, served inside the running event loop.

    Args:
        model: the built-in name, a Hugging Face folder, a `.gguf` file, or a hub id.
        progress: show progress on standard error while the model is fetched, converted and loaded.
        loader: finds models in place of the names above, for tests and stand-ins.
        options: the fields of `EngineConfig`.

    Raises:
        ConfigError: at once, for an option that cannot work.
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
        """Return an engine over the parts that `load` returns in place of a model's folder; it is called on a thread.

        `load_next` is called likewise with the name that a reload asks for; it raises ModelUnavailable for a name that
        it does not have.
        """
        if options.get("executor", "auto") == "auto":  # a stand-in has no device, nor can each be sent to a process
            options["executor"] = "thread"
        return cls(name, loader=PartsLoader(name, load, load_next), **options)

    async def start(self) -> None:
        """Find the model, load it, and open for requests. What it is still at is logged as a warning once a minute.

        Raises:
            ModelUnavailable: the model cannot be found, fetched or loaded.
            ConfigError: the journal cannot be created, or what is to be loaded cannot be sent to a process.
            EngineClosed: this engine was started before, or was stopped meanwhile.
            EngineBroken: an actor could not be built, or crashed too often while the others started.
        """
        await self._lifecycle.start()

    async def stop(self) -> None:
        """End every request with EngineClosed and give everything back. Harmless when done twice.

        Raises EngineUnavailable in another thread or event loop than the engine's.
        """
        if self._availability.is_open:
            self._availability.check_here()
        await self._lifecycle.stop()

    async def drain(self, timeout_seconds: float) -> int:
        """Take nothing new, let all that runs or waits finish, then stop; give the number of those that could not.

        New requests get EngineDraining, whoever is not done after `timeout_seconds` EngineClosed. A call of
        `generate_many` that has begun is served whole. `stop` ends a drain at once; cancelling it calls it off.

        Raises:
            ConfigError: `timeout_seconds` is no number above 0.
            EngineDraining: a drain is under way already, which goes on as it was.
            EngineUnavailable: not started, closed, or broken; or it gave up meanwhile.
        """
        seconds = check_timeout(timeout_seconds)
        self._availability.check()
        self._availability.check_not_draining()
        return await self._lifecycle.drain(seconds)

    async def reload(self, model: str | os.PathLike[str], *, running: Running = "finish") -> None:
        """Serve with other weights, or another model with the same tokenizer, from some step on; no request is dropped.

        It is loaded beside the model that serves, so there must be memory for both. Then, with `running` "finish", what
        runs is finished by the model before, and whatever has not begun waits for the new one; with "recompute" the new
        one takes over at once, and goes on with each request from the tokens there are. Returns when it has taken over.
        Cancelled, or failed, it has no effect.

        Raises:
            ModelUnavailable: it cannot be found or loaded, or its executor has died.
            ModelMismatch: it has another vocabulary, tokenizer or chat template, or a request does not fit its context.
            ConfigError: `running` is neither of the two.
            ReloadBusy: another reload is under way.
            EngineUnavailable: not started, closing, or broken.
        """
        recompute = check_running(running)
        self._availability.check()
        self._availability.check_not_draining()
        await self._running.models.change(model, recompute, self._availability.check)

    def resume(self, request_id: int, position: int = 0, *, tenant: str = "") -> Stream:
        """Pick up a request that an earlier process had accepted: its output from the token at `position` on.

        For an engine with `journal` and `resume`. The request has gone on meanwhile, and ends like any other if this
        stream is left. `position` is how many tokens its client has had; `result()` gives the whole output.

        Raises:
            UnknownRequest: there is none of this id, or nobody has picked it up in time.
            RequestTaken: somebody has picked it up already.
            WrongTenant: it is another tenant's.
            BadPosition: it has not come so far.
            WrongType: an argument is of another type.
            EngineUnavailable: not started, closed, or broken.
        """
        for name, value, kind in (
            ("request_id", request_id, int),
            ("position", position, int),
            ("tenant", tenant, str),
        ):
            if not isinstance(value, kind) or isinstance(value, bool):
                raise errors.WrongType(f"{name} must be of type {kind.__name__}, and it is of {type(value).__name__}")
        self._availability.check()
        if position < 0:
            raise errors.BadPosition(f"position is {shown(position)}; it must be at least 0")
        return self._running.requests.resume(RequestId(request_id), position, tenant)

    @property
    def unclaimed(self) -> tuple[int, ...]:
        """The ids of requests of an earlier process that nobody has picked up yet."""
        running = self._lifecycle.running
        return () if running is None else running.requests.unclaimed

    @property
    def _running(self) -> RunningEngine:
        """Raises EngineUnavailable where the engine does not serve."""
        self._availability.check_open()
        assert self._lifecycle.running is not None, "an engine that serves has been put together"
        return self._lifecycle.running

    @property
    def system(self) -> System | None:
        """The actors' system, for those who look at it from outside; None before the start."""
        return None if self._lifecycle.running is None else self._lifecycle.running.system

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def stream(self, prompt: object, **options: Unpack[RequestOptions]) -> Stream:
        """Submit a request and iterate over its output.

        `prompt` is text, a list of chat messages (`{"role": …, "content": …}`), or a list of token ids. The request
        is under way when this returns; what can be refused without the engine's help is refused here.

        Raises:
            RequestRejected: one of its kinds; see `cuelight.errors`.
            EngineUnavailable: not started, closed, or broken.
        """
        requests = self._running.requests
        return requests.send(requests.read(prompt, options))

    async def generate(self, prompt: object, **options: Unpack[RequestOptions]) -> Result:
        """Submit a request and wait for its whole output. Raises as `stream` does, and RequestFailed."""
        return await self.stream(prompt, **options).result()

    def samples(self, prompt: object, count: int, **options: Unpack[RequestOptions]) -> list[Stream]:
        """Submit one prompt `count` times, for as many outputs; the prompt is computed once and its blocks are shared.

        Each is a request of its own, with its own stream and end. With a `seed`, they have it and those that follow it.
        Raises as `stream` does, and then none is submitted.
        """
        if not isinstance(count, int) or isinstance(count, bool):
            raise errors.WrongType(f"count must be a number, and it is of type {type(count).__name__}")
        limit = self._config.queue_limit
        if not 1 <= count <= limit:
            raise errors.BadSampling(f"count is {shown(count)}; it must be from 1 to the queue limit, {limit}")
        requests = self._running.requests
        return requests.samples(requests.read(prompt, options, count), count)

    async def generate_many(
        self, prompts: Iterable[object], *, progress: bool = False, **options: Unpack[RequestOptions]
    ) -> list[Result]:
        """Serve many prompts and return their results in order; `progress` shows a bar on standard error.

        Every prompt is checked before the first is served. Only as many are submitted at once as keep the batch full,
        so a long list neither fills the queue nor shuts others out. The first error cancels the rest and is raised.
        """
        try:
            listed = None if isinstance(prompts, str | bytes) else iter(prompts)
        except TypeError:  # some say of themselves that they can be iterated over, and cannot
            listed = None
        if listed is None:
            raise errors.WrongType(f"prompts must be a list of prompts, and it is of type {type(prompts).__name__}")
        return await self._running.requests.serve_all(tuple(listed), options, progress=progress)

    def chat(self, system: str | None = None, **options: Unpack[RequestOptions]) -> Chat:
        """A conversation that remembers; `options` hold for each answer. The prefix cache keeps its K/V."""
        return Chat(lambda turns, merged: self.stream(turns, **merged), system, options)

    def stats(self) -> EngineStats:
        """Figures of this moment. All zero before the start."""
        running = self._lifecycle.running
        return NO_STATS if running is None else running.board.stats()

    def health(self) -> Health:
        """What the engine is doing, what has crashed, and how long the last recovery took. Never raises."""
        return self._lifecycle.health.snapshot()

    def forget_prefixes(self) -> None:
        """Let no request find in the prefix cache what was computed before. Those that run go on undisturbed.

        Raises EngineUnavailable and EngineBusy.
        """
        self._check_room()
        self._running.system.find(self._running.roles.cache).tell(ForgetPrefixes())

    def set_policy(
        self, policy: str, *, aging_seconds: float = 10.0, tenant_weights: Mapping[str, float] | None = None
    ) -> None:
        """Serve by another policy from now on, the requests that wait already too; nothing is dropped.

        The options are those of the configuration. Raises ConfigError, EngineUnavailable and EngineBusy.
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
        """A request's life: when it was admitted, preempted or ended, and what kept it waiting, with reasons.

        A stream's id is `stream.request_id`. Of requests that are over, the last 1,024 are remembered; one that was
        never given out, or is forgotten, has the state "unknown". Raises WrongType, EngineUnavailable and EngineBusy.
        """
        if not isinstance(request_id, int) or isinstance(request_id, bool):
            raise errors.WrongType(f"request_id must be a number, and it is of type {type(request_id).__name__}")
        self._check_room()
        try:
            scheduler = self._running.system.find(self._running.roles.scheduler)
            told: Explanation = await ask(scheduler, partial(Explain, RequestId(request_id)), timeout_seconds)
        except (ActorStopped, AskTimeout) as error:
            self._availability.check()  # it was stopped meanwhile
            raise errors.EngineBusy(f"no answer within {shown(timeout_seconds)} s") from error
        if told.state == "unknown" and request_id in self._lifecycle.open_requests:  # it has not come that far yet
            return msgspec.structs.replace(told, state="waiting")
        return told

    def _check_room(self) -> None:
        """Questions and orders come on top of what the scheduler's mailbox is made for."""
        self._availability.check()
        mailboxes = self._running.system.statistics()
        if max(mailboxes[name].length for name in ("cache", "scheduler", "intake")) >= CONTROL_MESSAGES_MAX:
            raise errors.EngineBusy("too many questions and orders wait for an answer already; try again")
