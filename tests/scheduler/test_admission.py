"""Who comes in when: one that does not fit shuts the door only while it is next, and nobody gives way for nothing."""

from __future__ import annotations

import pytest
from scheduling import (
    WatchedDevice,
    check,
    explained,
    finish,
    is_live,
    is_running,
    policy,
    preemptions,
    running,
    scheduler_of,
    step_until,
    tracked,
)
from support import Core

from cuelight.actors.scheduler.admission import NEXT_IN_LINE_WAIT
from cuelight.messages.request import Sampling, Service
from cuelight.messages.scheduler import SetPolicy

LONG = Sampling(max_tokens=100, ignore_eos=True)


def refused_core(seed: int, chosen: SetPolicy, **large: float) -> Core:
    """Request 0 decodes for long and needs no more blocks, three are free, and 1 has been refused the four it wants."""
    core = Core(seed, device=WatchedDevice(1 + 4, 64), policy=chosen)
    core.admit(0, [7] * 3, Sampling(max_tokens=60, ignore_eos=True), service=Service("a"))
    step_until(core, lambda: len(core.outputs().get(0, [])) > 5)
    core.admit(1, [8] * 200, Sampling(max_tokens=1), service=Service("b", **large))
    step_until(core, lambda: scheduler_of(core)._state._gate._refused is not None)
    return core


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_when_the_one_that_did_not_fit_leaves_the_next_is_tried_at_once(how: str, seed: int) -> None:
    core = refused_core(seed, policy("fcfs"), **({"queue_seconds": 0.2} if how == "expired" else {}))
    core.admit(2, [9] * 4, Sampling(max_tokens=1))
    step_until(core, lambda: is_live(core, 2))
    assert not is_running(core, 2), "it waits behind the large one"
    if how == "cancelled":
        core.abort(1)
    else:
        core.engine.pass_time(1.0)
    step_until(core, lambda: 1 in core.ends())
    step_until(core, lambda: 2 in core.ends(), steps_max=60)
    assert is_live(core, 0)
    finish(core)


@pytest.mark.parametrize("seed", range(6))
def test_fair_when_another_tenant_comes_before_the_one_that_did_not_fit_it_is_tried(seed: int) -> None:
    """Nobody joins or leaves: what a tenant is charged for changes the order."""
    core = refused_core(seed, policy("fair"))
    scheduler = scheduler_of(core)
    scheduler._state._queue.charge(tracked(0, Service("c")), 10.0)
    core.admit(2, [9] * 4, Sampling(max_tokens=1), service=Service("c"))
    step_until(core, lambda: is_live(core, 2))
    for _ in range(10):
        core.step()
        check(core)
    assert not is_running(core, 2), "it waits behind the large one"
    scheduler._state._queue.charge(tracked(0, Service("b")), 500.0)
    step_until(core, lambda: 2 in core.ends(), steps_max=60)
    assert is_live(core, 0) and is_live(core, 1) and preemptions(core) == 0
    finish(core)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("token_budget", [2, 4, 8])
def test_fair_decodes_that_fill_every_step_keep_nobody_from_its_share(token_budget: int, seed: int) -> None:
    """With one that decodes less, there is a token for the one that comes."""
    core = Core(seed, device=WatchedDevice(400, 4), running_max=64, token_budget=token_budget, policy=policy("fair"))
    for request_id in range(12):
        core.admit(request_id, [request_id] * 4, Sampling(max_tokens=40, ignore_eos=True), service=Service("long"))
    step_until(core, lambda: len(core.outputs()) == token_budget)
    core.admit(100, [50] * 4, Sampling(max_tokens=4), service=Service("short"))
    step_until(core, lambda: 100 in core.ends(), steps_max=300)
    assert preemptions(core) == 1 and len(core.ends()) == 1
    finish(core)


@pytest.mark.parametrize("seed", range(4))
def test_fair_nobody_gives_way_again_to_one_that_still_has_no_room(seed: int) -> None:
    """It wants nearly all blocks, and within the leeway: a seat is no help until those that run give theirs back."""
    core = Core(seed, device=WatchedDevice(1 + 45, 4), running_max=4, policy=policy("fair"))
    for request_id in range(6):
        sampling = Sampling(max_tokens=12 + 3 * request_id, ignore_eos=True)
        core.admit(request_id, [request_id] * 24, sampling, service=Service("a"))
    for request_id in range(10, 30):
        core.admit(request_id, [request_id] * 20, Sampling(max_tokens=15, ignore_eos=True), service=Service("a"))
    step_until(core, lambda: running(core) == 4)
    core.admit(100, [50] * 150, Sampling(max_tokens=4), service=Service("b"))
    step_until(core, lambda: is_live(core, 100))
    scheduler_of(core)._state._queue.charge(tracked(0, Service("b")), 1_000.0)
    step_until(core, lambda: 100 in core.ends())
    assert preemptions(core) <= len(core.ends())
    finish(core)


def test_fair_whoever_waits_for_its_tenant_s_part_of_a_step_is_told_so() -> None:
    core = Core(0, device=WatchedDevice(4000, 4), token_budget=32, long_prefill_tokens=8, policy=policy("fair"))
    core.admit(0, [5] * 3, LONG, service=Service("b"))
    for request_id in (1, 2):
        core.admit(request_id, [request_id] * 200, Sampling(max_tokens=4), service=Service("a"))
    step_until(core, lambda: is_running(core, 1))
    step_until(core, lambda: is_running(core, 2))
    assert NEXT_IN_LINE_WAIT in [moment.why for moment in explained(core, 2).timeline]
    finish(core)
