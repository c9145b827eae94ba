"""Attention in plain torch and in native code, and the choice of a backend."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

import pytest
import structlog
import torch
import transformers
from attention_cases import MIXES, SHAPES, Case, check
from tiny_models import GROUPED

from cuelight.actors.executor import model
from cuelight.actors.executor.model import backends
from cuelight.actors.executor.model.attention import UnsupportedAttention, _paged_attention
from cuelight.actors.executor.model.attention_triton import TritonBackend
from cuelight.actors.executor.model.backends import AttentionBackend, AttentionSpec, BackendUnavailable, choose
from cuelight.actors.executor.options import CannotLoad
from cuelight.models.cache import cache_directory

pytestmark = pytest.mark.usefixtures("one_thread")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NATIVE = cache_directory() / "native"


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_matches_float64(shape: str, mix: str) -> None:
    case = dataclasses.replace(SHAPES[shape], rows=MIXES[mix], is_spoilt=False)
    check(case, choose("reference", case.spec(CPU), None), CPU)


@pytest.mark.cuda
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_on_the_gpu(shape: str, mix: str) -> None:
    case = dataclasses.replace(SHAPES[shape], rows=MIXES[mix], is_spoilt=False)
    check(case, choose("reference", case.spec(CUDA), None), CUDA)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("shape", ["grouped", "alone", "bfloat16"])
def test_native_attention_matches_float64(shape: str, mix: str) -> None:
    case = dataclasses.replace(SHAPES[shape], rows=MIXES[mix])
    check(case, choose("cpu", case.spec(CPU), NATIVE), CPU)


def choice(name: str, spec: AttentionSpec) -> tuple[str, str, MutableMapping[str, object]]:
    """The name of the chosen backend, and the level and text of the log event."""
    with structlog.testing.capture_logs() as events:
        backend = choose(name, spec, NATIVE)
    (event,) = [event for event in events if event["event"] == "attention_backend"]
    return backend.name, str(event["log_level"]), event


@pytest.mark.usefixtures("native")
def test_native_attention_is_chosen_on_the_cpu_where_possible() -> None:
    spec = Case(()).spec(CPU)
    assert choice("auto", spec)[:2] == ("cpu", "info")
    for others, why in (
        ({"window": 8}, "neither sliding windows nor capped scores"),
        ({"softcap": 2.0}, "neither sliding windows nor capped scores"),
        ({"dtype": torch.float16}, "torch.float16"),
    ):
        name, level, event = choice("auto", dataclasses.replace(spec, **others))  # type: ignore[arg-type]
        assert (name, level) == ("reference", "warning")
        assert why in str(event["reason"])
        with pytest.raises(CannotLoad, match=f"attention 'cpu' is not available: .*{why}"):
            choose("cpu", dataclasses.replace(spec, **others), NATIVE)  # type: ignore[arg-type]


def test_native_attention_is_refused_on_cuda() -> None:
    with pytest.raises(CannotLoad, match="attention 'cpu' is not available: it runs on the CPU, not on cuda"):
        choose("cpu", Case(()).spec(CUDA), NATIVE)


class Chosen:
    """A backend that is chosen and never run."""

    is_token_major = False

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.mark.parametrize(
    ("lacking", "chosen", "level"),
    [
        ((), "triton", "info"),
        (("triton",), "flash", "warning"),
        (("triton", "flash"), "reference", "warning"),
    ],
)
def test_first_possible_backend_is_chosen_on_cuda(
    lacking: Sequence[str], chosen: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(name: str, spec: AttentionSpec, code_folder: Path | None) -> AttentionBackend:
        if name in lacking:
            raise BackendUnavailable(f"no {name} here")
        return Chosen(name)  # type: ignore[return-value]

    monkeypatch.setattr(backends, "_make", make)
    name, how_loud, event = choice("auto", Case(()).spec(CUDA))
    assert (name, how_loud) == (chosen, level)
    assert all(f"{each}: no {each} here" in str(event["reason"]) for each in lacking)


@pytest.mark.usefixtures("native")
def test_missing_triton_is_refused_by_name_and_skipped_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(model, "triton_kernels", raising=False)
    monkeypatch.delitem(sys.modules, f"{model.__name__}.triton_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    for device in (CPU, CUDA):
        with pytest.raises(CannotLoad, match="attention 'triton' is not available: triton cannot be imported"):
            choose("triton", Case(()).spec(device), None)
    assert choice("auto", Case(()).spec(CPU))[:2] == ("cpu", "info")


def test_kernels_that_do_not_run_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as with an old driver, or where the launcher of the kernels cannot be compiled."""
    triton_kernels = pytest.importorskip("cuelight.actors.executor.model.triton_kernels")

    class Old(triton_kernels.TritonKernels):  # type: ignore[misc, name-defined]
        def write(self, *_: object) -> None:
            raise OSError("the driver is too old")

    monkeypatch.setattr(triton_kernels, "IS_INTERPRETED", True)
    monkeypatch.setattr(triton_kernels, "TritonKernels", Old)
    with pytest.raises(CannotLoad, match="its kernels do not run here: OSError: the driver is too old"):
        choose("triton", Case(()).spec(CPU), None)


