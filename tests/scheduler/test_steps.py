"""The scheduler with the real cache manager and executor around a stub device, one message at a time."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
from support import Core, FailingDevice, expected_output

from cuelight.actors.executor.stub import StubBatch, StubDevice
from cuelight.messages.executor import ExecuteStep
from cuelight.messages.request import FinishReason, Sampling
from cuelight.messages.scheduler import StepDone


class WatchedDevice(StubDevice):
    """Keeps every step it ran."""

    def __init__(self, block_count: int, block_size: int) -> None:
        super().__init__(block_count, block_size)
        self.seen: list[ExecuteStep] = []

    def run(self, batch):  # type: ignore[no-untyped-def]  # as the base
        self.seen.append(batch.step)
        return super().run(batch)


def requests(seed: int, count: int, prompt_max: int, output_max: int) -> list[tuple[list[int], Sampling]]:
    """Some share a prefix, so the prefix cache takes part."""
    chance = random.Random(seed)
    shared = [chance.randrange(1000) for _ in range(prompt_max // 2)]
    made = []
    for _ in range(count):
        own = [chance.randrange(1000) for _ in range(chance.randint(1, prompt_max // 2))]
        prompt = shared[: chance.choice([0, 0, len(shared), chance.randint(0, len(shared))])] + own
        stops = tuple(chance.randrange(1000) for _ in range(chance.choice([0, 0, 40])))
        made.append((prompt, Sampling(max_tokens=chance.randint(1, output_max), stop_token_ids=stops)))
    return made


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_delivery_gives_each_request_what_it_gets_alone(seed: int) -> None:
    chance = random.Random(seed)
    block_size = chance.choice([1, 2, 4, 16])
    longest = 80
    # From "just enough for one" to "room for all".
    block_count = 2 + -(-longest // block_size) * chance.choice([1, 1, 2, 5])
    core = Core(
        seed,
        device=StubDevice(block_count, block_size),
        token_budget=chance.choice([1, 3, 8, 64]),
        running_max=chance.choice([1, 4, 16]),
        steps_in_flight=chance.choice([1, 2, 3]),
        watermark=chance.choice([0.0, 0.1]),
        eos=frozenset(range(20)),
    )
    capacity = (block_count - 1) * block_size
    wanted = requests(seed, 12, prompt_max=40, output_max=40)
    for request_id, (prompt, sampling) in enumerate(wanted):
        core.admit(request_id, prompt, sampling)
        for _ in range(chance.randint(0, 30)):
            core.step()
    core.run()
    for request_id, (prompt, sampling) in enumerate(wanted):
        tokens, reason = expected_output(prompt, sampling, frozenset(range(20)), capacity)
        assert core.outputs()[request_id] == tokens
        assert core.ends()[request_id].reason is reason
        assert core.ends()[request_id].usage.output_tokens == len(tokens)
    assert core.blocks().blocks_free == core.blocks().blocks_total
    assert (core.figures().running, core.figures().waiting) == (0, 0)


@pytest.mark.parametrize("seed", range(40))
def test_aborts_and_failed_steps_touch_nobody_else(seed: int) -> None:
    chance = random.Random(seed)
    device = FailingDevice(40, 4, lambda step: chance.random() < 0.03)
    core = Core(seed, device=device, token_budget=chance.choice([4, 32]), running_max=6)
    wanted = requests(seed, 12, prompt_max=40, output_max=30)
    aborted = set(chance.sample(range(12), 4))
    for request_id, (prompt, sampling) in enumerate(wanted):
        core.admit(request_id, prompt, sampling)
        for _ in range(chance.randint(0, 20)):
            core.step()
    for request_id in aborted:
        core.abort(request_id)
        for _ in range(chance.randint(0, 40)):
            core.step()
    core.run()
    for request_id, (prompt, sampling) in enumerate(wanted):
        tokens, reason = expected_output(prompt, sampling)
        got, end = core.outputs().get(request_id, []), core.ends()[request_id]
        if end.reason is FinishReason.CANCELLED:
            assert request_id in aborted
        elif end.reason is not FinishReason.FAILED:
            # FAILED needs two bad steps in a row for one request: rare, and then nobody else's matter.
            assert end.reason is reason and got == tokens
        assert got == tokens[: len(got)]
    assert core.blocks().blocks_free == core.blocks().blocks_total


class OverflowingDevice(StubDevice):
    """Makes no numbers of some requests' last tokens, and counts what it computes for each."""

    def __init__(self, overflows: set[int]) -> None:
        super().__init__(60, 4)
        self.overflows = overflows
        self.computed: Counter[int] = Counter()

    def run(self, batch: StubBatch) -> StepDone:
        done = super().run(batch)
        for chunk in batch.step.chunks:
            self.computed[chunk.request_id] += chunk.token_count
        sampled = dict(zip(done.request_ids, done.token_ids, strict=True))
        failed = tuple((request_id, "no number") for request_id in sampled if request_id in self.overflows)
        sound = {request_id: token_id for request_id, token_id in sampled.items() if request_id not in self.overflows}
        return msgspec.structs.replace(done, request_ids=tuple(sound), token_ids=tuple(sound.values()), failed=failed)


