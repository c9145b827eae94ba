"""The engine's benchmark: exact workloads, the least work of a step, and the stopwatch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from batches import batch
from benchmark_modules import benchmark

from cuelight import model_path
from cuelight.actors.executor.native.decoder import NativeDecoder
from cuelight.actors.executor.native.linear import WeightFormat
from cuelight.actors.executor.native.runner import NativeRunner
from cuelight.actors.scheduler.actor import Scheduler

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY, LAYERS = 8, 2, 1, 4, 16, 32, 3


@pytest.mark.model
def test_workloads_have_exact_lengths_and_other_text_in_each_variant() -> None:
    workloads = benchmark("workloads").own_workloads(model_path("smollm2-135m-instruct"))
    lengths = {name: [(len(a.token_ids), a.output_tokens) for a in w.asks(1)] for name, w in workloads.items()}
    assert lengths["W1"] == [(128, 128)] * 5
    assert lengths["W2"] == lengths["W3"]
    assert len(lengths["W2"]) == 32
    assert sum(output for _, output in lengths["W2"]) == 4352
    assert {min(prompt for prompt, _ in lengths["W2"]), max(prompt for prompt, _ in lengths["W2"])} == {32, 512}
    assert lengths["W4"] == [(544, 32)] * 32
    for workload in workloads.values():
        beginnings = {tuple(ask.token_ids[:16]) for v in range(workload.variants) for ask in workload.asks(v)}
        alike = len(workload.shapes) if workload.common else 1
        assert len(beginnings) == workload.variants * len(workload.shapes) / alike
        assert workload.asks(2) == workload.asks(2)


@pytest.mark.model
def test_common_prefix_is_common_and_has_the_given_length() -> None:
    asks = benchmark("workloads").own_workloads(model_path("smollm2-135m-instruct"))["W4"].asks(1)
    assert len({tuple(ask.token_ids[:512]) for ask in asks}) == 1
    assert len({tuple(ask.token_ids[512:528]) for ask in asks}) == 32


@pytest.mark.model
def test_arrivals_are_fixed_and_at_the_given_rate() -> None:
    workload = benchmark("workloads").own_workloads(model_path("smollm2-135m-instruct"))["W3"]
    first, second = ([ask.at for ask in workload.asks(variant)] for variant in (1, 2))
    assert first == second == sorted(first)
    assert first[0] == 0.0
    assert 31 / 1.7 * 0.7 < first[-1] < 31 / 1.7 * 1.4


def test_workload_file_gives_its_own_prompts_and_arrivals(tmp_path: Path) -> None:
    file = tmp_path / "online.json"
    shapes = [{"prompt": 2, "max_new": 3, "arrival": 0.0}, {"prompt": 1, "max_new": 5, "arrival": 3.0}]
    document = {"mode": "online", "rate_req_s": 1.5, "shapes": shapes, "variants": [[[1, 2], [3]], [[4, 5], [6]]]}
    file.write_text(json.dumps(document))
    workload = benchmark("workloads").FileWorkload(file)
    asks = [(ask.token_ids, ask.output_tokens, ask.at) for ask in workload.asks(1)]
    assert asks == [([4, 5], 3, 0.0), ([6], 5, 2.0)]
    assert (workload.name, workload.variants, workload.one_after_another) == ("online", 2, False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


QKV = HIDDEN * (HEADS + 2 * KV_HEADS) * HEAD_DIM
OTHERS = HEADS * HEAD_DIM * HIDDEN + 3 * HIDDEN * INTERMEDIATE
HEAD = VOCABULARY * HIDDEN
KV_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4


def test_least_work_of_a_step_matches_a_count_by_hand(folder: Path) -> None:
    model = benchmark("roofline").Model(folder, WeightFormat.F32, block_size=4)
    work = model.work(batch((1, 6, [1, 2]), (3, 3, [3])))
    assert work.bytes == 4 * (LAYERS * (QKV + OTHERS) + HEAD) + 9 * KV_BYTES
    # In the last layer only the two rows that are sampled continue after attention.
    assert work.products == 2 * (LAYERS * QKV * 4 + (2 * 4 + 2) * OTHERS + 2 * HEAD)
    assert work.attention == 4 * LAYERS * HEADS * HEAD_DIM * (6 + 1 + 2 + 3)


def test_shared_block_is_read_once_and_a_step_without_samples_has_no_head(folder: Path) -> None:
    model = benchmark("roofline").Model(folder, WeightFormat.F32, block_size=4)
    apart, shared = model.work(batch((1, 6, [1, 2]), (1, 6, [3, 4]))), model.work(batch((1, 6, [1, 2]), (1, 6, [1, 4])))
    assert apart.bytes - shared.bytes == 4 * KV_BYTES
    assert apart.products == shared.products
    silent = model.work(batch((2, 2, [1]), sampling_rows=0))
    assert silent.bytes == 4 * (LAYERS * QKV + (LAYERS - 1) * OTHERS) + 2 * KV_BYTES
    assert silent.products == 2 * (LAYERS * QKV * 2 + (LAYERS - 1) * 2 * OTHERS)


def test_least_time_is_the_slower_of_reading_and_computing() -> None:
    roofline, limits = benchmark("roofline"), benchmark("native_limits").Limits(float32=100, int8=400, memory=10)
    reading, computing = roofline.Work(20e9, 100e9, 0), roofline.Work(1e9, 800e9, 100e9)
    assert reading.seconds(limits, WeightFormat.INT8) == pytest.approx(2.0)
    assert computing.seconds(limits, WeightFormat.INT8) == pytest.approx(3.0)
    assert computing.seconds(limits, WeightFormat.F32) == pytest.approx(9.0)


def test_stopwatch_restores_every_method() -> None:
    wrapped = [(Scheduler, "handle"), (NativeRunner, "run"), (NativeRunner, "prepare"), (NativeDecoder, "decode")]
    before = [kind.__dict__[name] for kind, name in wrapped]
    with pytest.raises(KeyError), benchmark("stopwatch").Stopwatch():
        assert all(kind.__dict__[name] is not method for (kind, name), method in zip(wrapped, before, strict=True))
        raise KeyError
    assert [kind.__dict__[name] for kind, name in wrapped] == before


def test_idle_is_the_working_time_without_a_step() -> None:
    module = benchmark("stopwatch")
    watch = module.Stopwatch()
    watch.steps += [module.Step(1.0, 3.0, batch((1, 1, [1]))), module.Step(4.0, 6.0, batch((1, 1, [1])))]
    assert watch.idle([module.Span(1.0, 6.0)]) == pytest.approx(0.2)
    assert watch.idle([module.Span(2.0, 5.0)]) == pytest.approx(1 / 3)
    assert watch.idle([module.Span(7.0, 5.0)]) == 0.0, "an empty span has no idle time"
    assert watch.per_step(5.0)["device idle"] == pytest.approx(500.0)
