"""The benchmark for GPUs, on a CPU and a tiny model."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import batch
from benchmark_modules import benchmark
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from cuelight.actors.executor.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 90}


def tiny_plan() -> object:
    plan = benchmark("cuda").PLANS["cpu"]
    small, large = (dataclasses.replace(each, sizes={**each.sizes, **TINY}) for each in (plan.small, plan.large))
    sizes = {"requests": 6, "lengths": (3, 12), "rows": 3, "context": 40, "steps": 16, "matrix": 32}
    return dataclasses.replace(plan, small=small, large=large, cold_bytes=1 << 16, **sizes)


@pytest.mark.parametrize("name", ["SMALL_QWEN3", "SMALL_LLAMA"])
def test_transformers_reads_a_random_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = benchmark("random_models")
    monkeypatch.setattr(models, "SHARD_BYTES", 1 << 12)
    shape = getattr(models, name)
    folder = models.build(
        dataclasses.replace(shape, sizes={**shape.sizes, **TINY}), tmp_path / "model", "cpu", "bfloat16"
    )
    assert len(list(folder.glob("*.safetensors"))) > 5
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.dtype is torch.bfloat16
    weights, norm = (each.weight.detach().float() for each in (model.model.layers[0].mlp.up_proj, model.model.norm))
    assert 0.015 < float(weights.std()) < 0.025
    assert 0.9 < float(norm.mean()) < 1.1
    assert len(AutoTokenizer.from_pretrained(folder)) == TINY["vocab_size"]
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("w7 w89").ids == [7, 89]


@pytest.mark.parametrize("part", ["throughput", "decode"])
def test_engine_is_measured(part: str, tmp_path: Path) -> None:
    module = benchmark("cuda")
    before = {name: ModelRunner.__dict__[name] for name in ("prepare", "_compute")}
    row = module.PARTS[part](tiny_plan(), "cpu", tmp_path)
    assert {name: ModelRunner.__dict__[name] for name in before} == before
    assert json.loads(json.dumps(row)) == row
    assert int(row["steps"]) > 5
    assert 0 <= int(row["of the roofline"].split()[0]) <= 100


def test_transformers_is_measured(tmp_path: Path) -> None:
    row = benchmark("cuda").measure_peer(tiny_plan(), "cpu", tmp_path)
    assert float(row["output tok/s"]) > 0


def test_decodes_are_the_steps_between_others_of_the_same_row_count() -> None:
    watched = benchmark("device_watch")
    watch = watched.DeviceWatch(torch.device("cpu"))
    mixed, full, fewer = batch((3, 3, [1]), (1, 4, [2])), batch((1, 4, [1]), (1, 5, [2])), batch((1, 5, [1]))
    for begin, each in enumerate((mixed, full, full, full, fewer)):
        for name in ("token_ids", "positions", "blocks", "offsets"):
            assert len(getattr(each, name)) == len(each.token_ids)
        watch.steps.append(watched.Step(2.0 * begin, 2.0 * begin + 1.5, each))
    assert [gap for gap, _ in watch.decodes(2)] == [2.0, 2.0]
    assert watch.idle_share == pytest.approx(1 - 5 * 1.5 / 9.5)
    assert watch.row_count == 9


def test_failing_part_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    module = benchmark("cuda")

    def failing(result: object) -> Callable[..., object]:
        def run(*_: object, **__: object) -> object:
            if isinstance(result, Exception):
                raise result
            return subprocess.CompletedProcess([], 0, result, "")

        return run

    for result in (subprocess.TimeoutExpired("x", 1), subprocess.CalledProcessError(1, "x"), "", "no JSON"):
        monkeypatch.setattr(module.subprocess, "run", failing(result))
        assert "failed" in module.in_a_process("decode", "cuda")
    monkeypatch.setattr(module.subprocess, "run", failing('shown before\n{"rows": 3}\n'))
    assert module.in_a_process("decode", "cuda")["rows"] == 3


def test_least_time_is_the_slower_of_reading_and_computing(tmp_path: Path) -> None:
    module, plan = benchmark("cuda"), tiny_plan()
    folder = benchmark("random_models").build(plan.small, tmp_path / "model", "cpu", "float32")
    step = batch((1, 6, [1]))
    work = benchmark("roofline").Model(folder, benchmark("roofline").WeightFormat.F32, block_size=16).work(step)
    reading = module._least_seconds(folder, plan, module.Limits(bytes=1e6, operations=1e15), [step, step])
    computing = module._least_seconds(folder, plan, module.Limits(bytes=1e15, operations=1e6), [step])
    assert reading == pytest.approx(2 * work.bytes / 1e6)
    assert computing == pytest.approx((work.products + work.attention) / 1e6)
    assert np.isfinite(reading)