def test_nobody_finds_what_a_request_computed_whose_logits_were_no_numbers() -> None:
    device = OverflowingDevice({1})
    core = Core(0, device=device, token_budget=8)
    prompt = list(range(40))
    for request_id, count in ((0, 16), (1, 40), (2, 38)):
        core.admit(request_id, prompt[:count], Sampling(max_tokens=2))
        core.run()
    assert core.ends()[1].reason is FinishReason.FAILED
    assert core.ends()[2].reason is FinishReason.LENGTH
    # Of each the token that a decode in flight computed for nothing.
    assert device.computed[1] - 1 == 40 - 16, "it found what the first one had computed"
    assert device.computed[2] - 1 == 38 - 16, "and so did the last one, but nothing of the second's"
    assert core.blocks().blocks_free == core.blocks().blocks_total


def test_a_request_that_breaks_every_step_fails_alone() -> None:
    """What is at fault is found by running suspects one at a time; the others never notice."""
    poison = [666, 666, 666]
    device = FailingDevice(200, 4, lambda step: False)
    culprit = 3

    def fault(step: ExecuteStep) -> bool:
        return any(chunk.request_id == culprit for chunk in step.chunks)

    device._fault = fault
    core = Core(1, device=device)
    wanted = requests(5, 8, prompt_max=20, output_max=10)
    wanted[culprit] = (poison, Sampling(max_tokens=5))
    for request_id, (prompt, sampling) in enumerate(wanted):
        core.admit(request_id, prompt, sampling)
    core.run()
    for request_id, (prompt, sampling) in enumerate(wanted):
        if request_id == culprit:
            assert core.ends()[request_id].reason is FinishReason.FAILED
            assert "a step that fails" in core.ends()[request_id].error
        else:
            assert core.outputs()[request_id] == expected_output(prompt, sampling)[0]
    assert core.blocks().blocks_free == core.blocks().blocks_total


def test_decodes_come_before_prefills_and_the_budget_holds() -> None:
    device = WatchedDevice(500, 4)
    core = Core(0, device=device, token_budget=10, running_max=8)
    for request_id in range(3):
        core.admit(request_id, [request_id] * 4, Sampling(max_tokens=40))
    for _ in range(60):
        core.step()
    core.admit(9, list(range(100)), Sampling(max_tokens=2))
    core.run()
    mixed = [step for step in device.seen if len({chunk.token_count == 1 for chunk in step.chunks}) == 2]
    assert mixed, "the long prompt is computed beside the decodes"
    for step in device.seen:
        counts = [chunk.token_count for chunk in step.chunks]
        assert sum(counts) <= 10
        assert counts == sorted(counts, key=lambda count: count > 1), "decodes first"
    assert len([step for step in device.seen if any(chunk.request_id == 9 for chunk in step.chunks)]) > 10


def test_prefill_is_in_arrival_order() -> None:
    device = WatchedDevice(500, 4)
    core = Core(0, device=device, token_budget=16, running_max=8)
    for request_id in range(5):
        core.admit(request_id, [request_id] * 30, Sampling(max_tokens=3))
    core.run()
    first_seen = list(dict.fromkeys(chunk.request_id for step in device.seen for chunk in step.chunks))
    assert first_seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(10))
def test_rule_head_of_line_nobody_is_admitted_over_the_head_of_the_queue(seed: int) -> None:
    """The second does not fit beside the first; the third, which would, waits behind it."""
    device = WatchedDevice(1 + 12, 4)
    core = Core(seed, device=device)
    core.admit(0, [1] * 20, Sampling(max_tokens=8))
    core.admit(1, [2] * 30, Sampling(max_tokens=2))
    core.admit(2, [3] * 4, Sampling(max_tokens=2))
    core.run()
    first_step = [min(s.step for s in device.seen if any(c.request_id == i for c in s.chunks)) for i in range(3)]
    last_step_of_the_first = max(s.step for s in device.seen if any(c.request_id == 0 for c in s.chunks))
    assert last_step_of_the_first < first_step[1] <= first_step[2]
    for request_id, (length, max_tokens) in enumerate(((20, 8), (30, 2), (4, 2))):
        expected = expected_output([request_id + 1] * length, Sampling(max_tokens=max_tokens))[0]
        assert core.outputs()[request_id] == expected


def test_rule_victim_the_newest_is_preempted_first_and_keeps_its_tokens() -> None:
    core = Core(0, device=StubDevice(1 + 12, 4), token_budget=64, running_max=4)
    for request_id in range(3):
        core.admit(request_id, [request_id] * 8, Sampling(max_tokens=30))
    core.run()
    for request_id in range(3):
        assert core.outputs()[request_id] == expected_output([request_id] * 8, Sampling(max_tokens=30))[0]
    assert core.ends()[0].preemptions == 0
    assert core.ends()[2].preemptions > 0
    assert core.figures().preemptions == sum(end.preemptions for end in core.ends().values())


