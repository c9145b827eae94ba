"""Passes over models of many architectures, compared with the unchanged transformers model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import structlog
import torch
import transformers
from tiny_models import GROUPED, ODD, SHAPE, VOCABULARY, save
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from cuelight.actors.executor.model import passes
from cuelight.actors.executor.model.attention import ATTENTION_NAME, register
from cuelight.actors.executor.model.module_replacement import (
    ModuleReplacement,
    Probe,
    decoder_layers,
    difference,
    small_copy,
)
from cuelight.actors.executor.model.passes import (
    FusedNorm,
    MergedLinear,
    MergedLinearPart,
    Pass,
    apply_passes,
    fuse_norms,
    merge_linears,
    recognize,
    standard_passes,
)

pytestmark = pytest.mark.usefixtures("one_thread")

MERGED, FUSED = "merged_linears", "fused_norms"
OPT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "word_embed_proj_dim": 48,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[Callable[[], PreTrainedConfig], Mapping[str, int]]] = {
    "llama": (lambda: transformers.LlamaConfig(**GROUPED), {MERGED: 4, FUSED: 5}),
    "llama, odd": (lambda: transformers.LlamaConfig(**ODD, num_key_value_heads=1, head_dim=14), {MERGED: 4, FUSED: 5}),
    "llama, tied": (lambda: transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True), {MERGED: 4, FUSED: 5}),
    "qwen2, some biases": (lambda: transformers.Qwen2Config(**GROUPED), {MERGED: 4, FUSED: 5}),
    "qwen3, head norms": (lambda: transformers.Qwen3Config(**GROUPED, head_dim=16), {MERGED: 4, FUSED: 9}),
    "gemma2": (lambda: transformers.Gemma2Config(**GROUPED, head_dim=8), {MERGED: 4, FUSED: 9}),
    "gemma3": (lambda: transformers.Gemma3TextConfig(**GROUPED, head_dim=8), {MERGED: 4, FUSED: 13}),
    "mistral": (lambda: transformers.MistralConfig(**GROUPED), {MERGED: 4, FUSED: 5}),
    "phi3, merged already": (lambda: transformers.Phi3Config(**GROUPED), {FUSED: 5}),
    "opt, no such norms": (lambda: transformers.OPTConfig(**OPT), {MERGED: 2}),
    "gpt neox, nothing": (lambda: transformers.GPTNeoXConfig(**SHAPE), {}),
    "experts": (
        lambda: transformers.Qwen3MoeConfig(
            **GROUPED, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
        ),
        {MERGED: 2, FUSED: 9},
    ),
}


def opened(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    register()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION_NAME)
    return model.eval().requires_grad_(False)


@pytest.fixture
def llama(tmp_path: Path) -> PreTrainedModel:
    save(transformers.LlamaConfig(**GROUPED), tmp_path)
    return opened(tmp_path)


def others(model: PreTrainedModel) -> torch.Tensor:
    """Logits of other and more tokens than those the passes are verified with."""
    probe = Probe(model)
    probe._token_ids = torch.arange(3, 40)[None] * 11 % VOCABULARY
    probe._positions = torch.arange(37)[None]
    return probe.logits()


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_match_by_structure_and_change_no_result(family: str, tmp_path: Path) -> None:
    make, expected = FAMILIES[family]
    save(make(), tmp_path)
    model = opened(tmp_path)
    judge = others(model)
    weights = sum(parameter.numel() for parameter in model.parameters())
    with structlog.testing.capture_logs() as entries:
        assert apply_passes(model, standard_passes()) == expected
    assert entries == [], "no pass was undone"
    assert difference(others(model), judge) < 2e-6
    added = sum(parameter.numel() for parameter in model.parameters()) - weights
    assert 0 <= added <= 256, "each weight exists once, with zeros for biases that one of several layers lacks"


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2, some biases", "phi3, merged already"])
def test_half_precision_model_is_verified_on_a_float32_copy(family: str, tmp_path: Path) -> None:
    make, expected = FAMILIES[family]
    save(make(), tmp_path)
    model = opened(tmp_path, torch.bfloat16)
    judge = others(opened(tmp_path))
    before = difference(others(model), judge)
    assert apply_passes(model, standard_passes()) == expected
    assert difference(others(model), judge) < 2 * before, "the passes add no error"


def test_native_kernels_give_the_same_norms(native: object, llama: PreTrainedModel) -> None:
    judge = others(llama)
    assert apply_passes(llama, standard_passes(native))[FUSED] == 5  # type: ignore[arg-type]
    assert all(module._kernels is not None for module in llama.modules() if isinstance(module, FusedNorm))
    assert difference(others(llama), judge) < 2e-6


def test_pass_that_changes_results_is_undone_by_name(llama: PreTrainedModel) -> None:
    judge = others(llama)

    def swap(model: PreTrainedModel, probe: Probe) -> ModuleReplacement | None:
        change = merge_linears(model, probe)
        parts = [module for module in model.modules() if isinstance(module, MergedLinearPart)]
        parts[1].index, parts[2].index = 2, 1  # keys for values
        return change

    with structlog.testing.capture_logs() as entries:
        kept = apply_passes(llama, (Pass("swapped", swap), *standard_passes()))
    assert kept == {MERGED: 4, FUSED: 5}, "later passes find the model unchanged"
    (warning,) = entries
    assert (warning["event"], warning["name"], warning["log_level"]) == ("pass_undone", "swapped", "warning")
    assert "of the largest, over 0.0001" in warning["reason"]
    assert difference(others(llama), judge) < 2e-6


def test_pass_that_does_not_run_is_undone(llama: PreTrainedModel) -> None:
    judge = others(llama)

    def shrink(model: PreTrainedModel, probe: Probe) -> ModuleReplacement | None:
        change = merge_linears(model, probe)
        next(module for module in model.modules() if isinstance(module, MergedLinear)).widths[0] += 1
        return change

    with structlog.testing.capture_logs() as entries:
        assert apply_passes(llama, (Pass("shrunk", shrink),)) == {}
    assert entries[0]["reason"].startswith("RuntimeError")
    assert torch.equal(others(llama), judge)
    assert not any(isinstance(module, MergedLinear | MergedLinearPart) for module in llama.modules())


def test_subtle_error_is_detected_in_half_precision(tmp_path: Path) -> None:
    """An epsilon a hundred times too large hides in bfloat16's rounding, but not in the float32 copy."""
    save(transformers.LlamaConfig(**GROUPED), tmp_path)
    model = opened(tmp_path, torch.bfloat16)

    def blunt(model: PreTrainedModel, probe: Probe) -> ModuleReplacement | None:
        change = fuse_norms(model, probe)
        for module in model.modules():
            if isinstance(module, FusedNorm):
                module.epsilon += 1e-3
        return change

    with structlog.testing.capture_logs() as entries:
        assert apply_passes(model, (Pass("blunt", blunt),)) == {}
    assert [entry["event"] for entry in entries] == ["pass_undone"]
    assert not any(isinstance(module, FusedNorm) for module in model.modules())


