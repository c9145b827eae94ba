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
from support import Core, expected_output

from cuelight.actors.scheduler.planning import plan_step
from cuelight.actors.scheduler.policy import INPUT_TOKEN_COST, LEEWAY_TOKENS, OUTPUT_TOKEN_COST, Policy, policy_of
from cuelight.actors.scheduler.queue import ABOUT_MAX, ABOUT_SECONDS, Queue
from cuelight.actors.scheduler.request import Request
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


def test_rule_front_of_queue_preempted_ones_come_before_those_of_their_lane_that_never_ran() -> None:
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


def test_a_queue_of_20_000_costs_a_few_comparisons_an_operation() -> None:
    count, depth = 20_000, math.ceil(math.log2(20_000))
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


def test_from_fair_to_fair_the_counters_stay_and_new_weights_count_from_then_on() -> None:
    queue = queue_of("fair")
    greedy, calm = tracked(0, Service("greedy")), tracked(1, Service("calm"))
    queue.join(greedy)
    queue.join(calm)
    queue.charge(greedy, 1_000.0)
    for weights in ({}, {"greedy": 10.0}):
        queue.reorder(policy_of(policy("fair", **weights)))
        assert numbers(queue.head(2)) == [1, 0], "what was received is not forgotten"
    queue.charge(calm, 999.0)
    queue.charge(greedy, 5.0)
    assert numbers(queue.head(2)) == [1, 0], "five tokens count as half a token with a weight of ten"
    queue.charge(calm, 2.0)
    assert numbers(queue.head(2)) == [0, 1]
    queue.reorder(policy_of(policy("fcfs")))
    queue.reorder(policy_of(policy("fair")))
    assert numbers(queue.head(2)) == [1, 0], "from another policy, all tenants start alike"


@pytest.mark.parametrize("tokens", [1e3, 1e6, 1e9, 1e12])
def test_between_the_heaviest_tenants_a_token_counts_however_much_the_lightest_has_received(tokens: float) -> None:
    queue = queue_of("fair", light=1e-6, b=1e6, c=1e6)
    light = tracked(0, Service("light"))
    queue.charge(light, tokens)
    queue.join(light)
    for number in range(20):
        queue.join(tracked(100 + number, Service("bc"[number % 2])))
    queue.charge(light, 1.0)
    order = served(queue, cost=20.0)
    assert [number % 2 for number in order[:20]] == [0, 1] * 10
    assert order[20] == 0


def test_each_token_of_a_prompt_is_charged_once_and_none_that_the_cache_gave() -> None:
    queue = queue_of("fair")
    request = tracked(0, Service("a"), prompt=10)

    def charged(cached: int, computed: int) -> float:
        """Run, with so many tokens cached, until so many are computed; then lose all blocks."""
        request.admit(cached, 0.0)
        request.computed = computed
        for _ in range(2):
            queue.charge_prompt(request)
        request.evict(0.0)
        return queue._counters.get("a", 0.0)

    assert charged(3, 5) == 2.0
    assert charged(0, 4) == 2.0, "these were charged, or found"
    assert charged(0, 7) == 4.0
    assert charged(9, 9) == 4.0, "now others have computed more of it"
    request.token_ids += [1] * 5
    assert charged(0, 15) == 5.0, "the output was charged when it was sampled"


# Who takes the place of whom, for a tenant's share.


def seats(tenants: str, first: int = 0) -> list[Request]:
    """Running requests of tenants with names of one letter."""
    running = [tracked(first + i, Service(tenant)) for i, tenant in enumerate(tenants)]
    for request in running:
        request.admit(0, 0.0)
    return running


def claim(queue: Queue, running: Sequence[Request], **options: Any) -> tuple[int, int] | None:
    """The numbers of who comes in and who gives way, where each of those that run has a seat."""
    pair = queue.find_claim(running, len(running), lambda _: 1.0, **options)
    return None if pair is None else (pair[0].number, pair[1].number)


