"""Service options of requests, deadlines that end requests, and the retry time of a full queue."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
from msgspec.structs import asdict
from scheduling import (
    WatchedDevice,
    check,
    end_order,
    finish,
    is_live,
    is_running,
    policy,
    preemptions,
    scheduler_of,
    step_until,
    tracked,
)
from support import Core, expected_output

from cuelight import errors
from cuelight.actors.intake.admission import CompletionRate
from cuelight.actors.intake.errors import Refused
from cuelight.actors.intake.parsing import PRIORITY_MAX, check_tenant, parse_service
from cuelight.actors.scheduler.request import RequestDeadlines
from cuelight.config import POLICIES, EngineConfig
from cuelight.kernel import Timer
from cuelight.messages.request import FinishReason, Refusal, RequestId, Sampling, Service
from cuelight.testing import next_letter, stub_engine


class Name(str):
    """A subclass of str."""


# Valid and invalid service options.


@pytest.mark.parametrize(
    ("options", "service"),
    [
        ({}, Service()),
        ({"tenant": Name("a"), "priority": np.int64(3)}, Service("a", 3)),
        ({"priority": -PRIORITY_MAX, "queue_seconds": 1}, Service("", -PRIORITY_MAX, 1.0)),
        ({"queue_seconds": np.float32(0.5), "deadline_seconds": Fraction(1, 4)}, Service("", 0, 0.5, 0.25)),
        ({"tenant": "x" * 256, "deadline_seconds": None}, Service("x" * 256)),
        ({"tenant": "é"}, Service("é")),
    ],
)
def test_options_become_plain_types(options: dict[str, object], service: Service) -> None:
    parsed = parse_service(options)
    assert parsed == service
    for value in (parsed.tenant, parsed.priority, parsed.queue_seconds, parsed.deadline_seconds):
        assert type(value) in (str, int, float, type(None))
    assert parse_service(asdict(parsed)) == parsed, "parsing a Service returns an equal one"


@pytest.mark.parametrize(
    ("options", "refusal", "words"),
    [
        ({"tenant": 3}, Refusal.WRONG_TYPE, "tenant must be a name, and it is of type int"),
        ({"tenant": None}, Refusal.WRONG_TYPE, "it is None"),
        ({"tenant": b"a"}, Refusal.WRONG_TYPE, "type bytes"),
        ({"tenant": "x" * 257}, Refusal.BAD_SERVICE, "257 characters"),
        ({"tenant": "a\ud800"}, Refusal.BAD_SERVICE, "lone surrogate"),
        ({"priority": True}, Refusal.WRONG_TYPE, "type bool"),
        ({"priority": 1.0}, Refusal.WRONG_TYPE, "type float"),
        ({"priority": "1"}, Refusal.WRONG_TYPE, "type str"),
        ({"priority": None}, Refusal.WRONG_TYPE, "None"),
        ({"priority": PRIORITY_MAX + 1}, Refusal.BAD_SERVICE, "within 1000000 of 0"),
        ({"priority": -(10**6000)}, Refusal.BAD_SERVICE, "a number of 19932 bits"),
        ({"queue_seconds": 0}, Refusal.BAD_SERVICE, "queue_seconds is 0.0"),
        ({"queue_seconds": -1.5}, Refusal.BAD_SERVICE, "-1.5"),
        ({"deadline_seconds": math.nan}, Refusal.BAD_SERVICE, "deadline_seconds is nan"),
        ({"deadline_seconds": math.inf}, Refusal.BAD_SERVICE, "inf"),
        ({"deadline_seconds": 10**6000}, Refusal.BAD_SERVICE, "inf"),
        ({"deadline_seconds": Fraction(1, 10**6000)}, Refusal.BAD_SERVICE, "0.0"),
        ({"deadline_seconds": np.float64("nan")}, Refusal.BAD_SERVICE, "nan"),
        ({"deadline_seconds": True}, Refusal.WRONG_TYPE, "type bool"),
        ({"queue_seconds": "3"}, Refusal.WRONG_TYPE, "type str"),
        ({"queue_seconds": 1j}, Refusal.WRONG_TYPE, "type complex"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, object], refusal: Refusal, words: str) -> None:
    with pytest.raises(Refused) as refused:
        parse_service(options)
    assert refused.value.refusal is refusal and words in refused.value.reason


def test_unknown_tenant_is_refused_where_tenants_are_configured() -> None:
    check_tenant("a", None)
    check_tenant("a", ("a", "b"))
    with pytest.raises(Refused, match="unknown tenant 'c'") as refused:
        check_tenant("c", ("a", "b"))
    assert refused.value.refusal is Refusal.UNKNOWN_TENANT


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "lottery"},
        {"policy": None},
        {"policy": []},
        {"aging_seconds": 0},
        {"aging_seconds": -1},
        {"aging_seconds": math.nan},
        {"aging_seconds": math.inf},
        {"aging_seconds": True},
        {"aging_seconds": "10"},
        {"tenant_weights": {}},
        {"tenant_weights": ["a"]},
        {"tenant_weights": {"a": 0}},
        {"tenant_weights": {"a": -2.0}},
        {"tenant_weights": {"a": math.nan}},
        {"tenant_weights": {"a": True}},
        {"tenant_weights": {1: 1.0}},
    ],
)
def test_invalid_policies_are_refused_at_construction(options: dict[str, object]) -> None:
    with pytest.raises(errors.ConfigError):
        EngineConfig.of(options)
    engine = stub_engine()
    with pytest.raises(errors.ConfigError):
        engine.set_policy(**{"policy": "fcfs", **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1, True, 2.5, "8"])
def test_long_prefill_is_a_count(value: object) -> None:
    with pytest.raises(errors.ConfigError, match="long_prefill_tokens"):
        EngineConfig.of({"long_prefill_tokens": value})


# On a running engine.


async def test_every_refusal_is_typed_at_submit() -> None:
    async with stub_engine(tenant_weights={"a": 1, "b": 2.5}) as engine:
        for options, kind in (
            ({"tenant": "a", "deadline_seconds": 0}, errors.BadService),
            ({"tenant": "a", "queue_seconds": math.nan}, errors.BadService),
            ({"tenant": "a", "priority": 10**9}, errors.BadService),
            ({"tenant": "a", "deadline_seconds": 10**400}, errors.BadService),
            ({"tenant": "a", "priority": True}, errors.WrongType),
            ({"tenant": "a", "deadlines": 1}, errors.UnknownField),
            ({"tenant": 1}, errors.WrongType),
        ):
            with pytest.raises(kind) as refused:
                engine.stream("hi", **options)  # type: ignore[arg-type]
            assert type(refused.value) is kind and isinstance(refused.value, ValueError)
        for tenant in ("", "c"):
            with pytest.raises(errors.UnknownTenant):
                await engine.generate("hi", tenant=tenant)
        assert (await engine.generate("hi", tenant="b", priority=-3, max_tokens=2)).text


async def test_policy_is_replaced_while_the_engine_runs() -> None:
    async with stub_engine(running_max=2, token_budget=8) as engine:
        calls = [engine.generate(f"prompt {i}", max_tokens=30, tenant="ab"[i % 2]) for i in range(40)]
        work = [asyncio.create_task(call) for call in calls]
        for name in (*POLICIES, *POLICIES):
            with pytest.raises(errors.ConfigError):
                engine.set_policy(name, tenant_weights={"a": 0.0})
            engine.set_policy(name, aging_seconds=0.1, tenant_weights={"a": 1, "b": 3})
            await work[POLICIES.index(name)]
        with pytest.raises(errors.UnknownTenant):
            await engine.generate("hi")
        engine.set_policy("fcfs")
        assert (await engine.generate("hi", tenant="anybody", max_tokens=1)).text
        results = await asyncio.gather(*work)
        alone = [await engine.generate(f"prompt {i}", max_tokens=30) for i in range(40)]
    assert [result.text for result in results] == [result.text for result in alone]
    with pytest.raises(errors.EngineUnavailable):
        engine.set_policy("fair")


class Gate:
    """A stub's next token, which waits until the gate opens."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, token_ids: Sequence[int]) -> int:
        self.reached.set()
        assert self.opened.wait(60)
        return next_letter(token_ids)


