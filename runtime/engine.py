"""The engine as its users see it: open it, send requests, read its figures, close it."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import msgspec

from cuelight import errors
from cuelight.actors.intake.prompts import parse_prompt
from cuelight.actors.intake.refusal import Refused, UnknownOption
from cuelight.actors.intake.service import SERVICE_OPTIONS, parse_service
from cuelight.actors.intake.validation import parse_sampling
from cuelight.client import REFUSALS, Inbox, Result, Stream, open_stream
from cuelight.config import EngineConfig, EngineOptions, RequestOptions, check_policy
from cuelight.conversation import Chat
from cuelight.ensemble import Casting, Ensemble, casting, gather, roles
from cuelight.kernel import ActorCrashed, System, WorkerThread, ask, get_logger
from cuelight.kernel.journal import Journal
from cuelight.messages import observer
from cuelight.messages.cache import ForgetPrefixes
from cuelight.messages.intake import Cancel, SetTenants, Submit
from cuelight.messages.request import Prompt, RequestId, Sampling, Service
from cuelight.messages.scheduler import Explain, Explanation, SetPolicy
from cuelight.progress import counting_bar
from cuelight.replay import Origin, open_journal
from cuelight.store import DEFAULT_MODEL, model_path

if TYPE_CHECKING:
    from cuelight.actors.executor.batch import Batch

B = TypeVar("B")
T = TypeVar("T")

CONTROL_MESSAGES_MAX = 32
"""As many messages may wait for the scheduler, or for intake, when it is asked to explain or to change its policy."""

log = get_logger("cuelight.engine")


@dataclass(frozen=True)
class EngineStats:
    """Requests and blocks now, totals since the start. A block that is only cached counts as free.

    Of `budget_tokens`, the token budgets of all steps, `scheduled_tokens` were used. Of `tokens_looked_up`, those of
    all admissions, those after a preemption too, `tokens_found` were cached.
    """

    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    evictions: int
    steps: int
    preemptions: int
    finished: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    scheduled_tokens: int
    budget_tokens: int
    tokens_looked_up: int
    tokens_found: int
    host_blocks_total: int
    host_blocks_used: int
    blocks_saved: int
    blocks_loaded: int
    blocks_forked: int


class _Board:
    """The engine's own address: keeps the latest figures and wakes whoever waits for the start."""

    def __init__(self) -> None:
        self.requests = observer.RequestFigures()
        self.blocks = observer.BlockFigures()
        self.ready: asyncio.Future[observer.Ready] = asyncio.get_running_loop().create_future()
        self._cleared = False

    def tell(self, message: observer.ObserverMessage, /) -> None:
        if self._cleared:
            return
        match message:
            case observer.RequestFigures():
                self.requests = message
            case observer.BlockFigures():
                self.blocks = message
            case observer.Ready():
                if not self.ready.done():
                    self.ready.set_result(message)
            case observer.LoadFailed():
                self.fail(errors.ModelUnavailable(message.error))

    def fail(self, error: errors.EngineError) -> None:
        """The engine will not become ready."""
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # whoever waited may be gone, which is no reason to complain

    def clear(self) -> None:
        """Nothing runs, waits or holds blocks any more; the totals stay."""
        self._cleared = True
        self.requests = msgspec.structs.replace(self.requests, running=0, waiting=0)
        self.blocks = msgspec.structs.replace(self.blocks, blocks_free=self.blocks.blocks_total)


