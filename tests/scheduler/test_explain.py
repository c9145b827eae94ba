"""Why does my request wait? The scheduler's own account of each request's life, and what it does when nothing moves."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import pytest
from scheduling import (
    WatchedDevice,
    check,
    end_order,
    explained,
    finish,
    is_live,
    is_running,
    policy,
    preemptions,
    scheduler_of,
    step_until,
    tables_of,
)
from support import Core, expected_output

from cuelight import errors
from cuelight.actors.scheduler import admission
from cuelight.actors.scheduler.request import Request
from cuelight.actors.scheduler.timeline import ENDED_MAX, EVENTS_MAX, OBSTACLES_MAX
from cuelight.messages.cache import Admission
from cuelight.messages.request import FinishReason, RequestId, Sampling, Service
from cuelight.messages.scheduler import Admit, Explanation, Grant
from cuelight.testing import crash, stub_engine

PREFIX = list(range(500, 540))


def happened(explanation: Explanation) -> list[str]:
    return [each.what for each in explanation.timeline]


def reasons(explanation: Explanation) -> str:
    return "; ".join(each.why for each in explanation.timeline)


def in_order(explanation: Explanation) -> bool:
    seconds = [each.seconds for each in explanation.timeline]
    return seconds == sorted(seconds) and all(at >= 0 for at in seconds)


def test_a_life_without_trouble() -> None:
    core = Core(0, device=WatchedDevice(100, 4))
    assert explained(core, 0) == Explanation(RequestId(0), "unknown", ())
    core.admit(0, [1, 2, 3], Sampling(max_tokens=5))
    step_until(core, lambda: is_live(core, 0))
    assert explained(core, 0).state in ("waiting", "running")
    step_until(core, lambda: is_running(core, 0))
    assert explained(core, 0).state == "running" and happened(explained(core, 0)) == ["admitted"]
    finish(core)
    life = explained(core, 0)
    assert life.state == "length" and happened(life) == ["admitted", "length"]
    assert in_order(life) and life.timeline[1].seconds > life.timeline[0].seconds


def test_it_waits_for_a_seat() -> None:
    core = Core(0, device=WatchedDevice(100, 4), running_max=2)
    for request_id in range(3):
        core.admit(request_id, [1, request_id], Sampling(max_tokens=9))
    step_until(core, lambda: is_running(core, 1) and is_live(core, 2) and not core.engine.waiting("scheduler"))
    life = explained(core, 2)
    assert life.state == "waiting" and happened(life) == ["kept waiting"]
    assert life.timeline[0].why == "2 requests are running, the maximum"
    finish(core)
    assert happened(explained(core, 2)) == ["kept waiting", "admitted", "length"] and in_order(explained(core, 2))


def test_it_waits_for_budget() -> None:
    core = Core(0, device=WatchedDevice(100, 4), token_budget=4, running_max=8)
    core.admit(0, list(range(60)), Sampling(max_tokens=1))
    step_until(core, lambda: is_running(core, 0))
    core.admit(1, [1, 2], Sampling(max_tokens=1))
    finish(core)
    assert "use the whole token budget" in reasons(explained(core, 1))


def test_it_waits_for_blocks() -> None:
    core = Core(0, device=WatchedDevice(1 + 4, 4))
    for request_id in range(2):
        core.admit(request_id, [request_id] * 12, Sampling(max_tokens=3))
    step_until(core, lambda: "blocks" in reasons(explained(core, 1)))
    assert explained(core, 1).state == "waiting"
    finish(core)
    assert happened(explained(core, 1)) == ["kept waiting", "admitted", "length"]


def test_it_waits_while_suspects_run_alone() -> None:
    """Those of a failed step are computed again one by one, and nobody comes in between."""
    device = WatchedDevice(100, 4)
    core = Core(0, device=device, token_budget=4)
    core.admit(0, list(range(40)), Sampling(max_tokens=3))
    device.failures = 1
    step_until(core, lambda: preemptions(core) == 1)
    step_until(core, lambda: is_running(core, 0))
    core.admit(1, [4, 5], Sampling(max_tokens=1))
    finish(core)
    assert "requests of a failed step run alone" in reasons(explained(core, 1))
    assert "a step failed" in reasons(explained(core, 0))


def test_it_is_set_aside_for_a_prefix_and_that_is_said_once() -> None:
    core = Core(0, device=WatchedDevice(1 + 22, 4), token_budget=4, long_prefill_tokens=2)
    core.admit(0, [*PREFIX, 0], Sampling(max_tokens=12))
    core.admit(1, [*PREFIX, 1], Sampling(max_tokens=1))
    step_until(core, lambda: 1 in core.ends())
    life = explained(core, 1)
    assert happened(life).count("deferred") == 1
    assert "the prefix they share" in reasons(life)
    assert happened(life)[-2:] == ["admitted", "length"] and "40 tokens were cached" in reasons(life)
    finish(core)


def test_what_keeps_one_waiting_that_was_set_aside_is_said_too() -> None:
    core = Core(0, device=WatchedDevice(100, 4), token_budget=4, running_max=2, long_prefill_tokens=2)
    core.admit(0, [*PREFIX, 0], Sampling(max_tokens=30))
    core.admit(1, [*PREFIX, 1], Sampling(max_tokens=1))
    step_until(core, lambda: "deferred" in happened(explained(core, 1)))
    core.admit(2, [8, 8], Sampling(max_tokens=40))
    finish(core)
    life = explained(core, 1)
    assert happened(life).index("deferred") < happened(life).index("admitted")
    assert "2 requests are running" in reasons(life)


def test_it_is_preempted_and_comes_back() -> None:
    core = Core(0, device=WatchedDevice(1 + 12, 4), running_max=3)
    for request_id in range(3):
        core.admit(request_id, [request_id] * 8, Sampling(max_tokens=30))
    finish(core)
    life = explained(core, 2)
    assert in_order(life) and "another running request needed blocks" in reasons(life)
    events = [what for what in happened(life) if what != "kept waiting"]
    assert events == ["admitted"] + ["preempted", "admitted"] * core.ends()[2].preemptions + ["length"]


def test_it_expires_and_says_of_what() -> None:
    core = Core(0, device=WatchedDevice(100, 4), running_max=1)
    core.admit(0, [1, 2], Sampling(max_tokens=400))
    core.admit(1, [1, 2], Sampling(), service=Service(queue_seconds=0.1))
    core.admit(2, [1, 2], Sampling(), service=Service(deadline_seconds=0.2))
    core.admit(3, [1, 2], Sampling())
    step_until(core, lambda: {1, 2} <= set(core.ends()))
    core.abort(3)
    finish(core)
    assert explained(core, 1).state == explained(core, 2).state == "expired"
    assert explained(core, 3).state == "cancelled"
    assert explained(core, 1).timeline[-1].why == "it has waited for 0.1 s"
    assert explained(core, 2).timeline[-1].why == "its deadline has passed"
    assert explained(core, 1).timeline[-1].seconds == pytest.approx(0.1, abs=0.01)
    assert "kept waiting" in happened(explained(core, 1))


def test_a_life_of_many_preemptions_is_cut_at_its_beginning_and_says_nothing_wrong() -> None:
    core = Core(0, device=WatchedDevice(100, 4))
    scheduler, request = scheduler_of(core), Request(0, scheduler_admit(0))
    timeline = scheduler._state._timeline
    timeline.obstacle("the first", 1.0)
    timeline.obstacle("", 2.0)
    for turn in range(EVENTS_MAX):
        timeline.note(request, "admitted", "", 10.0 * turn + 5)
        timeline.obstacle("while it ran", 10.0 * turn + 6)
        timeline.obstacle("", 10.0 * turn + 7)
        timeline.note(request, "preempted", "", 10.0 * turn + 10)
    life = timeline.explain(request, "waiting")
    assert len([what for what in happened(life) if what != "kept waiting"]) == EVENTS_MAX
    assert "while it ran" not in reasons(life)


def scheduler_admit(request_id: int, priority: int = 0) -> Admit:
    return Admit(RequestId(request_id), (1, 2), Sampling(), 1000, Service(priority=priority), 0.0)


def test_memory_is_bounded_after_3000_requests() -> None:
    core = Core(0, device=WatchedDevice(1 + 8, 4), running_max=3, token_budget=16)
    timeline = scheduler_of(core)._state._timeline

    for request_id in range(3000):
        core.admit(request_id, [request_id % 7] * (1 + request_id % 9), Sampling(max_tokens=1 + request_id % 3))
        core.step()
    core.run()
    assert len(timeline._ended) == ENDED_MAX and not timeline._events
    assert len(timeline._obstacles) <= OBSTACLES_MAX
    assert all(len(life.timeline) <= EVENTS_MAX + OBSTACLES_MAX for life in timeline._ended.values())
    *_, forgotten = end_order(core)[:-ENDED_MAX]
    oldest, *_, newest = end_order(core)[-ENDED_MAX:]
    assert explained(core, forgotten).state == "unknown"
    assert explained(core, oldest).state == explained(core, newest).state == "length"
    assert sum(map(sys.getsizeof, (timeline._ended, timeline._obstacles))) < 200_000


# When nothing moves.


def plant(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Request], bool]) -> None:
    """Steps are planned without those for whom `fault` is true."""
    sound = admission.plan_step

    def plan_step(running, *limits, **others):  # type: ignore[no-untyped-def]  # as the sound one
        return [(request, count) for request, count in sound(running, *limits, **others) if not fault(request)]

    monkeypatch.setattr(admission, "plan_step", plan_step)


def run_to_rest(core: Core) -> int:
    """Messages delivered until nothing is left to deliver."""
    for count in range(20_000):
        if not core.step():
            return count
    raise AssertionError("it spins")


@pytest.mark.parametrize("seed", range(5))
def test_rule_liveness_a_planner_that_plans_nothing_ends_everybody(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda request: True)
    core = Core(seed, device=WatchedDevice(100, 4), running_max=3)
    for request_id in range(8):
        core.admit(request_id, [request_id, 1], Sampling())
    assert run_to_rest(core) < 300
    assert len(core.ends()) == 8
    for end in core.ends().values():
        assert end.reason is FinishReason.FAILED and "no progress is possible" in end.error
    assert core.blocks().blocks_free == core.blocks().blocks_total
    assert explained(core, 3).timeline[-1].why == core.ends()[3].error


@pytest.mark.parametrize("seed", range(5))
def test_rule_liveness_one_that_is_never_planned_fails_and_the_others_go_on(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, lambda request: request.request_id == 2)
    core = Core(seed, device=WatchedDevice(100, 4), running_max=3)
    for request_id in range(6):
        core.admit(request_id, [request_id, 1], Sampling(max_tokens=4))
    run_to_rest(core)
    assert core.ends()[2].reason is FinishReason.FAILED and "no step can be planned" in core.ends()[2].error
    for request_id in (0, 1, 3, 4, 5):
        assert core.outputs()[request_id] == expected_output([request_id, 1], Sampling(max_tokens=4))[0]
    assert core.blocks().blocks_free == core.blocks().blocks_total


@pytest.mark.parametrize("name", ["fcfs", "priority"])
@pytest.mark.parametrize("culprits", [{2}, set(range(6))])
def test_rule_liveness_a_cache_that_refuses_for_ever(
    culprits: set[int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only whoever is refused fails, even where another has come to the head of the queue meanwhile."""
    for seed in range(20):
        core = Core(seed, device=WatchedDevice(100, 4), running_max=3, policy=policy(name))
        step_until(core, lambda core=core: scheduler_of(core)._state.pool and not core.engine.waiting("cache"))
        tables = tables_of(core)
        sound = tables.admit

        def admit(admission: Admission, sound: Callable[[Admission], Grant | None] = sound) -> Grant | None:
            return None if admission.request_id in culprits else sound(admission)

        monkeypatch.setattr(tables, "admit", admit)
        for request_id in range(6):
            core.admit(request_id, [request_id, 1], Sampling(max_tokens=4), service=Service(priority=request_id))
            for _ in range(core.chance.randint(0, 3)):
                core.step()
        assert run_to_rest(core) < 600
        for request_id, end in core.ends().items():
            if request_id in culprits:
                assert end.reason is FinishReason.FAILED and "does not fit the block pool" in end.error
            else:
                assert end.reason is FinishReason.LENGTH, (seed, request_id, end.error)
        assert len(core.ends()) == 6
        assert core.blocks().blocks_free == core.blocks().blocks_total


