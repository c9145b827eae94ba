"""Loading a folder with the native decoder: configuration, weights, and folders that are refused."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import structlog.testing
import torch
import transformers
from safetensors.torch import save_file
from tiny_models import GROUPED, edit_config, options, remove_tensor, save
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from cuelight.actors.executor import loading
from cuelight.actors.executor import options as loading_options
from cuelight.actors.executor.native import build
from cuelight.actors.executor.native.build import NoNativeCode
from cuelight.actors.executor.native.loading import Unsuitable, load
from cuelight.actors.executor.native.model_folder import (
    Architecture,
    BadWeights,
    NotNative,
    as_float32,
    read_architecture,
    read_weights,
    stacked,
)
from cuelight.actors.executor.native.runner import NativeRunner
from cuelight.actors.executor.options import CannotLoad
from cuelight.actors.executor.runner import ModelRunner
from cuelight.core import parts
from cuelight.messages.request import HostTier

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(folder: Path, config: object) -> Architecture:
    (folder / "config.json").write_text(json.dumps(config))
    return read_architecture(folder)


def without(*names: str) -> dict[str, object]:
    return {name: value for name, value in LLAMA.items() if name not in names}


def test_sizes_are_those_of_the_configuration(tmp_path: Path) -> None:
    llama = read(tmp_path, {**LLAMA, "tie_word_embeddings": True})
    assert (llama.layers, llama.hidden, llama.heads, llama.kv_heads, llama.head_dim) == (2, 48, 6, 2, 10)
    assert (llama.intermediate, llama.vocabulary, llama.positions, llama.epsilon) == (64, 100, 256, 1e-5)
    assert llama.is_tied
    assert not llama.has_qkv_bias | llama.has_output_bias | llama.has_head_norms
    assert read(tmp_path, without("head_dim")).head_dim == 8
    assert read(tmp_path, {**LLAMA, "head_dim": None}).head_dim == 8
    assert read(tmp_path, without("num_key_value_heads")).kv_heads == 6
    assert read(tmp_path, without("rms_norm_eps")).epsilon == 1e-6
    assert not read(tmp_path, LLAMA).is_tied


def test_each_family_has_its_weights(tmp_path: Path) -> None:
    def parts(**changes: object) -> tuple[bool, bool, bool]:
        read_ = read(tmp_path, {**LLAMA, **changes})
        return read_.has_qkv_bias, read_.has_output_bias, read_.has_head_norms

    assert parts(attention_bias=True) == (True, True, False)
    assert parts(model_type="mistral", sliding_window=None) == (False, False, False)
    assert parts(model_type="mistral", sliding_window=None, attention_bias=True) == (False, False, False)
    assert parts(model_type="qwen2") == (True, False, False)
    assert parts(model_type="qwen2", use_sliding_window=False, sliding_window=8) == (True, False, False)
    assert parts(model_type="qwen3") == (False, False, True)
    assert parts(model_type="qwen3", attention_bias=True) == (True, True, True)


REFUSED: dict[str, tuple[object, str]] = {
    "another kind": ({**LLAMA, "model_type": "gemma"}, "it is a gemma"),
    "no kind": (without("model_type"), "it is a None"),
    "a kind that is no name": ({**LLAMA, "model_type": ["llama"]}, "it is a"),
    "a list": ([1], "not a JSON object"),
    "another activation": ({**LLAMA, "hidden_act": "gelu"}, "another kind"),
    "biases between": ({**LLAMA, "mlp_bias": True}, "another kind"),
    "a window": ({**LLAMA, "model_type": "mistral", "sliding_window": 8}, "sliding window"),
    "a window by default": ({**LLAMA, "model_type": "mistral"}, "sliding window"),
    "a window in use": ({**LLAMA, "model_type": "qwen2", "use_sliding_window": True}, "sliding window"),
    "layers of other kinds": (
        {**LLAMA, "model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
        "full attention",
    ),
    "quantized": ({**LLAMA, "quantization_config": {"bits": 4}}, "quantized already"),
    "no heads": (without("num_attention_heads"), "does not say its num_attention_heads"),
    "no layers": ({**LLAMA, "num_hidden_layers": 0}, "does not say its num_hidden_layers"),
    "no size": ({**LLAMA, "hidden_size": "48"}, "does not say its hidden_size"),
    "a size beyond numbers": ({**LLAMA, "vocab_size": 1 << 40}, "does not say its vocab_size"),
    "a true size": ({**LLAMA, "vocab_size": True}, "does not say its vocab_size"),
    "more heads than numbers": ({**without("head_dim"), "num_attention_heads": 96}, "does not say its head_dim"),
    "no positions": (without("max_position_embeddings"), "does not say its max_position_embeddings"),
    "no number": ({**LLAMA, "rms_norm_eps": "tiny"}, "does not say its rms_norm_eps"),
    "heads that do not divide": ({**LLAMA, "num_key_value_heads": 4}, "cannot share 4"),
    "odd heads": ({**LLAMA, "head_dim": 7}, "6 heads of 7"),
    "qwen2 of unknown heads": (
        {**without("num_key_value_heads"), "model_type": "qwen2"},
        "does not say its num_key_value_heads",
    ),
    "qwen3 of unknown heads": ({**without("head_dim"), "model_type": "qwen3"}, "does not say its head_dim"),
    "half a rotation": ({**LLAMA, "partial_rotary_factor": 0.5}, "part of each head"),
    "half a rotation, said there": ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, "part of each head"),
    "yarn": ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "is yarn"),
    "no name at all": ({**LLAMA, "rope_scaling": {"type": ["linear"]}}, "rotary embedding is"),
    "a rotation that is no object": ({**LLAMA, "rope_scaling": "linear"}, "unknown way"),
    "a rotation for each kind of layers": (
        {**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 100.0}}},
        "unknown way",
    ),
    "linear by nothing": ({**LLAMA, "rope_scaling": {"type": "linear"}}, "does not say its factor"),
    "linear by zero": ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 0}}, "does not say its factor"),
    "theta of no number": ({**LLAMA, "rope_theta": "big"}, "does not say its rope_theta"),
    "llama3 of half the numbers": ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq"),
    "llama3 without room": ({**LLAMA, "rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "no room"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_configuration_is_refused(name: str, tmp_path: Path) -> None:
    config, why = REFUSED[name]
    with pytest.raises(NotNative, match=why):
        read(tmp_path, config)


@pytest.mark.parametrize("text", [None, "", "{", "[" * 100_000, "\udcff"])
def test_unreadable_configuration_is_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(NotNative, match="cannot be read"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": 500_000.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 5.0},
        {"rope_scaling": {"type": "linear", "factor": 3.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_parameters": {"rope_theta": 7.0}},
        {"rope_scaling": LLAMA3, "rope_theta": 500_000.0},
        {"rope_parameters": {**LLAMA3, "factor": 8.0, "rope_theta": 500_000.0}},
        {"rope_scaling": {name: LLAMA3[name] for name in list(LLAMA3)[:4]}, "max_position_embeddings": 1024},
        {"rope_scaling": LLAMA3, "original_max_position_embeddings": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [2, 10, 64, 128])
def test_rotary_tables_match_transformers(changes: dict[str, object], head_dim: int, tmp_path: Path) -> None:
    config = {**LLAMA, **changes, "head_dim": head_dim}
    ours = read(tmp_path, config)
    theirs = LlamaRotaryEmbedding(transformers.AutoConfig.from_pretrained(tmp_path))
    frequencies = theirs.inv_freq.numpy()
    same = ours.inverse_frequencies == frequencies
    assert (~same).sum() <= 1, "at most one power is rounded differently"
    np.testing.assert_allclose(ours.inverse_frequencies, frequencies, rtol=1.2e-7, atol=0)
    cosines, sines = theirs(torch.zeros(1), torch.arange(3000)[None])
    for table, expected in zip(ours.rotary_tables(3000), (cosines, sines), strict=True):
        assert table.dtype == np.float32
        assert table.flags.c_contiguous
        wanted = expected[0, :, : head_dim // 2].numpy()
        np.testing.assert_allclose(table[:, same], wanted[:, same], rtol=0, atol=3e-7)
        np.testing.assert_allclose(table, wanted, rtol=0, atol=1.2e-7 * 3000)


TENSORS = {
    "f32": torch.arange(12.0).reshape(3, 4) / 7,
    "f16": torch.tensor([1.5, -2.0, 65504.0], dtype=torch.float16),
    "bf16": torch.tensor([[1.0, -0.0078125], [3e38, float("inf")]], dtype=torch.bfloat16),
    "no numbers": torch.zeros(0, 5),
    "one number": torch.tensor(3.0),
    "of another type": torch.arange(3),
}


def test_tensors_are_read_as_written(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"dtype": "F32"})
    tensors = read_weights(tmp_path)
    assert set(tensors) == set(TENSORS) - {"of another type"}
    for name, tensor in tensors.items():
        assert not tensor.flags.writeable
        wide = as_float32(tensor)
        assert wide.flags.owndata | (wide.base is not None and not np.shares_memory(wide, tensor))
        np.testing.assert_array_equal(wide, TENSORS[name].float().numpy())


def test_index_files_are_read_together_unless_a_single_file_exists(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.ones(3), "c": torch.ones(4)}, tmp_path / "2.safetensors")
    weight_map = {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert {name: tensor.size for name, tensor in read_weights(tmp_path).items()} == {"a": 2, "b": 3, "c": 4}
    save_file({"d": torch.ones(2)}, tmp_path / "model.safetensors")
    assert list(read_weights(tmp_path)) == ["d"]


def resident_bytes(file: Path) -> int:
    """The resident bytes of a mapped file in this process."""
    size, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counts = line.endswith(str(file))
        elif counts and line.startswith("Rss:"):
            size += 1024 * int(line.split()[1])
    return size


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="says nothing of its memory")
def test_weights_already_read_leave_memory(tmp_path: Path) -> None:
    numbers = np.arange(1 << 18, dtype=np.float32)
    save_file({"x": torch.from_numpy(numbers)}, tmp_path / "model.safetensors")
    tensors = read_weights(tmp_path)
    assert (tensors["x"] == numbers).all()
    assert resident_bytes(tmp_path / "model.safetensors") >= numbers.nbytes
    tensors.leave_memory()
    assert resident_bytes(tmp_path / "model.safetensors") == 0
    assert (tensors["x"] == numbers).all()


def file_of(header: object, data: bytes = b"\0" * 24, claimed: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if claimed is None else claimed).to_bytes(8, "little") + text + data


def entry(**changes: object) -> dict[str, object]:
    return {"x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changes}}


def test_unaligned_numbers_are_read(tmp_path: Path) -> None:
    numbers = np.arange(6, dtype=np.float32)
    for spaces in range(4):
        text = json.dumps(entry()).encode() + b" " * spaces
        (tmp_path / "model.safetensors").write_bytes(file_of(text, numbers.tobytes()))
        tensor = read_weights(tmp_path)["x"]
        assert tensor.flags.aligned
        np.testing.assert_array_equal(tensor, numbers.reshape(2, 3))


BAD_FILES: dict[str, bytes | None] = {
    "not there": None,
    "empty": b"",
    "shorter than a length": b"\1\0\0",
    "a header longer than the file": file_of(entry(), claimed=10_000),
    "a header longer than memory": file_of(entry(), claimed=(1 << 64) - 1),
    "a header cut off": file_of(entry(), claimed=20),
    "no JSON": file_of(b"{'x'"),
    "no UTF-8": file_of(b"\xff\xfe{}"),
    "no object": file_of([entry()]),
    "endless brackets": file_of(b"[" * 100_000),
    "no entry": file_of({"x": "F32"}),
    "a type that is none": file_of(entry(dtype=["F32"])),
    "cut off": file_of(entry(), b"\0" * 20),
    "offsets in reverse": file_of(entry(data_offsets=[24, 0])),
    "offsets below zero": file_of(entry(data_offsets=[-24, 0])),
    "offsets of another shape": file_of(entry(data_offsets=[0, 20])),
    "offsets that are no numbers": file_of(entry(data_offsets=["0", "24"])),
    "offsets that are fractions": file_of(entry(data_offsets=[0.0, 24.0])),
    "three offsets": file_of(entry(data_offsets=[0, 12, 24])),
    "no offsets": file_of({"x": {"dtype": "F32", "shape": [2, 3]}}),
    "a shape below zero": file_of(entry(shape=[-2, -3])),
    "a shape beyond memory": file_of(entry(shape=[1 << 40, 1 << 40])),
    "a shape that wraps to nothing": file_of(entry(shape=[1 << 32, 1 << 32], data_offsets=[0, 0])),
    "no shape": file_of(entry(shape=6)),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused(name: str, tmp_path: Path) -> None:
    contents = BAD_FILES[name]
    if contents is not None:
        (tmp_path / "model.safetensors").write_bytes(contents)
    with pytest.raises(BadWeights, match=r"model\.safetensors cannot be read"):
        read_weights(tmp_path)


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(2, 3), "y": torch.ones(5)}, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(BadWeights):
            read_weights(tmp_path)


@pytest.mark.parametrize(
    "index", [b"", b"[]", b"{}", b'{"weight_map": 3}', b'{"weight_map": {"a": 3}}', b"[" * 100_000]
)
def test_bad_index_is_refused(index: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(BadWeights, match="names no files"):
        read_weights(tmp_path)


def test_index_of_missing_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(BadWeights, match=r"gone\.safetensors"):
        read_weights(tmp_path)


def test_parts_of_several_types_are_stacked_as_numbers() -> None:
    bf16 = np.array([[0x3F80]], np.uint16)
    assert stacked([bf16, bf16]).dtype == np.uint16
    mixed = stacked([bf16, np.array([[2.0]], np.float16), np.array([[3.0]], np.float32)])
    np.testing.assert_array_equal(mixed, np.array([[1], [2], [3]], np.float32))


def tiny(folder: Path, **changes: object) -> Path:
    save(transformers.LlamaConfig(**{**GROUPED, **changes}), folder)
    return folder


def reshape_tensor(folder: Path, name: str, shape: tuple[int, ...]) -> None:
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    tensors[name] = torch.ones(shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


LAYER = "model.layers.1."
BREAKAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    **{
        f"no {name}": ((lambda folder, name=name: remove_tensor(folder, name)), f"lacks the weights {name}")
        for name in (
            "model.embed_tokens.weight",
            "model.norm.weight",
            "lm_head.weight",
            f"{LAYER}self_attn.k_proj.weight",
            f"{LAYER}mlp.up_proj.weight",
            f"{LAYER}input_layernorm.weight",
        )
    },
    **{
        f"another {name}": ((lambda folder, name=name: reshape_tensor(folder, name, (7, 48))), f"{name} has shape")
        for name in (
            "model.norm.weight",
            "lm_head.weight",
            f"{LAYER}self_attn.v_proj.weight",
            f"{LAYER}mlp.down_proj.weight",
        )
    },
    "a short norm": (
        lambda folder: reshape_tensor(folder, f"{LAYER}post_attention_layernorm.weight", (47,)),
        "should have",
    ),
    "biases that are not there": (lambda folder: edit_config(folder, attention_bias=True), "lacks the weights"),
    "norms that are not there": (lambda folder: edit_config(folder, model_type="qwen3"), "lacks the weights"),
    "a layer too few": (lambda folder: edit_config(folder, num_hidden_layers=3), r"lacks the weights model\.layers\.2"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "configuration cannot be read"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "cannot be read"),
    "weights cut off": (lambda folder: os.truncate(folder / "model.safetensors", 5000), "cannot be read"),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_unsuitable_folder_is_refused(breakage: str, tmp_path: Path) -> None:
    break_it, why = BREAKAGES[breakage]
    break_it(tiny(tmp_path))
    with pytest.raises(Unsuitable, match=why):
        load(options(tmp_path))


def test_more_inputs_than_a_product_can_sum_are_refused(tmp_path: Path) -> None:
    tiny(tmp_path, intermediate_size=65537, num_hidden_layers=1)
    with pytest.raises(Unsuitable, match="cannot pack"):
        load(options(tmp_path, quantization="int8"))


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"block_count": None, "kv_cache_bytes": 10}, "a KV cache of 10 bytes is too small"),
        ({"block_count": 1 << 50}, "no memory"),
        ({"block_count": 1 << 70}, "no memory"),
        ({"host_block_count": 1 << 50}, "no memory"),
        ({"host_block_count": 1 << 70}, "no memory"),
        ({"host_kv_cache_bytes": 10}, "host_kv_cache_bytes=10 holds no block"),
    ],
)
def test_impossible_options_are_refused(others: dict[str, object], why: str, tmp_path: Path) -> None:
    with pytest.raises(CannotLoad, match=why):
        load(options(tiny(tmp_path), **others))


def stored(runner: NativeRunner) -> npt.NDArray[Any]:
    memory = runner._pool._device
    assert not memory.scales.any()
    return memory.numbers


@pytest.mark.parametrize(
    ("others", "number_bytes"),
    [
        ({}, 4),
        ({"dtype": "auto"}, 4),
        ({"dtype": "bfloat16"}, 2),
        ({"dtype": "bfloat16", "kv_cache_dtype": "float32"}, 4),
        ({"dtype": "auto", "quantization": "int8"}, 1),
        ({"dtype": "bfloat16", "quantization": "int4"}, 1),
        ({"dtype": "auto", "quantization": "int8", "kv_cache_dtype": "bfloat16"}, 2),
        ({"quantization": "int4"}, 4),
        ({"kv_cache_dtype": "int8"}, 1),
    ],
)
def test_pool_takes_the_given_bytes(others: dict[str, object], number_bytes: int, tmp_path: Path) -> None:
    # 2 layers of keys and values of 2 heads of 8 numbers, in blocks of 4. Each int8 head of 8 bytes has a scale.
    block_bytes = 2 * 2 * 2 * 4 * (8 * number_bytes + (4 if number_bytes == 1 else 0))
    runner = load(options(tiny(tmp_path), block_count=None, kv_cache_bytes=10 * block_bytes + 5, **others))
    assert (runner.block_count, runner.block_size) == (10, 4)
    assert stored(runner).itemsize == number_bytes
    assert not stored(runner).any(), "the trial run's blocks are zeroed"


def test_default_pool_is_no_larger_than_useful(tmp_path: Path) -> None:
    tiny(tmp_path)
    assert load(options(tmp_path, block_count=None, pool_tokens=30)).block_count == 1 + 8, (
        "the null block holds no tokens"
    )
    asked = {"kv_cache_bytes": 20 * 2 * 2 * 2 * 4 * 8 * 4}
    assert load(options(tmp_path, block_count=None, pool_tokens=30, **asked)).block_count == 20


def test_only_loading_is_timed_without_host_memory(tmp_path: Path) -> None:
    looks = itertools.count()
    runner = load(options(tiny(tmp_path), now=lambda: float(next(looks))))
    assert runner.host == HostTier()
    assert next(looks) == 8, "begin and end of each of four phases"


def test_costs_of_host_memory_are_measured_within_the_available_room(tmp_path: Path) -> None:
    looks = itertools.count()

    def measured(**others: object) -> HostTier:
        runner = load(options(tmp_path, now=lambda: float(next(looks)), **others))
        assert not stored(runner).any(), "measured blocks are zeroed"
        return runner.host

    tiny(tmp_path)
    assert measured(host_block_count=3) == HostTier(3, move_seconds=1 / 3, recompute_seconds=1 / 64)
    assert measured(host_block_count=30).move_seconds == 1 / 8
    assert measured(host_block_count=1, token_budget=9).recompute_seconds == 1 / 9
    assert measured(host_block_count=1, block_count=3) == HostTier(1, move_seconds=1, recompute_seconds=1 / 8)
    edit_config(tmp_path, max_position_embeddings=10)
    assert measured(host_block_count=1).recompute_seconds == 1 / 10


def test_huge_token_budget_takes_bounded_memory(tmp_path: Path) -> None:
    assert load(options(tiny(tmp_path), token_budget=1 << 62)).block_count == 128


def test_known_model_is_served_natively_and_others_by_transformers(tmp_path: Path) -> None:
    tiny(tmp_path / "llama")
    assert isinstance(loading.load_device(options(tmp_path / "llama")), NativeRunner)
    assert isinstance(loading.load_device(options(tmp_path / "llama", decoder="transformers")), ModelRunner)
    assert isinstance(loading.load_device(options(tmp_path / "llama", attention="reference")), ModelRunner)
    save(transformers.GemmaConfig(**GROUPED, head_dim=8), tmp_path / "gemma")
    assert isinstance(loading.load_device(options(tmp_path / "gemma")), ModelRunner)


@pytest.mark.parametrize(
    "others", [{"decoder": "native"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}], ids=str
)
def test_impossible_request_for_the_native_decoder_is_refused(others: dict[str, object], tmp_path: Path) -> None:
    tiny(tmp_path)
    with pytest.raises(CannotLoad, match=r"on the CPU only: give device='cpu', not 'cuda'"):
        loading.load_device(options(tmp_path, device="cuda", **others))
    edit_config(tmp_path, model_type="gemma")
    with pytest.raises(CannotLoad, match="cannot serve this model: it is a gemma"):
        loading.load_device(options(tmp_path, **others))


def test_int4_needs_the_native_decoder(tmp_path: Path) -> None:
    tiny(tmp_path)
    assert isinstance(loading.load_device(options(tmp_path, quantization="int4")), NativeRunner)
    with pytest.raises(CannotLoad, match="quantization 'int4' needs the native decoder"):
        loading.load_device(options(tmp_path, quantization="int4", decoder="transformers"))
    with pytest.raises(CannotLoad, match="kv_cache_dtype 'bfloat16' needs the native decoder"):
        loading.load_device(options(tmp_path, kv_cache_dtype="bfloat16", decoder="transformers"))


@pytest.mark.parametrize("has_cuda", [True, False])
def test_torch_is_asked_for_cuda_only_if_gpu_files_exist(
    has_cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asked.append(1) or has_cuda)
    monkeypatch.setattr(loading_options, "GPU_FILES", (tmp_path / "none",))
    assert loading._is_cpu("auto") and loading._is_cpu("cpu") and not loading._is_cpu("cuda:1")
    assert not asked
    monkeypatch.setattr(loading_options, "GPU_FILES", (tmp_path / "none", tmp_path))
    assert loading._is_cpu("auto") is not has_cuda
    assert loading._is_cpu("cpu") and asked == [1]


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as another process on a machine without a compiler."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(build, "_loaded", None)


@pytest.mark.usefixtures("no_compiler")
def test_transformers_serves_without_a_compiler_unless_native_is_requested(tmp_path: Path) -> None:
    tiny(tmp_path)
    with structlog.testing.capture_logs() as entries:
        assert isinstance(loading.load_device(options(tmp_path)), ModelRunner)
    (warning,) = (entry for entry in entries if entry["event"] == "native_decoder_unsuitable")
    assert warning["log_level"] == "warning"
    assert "no-such-compiler" in str(warning["reason"])
    for others in ({"decoder": "native"}, {"quantization": "int4"}):
        with pytest.raises(CannotLoad, match="no C\\+\\+ compiler: looked for no-such-compiler"):
            loading.load_device(options(tmp_path, **others))


def test_code_without_a_writable_folder_is_compiled_for_this_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is in place of the folder: permissions would not stop root."""
    tiny(tmp_path)
    (tmp_path / "file").write_text("")
    compiled = build.load_native(options(tmp_path).code_folder)
    asked: list[Path] = []

    def known(scratch: Path, compiler: list[str]) -> Path:
        """Return the existing library instead of compiling for minutes."""
        asked.append(scratch)
        (scratch / "native.so").write_bytes(Path(compiled._name).read_bytes())
        return scratch / "native.so"

    monkeypatch.setattr(build, "_loaded", None)
    monkeypatch.setattr(build, "compile_into", known)
    runner = loading.load_device(options(tmp_path, decoder="native", code_folder=tmp_path / "file" / "native"))
    assert isinstance(runner, NativeRunner)
    assert len(asked) == 1
    assert not asked[0].exists()


