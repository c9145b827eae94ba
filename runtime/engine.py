"""The engine as its users see it: open it, send requests, read its figures, close it."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import msgspec

from cuelight import errors
from cuelight.actors.intake.departures import DepartureRate
from cuelight.actors.intake.prompts import parse_prompt
from cuelight.actors.intake.refusal import Refused, UnknownOption
from cuelight.actors.intake.service import SERVICE_OPTIONS, parse_service
from cuelight.actors.intake.validation import parse_sampling
from cuelight.board import NO_STATS, Alarms, Board, EngineStats
from cuelight.client import REFUSALS, Inbox, Result, Stream, open_stream
from cuelight.config import EngineConfig, EngineOptions, RequestOptions, check_policy
from cuelight.conversation import Chat
from cuelight.drain import Drain, check_timeout
from cuelight.ensemble import Casting, Ensemble, Lead, casting, gather, lives_in_process, roles
from cuelight.fingerprint import Fingerprint, fingerprint
from cuelight.health import Health, HealthRecord
from cuelight.kernel import ActorCrashed, NotSendable, System, ask, get_logger
from cuelight.kernel.journal import Journal
from cuelight.messages.cache import ForgetPrefixes
from cuelight.messages.intake import Cancel, SetTenants, Submit
from cuelight.messages.request import Prompt, RequestId, Sampling, Service
from cuelight.messages.scheduler import Condemn, Explain, Explanation, SetPolicy
from cuelight.open_requests import OpenRequests, Suspicion
from cuelight.past import Carried, Past
from cuelight.progress import Progress, counting_bar
from cuelight.record import Record, begin
from cuelight.reload import Models, Running, Stage, Successor, check_running, find_successor, stand_in
from cuelight.replay import Origin
from cuelight.resume import Unclaimed, submission
from cuelight.store import DEFAULT_MODEL, model_path
from cuelight.threads import in_thread

if TYPE_CHECKING:
    from cuelight.actors.executor.batch import Batch

B = TypeVar("B")

CONTROL_MESSAGES_MAX = 32
"""As many messages may wait for the scheduler, or for intake, when it is asked to explain or to change its policy."""

LINGER_SECONDS = 5.0
"""For the executor's process to end in order; then it is killed."""