async def test_deadlines_and_explanations_of_an_engine() -> None:
    gate = Gate()
    async with stub_engine(next_token=gate, running_max=1) as engine:
        running = engine.stream("first", max_tokens=3)
        waiting = engine.stream("second", queue_seconds=0.01)
        late = engine.stream("third", deadline_seconds=0.01)
        with pytest.raises(errors.DeadlineExceeded, match=r"waited for 0\.01 s") as expired:
            await waiting.result()
        assert isinstance(expired.value, errors.RequestFailed)
        with pytest.raises(errors.DeadlineExceeded, match="deadline"):
            async for _ in late:
                raise AssertionError("a chunk was sent")
        assert (await engine.explain(late.request_id)).state == "expired"
        assert (await engine.explain(running.request_id)).state == "running"
        assert (await engine.explain(10_000)).state == "unknown"
        gate.opened.set()
        assert len((await running.result()).token_ids) == 3
        assert engine.stats().blocks_free == engine.stats().blocks_total
    with pytest.raises(errors.EngineUnavailable):
        await engine.explain(1)


async def test_full_queue_says_when_there_is_room() -> None:
    gate = Gate()
    async with stub_engine(next_token=gate, queue_limit=2) as engine:
        held = [engine.stream(f"held {i}", max_tokens=2) for i in range(2)]
        with pytest.raises(errors.QueueFull) as refused:
            await engine.generate("one more")
        assert refused.value.retry_after_seconds is None, "no request has finished yet"
        gate.opened.set()
        for stream in held:
            await stream.result()
        for _ in range(3):
            await engine.generate("again", max_tokens=2)
        gate.opened.clear()
        held = [engine.stream(f"held {i}", max_tokens=2) for i in range(2)]
        with pytest.raises(errors.QueueFull) as refused:
            await engine.generate("one more")
        assert refused.value.retry_after_seconds is not None and 0 < refused.value.retry_after_seconds < math.inf
        gate.opened.set()