class Engine:
    """One model, served inside the running event loop.

    Args:
        model: the built-in name, a Hugging Face folder, a `.gguf` file, or a hub id.
        progress: show progress on standard error while the model is fetched and converted.
        options: the fields of `EngineConfig`.

    Raises:
        ConfigError: at once, for an option that cannot work.
    """

    def __init__(
        self, model: str | os.PathLike[str] = DEFAULT_MODEL, *, progress: bool = False, **options: Unpack[EngineOptions]
    ) -> None:
        self._name = str(model)
        self._casting = self._noting(partial(_find_model, model, progress))
        self._config = EngineConfig.of(options)
        self._origin: Origin | None = None
        self._journal: Journal | None = None
        self._ids = count(1)
        self._open: dict[RequestId, Inbox] = {}
        self._system: System | None = None
        self._board: _Board | None = None
        self._broken = False
        self._unavailable: Callable[[], errors.EngineUnavailable] | None = _not_started

    @classmethod
    def from_ensemble(
        cls, name: str, gather: Callable[[EngineConfig], Ensemble[B]], **options: Unpack[EngineOptions]
    ) -> Self:
        """An engine that plays what `gather` returns in place of a model's folder; it is called on a thread."""
        engine = cls(name, **options)
        engine._casting = engine._noting(lambda config: (gather(config), None))
        return engine

    def _noting(self, find: Callable[[EngineConfig], tuple[Ensemble[B], Path | None]]) -> Casting:
        """The casting, which leaves behind what a journal must say of it."""

        def gather(config: EngineConfig) -> Ensemble[B]:
            ensemble, folder = find(config)
            self._origin = Origin(self._name, folder, config, ensemble.facts)
            return ensemble

        return casting(gather)

    async def start(self) -> None:
        """Find the model, load it, and open for requests.

        Raises:
            ModelUnavailable: the model cannot be found, fetched or loaded.
            ConfigError: the journal cannot be created.
            EngineClosed: this engine was started before.
        """
        if self._unavailable is not _not_started or self._board is not None:
            raise errors.EngineClosed("an engine is started once; make another")
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._board = board = _Board()
        try:
            cast = roles(self._config)
            parts = await _in_thread(partial(self._casting, self._config, cast, board))
            self._check_still_starting()
            if self._origin is not None:
                self._journal = open_journal(self._origin)
            chance = random.Random(self._config.seed)
            self._system = System(
                parts, chance=chance, tap=self._journal, on_failure=self._crashed, on_end=self._actors_ended
            )
            await self._system.start()
            self._intake = self._system.find(cast.intake)
            self._scheduler = self._system.find(cast.scheduler)
            self._cache = self._system.find(cast.cache)
            ready = await board.ready
            self._check_still_starting()
        except BaseException:
            await self.stop()
            raise
        self._unavailable = None
        log.info("engine_ready", model=self._name, token_capacity=ready.token_capacity)

    def _check_still_starting(self) -> None:
        """Another task may have stopped what this one starts."""
        if self._unavailable is not None and self._unavailable is not _not_started:
            raise self._unavailable()

    async def stop(self) -> None:
        """End every request with EngineClosed and give everything back. Harmless when done twice."""
        self._ended()
        if self._system is not None:
            await self._system.stop(drop=True)
        self._close_journal()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _crashed(self, crash: ActorCrashed) -> None:
        """An actor is gone: whoever waits must hear of it."""
        self._broken = True
        self._end_service(partial(_broken, crash))

    def _actors_ended(self) -> None:
        self._ended()
        self._close_journal()

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _ended(self) -> None:
        """Nobody serves any more, whether it was `stop` that said so or a host that cancelled all tasks."""
        if not self._broken:
            self._end_service(_closed)

    def _end_service(self, reason: Callable[[], errors.EngineUnavailable]) -> None:
        """Tell every client, from now on and those that wait, each with an exception of its own."""
        self._unavailable = reason
        if self._board is not None:
            self._board.fail(reason())
            self._board.clear()
        for inbox in list(self._open.values()):
            inbox.fail(reason())

    def stream(self, prompt: object, **options: Unpack[RequestOptions]) -> Stream:
        """Submit a request and iterate over its output.

        `prompt` is text, a list of chat messages (`{"role": …, "content": …}`), or a list of token ids. The request
        is under way when this returns; what can be refused without the engine's help is refused here.

        Raises:
            RequestRejected: one of its kinds; see `cuelight.errors`.
            EngineUnavailable: not started, closed, or broken.
        """
        return self._submit(*self._parse(prompt, options))

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
            raise errors.BadSampling(f"count is {count}; it must be from 1 to the queue limit, {limit}")
        parsed, sampling, service = self._parse(prompt, options)
        self._check_available()
        self._check_open(count)
        first = self._submit(parsed, sampling, service)
        return [first] + [
            self._submit(parsed, _reseeded(sampling, number), service, like=first.request_id)
            for number in range(1, count)
        ]

    async def generate_many(
        self, prompts: Iterable[object], *, progress: bool = False, **options: Unpack[RequestOptions]
    ) -> list[Result]:
        """Serve many prompts and return their results in order; `progress` shows a bar on standard error.

        Every prompt is checked before the first is served. Only as many are submitted at once as keep the batch full,
        so a long list neither fills the queue nor shuts others out. The first error cancels the rest and is raised.
        """
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
            raise errors.WrongType(f"prompts must be a list of prompts, and it is of type {type(prompts).__name__}")
        parsed = [self._parse(prompt, options) for prompt in prompts]
        results: dict[int, Result] = {}
        todo = iter(enumerate(parsed))

        async def serve() -> None:
            for index, asked in todo:
                results[index] = await self._submit(*asked).result()
                bar.update()

        servers = max(1, min(2 * self._config.running_max, self._config.queue_limit // 2, len(parsed)))
        with counting_bar(len(parsed), "request", shown=progress) as bar:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(servers):
                        group.create_task(serve())
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None
        return [results[index] for index in range(len(parsed))]

    def chat(self, system: str | None = None, **options: Unpack[RequestOptions]) -> Chat:
        """A conversation that remembers; `options` hold for each answer. The prefix cache keeps its K/V."""
        return Chat(lambda turns, merged: self.stream(turns, **merged), system, options)

    def stats(self) -> EngineStats:
        """Figures of this moment. All zero before the start."""
        requests = self._board.requests if self._board else observer.RequestFigures()
        blocks = self._board.blocks if self._board else observer.BlockFigures()
        return EngineStats(
            running=requests.running,
            waiting=requests.waiting,
            blocks_total=blocks.blocks_total,
            blocks_free=blocks.blocks_free,
            blocks_cached=blocks.blocks_cached,
            evictions=blocks.evictions,
            steps=requests.steps,
            preemptions=requests.preemptions,
            finished=requests.finished,
            prompt_tokens=requests.prompt_tokens,
            cached_tokens=requests.cached_tokens,
            output_tokens=requests.output_tokens,
            scheduled_tokens=requests.scheduled_tokens,
            budget_tokens=requests.budget_tokens,
            tokens_looked_up=blocks.tokens_looked_up,
            tokens_found=blocks.tokens_found,
            host_blocks_total=blocks.host_blocks_total,
            host_blocks_used=blocks.host_blocks_used,
            blocks_saved=blocks.blocks_saved,
            blocks_loaded=blocks.blocks_loaded,
            blocks_forked=blocks.blocks_forked,
        )

    def forget_prefixes(self) -> None:
        """Let no request find in the prefix cache what was computed before. Those that run go on undisturbed.

        Raises EngineUnavailable and EngineBusy.
        """
        self._check_available()
        self._check_room()
        self._cache.tell(ForgetPrefixes())

    def set_policy(
        self, policy: str, *, aging_seconds: float = 10.0, tenant_weights: Mapping[str, float] | None = None
    ) -> None:
        """Serve by another policy from now on, the requests that wait already too; nothing is dropped.

        The options are those of the configuration. Raises ConfigError, EngineUnavailable and EngineBusy.
        """
        check_policy(policy, aging_seconds, tenant_weights)
        self._check_available()
        self._check_room()
        weights = tuple((tenant_weights or {}).items())
        self._intake.tell(SetTenants(None if tenant_weights is None else tuple(tenant_weights)))
        self._scheduler.tell(SetPolicy(policy, float(aging_seconds), weights))

    async def explain(self, request_id: int, timeout_seconds: float = 10.0) -> Explanation:
        """A request's life: when it was admitted, preempted or ended, and what kept it waiting, with reasons.

        A stream's id is `stream.request_id`. Of requests that are over, the last 1,024 are remembered; one that was
        never given out, or is forgotten, has the state "unknown". Raises WrongType, EngineUnavailable and EngineBusy.
        """
        if not isinstance(request_id, int):
            raise errors.WrongType(f"request_id must be a number, and it is of type {type(request_id).__name__}")
        self._check_available()
        self._check_room()
        told: Explanation = await ask(self._scheduler, partial(Explain, RequestId(request_id)), timeout_seconds)
        if told.state == "unknown" and request_id in self._open:  # it has not come that far yet
            return msgspec.structs.replace(told, state="waiting")
        return told

    def _parse(self, prompt: object, options: RequestOptions) -> tuple[Prompt, Sampling, Service]:
        if self._unavailable is not None:
            raise self._unavailable()
        service = {name: value for name, value in options.items() if name in SERVICE_OPTIONS}
        sampling = {name: value for name, value in options.items() if name not in SERVICE_OPTIONS}
        try:
            return parse_prompt(prompt), parse_sampling(sampling), parse_service(service)
        except UnknownOption as unknown:
            raise errors.UnknownField(f"{unknown}, {', '.join(SERVICE_OPTIONS)}") from None
        except Refused as refused:
            raise REFUSALS[refused.refusal](refused.reason) from None

    def _check_available(self) -> None:
        if self._unavailable is not None:
            raise self._unavailable()
        if threading.get_ident() != self._thread_id:
            raise errors.EngineUnavailable(
                "requests are sent from the thread whose event loop runs the engine; from others, "
                "use asyncio.run_coroutine_threadsafe(engine.generate(...), loop)"
            )

    def _check_room(self) -> None:
        """Questions and orders come on top of what the scheduler's mailbox is made for."""
        assert self._system is not None
        mailboxes = self._system.statistics()
        if max(mailboxes[name].length for name in ("cache", "scheduler", "intake")) >= CONTROL_MESSAGES_MAX:
            raise errors.EngineBusy("too many questions and orders wait for an answer already; try again")

    def _check_open(self, count: int) -> None:
        """Intake refuses beyond its queue limit; far beyond, not even a message is spent."""
        if len(self._open) + count > 2 * self._config.queue_limit:
            raise errors.QueueFull(f"{len(self._open)} requests are open already")

    def _submit(self, prompt: Prompt, sampling: Sampling, service: Service, like: RequestId | None = None) -> Stream:
        self._check_available()
        self._check_open(1)
        inbox = Inbox(RequestId(next(self._ids)), self._loop.time, on_end=self._forget)
        stream = open_stream(inbox, self._cancel, self._cancel_later)
        self._open[inbox.request_id] = inbox
        self._intake.tell(Submit(inbox.request_id, prompt, sampling, inbox, service, like))
        return stream

    def _forget(self, inbox: Inbox) -> None:
        self._open.pop(inbox.request_id, None)

    def _cancel(self, request_id: RequestId) -> None:
        if threading.get_ident() != self._thread_id:
            self._cancel_later(request_id)
        else:
            self._intake.tell(Cancel(request_id))

    def _cancel_later(self, request_id: RequestId) -> None:
        with suppress(RuntimeError):  # the loop is closed, and the request with it
            self._loop.call_soon_threadsafe(self._intake.tell, Cancel(request_id))


def _reseeded(sampling: Sampling, number: int) -> Sampling:
    """For the sample of this number; without a seed each draws its own."""
    if sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + number) % 2**64)


