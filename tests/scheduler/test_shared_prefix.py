"""Requests that arrive together with one prefix: it is computed once, whatever happens to whoever computes it."""

from __future__ import annotations

import random

import pytest
from scheduling import (
    WatchedDevice,
    check,
    finish,
    is_live,
    is_running,
    policy,
    scheduler_of,
    step_until,
    tables_of,
)
from support import Core, expected_output

from cuelight.actors.scheduler.admission import DEFERRED_MAX
from cuelight.messages.cache import Admission
from cuelight.messages.request import FinishReason, RequestId, Sampling, Service

PREFIX = list(range(500, 540))


def together(core: Core, count: int, sampling: Sampling, prefix: list[int] = PREFIX) -> None:
    for request_id in range(count):
        core.admit(request_id, [*prefix, request_id], sampling)


def outputs_are_right(core: Core, request_ids: range, sampling: Sampling, prefix: list[int] = PREFIX) -> None:
    for request_id in request_ids:
        assert core.ends()[request_id].reason is FinishReason.LENGTH, core.ends()[request_id].error
        assert core.outputs()[request_id] == expected_output([*prefix, request_id], sampling)[0]


@pytest.mark.parametrize("token_budget", [3, 8, 41, 512])
@pytest.mark.parametrize("seed", range(6))
def test_a_prefix_is_computed_once(seed: int, token_budget: int) -> None:
    """Each of the others computes its own last block, and one token for each output token but the last."""
    device = WatchedDevice(200, 4)
    core = Core(seed, device=device, token_budget=token_budget, running_max=8)
    sampling = Sampling(max_tokens=3)
    together(core, 12, sampling)
    finish(core)
    outputs_are_right(core, range(12), sampling)
    assert device.computed() == 41 + 11 * 1 + 12 * 2


