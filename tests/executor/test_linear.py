"""Packed linear layers against torch's own."""

from __future__ import annotations

import ctypes

import pytest
import torch

from cuelight.actors.executor.model.linear import Int8Linear, NativeInt8Linear, PackedLinear, pack
from cuelight.actors.executor.native.linear import Arena, LinearKernels


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 32, 200])
@torch.inference_mode()
def test_packed_layer_matches_the_plain_one(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    plain = torch.nn.Linear(48, 80, bias=bias)
    x = torch.randn(1, rows, 48)
    torch.testing.assert_close(PackedLinear(plain)(x), plain(x), rtol=1e-5, atol=1e-5)


def test_only_plain_float32_layers_are_packed() -> None:
    class Special(torch.nn.Linear):
        pass

    model = torch.nn.ModuleDict(
        {
            "plain": torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)),
            "special": Special(8, 8),
            "bf16": torch.nn.Linear(8, 8, dtype=torch.bfloat16),
        }
    )
    assert pack(model) == 2
    assert [type(layer) for layer in model["plain"]] == [PackedLinear, PackedLinear]
    assert type(model["special"]) is Special
    assert type(model["bf16"]) is torch.nn.Linear


def forms(plain: torch.nn.Linear, native: ctypes.CDLL) -> dict[str, torch.nn.Module]:
    return {"torch": Int8Linear(plain), "native": NativeInt8Linear(plain, LinearKernels(native), Arena())}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 80), (45, 67), (576, 192)])
@torch.inference_mode()
def test_int8_layers_are_near_the_plain_one(inputs: int, outputs: int, bias: bool, native: ctypes.CDLL) -> None:
    torch.manual_seed(inputs)
    plain = torch.nn.Linear(inputs, outputs, bias=bias)
    for rows in (1, 17, 40):
        x = torch.randn(1, rows, inputs) * torch.logspace(-3, 3, rows)[:, None]
        for layer in forms(plain, native).values():
            y, judge = layer(x), plain(x)
            assert y.shape == judge.shape and y.dtype is torch.float32
            off = (y - judge).norm(dim=-1) / judge.norm(dim=-1)
            assert 0 < off.max() < 0.02, "each row has its own scale"


@torch.inference_mode()
def test_int8_row_that_is_not_finite_changes_no_other(native: ctypes.CDLL) -> None:
    plain = torch.nn.Linear(64, 32)
    x = torch.randn(1, 5, 64)
    for bad in (torch.nan, torch.inf):
        spoilt = x.clone()
        spoilt[0, 2, 7] = bad
        for layer in forms(plain, native).values():
            y = layer(spoilt)[0]
            assert not y[2].isfinite().any()
            torch.testing.assert_close(y[[0, 1, 3, 4]], layer(x)[0, [0, 1, 3, 4]])


@torch.inference_mode()
def test_int8_of_zeros_and_of_half_precision(native: ctypes.CDLL) -> None:
    plain = torch.nn.Linear(64, 32)
    x = torch.randn(1, 5, 64)
    for layer in forms(plain, native).values():
        assert layer(torch.zeros(2, 64)).sub(plain.bias).abs().max() == 0
        half = layer(x.bfloat16())
        assert half.dtype is torch.bfloat16
        torch.testing.assert_close(half.float(), plain(x), rtol=0.05, atol=0.05)
    silent = torch.nn.Linear(64, 32)
    silent.weight[3] = 0
    for layer in forms(silent, native).values():
        torch.testing.assert_close(layer(x)[0, :, 3], silent.bias[3].expand(5))


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 16, 17, 40])
@torch.inference_mode()
def test_int8_on_cuda_matches_the_cpu(rows: int) -> None:
    torch.manual_seed(rows)
    layer = Int8Linear(torch.nn.Linear(64, 48))
    x = torch.randn(1, rows, 64)
    torch.testing.assert_close(layer.cuda()(x.cuda()).cpu(), layer.cpu()(x), rtol=1e-4, atol=1e-4)
