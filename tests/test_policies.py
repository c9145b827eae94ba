"""Whom each policy serves next and who loses its blocks: the queue alone, and the whole core."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, SupportsIndex

import pytest
from scheduling import (
    WatchedDevice,
    check,
    end_order,
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
from support import Core, expected_output

from cuelight.actors.scheduler.policy import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, Policy, policy_of
from cuelight.actors.scheduler.queue import Queue
from cuelight.messages.request import Sampling, Service
from cuelight.messages.scheduler import SetPolicy

POLICIES = ["fcfs", "priority", "deadline", "fair"]


def queue_of(name: str, aging_seconds: float = 10.0, **weights: float) -> Queue:
    return Queue(policy_of(policy(name, aging_seconds, **weights)))


def numbers(requests: Sequence[Any]) -> list[int]:
    return [request.number for request in requests]


def served(queue: Queue, cost: float = 0.0) -> list[int]:
    """Everybody in the order of service, each charged before the next is taken."""
    order = []
    while len(queue):
        (first,) = queue.head(1)
        queue.leave(first)
        queue.charge(first, cost)
        order.append(first.number)
    return order


# The order of the queue.


def test_fcfs_serves_in_order_of_arrival_whoever_asks_for_more() -> None:
    queue = queue_of("fcfs")
    requests = [tracked(n, Service(priority=n, deadline_seconds=10.0 - n)) for n in range(6)]
    for request in random.Random(1).sample(requests, 6):
        queue.join(request)
    assert numbers(queue.head(6)) == list(range(6))
    assert served(queue) == list(range(6))


def test_a_level_of_priority_is_worth_so_much_waiting() -> None:
    queue = queue_of("priority", aging_seconds=10.0)
    queue.join(tracked(0, Service(priority=0), at=0.0))
    queue.join(tracked(1, Service(priority=1), at=9.9))  # within ten seconds: before the first
    queue.join(tracked(2, Service(priority=1), at=10.1))  # the first has waited for a whole level
    queue.join(tracked(3, Service(priority=-1), at=1.0))
    queue.join(tracked(4, Service(priority=2), at=10.1))
    assert served(queue) == [4, 1, 0, 2, 3]


def test_among_equals_of_a_priority_the_first_is_first() -> None:
    queue = queue_of("priority")
    for number in (3, 1, 2):
        queue.join(tracked(number, Service(priority=5)))
    assert served(queue) == [1, 2, 3]


def test_earliest_deadline_first_and_those_without_one_last() -> None:
    queue = queue_of("deadline")
    seconds = [None, 30.0, 5.0, None, 12.0]
    for number, deadline in enumerate(seconds):
        queue.join(tracked(number, Service(deadline_seconds=deadline), at=float(number)))
    assert served(queue) == [2, 4, 1, 0, 3]


def test_fair_alternates_between_tenants_however_many_one_sends() -> None:
    queue = queue_of("fair")
    for number in range(100):
        queue.join(tracked(number, Service("flood")))
    for number in range(100, 105):
        queue.join(tracked(number, Service("calm")))
    first_ten = [number >= 100 for number in served(queue, cost=50.0)[:10]]
    assert first_ten.count(True) == 5
    assert not any(a and b for a, b in pairwise(first_ten))


def test_the_head_is_the_order_that_serving_one_by_one_would_give() -> None:
    for name in POLICIES:
        chance = random.Random(name)
        queue = queue_of(name, a=1.0, b=3.0)
        for number in range(30):
            service = Service(chance.choice("abc"), chance.randint(-2, 2), None, chance.choice([None, 5.0, 60.0]))
            queue.join(tracked(number, service, prompt=chance.randint(1, 20), at=number / 4))
        together = numbers(queue.head(30))
        one_by_one = []
        while len(queue):
            (first,) = queue.head(1)
            queue.leave(first)
            queue.charge(first, INPUT_TOKEN_COST * len(first.token_ids))
            one_by_one.append(first.number)
        assert together == one_by_one


def test_a_tenant_that_was_idle_gets_no_credit_for_it() -> None:
    """Whether others waited meanwhile, or only ran."""
    for others_wait in (True, False):
        queue = queue_of("fair")
        early = tracked(0, Service("idle"))
        queue.join(early)
        queue.leave(early)
        queue.charge(early, 10.0)
        busy = tracked(1, Service("busy"))
        queue.join(busy)
        queue.leave(busy)
        if others_wait:
            queue.join(tracked(2, Service("busy")))
        queue.charge(busy, 5_000.0)
        for number in range(10, 20):
            queue.join(tracked(number, Service("idle")))
            queue.join(tracked(number + 10, Service("busy")))
        tenants = [number in range(10, 20) for number in served(queue, cost=20.0)[:12]]
        assert 5 <= tenants.count(True) <= 7, tenants


def test_a_tenant_that_leaves_and_returns_pays_what_it_owes() -> None:
    queue = queue_of("fair")
    greedy = tracked(0, Service("greedy"))
    queue.join(greedy)
    queue.join(tracked(1, Service("other")))
    queue.leave(greedy)
    queue.charge(greedy, 1_000.0)
    queue.join(tracked(2, Service("greedy")))
    queue.join(tracked(3, Service("other")))
    assert served(queue, cost=10.0) == [1, 3, 2]


def test_tenants_that_come_once_are_not_remembered_for_ever() -> None:
    queue = queue_of("fair")
    debtor = tracked(0, Service("debtor"))
    queue.charge(debtor, 1e9)
    for number in range(1, 20_000):
        request = tracked(number, Service(f"tenant {number}"))
        queue.join(request)
        queue.leave(request)
        queue.charge(request, 3.0)
    assert len(queue._counters) < 6_000
    queue.join(tracked(20_001, Service("new")))
    queue.join(debtor)
    assert served(queue) == [20_001, 0], "who owes something is remembered"


def test_rule_36_preempted_ones_come_before_those_of_their_lane_that_never_ran() -> None:
    for name in POLICIES:
        queue = queue_of(name)
        waiting = tracked(1, Service("a", priority=5, deadline_seconds=1.0))
        back = tracked(2, Service("a", priority=0, deadline_seconds=9.0))
        back.preemptions = 1
        queue.join(waiting)
        queue.join(back)
        assert served(queue) == [2, 1], name


def test_the_victim_is_the_last_in_the_policy_s_order() -> None:
    requests = [
        tracked(0, Service("a", priority=0, deadline_seconds=5.0)),
        tracked(1, Service("b", priority=-1, deadline_seconds=50.0)),
        tracked(2, Service("a", priority=3, deadline_seconds=9.0)),
        tracked(3, Service("c", priority=3, deadline_seconds=1.0)),
    ]
    for name, victim in (("fcfs", 3), ("priority", 1), ("deadline", 1)):
        assert queue_of(name).victim(requests).number == victim, name
    fair = queue_of("fair")
    fair.charge(requests[0], 100.0)
    fair.charge(requests[1], 99.0)
    assert fair.victim(requests).number == 2, "the newest of the tenant that received most"
    assert queue_of("fair", a=4.0).victim(requests[:2]).number == 1


class Counted(tuple):  # type: ignore[type-arg]
    """A rank that counts how often it is compared."""

    comparisons = 0

    def __lt__(self, other: Any, /) -> bool:
        Counted.comparisons += 1
        return super().__lt__(other)

    def __eq__(self, other: object, /) -> bool:
        return super().__eq__(other)

    def __hash__(self) -> int:
        return super().__hash__()

    def __getitem__(self, index: SupportsIndex | slice, /) -> Any:
        return super().__getitem__(index)


def comparisons_of(work: Any) -> int:
    before = Counted.comparisons
    work()
    return Counted.comparisons - before


def test_a_queue_of_100_000_costs_a_few_comparisons_an_operation() -> None:
    count, depth = 100_000, math.ceil(math.log2(100_000))
    queue = Queue(Policy(lambda request: Counted((0.0, request.number))))  # type: ignore[arg-type, return-value]
    requests = [tracked(number) for number in range(count)]
    random.Random(3).shuffle(requests)
    assert max(comparisons_of(lambda r=r: queue.join(r)) for r in requests) <= depth + 1
    assert comparisons_of(lambda: queue.head(64)) <= 64 * 4 * depth
    assert comparisons_of(lambda: queue.leave(queue.head(1)[0])) <= 4 * depth
    # Whoever leaves out of turn costs nothing by itself; tidying up afterwards costs a few for each who left.
    leaving = [request for request in requests if request.number % 10 and request in queue._waiting]
    assert comparisons_of(lambda: [queue.leave(request) for request in leaving]) <= 8 * len(leaving)
    assert len(queue._lanes[""].places) <= 2 * len(queue) + 64, "those who left are forgotten"
    left = sorted(request.number for request in queue._waiting)
    assert served(queue) == left


def test_reorder_keeps_everybody_and_then_goes_by_the_new_policy() -> None:
    queue = queue_of("fcfs")
    requests = [tracked(n, Service("ab"[n % 2], priority=n % 5, deadline_seconds=100.0 - n)) for n in range(20)]
    for request in requests:
        queue.join(request)
    for request in requests[::3]:
        queue.leave(request)
    left = [request for request in requests if request.number % 3]
    for name in ("priority", "deadline", "fcfs"):
        queue.reorder(policy_of(policy(name)))
        assert numbers(queue.head(100)) == numbers(sorted(left, key=policy_of(policy(name)).rank))
    queue.reorder(policy_of(policy("fair")))
    assert sorted(numbers(queue.head(100))) == numbers(left)


# The whole core.


def blocked_core(
    seed: int = 0, chosen: SetPolicy | None = None, *, running_max: int = 1, block_count: int = 400
) -> tuple[Core, WatchedDevice]:
    """One request runs and takes every seat that others could have, until it has 20 tokens."""
    device = WatchedDevice(block_count, 4)
    core = Core(seed, device=device, running_max=running_max, policy=chosen or policy("fcfs"))
    for request_id in range(1000, 1000 + running_max):
        core.admit(request_id, [1, 2, request_id], Sampling(max_tokens=20), service=Service(priority=99))
    step_until(core, lambda: all(is_running(core, 1000 + i) for i in range(running_max)))
    return core, device


@pytest.mark.parametrize(
    ("chosen", "order"),
    [
        (policy("fcfs"), [0, 1, 2, 3]),
        (policy("priority"), [2, 0, 3, 1]),
        (policy("deadline"), [3, 1, 0, 2]),
        (policy("fair"), [0, 3, 1, 2]),
    ],
)
def test_the_core_serves_in_the_policy_s_order(chosen: SetPolicy, order: list[int]) -> None:
    core, device = blocked_core(0, chosen)
    services = [
        Service("a", 1, deadline_seconds=200.0),
        Service("a", 0, deadline_seconds=100.0),
        Service("a", 7),
        Service("b", 1, deadline_seconds=50.0),
    ]
    for request_id, service in enumerate(services):
        core.admit(request_id, [5, 5, request_id], Sampling(max_tokens=3), service=service)
    finish(core)
    assert [request_id for request_id in device.order() if request_id < 1000] == order


def test_under_priority_nobody_starves() -> None:
    """There is always another one of higher priority, and still the first goes on when it has waited for its turn."""
    core, _ = blocked_core(0, policy("priority", aging_seconds=0.5))
    core.admit(0, [9, 9], Sampling(max_tokens=2), service=Service(priority=0))
    for request_id in range(1, 3):
        core.admit(request_id, [9, request_id], Sampling(max_tokens=2), service=Service(priority=2))
    following = 3
    step_until(core, lambda: is_live(core, 0))
    while is_live(core, 0):
        assert core.stage.step() and following < 2_000
        check(core)
        if len(scheduler_of(core)._waiting) < 3:
            core.admit(following, [9, following], Sampling(max_tokens=2), service=Service(priority=2))
            following += 1
    assert following > 20, "it was made to wait"
    assert core.stage.clock.now() < 1.5, "two levels are worth a second"
    finish(core)


def tokens_by_tenant(core: Core, tenants: dict[int, str]) -> dict[str, int]:
    """Output received so far."""
    received = dict.fromkeys(tenants.values(), 0)
    for request_id, tokens in core.outputs().items():
        if request_id in tenants:
            received[tenants[request_id]] += len(tokens)
    return received


@pytest.mark.parametrize("running_max", [1, 2, 5])
def test_fair_one_tenant_floods_and_the_other_is_served_as_much(running_max: int) -> None:
    core, device = blocked_core(0, policy("fair"), running_max=running_max)
    tenants = {request_id: "flood" if request_id < 100 else "calm" for request_id in range(120)}
    for request_id, tenant in tenants.items():
        core.admit(request_id, [7, request_id], Sampling(max_tokens=6), service=Service(tenant))
    worst = 0
    while not all(request_id in core.ends() for request_id in range(100, 120)):
        assert core.stage.step()
        received = tokens_by_tenant(core, tenants)
        if any(request_id not in device.order() for request_id in range(100, 120)):
            worst = max(worst, abs(received["flood"] - received["calm"]))
    finish(core)
    # What they get differs by one request for each that runs at once, never by what has piled up.
    assert worst <= 6 * (running_max + 1)


@pytest.mark.parametrize("running_max", [1, 4])
def test_fair_shares_follow_the_weights(running_max: int) -> None:
    core, _ = blocked_core(0, policy("fair", small=1.0, large=3.0), running_max=running_max)
    tenants = {request_id: ("small", "large")[request_id % 2] for request_id in range(240)}
    for request_id, tenant in tenants.items():
        core.admit(request_id, [7, request_id], Sampling(max_tokens=1 + request_id % 7), service=Service(tenant))
    step_until(core, lambda: core.figures().finished >= 120)
    assert any(i not in core.ends() for i in tenants if i % 2), "both still want more"
    received = dict.fromkeys(("small", "large"), 0.0)
    for request_id, end in core.ends().items():
        if request_id in tenants:
            tokens = INPUT_TOKEN_COST * end.usage.prompt_tokens + OUTPUT_TOKEN_COST * end.usage.output_tokens
            received[tenants[request_id]] += tokens
    assert received["large"] / received["small"] == pytest.approx(3.0, rel=0.1)
    finish(core)


def test_fair_one_that_was_away_takes_turns_when_it_comes_back() -> None:
    """The other has run one long request meanwhile, with nobody waiting."""
    core, _ = blocked_core(0, policy("fair"))
    core.admit(0, [1, 1], Sampling(max_tokens=1), service=Service("away"))
    core.admit(1, [2, 2], Sampling(max_tokens=300), service=Service("busy"))
    step_until(core, lambda: len(core.outputs().get(1, [])) > 296)
    for request_id in range(10, 30):
        tenant = ("away", "busy")[request_id % 2]
        core.admit(request_id, [3, request_id], Sampling(max_tokens=4), service=Service(tenant))
    finish(core)
    order = [request_id % 2 for request_id in end_order(core) if 10 <= request_id < 30]
    assert abs(order[:10].count(0) - 5) <= 1, order


@pytest.mark.parametrize(
    ("chosen", "victim"), [(policy("fcfs"), 2), (policy("priority"), 1), (policy("deadline"), 0), (policy("fair"), 1)]
)
def test_the_core_preempts_the_policy_s_victim(chosen: SetPolicy, victim: int) -> None:
    """Three grow until the pool is full; the one that the policy would serve last gives way."""
    core = Core(0, device=WatchedDevice(1 + 12, 4), running_max=3, policy=chosen)
    services = [
        Service("a", 5, deadline_seconds=900.0),
        Service("a", 0, deadline_seconds=100.0),
        Service("b", 5, deadline_seconds=200.0),
    ]
    for request_id, service in enumerate(services):
        core.admit(request_id, [request_id] * 8, Sampling(max_tokens=30), service=service)
    step_until(core, lambda: preemptions(core) == 1)
    assert [i for i in range(3) if not is_running(core, i)] == [victim]
    finish(core)
    for request_id in range(3):
        assert core.outputs()[request_id] == expected_output([request_id] * 8, Sampling(max_tokens=30))[0]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", POLICIES)
def test_a_preempted_request_runs_again_before_one_that_never_ran(name: str, seed: int) -> None:
    core = Core(seed, device=(device := WatchedDevice(1 + 12, 4)), running_max=3, policy=policy(name))
    for request_id in range(3):
        core.admit(request_id, [request_id] * 8, Sampling(max_tokens=30))
    step_until(core, lambda: running(core) == 3)
    # Under "deadline", one that must be done before all others still comes after the one that was preempted.
    core.admit(3, [3] * 8, Sampling(max_tokens=2), service=Service(priority=0, deadline_seconds=1e6))
    step_until(core, lambda: preemptions(core) == 1)
    (victim,) = [i for i in range(3) if not is_running(core, i)]
    step_until(core, lambda: is_running(core, victim) or is_running(core, 3))
    assert is_running(core, victim)
    finish(core)
    assert device.order()[-1] == 3


@pytest.mark.parametrize("seed", range(6))
def test_the_policy_changes_while_a_hundred_wait_and_some_run(seed: int) -> None:
    core, device = blocked_core(seed, policy("fcfs"), running_max=3)
    chance = random.Random(seed)
    services = [Service(chance.choice("ab"), p, deadline_seconds=1e6 - p) for p in chance.sample(range(100), 100)]
    for request_id, service in enumerate(services):
        core.admit(request_id, [7, request_id], Sampling(max_tokens=5), service=service)
    changes = [policy("priority", 1e-6), policy("fair", b=2.0), policy("deadline"), policy("priority", 1e6)]
    for change in changes:
        finished = core.figures().finished
        step_until(core, lambda finished=finished: core.figures().finished >= finished + 10)
        core.scheduler.tell(change)
    scheduler = scheduler_of(core)
    step_until(core, lambda: scheduler._waiting._policy.rank(tracked(0, Service(priority=1))) == (-1e6, 0))
    # Whoever had been chosen by then, the rest follow by priority alone.
    begun = set(device.order()) | set(scheduler._running) | scheduler._courted | set(scheduler._asked or ())
    finish(core)
    rest = [request_id for request_id in device.order() if request_id not in begun]
    assert len(rest) > 30
    assert rest == sorted(rest, key=lambda request_id: -services[request_id].priority)
    for request_id in range(100):
        assert core.outputs()[request_id] == expected_output([7, request_id], Sampling(max_tokens=5))[0]


# How much of a step one prompt may have.


def first_tokens(core: Core, device: WatchedDevice, request_id: int) -> int:
    """Steps that ran until the first token of this request was out."""
    before = len(device.seen)
    step_until(core, lambda: core.outputs().get(request_id))
    return len(device.seen) - before


@pytest.mark.parametrize("seed", range(10))
def test_rule_4_a_short_prompt_behind_a_long_one_need_not_wait_for_it(seed: int) -> None:
    device = WatchedDevice(400, 4)
    core = Core(seed, device=device, token_budget=20, long_prefill_tokens=5)
    core.admit(0, list(range(200)), Sampling(max_tokens=1))
    step_until(core, lambda: device.computed() >= 40)
    core.admit(1, [300, 301, 302], Sampling(max_tokens=1))
    # Two steps are in flight when it comes, and one of its own is computed.
    assert first_tokens(core, device, 1) <= 4
    assert is_live(core, 0)
    finish(core)


def test_rule_4_alone_a_long_prompt_gets_the_whole_budget() -> None:
    device = WatchedDevice(400, 4)
    core = Core(0, device=device, token_budget=20, long_prefill_tokens=5)
    core.admit(0, list(range(200)), Sampling(max_tokens=1))
    finish(core)
    assert [sum(chunk.token_count for chunk in step.chunks) for step in device.seen] == [20] * 10


def test_rule_4_what_the_others_do_not_want_the_long_one_gets() -> None:
    """Two run, and every step is full until there is nothing more to fill it with."""
    device = WatchedDevice(400, 4)
    core = Core(0, device=device, token_budget=20, long_prefill_tokens=5)
    for request_id, length in enumerate((200, 60)):
        core.admit(request_id, list(range(1000 * request_id, 1000 * request_id + length)), Sampling(max_tokens=1))
    finish(core)
    assert [sum(chunk.token_count for chunk in step.chunks) for step in device.seen] == [20] * 13
    # An even share is more than five: neither is held to less than that while both want more.
    both = [step for step in device.seen if len(step.chunks) == 2]
    assert len(both) >= 5 and all(chunk.token_count == 10 for step in both[1:-1] for chunk in step.chunks)


def test_rule_4_seats_that_are_taken_leave_nothing_to_save_for() -> None:
    """One waits that cannot come in, so the one that runs is not held back for it."""
    device = WatchedDevice(400, 4)
    core = Core(0, device=device, token_budget=20, running_max=1, long_prefill_tokens=5)
    core.admit(0, list(range(200)), Sampling(max_tokens=1))
    core.admit(1, [1, 2, 3], Sampling(max_tokens=1))
    finish(core)
    assert [sum(c.token_count for c in step.chunks) for step in device.seen if step.chunks[0].request_id == 0][-1] == 20
    assert len(device.seen) <= 12


def test_rule_3_one_that_gets_nothing_is_passed_over() -> None:
    """The first in line is done but for the token that is in flight; those behind it are computed."""
    device = WatchedDevice(400, 4)
    core = Core(0, device=device, token_budget=4, steps_in_flight=3)
    core.admit(0, [1, 2], Sampling(max_tokens=1))
    core.admit(1, list(range(50, 70)), Sampling(max_tokens=1))
    finish(core)
    assert [sum(chunk.token_count for chunk in step.chunks) for step in device.seen] == [4, 4, 4, 4, 4, 2]


def test_the_heap_of_the_queue_stays_a_heap() -> None:
    """Joining, leaving and looking in any order, against a sorted list."""
    chance = random.Random(9)
    queue = queue_of("priority", aging_seconds=1.0)
    waiting: list[Any] = []
    rank = policy_of(policy("priority", 1.0)).rank
    for number in range(3000):
        request = tracked(number, Service(priority=chance.randint(-3, 3)), at=number / 7)
        queue.join(request)
        waiting.append(request)
        while waiting and chance.random() < 0.5:
            queue.leave(waiting.pop(chance.randrange(len(waiting))))
        assert numbers(queue.head(3)) == numbers(heapq.nsmallest(3, waiting, key=rank))