def test_code_folder_is_none_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("CUELIGHT_CACHE", str(tmp_path))
    assert parts._code_folder() == tmp_path / "native"
    monkeypatch.delenv("CUELIGHT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with structlog.testing.capture_logs() as entries:
        assert parts._code_folder() is None
    assert "no home folder" in entries[0]["reason"]


def test_failed_compilation_reports_the_compiler_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(scratch: Path, compiler: list[str]) -> Path:
        raise NoNativeCode("c++ failed with status 1:\nout of ideas")

    tiny(tmp_path)
    monkeypatch.setattr(build, "_loaded", None)
    monkeypatch.setattr(build, "compile_into", fail)
    with pytest.raises(CannotLoad, match="out of ideas"):
        loading.load_device(options(tmp_path, decoder="native", code_folder=tmp_path / "code"))


GREEDY_STEPS = """
import sys, time
from pathlib import Path
from cuelight.core import parts
from cuelight.actors.executor import loading
from cuelight.actors.executor.options import LoadOptions
from cuelight.messages.executor import RowChunk, ExecuteStep, Row
from cuelight.messages.request import RequestId, Sampling

folder, code = map(Path, sys.argv[1:])
runner = loading.load_device(LoadOptions(
    folder=folder, decoder="native", dtype="auto", quantization=None, attention="auto", device="cpu", block_size=4,
    block_count=9, kv_cache_bytes=None, eos_token_ids=(), token_budget=64, code_folder=code, now=time.perf_counter,
    host_block_count=2))
sampling = Sampling(temperature=0.8, top_k=5, seed=1)
for step in range(3):
    row = Row(RequestId(1), (5, 6, 7), 3, 0, (1, 2), sampling)
    done = runner.run(runner.prepare(ExecuteStep(
        epoch=0, step=step, life=0, ended=(), rows=() if step else (row,), extensions=(),
        chunks=(RowChunk(RequestId(1), 1 if step else 3),), reply_to=None)))
    assert len(done.token_ids) == 1
heavy = {"torch", "transformers", "tokenizers", "safetensors", "accelerate"} & set(sys.modules)
assert not heavy, heavy
"""


def test_native_path_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    tiny(tmp_path)
    code = options(tmp_path).code_folder
    build.load_native(code)
    subprocess.run([sys.executable, "-c", GREEDY_STEPS, tmp_path, code], check=True, timeout=120)