def test_model_is_verified_itself_without_memory_for_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: PreTrainedModel) -> PreTrainedModel:
        raise torch.OutOfMemoryError("tried to allocate 5 GiB")

    save(transformers.LlamaConfig(**GROUPED), tmp_path)
    monkeypatch.setattr(passes, "small_copy", full)
    with structlog.testing.capture_logs() as entries:
        assert apply_passes(opened(tmp_path, torch.bfloat16), standard_passes()) == {MERGED: 4, FUSED: 5}
    assert [(entry["event"], entry["log_level"]) for entry in entries] == [("passes_judged_coarsely", "warning")]


def test_passes_are_skipped_where_logits_are_not_finite(llama: PreTrainedModel) -> None:
    llama.get_input_embeddings().weight.fill_(torch.nan)
    with structlog.testing.capture_logs() as entries:
        assert apply_passes(llama, standard_passes()) == {}
    assert [entry["event"] for entry in entries] == ["passes_skipped"]


class Plain(nn.Module):
    """A stand-in for a model: layers called by a given forward function."""

    def __init__(self, forward: Callable[[Plain, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 4, bias=False), nn.Linear(8, 8)
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)


class PlainProbe(Probe):
    def __init__(self, model: Plain) -> None:
        self._model = model  # type: ignore[assignment]
        self.x = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0))

    def logits(self) -> torch.Tensor:
        with torch.inference_mode():
            return self._model(self.x)[0]


@pytest.mark.parametrize(
    ("forward", "merged"),
    [
        (lambda m, x: m.a(x) + m.c(x), 1),
        (lambda m, x: torch.cat([m.a(x), m.b(x), m.c(x)], -1), 1),
        (lambda m, x: m.a(x) + m.c(x + 1), 0),
        (lambda m, x: m.c(m.a(x)), 0),
        (lambda m, x: m.a(x) + m.a(x) + m.c(x), 0),
        (lambda m, x: m.a(x) + m.c(input=x), 0),
    ],
    ids=["two", "three, one without bias", "two inputs", "one after the other", "one twice", "by name"],
)
def test_only_layers_of_one_input_used_once_are_merged(
    forward: Callable[[Plain, torch.Tensor], torch.Tensor], merged: int
) -> None:
    model = Plain(forward)
    probe = PlainProbe(model)
    judge = probe.logits()
    change = merge_linears(model, probe)  # type: ignore[arg-type]
    assert (0 if change is None else change.count) == merged
    torch.testing.assert_close(probe.logits(), judge)


