"""Several samples of one prompt: the prompt is computed once, its full blocks are shared, its half-full one forked."""

from __future__ import annotations

import asyncio
import random

import pytest
from scheduling import WatchedDevice, finish, step_until
from support import Core, expected_output

from cuelight import errors
from cuelight.actors.intake.parsing import parse_prompt
from cuelight.messages.intake import Submit
from cuelight.messages.request import FinishReason, Sampling, Service
from cuelight.testing import stub_engine

PROMPT = list(range(500, 541))


def samples(core: Core, count: int, sampling: Sampling, prompt: list[int] = PROMPT) -> None:
    for request_id in range(count):
        core.admit(request_id, prompt, sampling, sample_of=0 if request_id else None)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 10, 16, 17, 41])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("token_budget", [8, 512])
def test_prompt_is_computed_once(length: int, block_size: int, token_budget: int) -> None:
    """Each further sample computes one token of the prompt, for its logits."""
    for seed in range(4):
        device = WatchedDevice(300, block_size)
        core = Core(seed, device=device, token_budget=token_budget, running_max=8)
        prompt, sampling = PROMPT[:length], Sampling(max_tokens=6)
        samples(core, 5, sampling, prompt)
        finish(core)
        tokens, reason = expected_output(prompt, sampling)
        assert all(core.outputs()[request_id] == tokens for request_id in range(5))
        assert all(end.reason is reason for end in core.ends().values())
        assert device.computed() == length + 4 + 5 * 5
        assert all(core.ends()[request_id].usage.cached_tokens == length - 1 for request_id in range(1, 5))


def test_half_full_block_is_forked_and_never_shared() -> None:
    device = WatchedDevice(300, 16)
    core = Core(0, device=device)
    samples(core, 4, Sampling(max_tokens=30), PROMPT[:20])
    finish(core)
    assert core.blocks().blocks_forked == 3
    # Full blocks are shared: the first one of each table.
    assert core.blocks().tokens_found == 3 * 19


