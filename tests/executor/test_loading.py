"""Loading a model: models and options that are refused, fallbacks, and int8 weights outside the native decoder."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
import torch
import transformers
from tiny_models import (
    GROUPED,
    SHAPE,
    Driver,
    edit_config,
    greedy_alone,
    options,
    random_prompts,
    save,
)
from transformers import PreTrainedConfig

from cuelight.actors.executor import loading
from cuelight.actors.executor.model import folder
from cuelight.actors.executor.model import loading as model_loading
from cuelight.actors.executor.model.linear import Int8Linear, NativeInt8Linear
from cuelight.actors.executor.model.loading import load
from cuelight.actors.executor.model.module_replacement import Probe, spread
from cuelight.actors.executor.native import build
from cuelight.actors.executor.options import CannotLoad
from cuelight.actors.executor.runner import ModelRunner, load_runner
from cuelight.errors import ModelUnavailable
from cuelight.models.folder import ModelFacts, read_facts

pytestmark = pytest.mark.usefixtures("one_thread")

INT8: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma": lambda: transformers.GemmaConfig(**GROUPED, head_dim=8),
    "gpt neox, biases": lambda: transformers.GPTNeoXConfig(**SHAPE),
    "phi3": lambda: transformers.Phi3Config(**GROUPED),
    "experts": lambda: transformers.Qwen3MoeConfig(
        **GROUPED, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}
TOLERANCE = 0.1
"""Largest relative difference of int8 and float32 logits (norms over all of them), with random weights."""


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as another process on a machine without a compiler."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(build, "_loaded", None)


@pytest.mark.parametrize("family", INT8)
def test_int8_weights_stay_close_to_float32(family: str, tmp_path: Path) -> None:
    save(INT8[family](), tmp_path)
    judge = Probe(load(options(tmp_path)).model).logits()
    loaded = load(options(tmp_path, quantization="int8"))
    assert 0 < spread(Probe(loaded.model).logits(), judge) < TOLERANCE
    assert not any(type(module) is torch.nn.Linear for module in loaded.model.modules())


def test_int8_of_a_model_unknown_to_the_native_decoder(native: object, tmp_path: Path) -> None:
    save(INT8["gemma"](), tmp_path)
    with structlog.testing.capture_logs() as entries:
        runner = loading.load_device(options(tmp_path, quantization="int8"))
    assert isinstance(runner, ModelRunner)
    warnings = [(entry["event"], entry["instead"]) for entry in entries if entry["log_level"] == "warning"]
    assert warnings == [("native_decoder_unsuitable", "transformers")]
    (quantized,) = (entry for entry in entries if entry["event"] == "quantized")
    assert quantized["kernels"] == "native" and 0 < quantized["logits_off"] < TOLERANCE
    driver = Driver(runner, random_prompts(3), seed=5)
    driver.run(output_tokens=10)
    assert driver.failed == {}
    assert all(len(tokens) == 10 for tokens in driver.outputs.values())


@pytest.mark.usefixtures("no_compiler")
def test_int8_runs_in_torch_without_a_compiler(tmp_path: Path) -> None:
    save(transformers.LlamaConfig(**GROUPED), tmp_path)
    with structlog.testing.capture_logs() as entries:
        runner = loading.load_device(options(tmp_path, quantization="int8", attention="auto"))
    assert isinstance(runner, ModelRunner)
    named = {(entry["event"], entry.get("instead", entry.get("attention"))) for entry in entries}
    assert ("native_kernels_missing", "torch") in named
    assert ("attention_backend", "reference") in named
    kinds = {type(module) for module in runner._loaded.model.modules()}
    assert Int8Linear in kinds and NativeInt8Linear not in kinds


def test_int8_unsuitable_for_a_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(INT8["gemma"](), tmp_path)
    monkeypatch.setattr(model_loading, "INT8_TOLERANCE", 1e-4)
    with pytest.raises(
        CannotLoad, match=r"'int8' does not suit this model: its logits are off by 0\.\d+ of their size"
    ):
        load(options(tmp_path, quantization="int8"))


def test_int4_of_other_models_is_refused(tmp_path: Path) -> None:
    save(INT8["gemma"](), tmp_path)
    with pytest.raises(CannotLoad, match="the native decoder cannot serve this model: it is a gemma"):
        loading.load_device(options(tmp_path, quantization="int4"))


def sharded(folder: Path) -> list[Path]:
    model = save(transformers.LlamaConfig(**GROUPED), folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="30kB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    return shards


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def reindexed(path: Path) -> None:
    """Let the index name, for one tensor, a shard that lacks it."""
    index = path.parent / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = next(name for name, file in content["weight_map"].items() if file == path.name)
    content["weight_map"][name] = next(file for file in content["weight_map"].values() if file != path.name)
    index.write_text(json.dumps(content))


def test_model_in_shards_is_served(tmp_path: Path) -> None:
    shards = sharded(tmp_path)
    runner = ModelRunner(load(options(tmp_path)))
    driver = Driver(runner, random_prompts(3), seed=5)
    driver.run(output_tokens=3)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert [driver.outputs[i] for i in range(6)] == [greedy_alone(model, prompt, 3) for prompt in random_prompts(3)]
    assert len(shards) > 2


@pytest.mark.parametrize(
    "damage",
    [Path.unlink, cut, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"\xff" * 64)],
    ids=["missing", "cut short", "empty", "no weights at all"],
)
@pytest.mark.parametrize("decoder", ["auto", "transformers"])
def test_damaged_shard_is_refused(decoder: str, damage: Callable[[Path], object], tmp_path: Path) -> None:
    damage(sharded(tmp_path)[1])
    with pytest.raises(CannotLoad, match="cannot load"):
        loading.load_device(options(tmp_path, decoder=decoder))


def test_index_that_names_the_wrong_shard_loses_no_weights_silently(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(sharded(tmp_path)[0].parent)
    reindexed(sorted(tmp_path.glob("model-*.safetensors"))[1])
    try:
        loaded = load(options(tmp_path))
    except CannotLoad:
        return
    torch.testing.assert_close(loaded.model.state_dict()["model.norm.weight"], model.model.norm.weight)


def test_unsupported_quantized_weights_are_refused(tmp_path: Path) -> None:
    save(transformers.LlamaConfig(**GROUPED), tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    with pytest.raises(CannotLoad, match="transformers cannot load"):
        load(options(tmp_path))


def test_dtype_unsupported_by_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object) -> None:
        raise RuntimeError('"addmm" not implemented for BFloat16')

    monkeypatch.setattr(torch, "mm", lacking)
    with pytest.raises(CannotLoad, match=r"cpu does not compute in bfloat16: .*not implemented"):
        folder.choose_dtype("bfloat16", torch.device("cpu"))


def test_weights_bytes_count_the_loaded_dtype(tmp_path: Path) -> None:
    model = save(transformers.LlamaConfig(**GROUPED), tmp_path)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert folder.weights_bytes(tmp_path, torch.float32) == 4 * count
    assert folder.weights_bytes(tmp_path, torch.bfloat16) == 2 * count
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert folder.weights_bytes(tmp_path, torch.float32) == 0


@pytest.mark.parametrize("end", [100, -1, [1, 4000]])
def test_end_token_outside_the_vocabulary_is_refused(end: object, tmp_path: Path) -> None:
    save(transformers.LlamaConfig(**GROUPED), tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    with pytest.raises(ModelUnavailable, match=r"is outside the vocabulary of 100 tokens|must be at least 0, not -1"):
        read_facts(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("vocab_size", 0, "must be at least 1, not 0"),
        ("vocab_size", True, "no whole number vocab_size"),
        ("max_position_embeddings", -1, "must be at least 2, not -1"),
        ("max_position_embeddings", None, "no whole number max_position_embeddings"),
    ],
)
def test_invalid_model_facts_are_refused(name: str, value: object, why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, name: value}))
    with pytest.raises(ModelUnavailable, match=why):
        read_facts(tmp_path)


def test_gpt2_context_length_is_found_under_its_own_key(tmp_path: Path) -> None:
    transformers.GPT2Config(vocab_size=100, n_positions=77, eos_token_id=1).save_pretrained(tmp_path)
    assert read_facts(tmp_path) == ModelFacts(vocab_size=100, context_length=77, eos_token_ids=(1,))


def test_model_without_layers_is_refused(tmp_path: Path) -> None:
    transformers.GPTNeoXConfig(**SHAPE).save_pretrained(tmp_path)
    edit_config(tmp_path, num_hidden_layers=0)
    with pytest.raises(CannotLoad, match="num_hidden_layers is 0"):
        folder.read_config(tmp_path)


def test_failed_start_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.enumerate()
    with pytest.raises(CannotLoad) as kept:  # with its traceback, and all that the traceback references
        load_runner(options(tmp_path))
    assert "cannot load" in str(kept.value)
    for thread in threading.enumerate():
        if thread not in before:
            thread.join()
