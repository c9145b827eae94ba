"""The Triton kernels in Triton's interpreter, compiled for GPUs that need not be present, and on a present one."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
import transformers
import triton_checks
from attention_cases import MIXES, SHAPES, Case
from interpreter import TritonProcess, triton_process
from tiny_models import GROUPED
from transformers import PreTrainedConfig

from cuelight.actors.executor import model
from cuelight.actors.executor.model.backends import choose
from cuelight.actors.executor.options import CannotLoad

pytest.importorskip("triton", reason="there is no Triton for this machine")

CUDA = torch.device("cuda")
SPLIT: dict[str, Case] = {
    "long": Case(((900, 1), (40, 1), (300, 1), (600, 3)), head_dim=64, block_size=16),
    "windowed": Case(((200, 1), (70, 1), (150, 9)), window=40),
    "windowed to the last part": Case(((200, 1), (31, 1)), window=3),
    "capped": Case(((130, 1), (65, 5)), softcap=2.0, groups=5),
    "bfloat16": Case(((130, 1), (65, 5)), dtype=torch.bfloat16, head_dim=64, block_size=16),
}
"""Steps whose keys are divided with spans of 64 or 128."""


@pytest.fixture(scope="module")
def interpreted() -> Iterator[TritonProcess]:
    with triton_process() as process:
        yield process


KINDS = ((9, 1), (33, 1), (50, 7), (12, 12), (70, 24))
"""Decodes, a whole prompt and chunks of more than one tile; the interpreter runs the programs one after the other."""


@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_match_float64(shape: str, interpreted: TritonProcess) -> None:
    for rows in (MIXES["one token"], KINDS):
        interpreted.run(triton_checks.kernels_are_right, dataclasses.replace(SHAPES[shape], rows=rows), None)


@pytest.mark.parametrize("name", SPLIT)
def test_keys_divided_among_programs_are_merged(name: str, interpreted: TritonProcess) -> None:
    interpreted.run(triton_checks.kernels_are_right, SPLIT[name], 128 if name == "long" else 64)


def test_padding_of_a_step_gives_zeros(interpreted: TritonProcess) -> None:
    for rows in (((9, 1), (300, 1), (31, 1)), ((5, 1),)):
        interpreted.run(triton_checks.padding_is_nothing, Case(rows), 4)


def test_row_with_a_fixed_span_is_independent_of_other_rows(interpreted: TritonProcess) -> None:
    case = Case(((130, 1), (20, 1), (70, 1), (300, 1), (5, 1)))
    interpreted.run(triton_checks.a_row_is_the_same_in_any_company, case, 64)


MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "gemma2": lambda: transformers.Gemma2Config(
        **GROUPED,
        head_dim=8,
        query_pre_attn_scalar=8,
        tie_word_embeddings=False,
        sliding_window=8,
        attn_logit_softcapping=3.0,
    ),
}


@pytest.mark.parametrize("family", MODELS)
def test_models_give_the_tokens_of_transformers(family: str, interpreted: TritonProcess) -> None:
    interpreted.run(triton_checks.outputs_are_those_of_transformers, MODELS[family]())


FAST_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
"""Bytes of shared memory that a program may use, by compute capability."""


@pytest.mark.parametrize(
    ("capability", "type_name", "case", "rows"),
    [
        (80, "bf16", Case((), kv_heads=8, groups=4, head_dim=128, block_size=16, dtype=torch.bfloat16), 64),
        (89, "fp16", Case((), head_dim=256, block_size=16, dtype=torch.float16, window=5, softcap=2.0), 32),
        (90, "fp32", Case((), kv_heads=3, head_dim=80, block_size=3, window=5), 32),
    ],
)
def test_kernels_compile_and_fit_a_gpu(capability: int, type_name: str, case: Case, rows: int) -> None:
    shared = triton_checks.compiled(capability, type_name, case, rows)
    # Two programs at a time at least, so that one computes while the other waits for memory.
    assert 0 < shared <= FAST_MEMORY[capability] // (2 if type_name != "fp32" else 1)


def test_missing_triton_is_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cuelight.actors.executor.model.triton_kernels", raising=False)
    monkeypatch.delattr(model, "triton_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(CannotLoad, match="attention 'triton' is not available: triton cannot be imported"):
        choose("triton", Case(()).spec(CUDA), None)


@pytest.mark.cuda
@pytest.mark.parametrize("span", [None, 64])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_on_the_gpu(shape: str, mix: str, span: int | None) -> None:
    triton_checks.kernels_are_right(dataclasses.replace(SHAPES[shape], rows=MIXES[mix]), span, CUDA)


@pytest.mark.cuda
@pytest.mark.parametrize("family", MODELS)
def test_models_on_the_gpu(family: str) -> None:
    triton_checks.outputs_are_those_of_transformers(MODELS[family](), "cuda")


@pytest.mark.cuda
def test_padding_on_the_gpu() -> None:
    triton_checks.padding_is_nothing(Case(((9, 1), (30000, 1), (31, 1))), 4, CUDA)


@pytest.mark.cuda
@pytest.mark.parametrize("name", SPLIT)
def test_divided_keys_on_the_gpu(name: str) -> None:
    triton_checks.kernels_are_right(SPLIT[name], 64, CUDA)
    triton_checks.a_row_is_the_same_in_any_company(
        dataclasses.replace(SPLIT[name], window=None, softcap=None), 64, CUDA
    )