def test_rule_liveness_whoever_was_refused_fails_and_not_who_came_in_front_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = Core(0, device=WatchedDevice(100, 4), policy=policy("priority"))
    step_until(core, lambda: scheduler_of(core)._state.pool and not core.engine.waiting("cache"))
    tables = tables_of(core)
    sound = tables.admit
    monkeypatch.setattr(tables, "admit", lambda admission: sound(admission) if admission.request_id else None)
    scheduler = scheduler_of(core)
    scheduler.handle(scheduler_admit(0))
    assert scheduler._state._block_requests.candidates == {0}
    scheduler.handle(scheduler_admit(1, priority=9))
    run_to_rest(core)
    assert core.ends()[0].reason is FinishReason.FAILED and "does not fit the block pool" in core.ends()[0].error
    assert core.ends()[1].reason is FinishReason.LENGTH


def test_rule_liveness_a_cache_that_sets_everybody_aside_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core(0, device=WatchedDevice(100, 4), running_max=3)
    step_until(core, lambda: scheduler_of(core)._state.pool and not core.engine.waiting("cache"))
    monkeypatch.setattr(tables_of(core), "is_being_computed", lambda admission: True)
    for request_id in range(5):
        core.admit(request_id, [request_id, 1], Sampling(max_tokens=4))
    assert run_to_rest(core) < 200
    assert len(core.ends()) == 5
    assert all("all wait for a prefix" in end.error for end in core.ends().values())


def test_before_the_executor_is_ready_nothing_is_given_up() -> None:
    core = Core(0, device=WatchedDevice(100, 4))
    core.scheduler.actor, scheduler = None, core.scheduler.actor
    assert scheduler is not None
    for request_id in range(3):
        scheduler.handle(scheduler_admit(request_id))
    assert not core.ends()
    core.scheduler.actor = scheduler
    finish(core)
    assert all(end.reason is FinishReason.LENGTH for end in core.ends().values())
    check(core)


async def test_where_nobody_answers_the_engine_says_why() -> None:
    async with stub_engine() as engine:
        crash(engine, "scheduler")
        with pytest.raises(errors.EngineBusy, match=r"no answer within 0\.001 s"):
            await engine.explain(1, timeout_seconds=0.001)
        asked = asyncio.create_task(engine.explain(1, timeout_seconds=0.001))
        await asyncio.sleep(0)
        await engine.stop()
        with pytest.raises(errors.EngineClosed):
            await asked


async def test_a_request_on_its_way_to_the_scheduler_waits() -> None:
    async with stub_engine() as engine:
        stream = engine.stream("hi", max_tokens=2)
        assert (await engine.explain(stream.request_id)).state == "waiting"
        await stream.result()