def waiting_for(*tenants: str, name: str = "fair", **weights: float) -> Queue:
    queue = queue_of(name, **weights)
    for number, tenant in enumerate(tenants, 100):
        queue.join(tracked(number, Service(tenant)))
    return queue


def test_one_that_has_less_than_its_share_takes_the_newest_place_of_whoever_has_most() -> None:
    assert claim(waiting_for("b"), seats("aaaa")) == (100, 3)
    assert claim(waiting_for("c"), seats("abbbab")) == (100, 5)
    assert claim(waiting_for("a", "b", "a"), seats("aaaa")) == (101, 3)
    assert claim(waiting_for("b"), seats("aaab")) == (100, 2)
    assert claim(waiting_for("b"), seats("aabb")) is None, "it has its share"
    assert claim(waiting_for("b"), seats("aab")) is None, "the other would want it back"
    assert claim(waiting_for("b"), seats("a")) is None, "nor is the last place taken"


def test_with_one_tenant_or_another_policy_nobody_gives_way() -> None:
    assert claim(waiting_for("a", "a"), seats("aaaa")) is None
    assert claim(waiting_for(), seats("aaab")) is None, "nobody waits"
    for name in ("fcfs", "priority", "deadline"):
        assert claim(waiting_for("b", name=name), seats("aaaa")) is None


def test_shares_of_places_follow_the_weights() -> None:
    assert claim(waiting_for("b", b=3.0), seats("aaaabbbb")) == (100, 3)
    assert claim(waiting_for("b", b=3.0), seats("aabbbbbb")) is None
    assert claim(waiting_for("b", a=3.0), seats("aaaaaab")) is None
    assert claim(waiting_for("b", a=3.0), seats("aaaaaaa")) == (100, 6)


def test_a_queue_that_wants_more_than_its_share_takes_only_half_of_that() -> None:
    many = ["b"] * 10
    assert claim(waiting_for(*many), seats("aaaaaaab")) == (100, 6)
    assert claim(waiting_for(*many), seats("aaaaaabb")) is None
    assert claim(waiting_for("b", "b"), seats("aaaaaabb")) == (100, 5), "two fit its share"


def test_whoever_has_received_more_beyond_the_leeway_takes_no_place() -> None:
    queue, running = waiting_for("b"), seats("aaaa")
    queue.charge(tracked(0, Service("b")), LEEWAY_TOKENS)
    assert claim(queue, running) == (100, 3)
    queue.charge(tracked(0, Service("b")), 1.0)
    assert claim(queue, running) is None
    queue.charge(running[0], 1.0)
    assert claim(queue, running) == (100, 3)


def test_whoever_was_let_in_for_its_share_is_spared_and_who_cannot_come_in_takes_no_place() -> None:
    queue, running = waiting_for("b"), seats("aaaa")
    running[3].is_protected = True
    assert claim(queue, running) == (100, 2)
    assert queue.victim(running).number == 2
    for request in running:
        request.is_protected = True
    assert claim(queue, running) is None
    assert queue.victim(running).number == 3, "somebody has to lose its blocks"
    assert waiting_for(name="fcfs").victim(running).number == 3
    running = seats("aaaa")
    assert claim(queue, running, is_aside=lambda request: request.number == 100) is None
    queue.head(1)[0].pending = 1
    assert claim(queue, running) is None, "its tokens in flight have not arrived"


def test_of_blocks_a_request_takes_only_what_leaves_the_other_no_less() -> None:
    queue, running = queue_of("fair"), seats("aaaa")
    queue.join(tracked(100, Service("b"), prompt=40))
    for request, capacity in zip(running, (16, 16, 32, 36), strict=True):
        request.capacity = capacity
    pair = queue.find_claim(running, 100.0, Request.slots)
    assert pair is not None and pair[1] is running[3]
    running.pop()
    assert queue.find_claim(running, 100.0, Request.slots) is None, "32 and 40 would be unfair the other way"


