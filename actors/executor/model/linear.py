"""Linear layers that keep their weights as something else than a matrix of floats, and how they get into a model.

torch's own float32 path on the CPU multiplies by the weight as it lies in memory, which for the few rows of a decode
step costs up to twice as much as with a weight that oneDNN has laid out. Quantized weights are a quarter of the bytes,
which is what few rows wait for. Knows nothing of attention, batches or requests.
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
"""The layout is chosen for this many rows, a typical decode step, and used for any number."""

INT8_MAX = 127
INT_MM_ROWS_ADDED = 16
"""CUDA's int8 product takes more rows than this. Always so many more, since what depends on the number of rows would be
compiled again for few."""

INT_MM_MULTIPLE = 8
"""It takes weights of such sizes only."""


class PackedWeight(NamedTuple):
    """What a model may ask of a weight that lies packed. It is no tensor, so that nobody computes with it."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class OpaqueLinear(torch.nn.Module):
    """`x @ weight.T + bias` by an operation that a compiler must not look into."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.weight = PackedWeight(linear.weight.shape, linear.weight.dtype, linear.weight.device)
        # A tensor, since a number would be compiled in, and each layer would have code of its own.
        self.number = torch.tensor(next(_numbers))
        _layers[int(self.number)] = self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, in_features] → […, out_features], of x's type."""
        if torch.compiler.is_compiling():
            y: torch.Tensor = torch.ops.cuelight.linear(x, self.number, self.out_features)
            return y
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """As `forward`, always at once."""
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
    """A float32 weight in oneDNN's layout; the original is not kept."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(linear)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACKED_FOR_ROWS)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """As `OpaqueLinear.compute`."""
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


class NativeInt8Linear(OpaqueLinear):
    """An int8 weight with a scale per output in the native kernels' layout, by rows that they quantize as they come."""

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
        """As `OpaqueLinear.compute`; in float32 within."""
        rows = x.float().contiguous().view(-1, self.in_features)
        y = torch.from_numpy(self._kernels.linear(self._packed, rows.numpy(), self._added))
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)


class Int8Linear(torch.nn.Module):
    """The same in plain torch, on any device: one scale per output, and one per row of what comes in."""

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
        """[…, in_features] → […, out_features], of x's type."""
        rows = x.reshape(-1, self.in_features).float()
        # A row that is not finite has a scale that is not, and so have all its products.
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
    """Replace every plain float32 linear layer of a CPU model; returns how many. None where torch lacks oneDNN."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return 0
    return _replace(model, lambda linear: PackedLinear(linear) if linear.weight.dtype is torch.float32 else None)


def quantize(model: torch.nn.Module, library: ctypes.CDLL | None) -> int:
    """Replace plain linear layers by int8 ones, one after the other; returns how many.

    With a library its kernels serve a model on the CPU. What a device's product does not take stays as it is.
    """
    if library is not None:
        kernels, arena = LinearKernels(library), Arena()
        return _replace(model, lambda linear: NativeInt8Linear(linear, kernels, arena))
    return _replace(model, lambda linear: Int8Linear(linear) if _fits_int_mm(linear) else None)


def _fits_int_mm(linear: torch.nn.Linear) -> bool:
    is_even = linear.in_features % INT_MM_MULTIPLE == 0 and linear.out_features % INT_MM_MULTIPLE == 0
    return is_even or not linear.weight.is_cuda


def _replace(model: torch.nn.Module, make: Callable[[torch.nn.Linear], torch.nn.Module | None]) -> int:
    """The old layer goes before the next is made, so that both forms of a model are never there at once."""
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and (new := make(child)) is not None:
                setattr(parent, name, new)
                replaced += 1
    return replaced