log = get_logger("cuelight.engine")


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
        self._progress = Progress(progress)
        self._casting = self._noting(partial(_find_model, model, progress))
        self._config = EngineConfig.of(options)
        self._origin: Origin | None = None
        self._journal: Journal | Record | None = None
        self._next_id = 1
        self._open = OpenRequests(ended_max=self._config.queue_limit if self._config.resume else 0)
        self._unclaimed = Unclaimed(self._cancel)
        self._grace: asyncio.TimerHandle | None = None
        self._models = Models(self._config, find_successor)
        self._leaving = DepartureRate()
        self._suspicion = Suspicion()
        seed = self._config.seed
        self._chance = random.Random() if seed is None else random.Random(f"requests {seed}")
        self._health = HealthRecord(time.monotonic)
        self._system: System | None = None
        self._board: Board | None = None
        self._broken = False
        self._farewell: asyncio.Task[None] | None = None
        self._drain: Drain | None = None
        self._batches = 0
        self._unavailable: Callable[[], errors.EngineUnavailable] | None = _not_started

    @classmethod
    def from_ensemble(
        cls,
        name: str,
        gather: Callable[[EngineConfig], Ensemble[B]],
        others: Callable[[str, EngineConfig], Ensemble[B]] | None = None,
        **options: Unpack[EngineOptions],
    ) -> Self:
        """An engine that plays what `gather` returns in place of a model's folder; it is called on a thread.

        So is `others`, for the name that a reload asks for; it raises ModelUnavailable for one that it does not know.
        """
        engine = cls(name, **options)

        def find_other(model: object, config: EngineConfig) -> Successor:
            if others is None:
                raise errors.ModelUnavailable(f"this engine stands for {name!r} and knows no other model")
            return stand_in(str(model), others(str(model), config), config, tokenizer=name)

        if engine._config.executor == "auto":  # a stand-in has no device, nor can every one be sent to a process
            engine._config = replace(engine._config, executor="thread")
        engine._models = Models(engine._config, find_other)
        engine._casting = engine._noting(lambda config: (gather(config), None))
        return engine

    def _noting(self, find: Callable[[EngineConfig], tuple[Ensemble[B], Path | None]]) -> Casting:
        """The casting, which leaves behind what a journal must say of it."""

        def gather(config: EngineConfig) -> Ensemble[B]:
            ensemble, folder = find(config)
            # Only for the sake of a journal, or of a reload, which does it then.
            mark = Fingerprint(self._name, self._name) if folder is None else fingerprint(folder)
            self._origin = Origin(self._name, folder, config, ensemble.facts, mark)
            return ensemble

        return casting(gather)

    async def start(self) -> None:
        """Find the model, load it, and open for requests.

        Raises:
            ModelUnavailable: the model cannot be found, fetched or loaded.
            ConfigError: the journal cannot be created, or what is to be loaded cannot be sent to a process.
            EngineClosed: this engine was started before.
        """
        if self._unavailable is not _not_started or self._board is not None:
            raise errors.EngineClosed("an engine is started once; make another")
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._board = board = Board(self._health, Alarms(self._again_ready, self._gave_up, self._progress.note))
        try:
            self._cast = cast = roles(self._config)
            lead = Lead(cast.executor)
            parts = await in_thread(partial(self._casting, self._config, cast, board, lead))
            self._check_still_starting()
            past = await self._begin_journal()
            self._check_still_starting()
            chance = random.Random(self._config.seed)
            self._system = System(
                parts,
                chance=chance,
                tap=self._journal,
                on_crash=self._one_crashed,
                on_failure=self._crashed,
                on_end=self._actors_ended,
            )
            await self._start_system()
            self._models.begin(Stage(self._system, cast, lead), self._origin, self._taken_over)
            self._intake = self._system.find(cast.intake)
            self._scheduler = self._system.find(cast.scheduler)
            self._cache = self._system.find(cast.cache)
            ready = await board.ready
            self._check_still_starting()
            self._go_on(past)
        except BaseException as error:
            is_stopped = self._unavailable is _closed
            self._health.enter("unavailable", str(error))
            await self.stop()
            if is_stopped and isinstance(error, errors.EngineError):  # whatever the stop has made of the start
                raise _closed() from error
            raise
        self._unavailable = None
        self._health.enter("serving")
        log.info("engine_ready", model=self._name, token_capacity=ready.token_capacity)

    async def _begin_journal(self) -> Past | None:
        """The journal, if there is to be one, and what an earlier process has left in it."""
        if self._config.journal is None or self._origin is None:
            return None
        work = partial(begin, self._origin, self._loop.time, self._unfinished)
        self._journal, past = await in_thread(work, too_late=_close_begun)
        return past

    def _unfinished(self) -> tuple[int, tuple[Carried, ...]]:
        return self._next_id, self._open.unfinished(self._loop.time(), self._config.resume_seconds)

    def _go_on(self, past: Past | None) -> None:
        """What an earlier process had not finished goes on, for whoever picks it up."""
        if isinstance(self._journal, Record):
            self._journal.settle()
        if past is None:
            return
        self._next_id = past.next_id
        for carried in past.requests:
            inbox = self._new_inbox(carried.request_id)
            inbox.submitted_at -= carried.seconds_ago
            inbox.is_accepted = True
            submit = submission(carried, inbox)
            self._open.add(inbox, submit)
            self._unclaimed.add(inbox, carried)
            self._intake.tell(submit)
        self._grace = self._loop.call_later(self._config.resume_seconds, self._unclaimed.give_up)
        log.info("resumed", requests=len(past.requests), next_id=past.next_id)

    async def _start_system(self) -> None:
        assert self._system is not None
        try:
            await self._system.start()
        except NotSendable as error:
            raise errors.ConfigError(str(error)) from error
        except ActorCrashed as crash:
            raise _broken(crash) from crash

    def _check_still_starting(self) -> None:
        """Another task may have stopped what this one starts."""
        if self._unavailable is not None and self._unavailable is not _not_started:
            raise self._unavailable()

    async def stop(self) -> None:
        """End every request with EngineClosed and give everything back. Harmless when done twice."""
        self._ended()
        if self._grace is not None:
            self._grace.cancel()
        self._health.enter("closed")
        if self._system is not None:
            # What is being computed is for nobody, so a process need not be waited for.
            is_apart = lives_in_process(self._config)
            await self._system.stop(drop=True, timeout_seconds=LINGER_SECONDS if is_apart else None)
        self._close_journal()

    async def drain(self, timeout_seconds: float) -> int:
        """Take nothing new, let all that runs or waits finish, then stop; give the number of those that could not.

        New requests get EngineDraining, whoever is not done after `timeout_seconds` EngineClosed. A call of
        `generate_many` that has begun is served whole. `stop` ends a drain at once; cancelling it calls it off.

        Raises:
            ConfigError: `timeout_seconds` is no number above 0.
            EngineDraining: a drain is under way already, which goes on as it was.
            EngineUnavailable: not started, closed, or broken.
        """
        seconds = check_timeout(timeout_seconds)
        self._check_available()
        self._check_not_draining()
        self._drain = Drain(lambda: not self._open and not self._batches)
        self._health.enter("draining")
        try:
            await self._drain.over(seconds)
        except BaseException:
            self._drain = None
            self._health.enter("serving")
            raise
        left = sum([not inbox.over for inbox in self._open.values()])
        await self.stop()
        return left

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
        self._check_available()
        self._check_not_draining()
        await self._models.change(model, recompute, self._check_available)

    def _taken_over(self, origin: Origin) -> None:
        """Another model serves."""
        self._origin, self._name = origin, origin.name
        if isinstance(self._journal, Record):
            self._journal.taken_over(origin)

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
        self._check_available()
        if position < 0:
            raise errors.BadPosition(f"position is {position}; it must be at least 0")
        inbox = self._unclaimed.take(RequestId(request_id), position, tenant)
        return open_stream(inbox, self._cancel, self._cancel_later, position)

    @property
    def unclaimed(self) -> tuple[int, ...]:
        """The ids of requests of an earlier process that nobody has picked up yet."""
        return self._unclaimed.request_ids

    @property
    def system(self) -> System | None:
        """The actors' system, for those who look at it from outside; None before the start."""
        return self._system

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _crashed(self, crash: ActorCrashed) -> None:
        """An actor is gone for good: whoever waits must hear of it."""
        self._broken = True
        self._health.enter("unavailable", str(crash))
        self._end_service(partial(_broken, crash))

    def _one_crashed(self, crash: ActorCrashed) -> None:
        """An actor is gone, and mostly another one comes."""
        self._health.crashed(crash)
        if crash.actor == self._cast.scheduler.name:
            self._loop.call_soon(self._models.repeat)
        culprit = self._suspicion.at_fault(crash)
        if culprit is None or self._unavailable is not None:
            return
        reason = f"the request brought the {crash.actor} down twice: {crash.__cause__!r}"
        log.error("request_at_fault", request_id=culprit, actor=crash.actor, exc_info=crash.__cause__)
        if (inbox := self._open.get(culprit)) is not None:
            inbox.fail(errors.RequestFailed(reason))
        self._intake.tell(Condemn(culprit, reason))

    def _again_ready(self) -> None:
        """Intake is new. It is told all once more, though not in the middle of what it is doing."""
        self._loop.call_soon(self._repeat)

    def _repeat(self) -> None:
        if self._unavailable is None:
            self._open.repeat(self._intake)

    def _gave_up(self, reason: str) -> None:
        """Nobody will be served any more, so all that was taken up for it is given back."""
        assert self._system is not None
        self._broken = True
        self._health.enter("unavailable", reason)
        log.error("gave_up", reason=reason)
        self._end_service(lambda: errors.EngineGaveUp(reason))
        stopping = self._system.stop(drop=True, timeout_seconds=LINGER_SECONDS)
        self._farewell = self._loop.create_task(stopping, name="cuelight farewell")

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
        self._open.fail(reason)
        self._models.end(reason)

    def stream(self, prompt: object, **options: Unpack[RequestOptions]) -> Stream:
        """Submit a request and iterate over its output.

        `prompt` is text, a list of chat messages (`{"role": …, "content": …}`), or a list of token ids. The request
        is under way when this returns; what can be refused without the engine's help is refused here.

        Raises:
            RequestRejected: one of its kinds; see `cuelight.errors`.
            EngineUnavailable: not started, closed, or broken.
        """
        self._check_new(1)
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
        self._check_new(count)
        parsed, sampling, service = self._parse(prompt, options)
        self._check_available()
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
        with self._batch(), counting_bar(len(parsed), "request", shown=progress) as bar:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(servers):
                        group.create_task(serve())
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None
        return [results[index] for index in range(len(parsed))]

    @contextmanager
    def _batch(self) -> Iterator[None]:
        """Meanwhile more requests will come of what was there before a drain."""
        self._batches += 1
        try:
            yield
        finally:
            self._batches -= 1
            self._look_who_is_left()

    def _look_who_is_left(self) -> None:
        if self._drain is not None:
            self._drain.look()

    def chat(self, system: str | None = None, **options: Unpack[RequestOptions]) -> Chat:
        """A conversation that remembers; `options` hold for each answer. The prefix cache keeps its K/V."""
        return Chat(lambda turns, merged: self.stream(turns, **merged), system, options)

    def stats(self) -> EngineStats:
        """Figures of this moment. All zero before the start."""
        return self._board.stats() if self._board is not None else NO_STATS

    def health(self) -> Health:
        """What the engine is doing, what has crashed, and how long the last recovery took. Never raises."""
        return self._health.snapshot()

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
        tenants = SetTenants(None if tenant_weights is None else tuple(tenant_weights))
        for order in (tenants, SetPolicy(policy, float(aging_seconds), weights)):
            self._open.order(order)
            self._intake.tell(order)

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
        self._check_not_draining()
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

    def _check_not_draining(self) -> None:
        if self._drain is not None:
            raise errors.EngineDraining("the engine finishes what it has begun, and takes nothing new")

    def _check_room(self) -> None:
        """Questions and orders come on top of what the scheduler's mailbox is made for."""
        assert self._system is not None
        mailboxes = self._system.statistics()
        if max(mailboxes[name].length for name in ("cache", "scheduler", "intake")) >= CONTROL_MESSAGES_MAX:
            raise errors.EngineBusy("too many questions and orders wait for an answer already; try again")

    def _check_new(self, count: int) -> None:
        """Whether so many more can be taken, before any work is done for them: a flood is refused at a small cost."""
        if self._unavailable is not None:
            raise self._unavailable()
        self._check_not_draining()
        self._check_open(count)

    def _check_open(self, count: int) -> None:
        """Intake counts the same and would say the same; here not even a message is spent."""
        live, limit = len(self._open), self._config.queue_limit
        if (excess := live + count - limit) > 0:
            reason = f"{live} requests are live, and the queue limit is {limit}"
            raise errors.QueueFull(reason, self._leaving.seconds_for(excess))

    def _submit(self, prompt: Prompt, sampling: Sampling, service: Service, like: RequestId | None = None) -> Stream:
        self._check_available()
        self._check_open(1)
        if sampling.seed is None:  # drawn here, so that it stays the same request when it is sent again
            sampling = msgspec.structs.replace(sampling, seed=self._chance.getrandbits(64))
        inbox = self._new_inbox(RequestId(self._next_id))
        self._next_id += 1
        stream = open_stream(inbox, self._cancel, self._cancel_later)
        submit = Submit(inbox.request_id, prompt, sampling, inbox, service, like)
        self._open.add(inbox, submit)
        self._intake.tell(submit)
        return stream

    def _new_inbox(self, request_id: RequestId) -> Inbox:
        """Where output gathers. If this process is killed, the next one must know all that a client has been given."""
        if isinstance(self._journal, Record):
            return Inbox(request_id, self._loop.time, self._forget, before_read=self._journal.flush)
        return Inbox(request_id, self._loop.time, self._forget)

    def _forget(self, inbox: Inbox) -> None:
        self._open.remove(inbox)
        if inbox.end is not None:
            self._leaving.note(1, self._loop.time())
        self._look_who_is_left()

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


def _close_begun(begun: tuple[Journal | Record | None, Past | None]) -> None:
    """The start was given up meanwhile, and nobody records."""
    if begun[0] is not None:
        begun[0].close()


def _find_model(model: str | os.PathLike[str], progress: bool, config: EngineConfig) -> tuple[Ensemble[Batch], Path]:
    folder = model_path(model, progress=progress)
    return gather(folder, config), folder
