"""Merges linear layers of one module that are given the same tensor: q, k and v, or gate and up.

One product over all their weights costs few rows half of what three do. The module's code stays as it is: the layer it
calls first computes for all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

import torch
from transformers import PreTrainedModel

from cuelight.actors.executor.model.probing import ModuleCall, Probe
from cuelight.actors.executor.model.surgery import ModuleReplacement, replace_modules


class MergedLinear(torch.nn.Module):
    """Several linear layers of the same input as one, `linear`. Its parts are taken in order, a tensor at a time."""

    def __init__(self, linears: Sequence[torch.nn.Linear]) -> None:
        super().__init__()
        first = linears[0]
        self.widths = [linear.out_features for linear in linears]
        has_bias = any(linear.bias is not None for linear in linears)
        merged = torch.nn.Linear(first.in_features, sum(self.widths), bias=has_bias, device="meta")
        merged.weight = _frozen(torch.cat([linear.weight for linear in linears]))
        if has_bias:
            merged.bias = _frozen(torch.cat([_bias(linear) for linear in linears]))
        self.linear = merged
        self._input: torch.Tensor | None = None
        self._parts: Sequence[torch.Tensor] = ()

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """What layer `index` gives for x. Nothing is kept once the last part was taken."""
        if index == 0 or x is not self._input:
            self._input, self._parts = x, self.linear(x).split(self.widths, dim=-1)
        part = self._parts[index]
        if index == len(self.widths) - 1:
            self._input, self._parts = None, ()
        return part


class MergedLinearPart(torch.nn.Module):
    """In the place of one of the merged layers."""

    def __init__(self, merged: MergedLinear, index: int) -> None:
        super().__init__()
        self.index = index
        self.out_features = merged.widths[index]
        # Among the model's modules once, under the first part, where those that pack or quantize linear layers find it.
        if index == 0:
            self.merged = merged
        self._shared = (merged,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, in_features] → […, out_features]."""
        return self._shared[0].part(self.index, x)


def merge_linears(model: PreTrainedModel, probe: Probe) -> ModuleReplacement | None:
    """Merge all that can be. Until the change is dropped the weights are there once, seen by both forms."""
    places: dict[torch.nn.Module, torch.nn.Module] = {}
    groups = _groups(model, probe.trace(lambda module: type(module) is torch.nn.Linear))
    for linears in groups:
        merged = MergedLinear(linears)
        places.update((linear, MergedLinearPart(merged, index)) for index, linear in enumerate(linears))
        rows = torch.split(merged.linear.weight, merged.widths)
        for linear, mine in zip(linears, rows, strict=True):
            linear.weight = _frozen(mine)
    return ModuleReplacement(len(groups), replace_modules(model, places)) if groups else None


def _groups(model: torch.nn.Module, calls: Sequence[ModuleCall]) -> list[list[torch.nn.Linear]]:
    """Layers to merge, each group in the order in which it is called."""
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    fit = [
        (call.name.rpartition(".")[0], id(call.inputs[0]), call.module)
        for call in calls
        if call.is_simple and len(call.inputs) == 1 and owners[id(call.module._parameters["weight"])] == 1
    ]
    groups: list[list[torch.nn.Linear]] = []
    for _, same in groupby(fit, key=lambda each: each[:2]):
        linears = [module for _, _, module in same if isinstance(module, torch.nn.Linear)]
        kinds = {(linear.weight.dtype, linear.weight.device) for linear in linears}
        if len(linears) > 1 and len(kinds) == 1:
            groups.append(linears)
    return groups


def _bias(linear: torch.nn.Linear) -> torch.Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias


def _frozen(values: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(values.detach(), requires_grad=False)