@pytest.mark.parametrize("seed", range(20))
def test_places_change_hands_a_few_times_and_never_go_back(seed: int) -> None:
    """Whoever runs and whoever waits, the tenants get even and then it is over; none of them gives what it lacks."""
    chance = random.Random(seed)
    weights = {tenant: chance.choice([0.5, 1.0, 1.0, 4.0]) for tenant in "abcd"}
    running = seats("".join(chance.choices("aaabcd", k=chance.randint(1, 20))))
    queue = waiting_for(*chance.choices("abcd", k=chance.randint(1, 30)), **weights)
    before, taken, gave = len(running), set[str](), set[str]()
    for _ in range(len(running) + 1):
        if (pair := queue.find_claim(running, before, lambda _: 1.0)) is None:
            break
        claimant, victim = pair
        held = [request.service.tenant for request in running]
        share = before * weights[victim.service.tenant] / sum(weights[t] for t in {*held, *queue._lanes})
        assert held.count(victim.service.tenant) > share
        taken.add(claimant.service.tenant)
        gave.add(victim.service.tenant)
        running.remove(victim)
        victim.evict(0.0)
        victim.preemptions += 1
        queue.join(victim)
        queue.leave(claimant)
        claimant.admit(0, 0.0)
        claimant.is_protected = True
        running.append(claimant)
    else:
        raise AssertionError("it does not end")
    assert not taken & gave


# How tenants share a step.


def prompts_of(tenants: str, tokens: int) -> list[Request]:
    running = [tracked(i, Service(tenant), prompt=tokens) for i, tenant in enumerate(tenants)]
    for request in running:
        request.admit(0, 0.0)
    return running


def shared(queue: Queue, running: Sequence[Request], *, now: float = 0.0, budget: int = 100) -> dict[int, int]:
    """Tokens of each request in a step in which one tenant's prompts may have 20."""
    plan = plan_step(running, budget, 20, others_wait=False, turns=lambda: queue.turns(running, now))
    return {request.number: count for request, count in plan}


def test_the_prompts_of_whoever_has_little_and_no_queue_come_first_and_alone() -> None:
    running = prompts_of("aab", 70)
    queue = waiting_for("a")
    assert shared(queue, running) == {2: 70}
    queue.charge(running[2], LEEWAY_TOKENS + 1.0)
    assert shared(queue, running) == {0: 20, 2: 20}, "it has had its turn"
    queue.charge(running[0], 1.0)
    assert shared(queue, running) == {2: 70}
    queue.join(tracked(50, Service("b")))
    assert shared(queue, running) == {0: 20, 2: 20}, "both have a queue"


def test_those_whose_turn_it_is_go_by_what_they_have_received() -> None:
    running = prompts_of("abc", 70)
    queue = waiting_for("a")
    queue.charge(running[1], 5.0)
    assert shared(queue, running) == {2: 70, 1: 30}


def test_a_tenant_with_a_queue_takes_short_steps_while_another_is_about() -> None:
    running = prompts_of("aa", 70)
    queue = waiting_for("a")
    assert shared(queue, running) == {0: 50, 1: 50}, "it is alone"
    other = tracked(60, Service("b"), at=5.0)
    queue.join(other)
    queue.leave(other)
    assert shared(queue, running, now=5.0) == {0: 20}
    assert queue.saturated_tenants(running, queue.turns(running, 5.0), 140) == {"a"}  # type: ignore[arg-type]  # two are about
    assert queue.saturated_tenants(running, queue.turns(running, 5.0), 141) == set()  # type: ignore[arg-type]
    assert shared(queue, running, now=5.0 + ABOUT_SECONDS) == {0: 20}
    assert shared(queue, running, now=5.1 + ABOUT_SECONDS) == {0: 50, 1: 50}, "it has not come for long"
    assert queue.turns(prompts_of("ab", 9), 1e9) is not None, "one that runs is about"


