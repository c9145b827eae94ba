"""The public API as a user's type checker sees it. Never run: `mypy tests/typing` checks it against the package."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias, assert_never, assert_type

import cuelight.testing
from cuelight import Chat, Chunk, Engine, EngineError, EngineStats, Health, Result, Stream, model_path
from cuelight.config import EngineOptions, RequestOptions, SamplingOptions
from cuelight.errors import DeadlineExceeded, EngineUnavailable, QueueFull, RequestFailed, RequestRejected
from cuelight.kernel import (
    Actor,
    ActorSpec,
    Context,
    Delivered,
    Ended,
    Event,
    InLoop,
    InProcess,
    MailboxStatistics,
    OnThread,
    Placement,
    Ref,
    RestartPolicy,
    Role,
    Started,
    Strategy,
    System,
    Terminated,
    Timer,
    Worker,
    ask,
)
from cuelight.messages.address import Address
from cuelight.messages.request import FinishReason, Usage
from cuelight.messages.scheduler import Explanation, Occurrence


async def engine_api(engine: Engine) -> None:
    assert_type(engine.stream("text"), Stream)
    assert_type(engine.stream([{"role": "user", "content": "hi"}], max_tokens=8, stop="\n"), Stream)
    assert_type(engine.stream([1, 2, 3], temperature=1, top_k=5, top_p=0.9, seed=None), Stream)
    assert_type(await engine.generate("text", stop=["a", "b"], stop_token_ids=[2], ignore_eos=True), Result)
    assert_type(await engine.generate_many(["a", [1, 2]], progress=True, min_tokens=1), list[Result])
    assert_type(engine.stats(), EngineStats)
    assert_type(engine.health(), Health)
    assert_type(engine.stats().blocks_free, int)
    assert_type(engine.chat(system="brief", max_tokens=8), Chat)
    assert_type(cuelight.testing.stub_engine(queue_limit=3), Engine)
    assert_type(engine.stream("text", tenant="a", priority=2, queue_seconds=1, deadline_seconds=None), Stream)
    engine.set_policy("fair", tenant_weights={"a": 1, "b": 2.5})
    explanation = await engine.explain(engine.stream("text").request_id, timeout_seconds=1)
    assert_type(explanation, Explanation)
    assert_type(explanation.timeline, tuple[Occurrence, ...])


async def wrong_engine_options(engine: Engine) -> None:
    Engine("name", token_budget="many")  # type: ignore[arg-type]  # expects a number
    Engine("name", budget=1)  # type: ignore[call-arg]  # no such option
    engine.stream("text", max_tokens="3")  # type: ignore[arg-type]  # expects a number
    engine.stream("text", max_token=3)  # type: ignore[call-arg]  # no such option
    engine.stream("text", priority="high")  # type: ignore[arg-type]  # expects a number
    engine.set_policy(aging_seconds=1.0)  # type: ignore[call-arg]  # names no policy
    await engine.chat().say(3)  # type: ignore[arg-type, misc]  # expects text; a stream is not awaitable


async def start_and_stop(path: Path) -> None:
    engine = Engine(path, progress=True, dtype="float32", block_count=None)
    await engine.start()
    await engine.stop()
    assert_type(await engine.drain(30), int)
    await engine.reload(path, running="recompute")
    await engine.reload("name", running="now")  # type: ignore[arg-type]  # expects "finish" or "recompute"
    assert_type(engine.resume(3, 7, tenant="a"), Stream)
    assert_type(engine.unclaimed, tuple[int, ...])
    async with Engine() as opened:
        assert_type(opened, Engine)
    assert_type(model_path("name"), Path)


async def stream_api(stream: Stream) -> None:
    async for chunk in stream:
        assert_type(chunk, Chunk)
        assert_type(chunk.text, str)
        assert_type(chunk.position, int)
        assert_type(chunk.token_ids, tuple[int, ...])
    assert_type(aiter(stream), AsyncIterator[Chunk])
    async with stream as same:
        assert_type(same, Stream)
    await stream.aclose()
    result = await stream.result()
    assert_type(result.finish_reason, FinishReason)
    assert_type(result.usage, Usage)
    assert_type(result.usage.cached_tokens, int)
    assert_type(result.timings.first_token_seconds, float)


async def chat_api(chat: Chat) -> None:
    assert_type(chat.say("hello", temperature=0.5), Stream)
    assert_type(chat.messages, list[dict[str, str]])


def options_by_name() -> tuple[EngineOptions, SamplingOptions, RequestOptions]:
    engine: EngineOptions = {"queue_limit": 3, "seed": None, "policy": "fair", "tenant_weights": {"a": 2}}
    sampling: SamplingOptions = {"stop": ("a",), "seed": 1}
    request: RequestOptions = {"stop": "a", "tenant": "a", "deadline_seconds": 3.5}
    return engine, sampling, request


async def errors_api(engine: Engine) -> str:
    try:
        await engine.generate("text")
    except DeadlineExceeded as late:
        failed: RequestFailed = late
        return str(failed)
    except QueueFull as refused:
        assert_type(refused, QueueFull)
        assert_type(refused.retry_after_seconds, float | None)
        rejected: RequestRejected = refused
        value_error: ValueError = rejected
        return str(value_error)
    except EngineUnavailable as unavailable:
        error: EngineError = unavailable
        return str(error)
    return ""


@dataclass(frozen=True)
class Add:
    number: int


@dataclass(frozen=True)
class Total:
    reply_to: Address[int]


SumMessage: TypeAlias = Add | Total | Terminated
SUM = Role[SumMessage]("sum", SumMessage, capacity=8)


class Sum(Actor[SumMessage]):
    def __init__(self, context: Context[object]) -> None:
        self._total = 0
        assert_type(context.clock.now(), float)
        self._context = context
        assert_type(context.find(SUM), Ref[SumMessage])

    def handle(self, message: SumMessage) -> None:
        match message:
            case Add(number):
                self._total += number
            case Total(reply_to):
                reply_to.tell(self._total)
                reply_to.tell("much")  # type: ignore[arg-type]  # expects an int
            case Terminated(actor=actor, is_restarting=False):
                self._context.dismiss(Role[Add](actor, Add, capacity=1))
            case Terminated(error=error):
                assert_type(error, str)
            case _:
                assert_never(message)


async def kernel_api() -> None:
    async with System((ActorSpec(SUM, Sum),)) as system:
        ref = system.find(SUM)
        ref.tell(Add(1))
        ref.tell("one")  # type: ignore[arg-type]  # not in its protocol
        total: int = await ask(ref, Total, timeout_seconds=1)
        assert_type(total, int)
        wrong: str = await ask(ref, Total, timeout_seconds=1)  # type: ignore[arg-type]  # the answer is an int
        assert wrong
        await ask(ref, Add, timeout_seconds=1)  # type: ignore[arg-type]  # has no return address
        await ask(ref, partial(Total), timeout_seconds=1)
        await ask(ref, Total)  # type: ignore[call-arg]  # a timeout is required
        assert_type(system.statistics(), dict[str, MailboxStatistics])
        assert_type(system.spawn(ActorSpec(SUM, Sum)), Ref[SumMessage])
        system.dismiss(SUM, drop=True)
        await system.stop(timeout_seconds=1.0)


def context_api(context: Context[SumMessage], job: Path) -> None:
    assert_type(context.ref, Ref[SumMessage])
    timer: Timer = context.after(1.0, Add(1))
    timer.cancel()
    context.after(1.0, "late")  # type: ignore[arg-type]  # not a message of this actor
    context.watch(SUM)
    context.watch("sum")  # type: ignore[arg-type]  # expects a Role
    worker: Worker[SumMessage] = context.worker("disk")
    worker.submit(job.read_text, done=lambda text: Add(len(text)), failed=lambda error: Add(0))
    worker.submit(job.read_text, done=Add, failed=lambda error: Add(0))  # type: ignore[misc]  # text is not a number
    assert_type(context.spawn(ActorSpec(SUM, Sum)), Ref[SumMessage])


class Adder(Actor[Add]):
    def handle(self, message: Add) -> None: ...


def system_api(tell: Ref[Add]) -> System:
    restart_policy = RestartPolicy(
        restarts_max=3, window_seconds=60.0, strategy=Strategy.REST_FOR_ONE, backoff_seconds=0.1
    )
    RestartPolicy(strategy="rest for one")  # type: ignore[arg-type]  # expects a Strategy
    places: list[Placement] = [InLoop(), OnThread(), InProcess(message_bytes_max=1024)]
    part: ActorSpec[SumMessage] = ActorSpec(SUM, Sum, restart_policy, places[1])
    ActorSpec(SUM, Sum, placement="thread")  # type: ignore[arg-type]  # expects a Placement
    ActorSpec(SUM, lambda context: Adder())  # type: ignore[arg-type, return-value]  # accepts fewer than its role
    adder = ActorSpec(Role[Add]("adder", Add, capacity=1), Sum)  # an actor may accept more than its role

    def tap(event: Event) -> None:
        match event:
            case Started(life=life):
                assert_type(life, int)
            case Delivered(message=message, sender=sender):
                assert_type(message, object)
                assert_type(sender, str)
            case Ended(error=error):
                assert_type(error, str)
            case _:
                assert_never(event)

    return System([part, adder], tap=tap, on_failure=lambda crash: None)


def narrowed_address(ref: Ref[SumMessage]) -> Address[Add]:
    narrow: Ref[Add] = ref
    wide: Ref[SumMessage | str] = ref  # type: ignore[assignment]  # the ref accepts fewer types
    assert wide is ref
    return narrow