def test_rule_no_useless_step_no_step_is_run_that_nobody_needs() -> None:
    """A prompt and three tokens take one prefill and two decodes, however many steps may be in flight."""
    device = WatchedDevice(50, 4)
    core = Core(0, device=device, steps_in_flight=4)
    core.admit(0, [1, 2, 3], Sampling(max_tokens=3))
    core.run()
    assert [sum(c.token_count for c in step.chunks) for step in device.seen] == [3, 1, 1]


def test_rule_resume_as_prefill_the_prefix_of_a_conversation_is_found_again() -> None:
    core = Core(0, device=StubDevice(100, 4))
    prompt = list(range(100, 120))
    core.admit(0, prompt, Sampling(max_tokens=9))
    core.run()
    turn = prompt + core.outputs()[0] + [7, 8, 9]
    core.admit(1, turn, Sampling(max_tokens=4))
    core.run()
    # 28 tokens have K/V: prompt and output less the last token, which was sampled but never computed.
    assert core.ends()[1].usage.cached_tokens == 28
    assert core.outputs()[1] == expected_output(turn, Sampling(max_tokens=4))[0]


@pytest.mark.parametrize("output_tokens", [1, 4])
def test_a_stop_string_ends_the_request_where_the_text_ended(output_tokens: int) -> None:
    core = Core(3, device=StubDevice(100, 4))
    core.admit(0, [1, 2, 3], Sampling(max_tokens=100))
    while len(core.outputs().get(0, [])) < output_tokens + 1:
        core.step()
    core.stop_matched(0, output_tokens)
    core.run()
    assert core.ends()[0].reason is FinishReason.STOP
    assert core.ends()[0].usage.output_tokens == output_tokens
    assert core.blocks().blocks_free == core.blocks().blocks_total


@pytest.mark.parametrize("seed", range(40))
def test_one_that_leaves_while_it_is_given_the_last_block_makes_room(seed: int) -> None:
    core = Core(seed, device=StubDevice(2, 16))
    sampling = Sampling(max_tokens=4)
    for request_id in range(4):
        core.admit(request_id, [7, 8, request_id], sampling)
    for _ in range(core.chance.randint(2, 12)):
        core.step()
    core.abort(0)
    core.run()
    ends = core.ends()
    assert set(ends) == {0, 1, 2, 3}
    for request_id in (1, 2, 3):
        assert ends[request_id].reason is FinishReason.LENGTH, ends[request_id].error
        assert core.outputs()[request_id] == expected_output([7, 8, request_id], sampling)[0]
    assert core.blocks().blocks_free == core.blocks().blocks_total


@pytest.mark.parametrize("seed", range(10))
def test_a_stop_string_may_be_found_late(seed: int) -> None:
    """The cache manager knows tokens by then that the text does not have."""
    core = Core(seed, device=StubDevice(80, 1), steps_in_flight=4)
    core.admit(0, [7, 8, 9], Sampling(max_tokens=60))
    while len(core.outputs().get(0, [])) < 30:
        assert core.step()
    core.stop_matched(0, 5)
    core.run()
    assert core.ends()[0].reason is FinishReason.STOP
    assert core.ends()[0].usage.output_tokens == 5
    assert core.blocks().blocks_free == core.blocks().blocks_total


def test_rule_abort_anywhere_abort_is_known_in_every_state_and_idempotent() -> None:
    """Whatever the moment, one abort ends the request once and gives every block back."""
    for moment in range(0, 120, 3):
        core = Core(moment, device=StubDevice(1 + 8, 4), token_budget=6, running_max=3)
        for request_id in range(4):
            core.admit(request_id, [request_id] * 9, Sampling(max_tokens=12))
        for _ in range(moment):
            core.step()
        for request_id in (0, 3, 3, 77):
            core.abort(request_id)
        core.run()
        assert set(core.ends()) == {0, 1, 2, 3}
        for request_id in (1, 2):
            assert core.outputs()[request_id] == expected_output([request_id] * 9, Sampling(max_tokens=12))[0]
        assert core.blocks().blocks_free == core.blocks().blocks_total


def test_min_tokens_keeps_an_end_token_from_ending() -> None:
    prompt = [5, 6, 7]
    tokens, _ = expected_output(prompt, Sampling(max_tokens=20))
    core = Core(0, device=StubDevice(50, 4), eos=frozenset(tokens[2:3] + tokens[9:10]))
    core.admit(0, prompt, Sampling(max_tokens=20, min_tokens=5))
    core.admit(1, prompt, Sampling(max_tokens=20))
    core.admit(2, prompt, Sampling(max_tokens=20, ignore_eos=True))
    core.run()
    assert core.outputs()[0] == tokens[:10]
    assert core.outputs()[1] == tokens[:3]
    assert core.outputs()[2] == tokens
    assert [core.ends()[i].reason for i in range(3)] == [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]