# Exceptions are made anew for everyone: one that is raised again gathers the tracebacks of all who met it.


def _not_started() -> errors.EngineUnavailable:
    return errors.NotStarted("start the engine first: `async with Engine(...)`")


def _closed() -> errors.EngineUnavailable:
    return errors.EngineClosed("the engine is closed")


def _broken(crash: ActorCrashed) -> errors.EngineUnavailable:
    error = errors.EngineBroken(str(crash))
    error.__cause__ = crash
    return error


def _find_model(model: str | os.PathLike[str], progress: bool, config: EngineConfig) -> tuple[Ensemble[Batch], Path]:
    folder = model_path(model, progress=progress)
    return gather(folder, config), folder


async def _in_thread(work: Callable[[], T]) -> T:
    """Run blocking `work` on a thread of its own, which is gone afterwards."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(put: Callable[[], None]) -> None:
        if not outcome.done():
            put()

    worker = WorkerThread[Callable[[], None]]("cuelight load", settle, loop)
    worker.submit(
        work,
        done=lambda result: partial(outcome.set_result, result),
        failed=lambda error: partial(outcome.set_exception, error),
    )
    worker.close()
    try:
        return await outcome
    finally:
        if not outcome.cancelled():  # nobody waits for work that was given up
            await worker.ended()
