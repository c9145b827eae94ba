"""The device with the native decoder: rows in mixed batches, moved and forked, against `transformers`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from support import Recorder, finished
from tiny_models import NATIVE, Driver, Mover, greedy_alone, options, random_prompts, save

from cuelight.actors.executor.batch import NOT_FINITE, Batch
from cuelight.actors.executor.model.loading import load as load_general
from cuelight.actors.executor.native import loading
from cuelight.actors.executor.native.build import NoNativeCode, load_native
from cuelight.actors.executor.native.runner import NativeRunner
from cuelight.actors.executor.runner import ModelRunner
from cuelight.messages.executor import ExecuteStep, Row, RowChunk
from cuelight.messages.request import BlockCopies, CopyKind, RequestId, Sampling
from cuelight.messages.scheduler import StepDone
from cuelight.models.cache import cache_directory


@pytest.fixture(autouse=True)
def native() -> None:
    try:
        load_native(cache_directory() / "native")
    except NoNativeCode as error:
        pytest.skip(str(error))


def load(folder: Path, **others: object) -> NativeRunner:
    return loading.load(options(folder, **others))


@pytest.mark.parametrize("family", NATIVE)
def test_chunks_and_batches_give_the_output_of_transformers_alone(family: str, tmp_path: Path) -> None:
    model = save(NATIVE[family](), tmp_path)
    prompts = random_prompts(3)
    driver = Driver(load(tmp_path), prompts, seed=5)
    driver.run(output_tokens=8)
    assert driver.failed == {}
    for index, prompt in enumerate(prompts):
        assert driver.outputs[index] == greedy_alone(model, prompt, 8)
    assert len({token for tokens in driver.outputs.values() for token in tokens}) > 5, "the models' outputs vary"


def test_step_of_partial_chunks_samples_nothing(tmp_path: Path) -> None:
    model = save(NATIVE["llama"](), tmp_path)
    driver = Driver(load(tmp_path), random_prompts(3), seed=0)
    driver._run([(4, 10), (5, 10)])
    assert not any(driver.outputs.values())
    driver.run(output_tokens=2)
    assert driver.outputs[5] == greedy_alone(model, driver.prompts[5], 2)


@pytest.mark.parametrize("seed", range(3))
def test_moved_and_forked_rows_give_the_same_output(seed: int, tmp_path: Path) -> None:
    model = save(NATIVE["llama"](), tmp_path)
    runner = load(tmp_path, host_block_count=64)

    def spoil(blocks: list[int]) -> None:
        runner._pool._device.numbers[blocks] = 1000.0

    mover = Mover(runner, random_prompts(3), seed, spoil)
    mover.run(output_tokens=8)
    assert min(mover.moves.values()) > 5
    for index, prompt in enumerate(mover.prompts):
        assert mover.outputs[index] == greedy_alone(model, prompt, 8)


@pytest.mark.parametrize("seed", range(3))
def test_int8_cache_is_moved_and_forked_with_its_scales(seed: int, tmp_path: Path) -> None:
    save(NATIVE["llama"](), tmp_path)
    alone = Driver(load(tmp_path, kv_cache_dtype="int8"), random_prompts(3), seed)
    alone.run(output_tokens=8)
    runner = load(tmp_path, host_block_count=64, kv_cache_dtype="int8")

    def spoil(blocks: list[int]) -> None:
        runner._pool._device.numbers[blocks] = 127
        runner._pool._device.scales[blocks] = np.nan

    mover = Mover(runner, random_prompts(3), seed, spoil)
    mover.run(output_tokens=8)
    assert min(mover.moves.values()) > 5
    assert mover.failed == {}
    for index in range(3):
        assert mover.outputs[index] == alone.outputs[index]


class Stepper:
    """Rows of two blocks each, with all blocks reserved at the start; numbers the steps."""

    def __init__(self, runner: NativeRunner | ModelRunner) -> None:
        self.runner = runner
        self._step = 0

    def step(
        self,
        enter: dict[int, Sequence[int]],
        go_on: Sequence[int] = (),
        ended: Sequence[int] = (),
        **sampling: Sampling,
    ) -> ExecuteStep:
        """Rows enter with all their tokens as one chunk; the others decode."""
        wish = sampling.get("sampling", Sampling())
        chunks = [RowChunk(RequestId(index), 1) for index in go_on]
        chunks += [RowChunk(RequestId(index), len(tokens)) for index, tokens in enter.items()]
        rows = [
            Row(RequestId(index), tuple(tokens), len(tokens), 0, (2 * index + 1, 2 * index + 2), wish)
            for index, tokens in enter.items()
        ]
        self._step += 1
        return ExecuteStep(
            epoch=0,
            step=self._step,
            life=0,
            ended=tuple(map(RequestId, ended)),
            rows=tuple(rows),
            extensions=(),
            chunks=tuple(chunks),
            reply_to=Recorder(),
        )

    def run(self, step: ExecuteStep) -> dict[int, int]:
        return tokens_of(finished(self.runner.run(self.runner.prepare(step))))


def tokens_of(done: StepDone) -> dict[int, int]:
    return dict(zip(done.request_ids, done.token_ids, strict=True))


def test_steps_are_prepared_before_the_steps_they_depend_on_have_run(tmp_path: Path) -> None:
    """The tokens that the later step needs are fed to it when it runs."""
    model = save(NATIVE["qwen2"](), tmp_path)
    runner = load(tmp_path)
    stepper = Stepper(runner)
    prompts = {0: [5, 6, 7], 1: [8, 9]}
    steps = [
        stepper.step({0: prompts[0]}),
        stepper.step({1: prompts[1]}, [0]),
        stepper.step({}, [1, 0]),
        stepper.step({}, [0, 1]),
        stepper.step({}, [1], ended=[0]),
    ]
    batches = [runner.prepare(step) for step in steps]
    outputs: dict[int, list[int]] = {0: [], 1: []}
    for batch in batches:
        for index, token in tokens_of(runner.run(batch)).items():
            outputs[index].append(token)
    for index, prompt in prompts.items():
        assert outputs[index] == greedy_alone(model, prompt, 4)


def test_slots_grow_and_are_reused(tmp_path: Path) -> None:
    model = save(NATIVE["llama"](), tmp_path)
    stepper = Stepper(load(tmp_path))
    chance = random.Random(1)
    prompts = {index: [chance.randrange(2, 100) for _ in range(3)] for index in range(60)}
    running: list[int] = []
    ended: list[int] = []
    outputs: dict[int, list[int]] = {index: [] for index in prompts}
    waiting = list(prompts)
    while waiting or running:
        enter = [waiting.pop(0) for _ in range(min(len(waiting), chance.randint(0, 20)))]
        if not enter and not running:
            continue
        got = stepper.run(stepper.step({index: prompts[index] for index in enter}, running, ended))
        for index, token in got.items():
            outputs[index].append(token)
        ended = [index for index in got if len(outputs[index]) == 3]
        running = [index for index in got if len(outputs[index]) < 3]
    for index, prompt in prompts.items():
        assert outputs[index] == greedy_alone(model, prompt, 3)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=3),
        Sampling(temperature=0.8, top_k=7, seed=4),
        Sampling(temperature=1.3, top_p=0.8, seed=5),
        Sampling(temperature=0.0, min_tokens=3, stop_token_ids=(4, 9)),
        Sampling(temperature=2.0, top_k=90, top_p=0.5, min_tokens=4, seed=6),
    ],
    ids=str,
)
def test_sampled_tokens_match_the_general_path(sampling: Sampling, tmp_path: Path) -> None:
    save(NATIVE["llama"](), tmp_path)
    prompts = {index: [5 + index, 6, 7, 60 - index][: 1 + index % 4] for index in range(12)}
    outputs = []
    for runner in (load(tmp_path), ModelRunner(load_general(options(tmp_path)))):
        stepper = Stepper(runner)
        first = stepper.run(stepper.step(prompts, sampling=sampling))
        outputs.append([first, *(stepper.run(stepper.step({}, list(prompts))) for _ in range(3))])
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0][0].values())) > 3


def spoil_embedding(folder: Path, token: int) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("others", [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_nan_in_the_hidden_state_of_a_row_stays_in_that_row(others: dict[str, object], tmp_path: Path) -> None:
    """The embedding of one token is NaN: rows that hold it fail, and do not affect the others."""
    save(NATIVE["llama"](), tmp_path)
    prompts = [[token for token in prompt if token != 99] or [5] for prompt in random_prompts(3)]
    sound = Driver(load(tmp_path, **others), prompts, seed=5)
    sound.run(output_tokens=8)
    spoil_embedding(tmp_path, 99)
    spoilt = [[*prompt[:1], 99, *prompt[2:]] if index == 2 else prompt for index, prompt in enumerate(prompts)]
    driver = Driver(load(tmp_path, **others), spoilt, seed=5)
    driver.run(output_tokens=8)
    hit = {2} | {index for index, tokens in sound.outputs.items() if 99 in tokens[:-1]}
    assert driver.failed == dict.fromkeys(hit, NOT_FINITE)
    assert len(hit) < 4
    if not others:  # rounding depends on the steps, which differ once a row has failed
        for index in set(sound.outputs) - hit:
            assert driver.outputs[index] == sound.outputs[index]


def test_rule_zeroed_pool_blocks_that_held_nan_do_not_affect_their_next_rows(tmp_path: Path) -> None:
    save(NATIVE["llama"](), tmp_path)
    prompts = random_prompts(3)
    sound = Driver(load(tmp_path), prompts, seed=2)
    sound.run(output_tokens=8)
    spoil_embedding(tmp_path, 99)
    runner = load(tmp_path, block_count=1 + 55)
    spoilers = Driver(runner, [[99] * 40] * 5, seed=1)
    spoilers.run(output_tokens=1)
    assert len(spoilers.failed) == 5
    driver = Driver(runner, prompts, seed=2, epoch=1)
    driver.run(output_tokens=8)
    clean = [index for index, prompt in enumerate(prompts) if 99 not in prompt + sound.outputs[index]]
    assert len(clean) > 3
    assert [driver.outputs[index] for index in clean] == [sound.outputs[index] for index in clean]


@pytest.mark.parametrize("others", [{}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}], ids=str)
def test_prefix_before_a_nan_token_can_be_shared(others: dict[str, object], tmp_path: Path) -> None:
    """The block before the NaN token is computed in the same chunk; a row that shares it does not fail."""
    save(NATIVE["qwen3, wide"](), tmp_path)
    spoil_embedding(tmp_path, 99)
    runner = load(tmp_path, block_size=16, **others)
    prefix = list(range(5, 21))
    driver = Driver(runner, [[*prefix, 99, 7], [*prefix, 7]], seed=0)
    driver._run([(0, 1)])
    driver._run([(0, 17)])
    driver.blocks[1], driver.computed[1] = driver.blocks[0][:1], 16
    driver.run(output_tokens=2)
    assert driver.failed == {0: NOT_FINITE}


def test_infinite_logits_fail_their_row_alone(tmp_path: Path) -> None:
    save(NATIVE["llama"](), tmp_path)
    runner = load(tmp_path)
    stepper = Stepper(runner)
    decode = runner._decoder.decode

    def spoilt(*step: object) -> tuple[np.ndarray, np.ndarray]:
        logits, best = decode(*step)  # type: ignore[arg-type]
        logits[1, 7], best[1] = np.inf, -1
        return logits, best

    runner._decoder.decode = spoilt  # type: ignore[method-assign]
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=1)):
        done = runner.run(runner.prepare(stepper.step({0: [5], 1: [6], 2: [7]}, sampling=sampling)))
        assert done.failed == ((1, NOT_FINITE),)
        assert done.request_ids == (0, 2)
        runner.prepare(stepper.step({}, [], ended=[0, 1, 2]))


@pytest.mark.parametrize(
    ("copying", "sources", "targets"),
    [
        (CopyKind.FORK, (1,), (128,)),
        (CopyKind.FORK, (0,), (1,)),
        (CopyKind.SAVE, (1,), (2,)),
        (CopyKind.SAVE, (-1,), (0,)),
        (CopyKind.LOAD, (0,), (0,)),
        (CopyKind.LOAD, (2,), (1,)),
    ],
)
def test_copies_of_missing_blocks_are_refused(
    copying: CopyKind, sources: tuple[int, ...], targets: tuple[int, ...], tmp_path: Path
) -> None:
    save(NATIVE["llama"](), tmp_path)
    runner = load(tmp_path, host_block_count=2)
    with pytest.raises(AssertionError, match="a copied block exists"):
        runner.copy(BlockCopies(copying, sources, targets))


def test_batches_of_another_device_are_refused(tmp_path: Path) -> None:
    save(NATIVE["llama"](), tmp_path)
    empty = np.zeros(0, np.int64)
    with pytest.raises(AssertionError, match="come from `prepare`"):
        load(tmp_path).run(Batch(0, 0, empty, empty, empty, empty))
