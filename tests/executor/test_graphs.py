"""Decode steps through CUDA graphs: captures, padding, and the same tokens as without graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from checked_graphs import CheckedGraphs, launching
from checked_streams import Checked, watch_staging
from plain_kernels import PlainKernels
from tiny_models import GROUPED, Driver, Pipeline, greedy_alone, options, random_prompts, save

from cuelight.actors.executor.batch import Batch, SamplingRow
from cuelight.actors.executor.batch import BatchChunk as Row
from cuelight.actors.executor.model import graphs as graphs_module
from cuelight.actors.executor.model import loading
from cuelight.actors.executor.model.attention_triton import (
    GraphKey,
    ScoreOptions,
    Tiling,
    TritonBackend,
    TritonPlanner,
    TritonStep,
)
from cuelight.actors.executor.model.graphs import SIZES, Capture, CudaGraphs, DecodeGraphs, Graph, sizes_up_to
from cuelight.actors.executor.model.loading import LoadedModel, load
from cuelight.actors.executor.native.build import NoNativeCode
from cuelight.actors.executor.runner import ModelRunner, graphs_of
from cuelight.messages.request import RequestId, Sampling

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SMALL = (1, 2, 4, 6)


class LaunchedKernels(PlainKernels):
    """Kernels that each count as one launch, as on a device."""

    checked: Checked | None = None

    @contextmanager
    def _launched(
        self, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor], *baked: object
    ) -> Iterator[None]:
        if self.checked is not None:
            for tensor in reads:
                self.checked.touch(tensor, writes=False)
            for tensor in writes:
                self.checked.touch(tensor, writes=True)
        with launching(name, *reads, *writes, *baked):
            yield

    def write(
        self, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        with self._launched("write", [k, v, slots], [keys, values]):
            super().write(k, v, keys, values, slots)

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        step: TritonStep,
        scores: ScoreOptions,
    ) -> None:
        # A launch has the address of a table, not its length.
        reads = [q, keys, values, step.items, step.tables[:1]]
        with self._launched("attend", reads, [out, step.partials, step.sums], step.key, scores):
            super().attend(q, keys, values, out, step, scores)

    def merge(self, out: torch.Tensor, step: TritonStep) -> None:
        with self._launched("merge", [step.merges, step.partials, step.sums], [out], step.key):
            super().merge(out, step)


def load_planned(folder: Path, span: int | None = None, **others: object) -> LoadedModel:
    """Load with attention that plans, on the CPU, and with nothing computed by code that a device lacks."""

    def nothing(folder: Path | None) -> None:
        raise NoNativeCode("as on a device")

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(loading, "load_native", nothing)
        loaded = load(options(folder, **others))
    planner = TritonPlanner(3, loaded.pool.kv_heads, loaded.pool.block_size, Tiling(16, 16, 4), span)
    return replace(loaded, backend=TritonBackend(LaunchedKernels(), planner, loaded.device))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A model, prompts, and the outputs of transformers."""
    folder = tmp_path_factory.mktemp("tiny")
    model = save(transformers.LlamaConfig(**GROUPED), folder)
    prompts = random_prompts(3) + [prompt[::-1] for prompt in random_prompts(4)]
    return folder, prompts, [greedy_alone(model, prompt, 8) for prompt in prompts]


Tiny = tuple[Path, list[list[int]], list[list[int]]]


def graphs(loaded: LoadedModel, sizes: tuple[int, ...] = SMALL, capture: Capture | None = None) -> DecodeGraphs:
    made = graphs_of(loaded, capture or CheckedGraphs(), sizes)
    assert made is not None
    return made