def test_one_that_wants_no_prompt_computed_keeps_nobody_s_turn_from_coming() -> None:
    """Whether it is only about or decodes: it has received less than any other."""
    running = prompts_of("aab", 70)
    decoding = tracked(9, Service("idle"), prompt=1)
    queue = waiting_for("a", "idle")
    queue.leave(queue.head(2)[1])
    for tenant in "ab":
        queue.charge(tracked(0, Service(tenant)), 5 * LEEWAY_TOKENS)
    assert shared(queue, running) == {2: 70}
    decoding.admit(0, 0.0)
    decoding.scheduled = 1
    decoding.pending = 1
    assert shared(queue, [*running, decoding]) == {9: 1, 2: 70}
    decoding.prefill_tokens = decoding.scheduled + 1
    assert shared(queue, [*running, decoding]) == {9: 1, 0: 20, 2: 20}, "it wants a token of its prompt"


def test_of_tenants_that_were_about_only_so_many_are_remembered() -> None:
    queue = queue_of("fair")
    for number in range(10 * ABOUT_MAX):
        request = tracked(number, Service(f"tenant {number}"))
        queue.join(request)
        queue.leave(request)
    assert len(queue._came_at) == ABOUT_MAX


def test_the_head_passes_over_tenants_that_are_not_to_come() -> None:
    queue = waiting_for("a", "b", "a", "c")
    assert numbers(queue.head(2, without={"a"})) == [101, 103]
    assert numbers(queue.head(9, without={"a", "b", "c"})) == []
    assert len(queue.head(9)) == 4


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
        assert core.step() and following < 2_000
        check(core)
        if len(scheduler_of(core)._state._queue) < 3:
            core.admit(following, [9, following], Sampling(max_tokens=2), service=Service(priority=2))
            following += 1
    assert following > 20, "it was made to wait"
    assert core.now() < 1.5, "two levels are worth a second"
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
        assert core.step()
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
    step_until(core, lambda: scheduler._state._queue._policy.rank(tracked(0, Service(priority=1))) == (-1e6, 0))
    # Whoever had been chosen by then, the rest follow by priority alone.
    begun = set(device.order()) | set(scheduler._state.running) | set(scheduler._state._block_requests.candidates)
    finish(core)
    rest = [request_id for request_id in device.order() if request_id not in begun]
    assert len(rest) > 30
    assert rest == sorted(rest, key=lambda request_id: -services[request_id].priority)
    for request_id in range(100):
        assert core.outputs()[request_id] == expected_output([7, request_id], Sampling(max_tokens=5))[0]


def alternating_core(seed: int, *, running_max: int, block_count: int) -> Core:
    """Tenant "long" holds everything that it can, with long outputs and more requests in the queue."""
    core = Core(
        seed, device=WatchedDevice(block_count, 4), running_max=running_max, policy=policy("fair"), token_budget=32
    )
    for request_id in range(8):
        core.admit(request_id, [request_id] * 12, Sampling(max_tokens=60), service=Service("long"))
    return core


def preempted_for_a_share(core: Core, request_ids: range) -> list[int]:
    whys = {i: [m.why for m in explained(core, i).timeline if m.what == "preempted"] for i in request_ids}
    return [i for i, why in whys.items() for each in why if "share" in each]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lead", [0.0, 900.0])
