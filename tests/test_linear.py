"""Packed linear layers against torch's own."""

from __future__ import annotations

import pytest
import torch

from cuelight.actors.executor.model.linear import PackedLinear, pack


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 32, 200])
@torch.inference_mode()
def test_a_packed_layer_gives_what_the_plain_one_gives(rows: int, bias: bool) -> None:
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
