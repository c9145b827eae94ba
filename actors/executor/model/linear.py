"""Linear layers with packed or quantized weights, and their installation in a model.

torch's float32 layers on the CPU use the weight in its original layout, which for the few rows of a decode step takes
up to twice as long as with a layout by oneDNN. Quantized weights have a quarter of the bytes, and reading the weights
takes most of the time of few rows.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import library

from cuelight.actors.executor.native.linear import Arena, LinearKernels, SourceType, WeightFormat

PACKED_FOR_ROWS = 32
"""The number of rows that oneDNN optimizes the layout for, a typical decode step. Any number of rows may be used."""

INT8_MAX = 127
INT_MM_ROWS_ADDED = 16
"""Rows of padding, since CUDA's int8 product needs more than 16 rows.

The padding is the same for any number of rows: a condition on the number would compile the layer again for few rows.
"""

INT_MM_MULTIPLE = 8
"""CUDA's int8 product needs weights whose sizes are multiples of this."""


class PackedWeight(NamedTuple):
    """The attributes of a packed weight that a model may read. Not a tensor, so computing with it raises an error."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class OpaqueLinear(torch.nn.Module):
    """A linear layer, `x @ weight.T + bias`, as an operation that torch.compile does not trace."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.weight = PackedWeight(linear.weight.shape, linear.weight.dtype, linear.weight.device)
        # A tensor, since an int would be a constant in compiled code, and every layer would be compiled separately.
        self.number = torch.tensor(next(_numbers))
        _layers[int(self.number)] = self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map […, in_features] to […, out_features], in x's dtype."""
        if torch.compiler.is_compiling():
            y: torch.Tensor = torch.ops.cuelight.linear(x, self.number, self.out_features)
            return y
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """As `forward`, never traced by the compiler."""
        raise NotImplementedError


_numbers = itertools.count()
_layers: WeakValueDictionary[int, OpaqueLinear] = WeakValueDictionary()


@library.custom_op("cuelight::linear", mutates_args=())
def _linear(x: torch.Tensor, number: torch.Tensor, out_features: int) -> torch.Tensor:
    return _layers[int(number)].compute(x).contiguous()


@_linear.register_fake
def _(x: torch.Tensor, number: torch.Tensor, out_features: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


class PackedLinear(OpaqueLinear):
    """A linear layer with its float32 weight in oneDNN's layout; the original weight is not kept."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(linear)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACKED_FOR_ROWS)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """As `OpaqueLinear.compute`."""
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


class NativeInt8Linear(OpaqueLinear):
    """A linear layer with an int8 weight and a scale per output, by the native kernels, which quantize its input."""

    def __init__(self, linear: torch.nn.Linear, kernels: LinearKernels, arena: Arena) -> None:
        super().__init__(linear)
        shape = linear.out_features, linear.in_features
        weight = linear.weight.detach().float().contiguous()
        memory = arena.take(kernels.packed_bytes(WeightFormat.INT8, *shape))
        self._kernels = kernels
        self._packed = kernels.pack_from(
            weight.data_ptr(), SourceType.FLOAT32, shape[1], shape, WeightFormat.INT8, into=memory
        )
        self._added = None if linear.bias is None else np.ascontiguousarray(linear.bias.detach().float().numpy())

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """As `OpaqueLinear.compute`; input and result of the kernels are float32."""
        rows = x.float().contiguous().view(-1, self.in_features)
        y = torch.from_numpy(self._kernels.linear(self._packed, rows.numpy(), self._added))
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)


class Int8Linear(torch.nn.Module):
    """A linear layer with an int8 weight in plain torch, on any device: a scale per output and per row of input."""

    weight: torch.Tensor
    scales: torch.Tensor

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        weight = linear.weight.detach().float()
        scales = weight.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / INT8_MAX
        self.register_buffer("weight", (weight / scales).round().to(torch.int8))
        self.register_buffer("scales", scales[:, 0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map […, in_features] to […, out_features], in x's dtype."""
        rows = x.reshape(-1, self.in_features).float()
        # A row that is not finite has a scale that is not finite, so none of its outputs is finite either.
        scales = rows.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / INT8_MAX
        quantized = (rows / scales).round().to(torch.int8)
        if x.is_cuda:
            quantized = torch.nn.functional.pad(quantized, (0, 0, 0, INT_MM_ROWS_ADDED))
        sums = torch._int_mm(quantized, self.weight.t())
        y = sums[: len(rows)].float() * scales * self.scales
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)


def pack(model: torch.nn.Module) -> int:
    """Pack every plain float32 linear layer of a model on the CPU and return how many; 0 if torch lacks oneDNN."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return 0
    return _replace(model, lambda linear: PackedLinear(linear) if linear.weight.dtype is torch.float32 else None)


def quantize(model: torch.nn.Module, library: ctypes.CDLL | None) -> int:
    """Replace plain linear layers by int8 layers and return how many.

    With `library`, which requires a model on the CPU, the layers use its kernels. Without, layers whose sizes the
    device's int8 product does not support stay as they are.
    """
    if library is not None:
        kernels, arena = LinearKernels(library), Arena()
        return _replace(model, lambda linear: NativeInt8Linear(linear, kernels, arena))
    return _replace(model, lambda linear: Int8Linear(linear) if _fits_int_mm(linear) else None)


def _fits_int_mm(linear: torch.nn.Linear) -> bool:
    is_even = linear.in_features % INT_MM_MULTIPLE == 0 and linear.out_features % INT_MM_MULTIPLE == 0
    return is_even or not linear.weight.is_cuda


def _replace(model: torch.nn.Module, make: Callable[[torch.nn.Linear], torch.nn.Module | None]) -> int:
    """Replace plain linear layers one by one, so that both forms of the whole model are never in memory at once."""
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and (new := make(child)) is not None:
                setattr(parent, name, new)
                replaced += 1
    return replaced