@pytest.mark.parametrize(("running_max", "block_count"), [(4, 400), (8, 1 + 36)])
def test_fair_one_that_comes_takes_a_place_of_whoever_holds_all(
    running_max: int, block_count: int, lead: float, seed: int
) -> None:
    """Of the seats, or of the blocks, and even where its tenant has received a little more than the other.

    It is done long before any of the others; they lose time and no token.
    """
    core = alternating_core(seed, running_max=running_max, block_count=block_count)
    step_until(core, lambda: any(len(tokens) > 9 for tokens in core.outputs().values()))
    core.admit(100, [50] * 8, Sampling(max_tokens=4), service=Service("short"))
    step_until(core, lambda: is_live(core, 100))
    scheduler_of(core)._state._queue.charge(tracked(0, Service("short")), lead)
    step_until(core, lambda: 100 in core.ends(), steps_max=2_000)
    assert not any(i in core.ends() for i in range(8))
    assert 1 <= len(preempted_for_a_share(core, range(8))) <= 2
    finish(core)
    for request_id in range(8):
        assert core.outputs()[request_id] == expected_output([request_id] * 12, Sampling(max_tokens=60))[0]


@pytest.mark.parametrize("seed", range(4))
def test_fair_a_tenant_alone_loses_nothing_for_fairness(seed: int) -> None:
    core = alternating_core(seed, running_max=4, block_count=400)
    finish(core)
    assert preemptions(core) == 0


@pytest.mark.parametrize("seed", range(6))
def test_fair_what_is_computed_again_is_not_charged_again(seed: int) -> None:
    core = Core(seed, device=WatchedDevice(1 + 12, 4), running_max=3, policy=policy("fair"))
    for request_id in range(3):
        core.admit(request_id, [request_id] * 8, Sampling(max_tokens=30), service=Service("a"))
    finish(core)
    assert preemptions(core) > 0
    usages = [end.usage for end in core.ends().values()]
    input_tokens = sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)
    output_tokens = sum(usage.output_tokens for usage in usages)
    charged = scheduler_of(core)._state._queue._counters["a"]
    assert charged == INPUT_TOKEN_COST * input_tokens + OUTPUT_TOKEN_COST * output_tokens


# How much of a step one prompt may have.


def first_tokens(core: Core, device: WatchedDevice, request_id: int) -> int:
    """Steps that ran until the first token of this request was out."""
    before = len(device.seen)
    step_until(core, lambda: core.outputs().get(request_id))
    return len(device.seen) - before


@pytest.mark.parametrize("seed", range(10))
def test_rule_long_prefill_cap_a_short_prompt_behind_a_long_one_need_not_wait_for_it(seed: int) -> None:
    device = WatchedDevice(400, 4)
    core = Core(seed, device=device, token_budget=20, long_prefill_tokens=5)
    core.admit(0, list(range(200)), Sampling(max_tokens=1))
    step_until(core, lambda: device.computed() >= 40)
    core.admit(1, [300, 301, 302], Sampling(max_tokens=1))
    # Two steps are in flight when it comes, and one of its own is computed.
    assert first_tokens(core, device, 1) <= 4
    assert is_live(core, 0)
    finish(core)


def test_rule_long_prefill_cap_alone_a_long_prompt_gets_the_whole_budget() -> None:
    device = WatchedDevice(400, 4)
    core = Core(0, device=device, token_budget=20, long_prefill_tokens=5)
    core.admit(0, list(range(200)), Sampling(max_tokens=1))
    finish(core)
    assert [sum(chunk.token_count for chunk in step.chunks) for step in device.seen] == [20] * 10


def test_rule_long_prefill_cap_what_the_others_do_not_want_the_long_one_gets() -> None:
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


def test_rule_long_prefill_cap_seats_that_are_taken_leave_nothing_to_save_for() -> None:
    """One waits that cannot come in, so the one that runs is not held back for it."""
    device = WatchedDevice(400, 4)
    core = Core(0, device=device, token_budget=20, running_max=1, long_prefill_tokens=5)
    core.admit(0, list(range(200)), Sampling(max_tokens=1))
    core.admit(1, [1, 2, 3], Sampling(max_tokens=1))
    finish(core)
    assert [sum(c.token_count for c in step.chunks) for step in device.seen if step.chunks[0].request_id == 0][-1] == 20
    assert len(device.seen) <= 12


def test_rule_skip_blocked_one_that_gets_nothing_is_passed_over() -> None:
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