@pytest.mark.parametrize("seed", range(40))
def test_samples_in_tiny_pools_with_aborts_in_any_order(seed: int) -> None:
    chance = random.Random(seed)
    block_size = chance.choice([1, 3, 4, 16])
    prompt = PROMPT[: chance.randint(1, 41)]
    sampling = Sampling(max_tokens=chance.randint(1, 12))
    blocks = 2 + -(-(len(prompt) + 12) // block_size) * chance.choice([1, 1, 2, 6])
    core = Core(
        seed,
        device=WatchedDevice(blocks, block_size),
        token_budget=chance.choice([1, 5, 64]),
        running_max=chance.choice([1, 3, 8]),
        steps_in_flight=chance.choice([1, 2, 3]),
    )
    device = core.device
    assert isinstance(device, WatchedDevice)
    samples(core, 6, sampling, prompt)
    for _ in range(chance.randint(0, 40)):
        core.step()
    gone = chance.randrange(6)
    core.abort(gone)
    device.failures = chance.choice([0, 0, 1])
    finish(core)
    for request_id in set(range(6)) - {gone}:
        assert core.outputs()[request_id] == expected_output(prompt, sampling)[0]


def test_other_samples_continue_when_the_first_has_left() -> None:
    core = Core(0, device=WatchedDevice(100, 16), token_budget=8)
    sampling = Sampling(max_tokens=3)
    samples(core, 4, sampling)
    device = core.device
    assert isinstance(device, WatchedDevice)
    step_until(core, lambda: device.computed([0]) >= 16)
    core.abort(0)
    finish(core)
    assert all(core.outputs()[request_id] == expected_output(PROMPT, sampling)[0] for request_id in range(1, 4))


def test_samples_of_different_salts_share_nothing() -> None:
    core = Core(0, device=WatchedDevice(100, 16))
    for request_id, salt in enumerate(["", "a", "b"]):
        core.admit(request_id, PROMPT, Sampling(max_tokens=2), service=Service(cache_salt=salt), sample_of=0)
    finish(core)
    assert all(end.usage.cached_tokens == 0 for end in core.ends().values())


async def test_engine_returns_a_stream_for_each_sample() -> None:
    async with stub_engine() as engine:
        streams = engine.samples("tell me " * 60, 5, max_tokens=7, temperature=1.0)
        results = await asyncio.gather(*(stream.result() for stream in streams))
        assert len({result.request_id for result in results}) == 5
        assert {result.text for result in results} == {results[0].text}  # the stub does not sample
        assert [result.usage.cached_tokens for result in results] == [0] + [len("tell me " * 60) - 1] * 4
        assert engine.stats().blocks_forked > 0
        assert engine.stats().blocks_free == engine.stats().blocks_total


async def test_each_sample_has_its_own_seed() -> None:
    seeds: list[int | None] = []
    async with stub_engine(seed=3) as engine:
        submit = engine._lifecycle.running.requests._intake.tell

        def tell(message):  # type: ignore[no-untyped-def]
            if isinstance(message, Submit):
                seeds.append(message.sampling.seed)
            submit(message)

        engine._lifecycle.running.requests._intake.tell = tell
        for stream in engine.samples("a", 3, seed=2**64 - 2, max_tokens=1):
            await stream.result()
        for stream in engine.samples("a", 2, max_tokens=1):
            await stream.result()
    assert seeds[:3] == [2**64 - 2, 2**64 - 1, 0]
    assert None not in seeds
    assert len(set(seeds)) == 5


async def test_sample_that_is_left_leaves_the_others_running() -> None:
    async with stub_engine() as engine:
        streams = engine.samples("b" * 500, 4, max_tokens=20)
        await streams[0].aclose()
        results = await asyncio.gather(*(stream.result() for stream in streams[1:]))
        assert all(len(result.token_ids) == 20 for result in results)


async def test_bad_prompt_is_refused_for_each_sample_with_its_own_error() -> None:
    async with stub_engine(context_length=100) as engine:
        streams = engine.samples("c" * 1000, 3)  # long enough to be tokenized on a thread
        outcomes = await asyncio.gather(*(stream.result() for stream in streams), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [errors.PromptTooLong] * 3
        assert len({id(outcome) for outcome in outcomes}) == 3
        assert (await engine.generate("d", max_tokens=1)).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("count", [0, -1, 9, True, "2", 2.0, None])
async def test_invalid_count_is_refused(count: object) -> None:
    error = errors.BadSampling if type(count) is int else errors.WrongType
    async with stub_engine(queue_limit=8) as engine:
        with pytest.raises(error, match="count"):
            engine.samples("a", count)  # type: ignore[arg-type]
        assert not engine._lifecycle.open_requests


async def test_all_samples_are_submitted_or_none() -> None:
    async with stub_engine(queue_limit=8) as engine:
        held = engine.samples("a" * 50, 8, max_tokens=200)
        with pytest.raises(errors.QueueFull):
            engine.samples("a" * 50, 8) + engine.samples("a" * 50, 8)
        assert len(engine._lifecycle.open_requests) <= 16
        for stream in held:
            await stream.aclose()


async def test_long_prompt_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[object] = []
    sound = parse_prompt("x")

    async with stub_engine() as engine:
        from cuelight.core.stub_model import StubEncoder

        encode = StubEncoder.encode

        def counting(self, prompt, token_limit):  # type: ignore[no-untyped-def]
            encoded.append(prompt)
            return encode(self, prompt, token_limit)

        monkeypatch.setattr(StubEncoder, "encode", counting)
        streams = engine.samples("e" * 1000, 4, max_tokens=1)
        await asyncio.gather(*(stream.result() for stream in streams))
        assert len(encoded) == 1
        await engine.generate(sound, max_tokens=1)
        assert len(encoded) == 2