def test_completion_rate_counts_the_last_64_ends() -> None:
    rate = CompletionRate()
    assert rate.seconds_for(1) is None
    rate.note(5, now=10.0)
    assert rate.seconds_for(1) is None, "a rate needs two moments"
    rate.note(1, now=12.0)
    assert rate.seconds_for(1) == pytest.approx(0.4)
    assert rate.seconds_for(10) == pytest.approx(4.0)
    for second in range(100):
        rate.note(1, now=20.0 + second)
    assert rate.seconds_for(3) == pytest.approx(3.0), "only the last 64 count"


# Deadlines, in every state.


def expired(core: Core, request_id: int) -> str:
    end = core.ends()[request_id]
    assert end.reason is FinishReason.EXPIRED
    return end.error


@pytest.mark.parametrize("seed", range(5))
def test_request_waiting_beyond_its_limit_expires(seed: int) -> None:
    core = Core(seed, device=WatchedDevice(100, 4), running_max=1)
    core.admit(0, [1, 2], Sampling(max_tokens=200))
    core.admit(1, [3, 4], Sampling(), service=Service(queue_seconds=0.1))
    core.admit(2, [5, 6], Sampling(), service=Service(deadline_seconds=0.2))
    step_until(core, lambda: 2 in core.ends())
    assert expired(core, 1) == "it has waited for 0.1 s" and expired(core, 2) == "its deadline has passed"
    assert core.ends()[1].queued_seconds == pytest.approx(0.1, abs=0.02)
    assert is_live(core, 0) and core.outputs().keys() <= {0}
    finish(core)
    assert core.outputs()[0] == expected_output([1, 2], Sampling(max_tokens=200))[0]