def test_without_a_common_block_nobody_waits_for_another() -> None:
    device = WatchedDevice(200, 4)
    core = Core(0, device=device, token_budget=512)
    for request_id in range(6):
        core.admit(request_id, [request_id, *PREFIX], Sampling(max_tokens=1))
    finish(core)
    assert len(device.seen) <= 3 and device.computed() == 6 * 41
    assert all(end.usage.cached_tokens == 0 for end in core.ends().values())


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("token_budget", [7, 13, 20])
def test_chunks_of_one_token_are_no_decodes(block_size: int, token_budget: int) -> None:
    """Prompts whose last chunk holds a single token, before and after the hit, for a leader and for those behind it."""
    for length in range(token_budget - 1, 3 * token_budget + 3):
        device = WatchedDevice(2 + 4 * -(-(length + 9) // block_size), block_size)
        core = Core(length, device=device, token_budget=token_budget, running_max=4)
        prefix, sampling = PREFIX[:1] * length, Sampling(max_tokens=2)
        together(core, 4, sampling, prefix)
        finish(core)
        outputs_are_right(core, range(4), sampling, prefix)


def leader_in_the_middle(seed: int, count: int = 5, service: Service | None = None) -> tuple[Core, WatchedDevice]:
    """The first request has computed a part of the prefix that the others wait for."""
    device = WatchedDevice(100, 4)
    core = Core(seed, device=device, token_budget=8, running_max=8)
    core.admit(0, [*PREFIX, 0], Sampling(max_tokens=4), service=service or Service())
    for request_id in range(1, count):
        core.admit(request_id, [*PREFIX, request_id], Sampling(max_tokens=4))
    step_until(core, lambda: device.computed([0]) >= 16)
    assert not any(is_running(core, request_id) for request_id in range(1, count))
    return core, device


@pytest.mark.parametrize("seed", range(6))
def test_a_leader_that_is_cancelled_is_followed_by_another(seed: int) -> None:
    core, device = leader_in_the_middle(seed)
    core.abort(0)
    finish(core)
    outputs_are_right(core, range(1, 5), Sampling(max_tokens=4))
    assert device.computed(range(1, 5)) <= 41 + 3 * 1 + 4 * 3, "what it had computed is not lost, nor done twice"


@pytest.mark.parametrize("seed", range(6))
def test_a_leader_that_expires_is_followed_by_another(seed: int) -> None:
    core, _ = leader_in_the_middle(seed, service=Service(deadline_seconds=5.0))
    core.engine.pass_time(5.0 - core.now())
    finish(core)
    assert core.ends()[0].reason is FinishReason.EXPIRED
    outputs_are_right(core, range(1, 5), Sampling(max_tokens=4))


@pytest.mark.parametrize("seed", range(6))
def test_a_leader_whose_steps_fail_is_followed_by_another(seed: int) -> None:
    core, device = leader_in_the_middle(seed)
    device.poison.add(0)
    finish(core)
    assert core.ends()[0].reason is FinishReason.FAILED
    outputs_are_right(core, range(1, 5), Sampling(max_tokens=4))


@pytest.mark.parametrize("seed", range(6))
def test_after_one_failed_step_the_leader_goes_on_and_the_others_too(seed: int) -> None:
    core, device = leader_in_the_middle(seed)
    device.failures = 1
    finish(core)
    outputs_are_right(core, range(5), Sampling(max_tokens=4))


def test_a_leader_that_is_preempted_goes_on_later() -> None:
    """One that runs already grows into the blocks of the leader, who is the newest."""
    for seed in range(20):
        device = WatchedDevice(1 + 17, 4)
        core = Core(seed, device=device, token_budget=5, running_max=8)
        core.admit(9, [1, 2, 3], Sampling(max_tokens=50))
        step_until(core, lambda core=core: len(core.outputs().get(9, [])) >= 14)
        together(core, 3, Sampling(max_tokens=4))
        finish(core)
        outputs_are_right(core, range(3), Sampling(max_tokens=4))
        assert core.ends()[9].preemptions == 0 < core.ends()[0].preemptions


@pytest.mark.parametrize("seed", range(10))
def test_the_leader_leaves_at_any_moment(seed: int) -> None:
    """Also between the question for blocks and its answer, which says then that somebody waits for the leader."""
    for moment in range(4, 40):
        core = Core(seed, device=WatchedDevice(100, 4), token_budget=8, running_max=8)
        together(core, 3, Sampling(max_tokens=2))
        for _ in range(moment):
            core.step()
            check(core)
        core.abort(0)
        finish(core)
        outputs_are_right(core, range(1, 3), Sampling(max_tokens=2))


@pytest.mark.parametrize("seed", range(15))
def test_those_who_wait_are_not_forgotten_when_the_last_block_comes_meanwhile(seed: int) -> None:
    """The prefix is complete between the question and the answer that sets the others aside; the leader runs on."""
    for moment in range(4, 40, 2):
        device = WatchedDevice(200, 4)
        core = Core(seed, device=device, token_budget=16, running_max=8, long_prefill_tokens=8)
        core.admit(0, [*PREFIX, 0], Sampling(max_tokens=200))
        for _ in range(moment):
            core.step()
        core.admit(1, [*PREFIX, 1], Sampling(max_tokens=2))
        step_until(core, lambda core=core: 1 in core.ends())
        assert len(core.outputs().get(0, [])) < 60, "the second does not wait for the end of the first"
        core.abort(0)
        finish(core)


@pytest.mark.parametrize("seed", range(10))
def test_those_behind_one_that_is_set_aside_go_on(seed: int) -> None:
    core, device = leader_in_the_middle(seed)
    core.admit(7, [9, 9], Sampling(max_tokens=1))
    step_until(core, lambda: not is_live(core, 7))
    assert device.computed(range(1, 5)) == 0 and is_live(core, 0)
    finish(core)
    outputs_are_right(core, range(5), Sampling(max_tokens=4))


@pytest.mark.parametrize("seed", range(10))
def test_those_behind_many_that_are_set_aside_go_on_at_once(seed: int) -> None:
    """There is one seat left, and each that is tried for it waits for the leader, who could use every step alone."""
    device = WatchedDevice(400, 4)
    core = Core(seed, device=device, token_budget=8, running_max=2, long_prefill_tokens=4)
    prefix = list(range(2000, 2200))
    together(core, 20, Sampling(max_tokens=1), prefix)
    core.admit(50, [9, 9], Sampling(max_tokens=1))
    step_until(core, lambda: 50 in core.ends())
    assert device.computed([0]) <= 64, "it has not waited for the leader's two hundred tokens"
    finish(core)
    outputs_are_right(core, range(20), Sampling(max_tokens=1), prefix)


def test_who_is_set_aside_is_tried_twice_and_not_at_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once to be set aside, once to be admitted; the leader's prompt takes fifty steps."""
    core = Core(1, device=WatchedDevice(400, 4), token_budget=8, running_max=16, long_prefill_tokens=4)
    prefix = list(range(2000, 2200))
    asked: list[int] = []
    step_until(core, lambda: scheduler_of(core)._state.pool and not core.engine.waiting("cache"))
    tables = tables_of(core)
    sound = tables.is_being_computed

    def is_being_computed(admission: Admission) -> bool:
        asked.append(admission.request_id)
        return sound(admission)

    monkeypatch.setattr(tables, "is_being_computed", is_being_computed)
    together(core, 12, Sampling(max_tokens=1), prefix)
    finish(core)
    assert max(asked.count(request_id) for request_id in range(12)) <= 3


def test_more_than_can_be_set_aside_still_all_end() -> None:
    core = Core(2, device=WatchedDevice(600, 4), token_budget=32, running_max=100, long_prefill_tokens=8)
    together(core, DEFERRED_MAX + 100, Sampling(max_tokens=1))
    for _ in range(200_000):
        if not core.step():
            break
    outputs_are_right(core, range(DEFERRED_MAX + 100), Sampling(max_tokens=1))
    assert not scheduler_of(core)._state._gate.prefix_waiters


@pytest.mark.parametrize("seed", range(40))
def test_tiny_pools_and_any_order_of_delivery(seed: int) -> None:
    """A pool for little more than one: nobody waits for ever, and nobody is let in over the head of another."""
    chance = random.Random(seed)
    block_size = chance.choice([1, 2, 4, 16])
    blocks = -(-60 // block_size) * chance.choice([1, 1, 2]) + chance.randint(0, 3)
    device = WatchedDevice(1 + blocks, block_size)
    core = Core(
        seed,
        device=device,
        token_budget=chance.choice([1, 5, 16, 64]),
        running_max=chance.choice([2, 8]),
        watermark=chance.choice([0.0, 0.1]),
        policy=policy(chance.choice(["fcfs", "priority", "deadline", "fair"])),
        long_prefill_tokens=chance.choice([1, 4, 2**63]),
    )
    sampling = Sampling(max_tokens=chance.randint(1, 15))
    for request_id in range(8):
        core.admit(request_id, [*PREFIX, request_id], sampling, service=Service(tenant=chance.choice("ab")))
        for _ in range(chance.choice([0, 0, 0, 20])):
            core.step()
            check(core)
    finish(core)
    outputs_are_right(core, range(8), sampling)


def test_the_same_prompt_many_times_is_computed_once_but_for_its_last_block() -> None:
    device = WatchedDevice(200, 4)
    core = Core(3, device=device, token_budget=16, running_max=4)
    for request_id in range(10):
        core.admit(request_id, PREFIX, Sampling(max_tokens=1))
    finish(core)
    assert device.computed() == 40 + 9 * 4, "one token at least is left to compute, so the last block is"
    assert not scheduler_of(core)._state._gate.prefix_waiters


@pytest.mark.parametrize(("shared", "sample_of", "enough"), [(9, None, 8), (39, None, 36), (40, 0, 39)])
def test_nobody_waits_for_tokens_that_it_cannot_share(shared: int, sample_of: int | None, enough: int) -> None:
    """Tokens of a block that differs before its end, and the last token (rule `recompute-last`)."""
    core = Core(0, device=WatchedDevice(100, 4), token_budget=enough)
    core.admit(0, PREFIX if sample_of == 0 else [*PREFIX[: enough + 1], 0], Sampling(max_tokens=4))
    core.admit(1, PREFIX if sample_of == 0 else [*PREFIX[:shared], 1, 2], Sampling(max_tokens=4), sample_of=sample_of)
    scheduler = scheduler_of(core)
    step_until(core, lambda: scheduler._state._gate.prefix_waiters)
    leader = scheduler._state.running[RequestId(0)]
    step_until(core, lambda: leader.computed >= enough)
    assert leader.computed == enough < leader.prefill_tokens and not scheduler._state._gate.prefix_waiters
    finish(core)
    assert core.ends()[1].usage.cached_tokens >= enough
