"""The client side of requests: parses and numbers them, sends them to intake, and tracks those that are open."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TypeAlias

import msgspec

from cuelight import errors
from cuelight.actors.intake.admission import CompletionRate, check_room
from cuelight.actors.intake.errors import Refused, UnknownOption
from cuelight.actors.intake.parsing import parse_options, parse_prompt
from cuelight.config import EngineConfig, RequestOptions
from cuelight.core.availability import Availability
from cuelight.core.open_requests import FaultAttribution, OpenRequests
from cuelight.journal.restore import RestoredState
from cuelight.journal.resume import UnclaimedRequests, submission
from cuelight.kernel import ActorCrashed, Role, System, get_logger
from cuelight.messages.address import Address
from cuelight.messages.intake import Cancel, IntakeMessage, Submit
from cuelight.messages.request import Prompt, RequestId, Sampling, Service
from cuelight.messages.scheduler import FailRequest
from cuelight.models.progress import counting_bar
from cuelight.stream import Inbox, Result, Stream, open_stream, rejection

log = get_logger("cuelight.engine")

Asked: TypeAlias = tuple[Prompt, Sampling, Service]

TURN_SECONDS = 0.005
"""Time after which parsing many prompts yields to the event loop; one prompt is not interrupted."""


class RequestRouter:
    """The requests of one engine: their submission, their streams, and those restored from an earlier process."""

    def __init__(
        self,
        config: EngineConfig,
        open_requests: OpenRequests,
        availability: Availability,
        system: System,
        intake: Role[IntakeMessage],
        before_read: Callable[[], object],
    ) -> None:
        """`before_read` is called before a client receives output. Construct this in the engine's event loop."""
        self._config = config
        self._open = open_requests
        self._availability = availability
        self._loop = asyncio.get_running_loop()
        self._system = system
        self._intake_role = intake
        self._before_read = before_read
        self._batches = 0
        self._completions = CompletionRate()
        self._faults = FaultAttribution()
        self._unclaimed = UnclaimedRequests(self._cancel)
        self._grace: asyncio.TimerHandle | None = None
        seed = config.seed
        self._rng = random.Random() if seed is None else random.Random(f"requests {seed}")

    @cached_property
    def _intake(self) -> Address[IntakeMessage]:
        """Intake's address, which exists once the system has started."""
        return self._system.find(self._intake_role)

    def end(self, reason: Callable[[], errors.EngineError]) -> None:
        """Fail all open requests, each with a new exception from `reason`."""
        if self._grace is not None:
            self._grace.cancel()
        self._open.fail(reason)

    def read(self, prompt: object, options: RequestOptions, count: int = 1) -> Asked:
        """Parse a prompt and options for `count` requests.

        The queue's room is checked first, so that refusing a request is cheap under overload. Raises RequestRejected
        and EngineUnavailable.
        """
        self._availability.check_takes_new()
        with _typed_refusals():
            self._check_room(count)
            return parse_prompt(prompt), *parse_options(options)

    def _check_room(self, count: int) -> None:
        """Raise `Refused`, as intake does, if the queue has no room for `count` requests."""
        check_room(len(self._open), count, self._config.queue_limit, self._completions)

    def send(self, asked: Asked, sample_of: RequestId | None = None) -> Stream:
        """Send a request to intake and return its stream; `sample_of` is the request whose prompt it shares.

        Raises EngineUnavailable.
        """
        self._availability.check()
        prompt, sampling, service = asked
        if sampling.seed is None:  # drawn here, so that a request that is sent again has the same seed
            sampling = msgspec.structs.replace(sampling, seed=self._rng.getrandbits(64))
        inbox = self._new_inbox(self._open.new_id())
        stream = open_stream(inbox, self._cancel, self._cancel_later)
        submit = Submit(inbox.request_id, prompt, sampling, inbox, service, sample_of)
        self._open.add(inbox, submit)
        self._intake.tell(submit)
        return stream

    def samples(self, asked: Asked, count: int) -> list[Stream]:
        """Send one prompt `count` times; with a seed, sample number n has `seed + n`. Raises EngineUnavailable."""
        prompt, sampling, service = asked
        first = self.send(asked)
        return [first] + [
            self.send((prompt, _reseeded(sampling, number), service), sample_of=first.request_id)
            for number in range(1, count)
        ]

    async def serve_all(self, prompts: Sequence[object], options: RequestOptions, *, progress: bool) -> list[Result]:
        """Parse all prompts, serve as many at once as keep the batch full, and return their results in order."""
        if not prompts:
            return []
        self._availability.check_takes_new()
        with self._batch():
            return await self._serve(await self._read_all(prompts, options), progress=progress)

    async def _read_all(self, prompts: Sequence[object], options: RequestOptions) -> list[Asked]:
        """Parse all prompts as `read` does, yielding to the event loop in between."""
        asked: list[Asked] = []
        with _typed_refusals():
            sampling, service = parse_options(options)
            due = self._loop.time() + TURN_SECONDS
            for prompt in prompts:
                asked.append((parse_prompt(prompt), sampling, service))
                if self._loop.time() >= due:
                    await asyncio.sleep(0)
                    due = self._loop.time() + TURN_SECONDS
        return asked

    async def _serve(self, asked: Sequence[Asked], *, progress: bool) -> list[Result]:
        results: dict[int, Result] = {}
        todo = iter(enumerate(asked))

        async def serve() -> None:
            for index, each in todo:
                with _typed_refusals():
                    self._check_room(1)
                results[index] = await self.send(each).result()
                bar.update()

        servers = max(1, min(2 * self._config.running_max, self._config.queue_limit // 2, len(asked)))
        with counting_bar(len(asked), "request", shown=progress) as bar:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(servers):
                        group.create_task(serve())
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None
        return [results[index] for index in range(len(asked))]

    @contextmanager
    def _batch(self) -> Iterator[None]:
        """Keep a drain from ending while a call of `generate_many` may still submit requests."""
        self._batches += 1
        try:
            yield
        finally:
            self._batches -= 1
            self._check_drain()

    @property
    def are_over(self) -> bool:
        """Whether all requests have ended, and no call of `generate_many` is in progress."""
        return not self._open and not self._batches

    @property
    def left(self) -> int:
        """The number of requests that are neither ended nor cancelled."""
        return sum([not inbox.over for inbox in self._open.values()])

    def _check_drain(self) -> None:
        if self._availability.drain is not None:
            self._availability.drain.look()

    def _new_inbox(self, request_id: RequestId) -> Inbox:
        here = self._availability.check_here
        return Inbox(request_id, self._loop.time, self._forget, self._before_read, here)

    def _forget(self, inbox: Inbox) -> None:
        self._open.remove(inbox)
        if inbox.end is not None:
            self._completions.note(1, self._loop.time())
        self._check_drain()

    def _cancel(self, request_id: RequestId) -> None:
        if self._availability.is_own_thread:
            self._intake.tell(Cancel(request_id))
        else:
            self._cancel_later(request_id)

    def _cancel_later(self, request_id: RequestId) -> None:
        with suppress(RuntimeError):  # the loop is closed, so the request has ended
            self._loop.call_soon_threadsafe(self._intake.tell, Cancel(request_id))

    def restore(self, past: RestoredState) -> None:
        """Submit the unfinished requests of an earlier process, and keep them for `resume`."""
        self._open.next_id = past.next_id
        for restored in past.requests:
            inbox = self._new_inbox(restored.request_id)
            inbox.submitted_at -= restored.seconds_ago
            inbox.is_accepted = True
            submit = submission(restored, inbox)
            self._open.add(inbox, submit)
            self._unclaimed.add(inbox, restored)
            self._intake.tell(submit)
        self._grace = self._loop.call_later(self._config.resume_seconds, self._unclaimed.give_up)
        log.info("resumed", requests=len(past.requests), next_id=past.next_id)

    def resume(self, request_id: RequestId, position: int, tenant: str) -> Stream:
        """Return the stream of a restored request. Raises as `UnclaimedRequests.take`."""
        inbox = self._unclaimed.take(request_id, position, tenant)
        return open_stream(inbox, self._cancel, self._cancel_later, position)

    @property
    def unclaimed(self) -> tuple[RequestId, ...]:
        """The ids of restored requests that have not been resumed."""
        return self._unclaimed.request_ids

    def resend_soon(self) -> None:
        """Send all open requests to a new intake, after its present handler has returned."""
        self._loop.call_soon(self._resend)

    def _resend(self) -> None:
        if self._availability.is_open:
            self._open.resend(self._intake)

    def attribute_crash(self, crash: ActorCrashed) -> None:
        """Fail the request over which an actor has crashed twice in a row, so that it is not sent again."""
        culprit = self._faults.at_fault(crash)
        if culprit is None or not self._availability.is_open:
            return
        reason = f"the request crashed the {crash.actor} twice: {crash.__cause__!r}"
        log.error("request_at_fault", request_id=culprit, actor=crash.actor, exc_info=crash.__cause__)
        if (inbox := self._open.get(culprit)) is not None:
            inbox.fail(errors.RequestFailed(reason))
        self._intake.tell(FailRequest(culprit, reason))


@contextmanager
def _typed_refusals() -> Iterator[None]:
    """Convert intake's `Refused` and `UnknownOption` into the errors of `cuelight.errors`."""
    try:
        yield
    except UnknownOption as unknown:
        raise errors.UnknownField(str(unknown)) from None
    except Refused as refused:
        raise rejection(refused.refusal, refused.reason, refused.retry_after_seconds) from None


def _reseeded(sampling: Sampling, number: int) -> Sampling:
    """Return the sampling options of sample `number`; without a seed they are unchanged."""
    if sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + number) % 2**64)