def test_layers_that_share_a_weight_or_differ_in_type_are_not_merged() -> None:
    shared = Plain(lambda m, x: m.a(x) + m.c(x))
    shared.c.weight = shared.a.weight
    assert merge_linears(shared, PlainProbe(shared)) is None  # type: ignore[arg-type]
    mixed = Plain(lambda m, x: m.a(x) + m.c(x.double() if m.c.weight.dtype is torch.float64 else x))
    mixed.c.double()
    assert merge_linears(mixed, PlainProbe(mixed)) is None  # type: ignore[arg-type]


@torch.inference_mode()
def test_merged_parts_are_right_in_any_order_and_keep_no_input() -> None:
    linears = [nn.Linear(8, width) for width in (8, 4, 6)]
    merged = MergedLinear(linears)
    parts = [MergedLinearPart(merged, index) for index in range(3)]
    x, y = torch.randn(2, 1, 5, 8)
    for index, tensor in ((0, x), (1, y), (2, x), (1, x), (2, y), (0, x), (2, x)):
        torch.testing.assert_close(parts[index](tensor), linears[index](tensor))
    assert merged._input is None and merged._parts == ()
    assert sum(parameter.numel() for part in parts for parameter in part.parameters()) == 18 * 8 + 18


class Spelled(nn.Module):
    """A norm in the usual spelling of models."""

    def __init__(self, weight: torch.Tensor, epsilon: float, *, offset: float = 0.0, centered: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.eps, self._offset, self._centered = epsilon, offset, centered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        if self._centered:
            y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return ((self._offset + self.weight.float()) * y).type_as(x)


WEIGHT = torch.linspace(-1.5, 2.0, 40)


@pytest.mark.parametrize("epsilon", [1e-3, 1e-5, 1e-6, 1e-8, 1e-12])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_is_recognized_by_its_results(epsilon: float, offset: float) -> None:
    norm = recognize(Spelled(WEIGHT, epsilon, offset=offset))
    assert norm is not None
    assert norm.epsilon == epsilon
    assert norm.is_offset == (offset == 1.0)
    torch.testing.assert_close(norm.scale, WEIGHT + offset)


def test_epsilon_without_an_attribute_is_measured() -> None:
    module = Spelled(WEIGHT, 1e-5)
    module.eps = torch.tensor(3e-5)  # type: ignore[assignment]
    norm = recognize(module)
    assert norm is not None
    assert norm.epsilon == pytest.approx(3e-5, rel=1e-5)


@pytest.mark.parametrize(
    "module",
    [
        Spelled(WEIGHT, 1e-5, centered=True),
        Spelled(WEIGHT, 1e-5, offset=2.0),
        Spelled(torch.zeros(40), 1e-5),
        nn.LayerNorm(40, bias=False),
        nn.PReLU(40),
    ],
    ids=["centered", "another offset", "nothing", "layer norm", "no norm"],
)
def test_other_modules_are_not_recognized_as_norms(module: nn.Module) -> None:
    assert recognize(module) is None


def test_zero_weight_may_be_an_offset_from_one() -> None:
    norm = recognize(Spelled(torch.zeros(40), 1e-5, offset=1.0))
    assert norm is not None and norm.is_offset


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_norm_keeps_nan_in_its_row(dtype: torch.dtype) -> None:
    norm = recognize(Spelled(WEIGHT, 1e-5, offset=1.0))
    assert norm is not None
    fused = FusedNorm(norm, dtype, None)
    x = torch.randn(3, 40, dtype=dtype)
    expected = Spelled(WEIGHT, 1e-5, offset=1.0)(x)
    x[1, 7] = torch.nan
    y = fused(x)
    assert y.dtype is dtype and y[1].isnan().all()
    torch.testing.assert_close(y[[0, 2]], expected[[0, 2]])


def test_small_copy_has_one_layer_of_each_kind_and_leaves_the_model_unchanged(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        **{**GROUPED, "num_hidden_layers": 5},
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        mlp_only_layers=[0, 3],
    )
    save(config, tmp_path)
    model = opened(tmp_path, torch.bfloat16)
    twin = small_copy(model)
    assert twin is not None and twin.dtype is torch.float32 and model.dtype is torch.bfloat16
    layers, kept = decoder_layers(model), twin.model.layers
    assert layers is not None and len(layers) == 5 and len(kept) == 2
    assert Probe(twin).logits().isfinite().all()
    kept[0].mlp.gate_proj.weight.zero_()
    assert layers[0].mlp.gate_proj.weight.any()
