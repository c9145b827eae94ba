"""Actors of an engine die: each is rebuilt from its peers, and no stream loses or repeats a token."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
from engines import NET_SECONDS, at_rest, expected_tokens, gated, until

from cuelight import Engine, Stream, errors
from cuelight.actors.executor.stub import StubDevice
from cuelight.config import EngineConfig
from cuelight.core.open_requests import FaultAttribution
from cuelight.core.parts import EngineParts
from cuelight.kernel import ActorCrashed
from cuelight.messages.detokenizer import Histories
from cuelight.messages.intake import Cancel, ResendComplete, SetTenants, Submit
from cuelight.messages.request import FinishReason, Prompt, RequestId, Sampling
from cuelight.messages.scheduler import SetPolicy, StepDone
from cuelight.models.folder import ModelFacts
from cuelight.testing import crash, decode, encode, next_letter, stub_engine

ACTORS = ("intake", "scheduler", "cache", "executor", "detokenizer")
TOKENS = 40


async def check_all(streams: dict[str, Stream], count: int = TOKENS) -> None:
    for prompt, stream in streams.items():
        result = await stream.result()
        assert result.token_ids == expected_tokens(prompt, count)
        assert result.text == decode(result.token_ids)


def submitted(engine: Engine, count: int = 6) -> dict[str, Stream]:
    return {f"prompt {n}": engine.stream(f"prompt {n}", max_tokens=TOKENS) for n in range(count)}


async def died(engine: Engine, actor: str, times: int = 1) -> None:
    before = engine.health().restarts.get(actor, 0)
    for death in range(1, times + 1):
        crash(engine, actor)
        while engine.health().restarts.get(actor, 0) < before + death:  # a crash between two lives has no effect
            crash(engine, actor)
            await asyncio.sleep(0)


@pytest.mark.parametrize("actor", ACTORS)
async def test_streams_continue_when_an_actor_dies(actor: str) -> None:
    async with gated() as (engine, gate):
        streams = submitted(engine)
        gate.allow(30)
        await until(lambda: gate.passed == 30)
        await died(engine, actor)
        gate.allow()
        await check_all(streams)
        assert engine.health().restarts == {actor: 1}
        await until(lambda: at_rest(engine) and not engine._lifecycle.open_requests)
        await check_all(submitted(engine))


@pytest.mark.parametrize("actor", ACTORS)
async def test_actor_dies_before_its_first_work(actor: str) -> None:
    async with asyncio.timeout(NET_SECONDS), stub_engine() as engine:
        streams = submitted(engine)
        crash(engine, actor)
        await check_all(streams)
        await until(lambda: at_rest(engine) and not engine._lifecycle.open_requests)


@pytest.mark.parametrize("actor", ACTORS)
async def test_actor_dies_repeatedly(actor: str) -> None:
    async with gated() as (engine, gate):
        streams = submitted(engine)
        gate.allow(20)
        await until(lambda: gate.passed == 20)
        await died(engine, actor, times=6)
        gate.allow()
        await check_all(streams)
        assert engine.health().restarts == {actor: 6}


@pytest.mark.parametrize("seed", range(6))
async def test_actors_die_in_any_order(seed: int) -> None:
    chance = random.Random(seed)
    async with gated() as (engine, gate):
        streams = submitted(engine, 12)
        for victims in range(12):
            gate.allow(chance.randint(1, 20))
            for _ in range(chance.randint(0, 30)):
                await asyncio.sleep(0)
            for actor in chance.sample(ACTORS, victims % 3 + 1):
                crash(engine, actor)
        gate.allow()
        await check_all(streams)
        await until(lambda: at_rest(engine) and not engine._lifecycle.open_requests)


async def test_cancelled_streams_stay_cancelled_after_intake_restarts() -> None:
    async with gated() as (engine, gate):
        streams = submitted(engine)
        gate.allow(12)
        await until(lambda: gate.passed == 12)
        crash(engine, "intake")
        for prompt in list(streams)[::2]:
            await streams.pop(prompt).aclose()
        await until(lambda: engine.health().restarts == {"intake": 1})
        gate.allow()
        await check_all(streams)
        await until(lambda: at_rest(engine) and not engine._lifecycle.open_requests)


async def test_samples_of_one_prompt_continue_after_intake_restarts() -> None:
    async with gated() as (engine, gate):
        samples = engine.samples("prompt", 4, max_tokens=TOKENS)
        crash(engine, "intake")
        gate.allow()
        for stream in samples:
            assert (await stream.result()).token_ids == expected_tokens("prompt", TOKENS)


async def test_tenants_outlive_intake() -> None:
    async with gated() as (engine, gate):
        engine.set_policy("fair", tenant_weights={"a": 1.0, "b": 2.0})
        await died(engine, "intake", times=2)
        gate.allow()
        result = await engine.generate("prompt", tenant="a", max_tokens=TOKENS)
        assert result.token_ids == expected_tokens("prompt", TOKENS)
        with pytest.raises(errors.UnknownTenant):
            await engine.generate("prompt", tenant="c")


@pytest.mark.parametrize("victims", [("intake",), ("scheduler",), ("intake", "scheduler")], ids=str)
async def test_policy_outlives_intake_and_the_scheduler(victims: tuple[str, ...]) -> None:
    async with gated(running_max=1) as (engine, gate):
        running = engine.stream("running", max_tokens=3)
        await until(lambda: engine.stats().running == 1)
        engine.set_policy("priority")
        low, high = [engine.stream("waits", max_tokens=3, priority=priority) for priority in (0, 5)]
        await until(lambda: engine.stats().waiting == 2)
        for victim in victims:
            await died(engine, victim)
        gate.allow()
        await asyncio.gather(running.result(), low.result(), high.result())
        assert high.inbox.ended_at < low.inbox.first_token_at


async def test_resent_request_without_a_seed_keeps_its_seed() -> None:
    """The seed is drawn once, before the request is sent to intake."""
    async with gated(seed=3) as (engine, gate):
        stream = engine.stream("prompt", temperature=1.0, max_tokens=TOKENS)
        submit = engine._lifecycle.open_requests._submits[stream.request_id]
        assert submit.sampling.seed is not None
        told: list[object] = []
        engine._lifecycle.open_requests.resend(_Listener(told.append))
        assert [each.sampling.seed for each in told if isinstance(each, Submit)] == [submit.sampling.seed]
        gate.allow()
        await stream.result()


class _Listener:
    def __init__(self, tell: Callable[[object], None]) -> None:
        self.tell = tell


async def test_engines_with_one_seed_draw_the_same_seeds() -> None:
    drawn = []
    for seed in (5, 5, 6):
        async with asyncio.timeout(NET_SECONDS), stub_engine(seed=seed) as engine:
            streams = submitted(engine, 3)
            drawn.append([submit.sampling.seed for submit in engine._lifecycle.open_requests._submits.values()])
            await check_all(streams)
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 3


async def test_open_requests_are_resent_in_order_to_a_new_intake() -> None:
    async with gated() as (engine, gate):
        engine.set_policy("priority")
        first, second = engine.stream("one", max_tokens=3), engine.stream("two", max_tokens=3)
        await until(lambda: first.inbox.is_accepted and second.inbox.is_accepted)
        third = engine.stream("three", max_tokens=3)
        await second.aclose()
        told: list[object] = []
        engine._lifecycle.open_requests.resend(_Listener(told.append))
        gate.allow()
        assert [type(each) for each in told] == [SetTenants, SetPolicy, Submit, Submit, Cancel, Submit, ResendComplete]
        submits = [each for each in told if isinstance(each, Submit)]
        assert [each.request_id for each in submits] == [s.request_id for s in (first, second, third)]
        assert [each.is_accepted for each in submits] == [True, True, False]
        await third.result()


# A request that crashes an actor.


class Deadly(BaseException):
    """An exception that `except Exception` does not catch."""


class Encoder:
    """Tokenizes like the stub; raises on some prompts, for a given number of times."""

    def __init__(self, times: float) -> None:
        self.times = times

    def encode(self, prompt: Prompt, token_limit: int) -> tuple[int, ...]:
        if "poison" in str(prompt) and self.times > 0:
            self.times -= 1
            raise Deadly(f"dies of {prompt}")
        return encode(prompt)


def engine_with(encoder: Encoder, decode: Callable[[Sequence[int]], str] = decode) -> Engine:
    facts = ModelFacts(vocab_size=257, context_length=4096, eos_token_ids=(256,))

    def gather(config: EngineConfig) -> EngineParts[object]:
        return EngineParts(facts, encoder, decode, lambda: StubDevice(1024, 16, next_letter))

    return Engine.from_parts("stub", gather)


async def test_request_that_crashes_intake_twice_fails_alone() -> None:
    async with asyncio.timeout(NET_SECONDS), engine_with(Encoder(times=float("inf"))) as engine:
        streams = submitted(engine)
        poison = engine.stream("poison", max_tokens=TOKENS)
        more = {f"more {n}": engine.stream(f"more {n}", max_tokens=TOKENS) for n in range(3)}
        with pytest.raises(errors.RequestFailed, match=r"crashed the intake twice: .*dies of poison"):
            await poison.result()
        await check_all({**streams, **more})
        assert engine.health().restarts == {"intake": 2}
        await until(lambda: at_rest(engine) and not engine._lifecycle.open_requests)


async def test_request_present_when_intake_crashed_once_is_served() -> None:
    async with asyncio.timeout(NET_SECONDS), engine_with(Encoder(times=1)) as engine:
        streams = {"poison": engine.stream("poison", max_tokens=TOKENS), **submitted(engine)}
        await check_all(streams)
        assert engine.health().restarts == {"intake": 1}


async def test_decoder_that_raises_a_base_exception_on_one_request_fails_that_request() -> None:
    def dies(token_ids: Sequence[int]) -> str:
        if bytes(token_ids[:3]).decode("latin1") == doomed:
            raise Deadly("dies of this text")
        return decode(token_ids)

    doomed = decode(expected_tokens("poison", 3))
    async with asyncio.timeout(NET_SECONDS), engine_with(Encoder(times=0), dies) as engine:
        poison = engine.stream("poison", max_tokens=TOKENS)
        streams = submitted(engine)
        with pytest.raises(errors.RequestFailed, match="dies of this text"):
            await poison.result()
        await check_all(streams)
        assert engine.health().restarts == {}
        await until(lambda: at_rest(engine) and not engine._lifecycle.open_requests)


def crashed(actor: str, message: object) -> ActorCrashed:
    crash = ActorCrashed(actor, type(message).__name__, ValueError("x"))
    crash.message = message
    return crash


def submit(number: int) -> Submit:
    return Submit(RequestId(number), "", Sampling(), _Listener(lambda _: None))


def test_only_the_same_message_of_a_request_twice_in_a_row_is_at_fault() -> None:
    faults = FaultAttribution()
    assert faults.at_fault(crashed("intake", submit(1))) is None
    assert faults.at_fault(crashed("intake", submit(2))) is None
    assert faults.at_fault(crashed("intake", Cancel(RequestId(2)))) is None
    assert faults.at_fault(crashed("scheduler", submit(2))) is None
    assert faults.at_fault(crashed("intake", None)) is None
    assert faults.at_fault(crashed("intake", submit(2))) is None
    assert faults.at_fault(crashed("intake", submit(2))) == 2
    assert faults.at_fault(crashed("intake", submit(2))) is None, "counting starts anew"


def test_message_about_several_requests_attributes_no_fault() -> None:
    faults = FaultAttribution()
    several = StepDone(1, 1, (RequestId(1), RequestId(2)), (5, 6))
    alone = StepDone(1, 1, (RequestId(1),), (5,))
    assert [faults.at_fault(crashed("scheduler", each)) for each in (several, several)] == [None, None]
    assert [faults.at_fault(crashed("scheduler", each)) for each in (alone, alone)] == [None, 1]


def test_message_about_all_requests_attributes_the_fault_to_the_request_before() -> None:
    faults = FaultAttribution()
    everything = Histories((), ())
    assert faults.at_fault(crashed("detokenizer", everything)) is None
    assert faults.at_fault(crashed("detokenizer", submit(3))) is None
    assert faults.at_fault(crashed("detokenizer", everything)) == 3


async def test_engine_stopped_during_a_recovery_closes_in_order() -> None:
    for actor in ACTORS:
        async with gated() as (engine, gate):
            streams = submitted(engine)
            gate.allow(10)
            await until(lambda gate=gate: gate.passed == 10)
            crash(engine, actor)
            gate.allow()
        for stream in streams.values():
            with suppress(errors.EngineClosed):
                assert (await stream.result()).finish_reason is FinishReason.LENGTH


async def test_device_of_a_lost_executor_is_free_before_the_next_is_loaded() -> None:
    """Two models would not fit where one fills the memory."""
    devices: list[weakref.ref[StubDevice]] = []
    alive: list[int] = []

    def load() -> StubDevice:
        alive.append(sum(each() is not None for each in devices))
        device = StubDevice(1024, 16, next_letter)
        devices.append(weakref.ref(device))
        return device

    facts = ModelFacts(vocab_size=257, context_length=4096, eos_token_ids=(256,))
    engine = Engine.from_parts("stub", lambda _: EngineParts(facts, Encoder(times=0), decode, load))
    gc.collect()
    gc.disable()
    try:
        async with asyncio.timeout(NET_SECONDS), engine:
            for lives in (2, 3):
                streams = submitted(engine)
                await died(engine, "executor")
                await check_all(streams)
                assert len(alive) == lives
    finally:
        gc.enable()
    assert alive == [0, 0, 0]