def decodes(*lengths: int, sampling: int | None = None) -> Batch:
    """A step of rows with one token each, the first `sampling` of which sample; no two rows share a block."""
    count, starts = len(lengths), np.cumsum([0, *(-(-length // 4) for length in lengths)]) + 1
    tables = [np.arange(starts[row], starts[row + 1]) for row in range(count)]
    last = np.array(lengths, np.int64) - 1
    blocks = np.array([table[-1] for table in tables], np.int64)
    rows = [Row(row, row + 1, length, tables[row]) for row, length in enumerate(lengths)]
    batch = Batch(0, 0, np.zeros(count, np.int64), last, blocks, last % 4, chunks=rows)
    for row in range(count if sampling is None else sampling):
        batch.sampling_rows.append(SamplingRow(RequestId(row), row, row, lengths[row], 0, Sampling()))
    return batch


def test_decode_steps_are_padded_to_the_next_size(tiny: Tiny) -> None:
    made = graphs(load_planned(tiny[0]))
    assert [made.size(decodes(*[5] * count)) for count in range(1, 9)] == [1, 2, 4, 4, 6, 6, None, None]
    assert made.size(Batch(0, 0, *np.zeros((4, 0), np.int64))) is None
    assert made.size(decodes(5, 5, sampling=1)) is None, "a partial chunk of one token samples nothing"
    chunk = Batch(0, 0, *np.zeros((4, 2), np.int64), chunks=[Row(0, 2, 2, np.array([1]))])
    chunk.sampling_rows.append(SamplingRow(RequestId(0), 0, 1, 2, 0, Sampling()))
    assert made.size(chunk) is None


def test_sizes_cover_the_largest_batch() -> None:
    assert sizes_up_to(1) == (1,)
    assert sizes_up_to(3) == (1, 2, 4)
    assert sizes_up_to(64)[-1] == 64
    assert sizes_up_to(65)[-1] == 80
    assert sizes_up_to(10_000) == SIZES
    assert list(SIZES) == sorted(set(SIZES))


def test_backend_without_plans_has_no_graphs(tiny: Tiny) -> None:
    assert graphs_of(load(options(tiny[0])), CheckedGraphs()) is None


@pytest.mark.parametrize("span", [None, 8])
@pytest.mark.parametrize("warm", [False, True])
def test_steps_through_graphs_give_the_output_of_each_prompt_alone(span: int | None, warm: bool, tiny: Tiny) -> None:
    """Rows of all lengths, in chunks and alone: every batch size, with steps without graphs between them."""
    folder, prompts, expected = tiny
    loaded = load_planned(folder, span)
    made = graphs(loaded)
    runner = ModelRunner(loaded, graphs=made, debug_poison=True)
    if warm:
        runner.warm_up()
        assert made.count == len(SMALL)
        assert not any(tensor.any() for tensor in (*loaded.pool.keys, *loaded.pool.values))
    driver = Driver(runner, prompts, seed=1)
    driver.run(output_tokens=8)
    assert [driver.outputs[index] for index in range(len(prompts))] == expected
    assert {size for size, _ in made._graphs} >= {1, 2, 4}


@pytest.mark.parametrize("seed", range(2))
def test_graphs_access_memory_in_order_and_leave_host_memory_alone(seed: int, tiny: Tiny) -> None:
    folder, prompts, expected = tiny
    loaded = load_planned(folder)
    made = graphs(loaded)
    known = [*made._weights.values(), *made._inputs.memory().values()]
    packed = [module.packed for module in loaded.model.modules() if hasattr(module, "packed")]
    checked = Checked(seed, [*known, *packed])
    loaded.backend._kernels.checked = checked  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patches:
        watch_staging(patches, checked)
        runner = ModelRunner(loaded, checked.streams, made, debug_poison=True)
        pipeline = CheckedPipeline(runner, prompts, seed)
        pipeline.checked = checked
        with checked:
            pipeline.run(output_tokens=6)
    assert [pipeline.outputs[index] for index in range(len(prompts))] == [tokens[:6] for tokens in expected]
    assert made.count > 0


class CheckedPipeline(Pipeline):
    checked: Checked

    def go_on(self) -> None:
        while self.chance.random() < 0.7:
            self.checked.advance()
        super().go_on()

    def finish(self, result):  # type: ignore[no-untyped-def]  # as in the base class
        with self.checked.waiting():
            return super().finish(result)


class Recording:
    """A capture that records the work, and counts."""

    def __init__(self) -> None:
        self.captured: list[dict[str, int]] = []
        self.replayed: list[int] = []

    def capture(self, work: Callable[[], None], memory: Mapping[str, torch.Tensor]) -> Graph:
        number = len(self.captured)
        self.captured.append({name: tensor.data_ptr() for name, tensor in memory.items()})
        work()

        def replay(work: Callable[[], None]) -> None:
            self.replayed.append(number)
            work()

        return type("RestoreState", (), {"replay": staticmethod(replay)})()


def run(made: DecodeGraphs, batch: Batch, size: int) -> torch.Tensor:
    plan = made._backend.plan(batch, size)
    ids, positions = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions)
    with torch.inference_mode():
        return made.run(plan.key, size, ids, positions, torch.from_numpy(plan.numbers)).clone()


def test_graph_is_captured_once_per_key_and_then_replayed(tiny: Tiny) -> None:
    recording = Recording()
    made = graphs(load_planned(tiny[0]), capture=recording)
    for _ in range(3):
        run(made, decodes(3, 9), 2)
        run(made, decodes(3, 9, 4), 4)
    assert (made.count, recording.replayed) == (2, [0, 1, 0, 1])
    assert recording.captured[0] == recording.captured[1], "all graphs have the same memory"


def test_padding_changes_no_result_and_leaves_nothing_behind(tiny: Tiny) -> None:
    loaded = load_planned(tiny[0])
    made = graphs(loaded)
    alone = run(made, decodes(1), 1)
    before = [tensor.clone() for tensor in (*loaded.pool.keys, *loaded.pool.values)]
    for size in SMALL:
        torch.testing.assert_close(run(made, decodes(1), size), alone)
    for tensor, was in zip((*loaded.pool.keys, *loaded.pool.values), before, strict=True):
        torch.testing.assert_close(tensor, was)


def test_longer_tables_than_allocated_are_captured_anew(tiny: Tiny) -> None:
    recording = Recording()
    loaded = load_planned(tiny[0], block_count=14)
    made = graphs(loaded, capture=recording)
    shared = decodes(9, 9, 9, 9)
    run(made, shared, 4)
    assert made.count == 1
    long = [replace(row, context_length=49, block_ids=np.tile([1, 2], 7)[:13]) for row in shared.chunks]
    shared.chunks[:] = long
    run(made, shared, 4)
    assert (made.count, len(recording.captured)) == (1, 2)
    assert recording.captured[0]["numbers"] != recording.captured[1]["numbers"]


def test_number_of_graphs_is_limited(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "GRAPHS_MAX", 1)
    loaded = load_planned(tiny[0])
    recording = Recording()
    made = graphs(loaded, capture=recording)
    expected = run(graphs(loaded), decodes(3, 9), 2)
    run(made, decodes(3), 1)
    torch.testing.assert_close(run(made, decodes(3, 9), 2), expected)
    run(made, decodes(3), 1)
    assert (made.count, recording.replayed) == (1, [0])


def test_model_that_cannot_be_captured_runs_without_graphs(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    class Unable:
        def capture(self, work: Callable[[], None], memory: Mapping[str, torch.Tensor]) -> Graph:
            raise RuntimeError("operation not permitted when stream is capturing")

    folder, prompts, expected = tiny
    loaded = load_planned(folder)
    made = graphs(loaded, capture=Unable())
    driver = Driver(ModelRunner(loaded, graphs=made), prompts, seed=1)
    driver.run(output_tokens=8)
    assert [driver.outputs[index] for index in range(len(prompts))] == expected
    assert made.count == 0
    assert made.size(decodes(5)) is None
    (line,) = [record.getMessage() for record in caplog.records if "graphs_unavailable" in record.getMessage()]
    assert "not permitted when stream is capturing" in line


def forward_with(loaded: LoadedModel, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> LoadedModel:
    class Changed(LoadedModel):
        def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            return change(super().forward(token_ids, positions, keep), positions)

    return Changed(**vars(loaded))


def moved(kept: list[torch.Tensor], logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Add a tensor that has another address each time."""
    kept.append(torch.from_numpy(np.zeros(1, np.float32)))
    return logits + kept[-1]


def baked(steps: list[int], logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Add a host integer that differs each time."""
    steps.append(0)
    return logits + float(len(steps))


def sized(steps: list[int], logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Make a tensor of another size each time."""
    steps.append(0)
    return logits + logits.new_zeros(len(steps)).sum()


def waited(_steps: list[int], logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return logits + float(positions.sum().item())


def chosen(_steps: list[int], logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return logits + logits[positions[0] >= 0].sum() * 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (moved, "memory that may be another's"),
        (baked, "baked in"),
        (sized, "baked in"),
        (waited, "cannot wait"),
        (chosen, "cannot wait"),
    ],
)
def test_work_impossible_in_a_graph_is_detected_without_one(
    change: Callable[[list[object], torch.Tensor, torch.Tensor], torch.Tensor], why: str, tiny: Tiny
) -> None:
    """Each planted fault must fail the checks of the tests above."""
    loaded = forward_with(load_planned(tiny[0]), partial(change, []))
    made = graphs(loaded)
    with pytest.raises(AssertionError, match=why):
        for _ in range(3):
            run(made, decodes(3, 9), 2)


def test_rule_graph_key_a_missing_number_is_detected(tiny: Tiny) -> None:
    """For example, the number of parts into which the keys are divided."""
    made = graphs(load_planned(tiny[0], span=16, block_count=300))

    class Forgetful(GraphKey):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, GraphKey) and self.tokens == other.tokens

        def __hash__(self) -> int:
            return hash(self.tokens)

    def work(batch: Batch) -> None:
        plan = made._backend.plan(batch, 2)
        ids, positions = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions)
        with torch.inference_mode():
            made.run(Forgetful(*plan.key), 2, ids, positions, torch.from_numpy(plan.numbers))  # type: ignore[misc]

    work(decodes(3, 4))
    work(decodes(2, 5))
    with pytest.raises(AssertionError, match="baked in"):
        work(decodes(3, 250))


@pytest.mark.cuda
def test_cuda_graphs_give_the_output_of_each_prompt_alone(tiny: Tiny) -> None:
    folder, prompts, expected = tiny
    loaded = load(options(folder, device="cuda", attention="triton", block_size=16))
    made = graphs(loaded, capture=CudaGraphs())
    runner = ModelRunner(loaded, graphs=made, debug_poison=True)
    runner.warm_up()
    pipeline = Pipeline(runner, prompts, seed=1)
    pipeline.run(output_tokens=8)
    assert [pipeline.outputs[index] for index in range(len(prompts))] == expected
    assert made.count >= len(SMALL)