def test_kernels_with_wrong_results_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_kernels = pytest.importorskip("cuelight.actors.executor.model.triton_kernels")

    class Wrong(triton_kernels.TritonKernels):  # type: ignore[misc, name-defined]
        def write(self, *_: object) -> None: ...

        def attend(self, q: torch.Tensor, keys: object, values: object, out: torch.Tensor, *_: object) -> None:
            out.zero_()

    monkeypatch.setattr(triton_kernels, "IS_INTERPRETED", True)
    monkeypatch.setattr(triton_kernels, "TritonKernels", Wrong)
    with pytest.raises(CannotLoad, match="a mean of ones is not one"):
        choose("triton", Case(()).spec(CPU), None)


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(CannotLoad, match="no attention 'nonesuch'"):
        choose("nonesuch", Case(()).spec(CPU), None)


def spec(config: transformers.PreTrainedConfig) -> AttentionSpec:
    return AttentionSpec.of(config, CPU, torch.float32, 16)


def test_requirements_of_a_model_come_from_its_configuration() -> None:
    llama = spec(transformers.LlamaConfig(**GROUPED))
    assert (llama.heads, llama.kv_heads, llama.head_dim, llama.query_groups) == (6, 2, 8, 3)
    assert (llama.window, llama.softcap) == (None, None)
    gemma = spec(transformers.Gemma2Config(**GROUPED, head_dim=32, sliding_window=8, attn_logit_softcapping=3.0))
    assert (gemma.head_dim, gemma.window, gemma.softcap) == (32, 8, 3.0)


def test_window_counts_where_it_is_shorter_than_the_context() -> None:
    mistral = lambda window: spec(transformers.MistralConfig(**GROUPED, sliding_window=window)).window  # noqa: E731
    assert [mistral(window) for window in (None, 255, 256, 4096)] == [None, 255, None, None]
    qwen = {**GROUPED, "sliding_window": 8, "max_window_layers": 1}
    assert spec(transformers.Qwen2Config(**qwen, use_sliding_window=True)).window == 8
    assert spec(transformers.Qwen2Config(**qwen, use_sliding_window=False)).window is None
    everywhere = transformers.Gemma3TextConfig(**GROUPED, sliding_window=8, layer_types=["full_attention"] * 2)
    assert spec(everywhere).window is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "masks of its own"),
        ({"s_aux": torch.zeros(2)}, "sinks"),
        ({"position_bias": torch.zeros(2)}, "position_bias"),
        ({"is_causal": False}, "those after them"),
    ],
)
def test_arguments_unknown_to_the_attention_function_are_refused(given: dict[str, object], why: str) -> None:
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(UnsupportedAttention, match=why):
        _paged_attention(module, q, q, q, **{"attention_mask": None, **given})  # type: ignore[arg-type]


def test_triton_backend_plans_steps() -> None:
    """CUDA graphs of decode steps need a plan."""
    from cuelight.actors.executor.model.graphs import PlanningBackend

    assert issubclass(TritonBackend, PlanningBackend)