@pytest.mark.parametrize("seed", range(5))
def test_queue_deadline_ends_at_admission_even_if_preempted_later(seed: int) -> None:
    core = Core(seed, device=WatchedDevice(1 + 12, 4), running_max=3)
    for request_id in range(3):
        core.admit(request_id, [request_id] * 8, Sampling(max_tokens=30), service=Service(queue_seconds=0.1))
    step_until(core, lambda: preemptions(core) > 0)
    core.engine.pass_time(100.0)
    finish(core)
    assert all(end.reason is FinishReason.LENGTH for end in core.ends().values())


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("state", ["waiting", "running", "in flight", "preempted", "set aside", "asked for"])
def test_deadline_ends_a_request_in_any_state(state: str, seed: int) -> None:
    """The request ends once, its blocks are freed, and all other requests are unaffected."""
    core = Core(seed, device=WatchedDevice(1 + 12, 4), token_budget=6, running_max=3, long_prefill_tokens=3)
    prefix, sampling = list(range(60, 76)), Sampling(max_tokens=20)
    for request_id in range(3):
        prompt = [*prefix, request_id] if state == "set aside" else [request_id] * 8
        core.admit(request_id, prompt, sampling, service=Service(deadline_seconds=50.0 if request_id == 2 else None))
    scheduler = scheduler_of(core)
    step_until(core, lambda: is_live(core, 2))
    victim = scheduler._state.requests[RequestId(2)]
    reached: dict[str, Callable[[], bool]] = {
        "waiting": lambda: not victim.running,
        "running": lambda: victim.running,
        "in flight": lambda: victim.pending > 0,
        "preempted": lambda: victim.preemptions > 0 and not victim.running,
        "set aside": lambda: victim in scheduler._state._gate.prefix_waiters,
        "asked for": lambda: (
            victim.request_id in scheduler._state._block_requests.candidates
            and scheduler._state._block_requests.asked is not None
        ),
    }
    step_until(core, reached[state])
    core.engine.pass_time(max(0.0, 50.0 - core.now()))
    finish(core)
    assert expired(core, 2) == "its deadline has passed"
    for request_id in range(2):
        prompt = [*prefix, request_id] if state == "set aside" else [request_id] * 8
        assert core.outputs()[request_id] == expected_output(prompt, sampling)[0]
    tokens, _ = expected_output([*prefix, 2] if state == "set aside" else [2] * 8, sampling)
    got = core.outputs().get(2, [])
    assert got == tokens[: len(got)] and len(got) == core.ends()[2].usage.output_tokens


def test_deadline_that_passed_before_admission() -> None:
    core = Core(0, device=WatchedDevice(100, 4), running_max=1)
    core.admit(0, [1, 2], Sampling(max_tokens=50))
    step_until(core, lambda: is_running(core, 0))
    core.admit(1, [1, 2], Sampling(), service=Service(deadline_seconds=0.5))
    core.engine.pass_time(1.0)
    step_until(core, lambda: 1 in core.ends())
    assert is_live(core, 0) and expired(core, 1)
    finish(core)


class Timers:
    """Counts the timers that are set."""

    def __init__(self) -> None:
        self.set: list[float] = []
        self.cancelled = 0

    def after(self, seconds: float) -> Timer:
        self.set.append(seconds)
        return self

    def cancel(self) -> None:
        self.cancelled += 1


def test_ten_thousand_deadlines_use_one_timer() -> None:
    timers = Timers()
    deadlines = RequestDeadlines(timers.after)
    requests = [tracked(n, Service(deadline_seconds=10.0 + n, queue_seconds=20_000.0)) for n in range(10_000)]
    for request in requests:
        deadlines.add(request, now=0.0)
    assert timers.set == [10.0] and timers.cancelled == 0
    assert deadlines.due(now=9.9) == [], "a timer may fire early"
    assert len(timers.set) - timers.cancelled == 1
    late = deadlines.due(now=10.0 + 4_999)
    assert late == requests[:5_000]
    assert len(timers.set) - timers.cancelled == 1 and timers.set[-1] == 1.0
    deadlines.add(tracked(10_000, Service(deadline_seconds=0.5), at=5_009.0), now=5_009.0)
    assert timers.set[-1] == 0.5 and len(timers.set) - timers.cancelled == 1


def test_far_deadlines_of_ended_requests_are_dropped() -> None:
    deadlines = RequestDeadlines(Timers().after)
    for number in range(20_000):
        request = tracked(number, Service(deadline_seconds=1e9, queue_seconds=1e8))
        deadlines.add(request, now=0.0)
        if number % 100:
            deadlines.forget(request)
    assert len(deadlines._live) == 200
    assert len(deadlines._moments) <= 4 * 200 + 64 + 2
    assert len(deadlines.due(now=2e8)) == 200


def test_simultaneous_deadlines_leave_the_other_requests_running() -> None:
    core = Core(0, device=WatchedDevice(100, 4), running_max=4, policy=policy("deadline"))
    for request_id in range(300):
        deadline = 0.15 if request_id % 3 else None
        core.admit(request_id, [request_id, 1], Sampling(max_tokens=3), service=Service(deadline_seconds=deadline))
    core.run()
    check(core)
    finish(core)
    assert len(end_order(core)) == 300
    for request_id, end in core.ends().items():
        assert end.reason is FinishReason.LENGTH or (request_id % 3 and end.reason is FinishReason.EXPIRED)
    reasons = [end.reason for end in core.ends().values()]
    assert reasons.count(FinishReason.EXPIRED) > 100
