"""Linear layers for float32 on the CPU, through oneDNN with weights laid out once for it.

torch's own path multiplies by the weight as it lies in memory; for the few rows of a decode step that costs up to twice
as much. Knows nothing of attention, batches or requests.
"""

from __future__ import annotations

import torch

PACKED_FOR_ROWS = 32
"""The layout is chosen for this many rows, a typical decode step, and used for any number."""


class PackedLinear(torch.nn.Module):
    """`x @ weight.T + bias` with a packed weight; the original is not kept."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACKED_FOR_ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, in_features] → […, out_features]."""
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


def pack(model: torch.nn.Module) -> int:
    """Replace every plain float32 linear layer of a CPU model; returns how many. None where torch lacks oneDNN."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return 0
    packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and child.weight.dtype is torch.float32:
                setattr(parent, name, PackedLinear(child))
                packed += 1
    return packed
