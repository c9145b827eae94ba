"""Optimization passes on a loaded model, each verified against the logits of the original model.

A pass recognizes modules by structure, not by class name. A pass that changes the logits or fails to run is undone.
"""

from __future__ import annotations

import copy
import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from cuelight.actors.executor.model.module_replacement import (
    ModuleCall,
    ModuleReplacement,
    Probe,
    difference,
    replace_modules,
    small_copy,
)
from cuelight.actors.executor.native.attention import SmallKernels
from cuelight.kernel import get_logger

log = get_logger("cuelight.executor")

TOLERANCE = 1e-4
"""Largest deviation of the logits after a pass in float32, relative to the largest logit."""

COARSE_TOLERANCE = 0.15
"""`TOLERANCE` in half precision, where another order of additions changes logits by hundredths after many layers."""


@dataclass(frozen=True)
class Pass:
    """An optimization. `find` modifies the model and returns the replacement; None if it recognized no module."""

    name: str
    find: Callable[[PreTrainedModel, Probe], ModuleReplacement | None]


def standard_passes(library: ctypes.CDLL | None = None) -> tuple[Pass, ...]:
    """Return all passes. With `library`, norms use its kernels if they support them."""
    return Pass("merged_linears", merge_linears), Pass("fused_norms", partial(fuse_norms, library=library))


def apply_passes(model: PreTrainedModel, passes: Sequence[Pass]) -> dict[str, int]:
    """Apply the passes in place and return the number of replacements of each pass that was kept.

    Passes are verified in float32. For a model in half precision, they are first verified on a float32 copy of a few of
    its layers, then on the model itself with the coarse tolerance.
    """
    if model.dtype is torch.float32:
        return _kept(model, passes, TOLERANCE)
    try:
        if (copied := small_copy(model)) is not None:
            sound = _kept(copied, passes, TOLERANCE)
            del copied
            passes = [each for each in passes if each.name in sound]
    except torch.OutOfMemoryError as error:
        log.warning("passes_judged_coarsely", reason=f"there is no memory for a copy in float32: {error}")
    return _kept(model, passes, COARSE_TOLERANCE)


def tolerance_of(model: PreTrainedModel) -> float:
    """Return the largest relative deviation of the logits that a change to this model may cause."""
    return TOLERANCE if model.dtype is torch.float32 else COARSE_TOLERANCE


def _kept(model: PreTrainedModel, passes: Sequence[Pass], tolerance: float) -> dict[str, int]:
    probe = Probe(model)
    reference = probe.logits()
    if not reference.isfinite().all():
        log.warning("passes_skipped", reason="the model's logits are not finite numbers, so nothing can be compared")
        return {}
    kept: dict[str, int] = {}
    for each in passes:
        change = each.find(model, probe)
        if change is not None and _is_sound(each.name, change, probe, reference, tolerance):
            kept[each.name] = change.count
    return kept


def _is_sound(name: str, change: ModuleReplacement, probe: Probe, reference: torch.Tensor, tolerance: float) -> bool:
    """Return whether the model's logits are unchanged up to `tolerance`; if not, undo the change."""
    try:
        off = difference(probe.logits(), reference)
        reason = "" if off <= tolerance else f"its logits are off by {off:.2g} of the largest, over {tolerance:g}"
    except Exception as error:  # the model's code may fail in any way on replaced modules
        reason = f"{type(error).__name__}: {error}"
    if reason:
        change.undo()
        log.warning("pass_undone", name=name, reason=reason)
    return not reason


class MergedLinear(torch.nn.Module):
    """Several linear layers with the same input, merged into `linear`. Parts of an output must be read in order."""

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
        """Return the output of layer `index` for x. Reading the last part releases the merged output."""
        if index == 0 or x is not self._input:
            self._input, self._parts = x, self.linear(x).split(self.widths, dim=-1)
        part = self._parts[index]
        if index == len(self.widths) - 1:
            self._input, self._parts = None, ()
        return part


class MergedLinearPart(torch.nn.Module):
    """The replacement of a merged layer."""

    def __init__(self, merged: MergedLinear, index: int) -> None:
        super().__init__()
        self.index = index
        self.out_features = merged.widths[index]
        # Registered once as a submodule, of the first part, so that packing and quantizing replace it once.
        if index == 0:
            self.merged = merged
        self._shared = (merged,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map […, in_features] to […, out_features]."""
        return self._shared[0].part(self.index, x)


def merge_linears(model: PreTrainedModel, probe: Probe) -> ModuleReplacement | None:
    """Merge linear layers that have the same input. Original layers become views of the merged weights."""
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
    """Return the groups of layers to merge, each in calling order: siblings with the same input, dtype and device."""
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


LARGE = 1024.0
"""Input so large that epsilon is negligible, so the norm returns its scale."""

SMALL = 1e-6
"""Input so small that the output depends on epsilon."""

MAGNITUDES = (1e-3, 1.0, 30.0)
"""Standard deviations of the random inputs that a recognized norm is verified with."""

ROUNDING = 1e-5
"""Tolerance for float32, relative and absolute."""


@dataclass(frozen=True)
class RecognizedNorm:
    """The RMS norm that a module computes. `scale` is float32; with `is_offset`, the module's weight is `scale - 1`."""

    scale: torch.Tensor
    epsilon: float
    is_offset: bool


class FusedNorm(torch.nn.Module):
    """An RMS norm in a single operation, in float32 internally; with `kernels`, by the native kernels on the CPU."""

    def __init__(self, norm: RecognizedNorm, dtype: torch.dtype, kernels: SmallKernels | None) -> None:
        super().__init__()
        # 1 + w is not rounded to the weight's dtype: in half precision, w would lose its digits.
        self.weight = torch.nn.Parameter(norm.scale if norm.is_offset else norm.scale.to(dtype), requires_grad=False)
        self.epsilon, self._kernels = norm.epsilon, kernels
        self._ahead: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map […, n] to […, n]; use the result of `compute_ahead` if it was for this tensor."""
        if self._ahead is not None:
            known, y = self._ahead
            self._ahead = None
            if known is x:
                return y
        return self._compute(x)

    def compute_ahead(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the norm of x now and store it for `forward`, so that the producer of x and the norm are fused."""
        y = self._compute(x)
        self._ahead = x, y
        return y

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not self.weight.dtype:
            return rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.epsilon).to(x.dtype)
        if self._kernels is None or torch.compiler.is_compiling():
            return rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        rows = x.contiguous().view(-1, x.shape[-1])
        return torch.from_numpy(self._kernels.add_rmsnorm(rows.numpy(), None, self.weight.numpy(), self.epsilon)).view(
            x.shape
        )


def fuse_norms(model: PreTrainedModel, probe: Probe, library: ctypes.CDLL | None = None) -> ModuleReplacement | None:
    """Replace every RMS norm. With `library`, its kernels compute those of float32 on the CPU."""
    kernels = None if library is None else SmallKernels(library)
    places: dict[torch.nn.Module, torch.nn.Module] = {}
    for call in probe.trace(_may_be_norm):
        weight = next(call.module.parameters())
        norm = recognize(call.module) if call.is_simple and call.inputs[0].shape[-1] == len(weight) else None
        if norm is not None:
            is_served = weight.dtype is torch.float32 and weight.device.type == "cpu"
            places[call.module] = FusedNorm(norm, weight.dtype, kernels if is_served else None)
    return ModuleReplacement(len(places), replace_modules(model, places)) if places else None


def _may_be_norm(module: torch.nn.Module) -> bool:
    parameters = list(module.parameters())
    is_leaf = not list(module.children()) and not list(module.buffers())
    return is_leaf and len(parameters) == 1 and parameters[0].dim() == 1 and not isinstance(module, FusedNorm)


@torch.inference_mode()
def recognize(module: torch.nn.Module) -> RecognizedNorm | None:
    """Return the RMS norm that a module with a single weight vector computes; None if it computes anything else."""
    copied = copy.deepcopy(module).float()
    weight = next(copied.parameters()).detach()
    ones = torch.ones(1, len(weight), device=weight.device)
    try:
        scale, least = copied(LARGE * ones)[0], copied(SMALL * ones)[0]
        is_offset = not _alike(scale, weight)
        exact = 1 + weight if is_offset else weight
        at = int(exact.abs().argmax())
        if not _alike(scale, exact) or least[at] == 0:
            return None
        # least = scale * SMALL / sqrt(SMALL² + epsilon)
        measured = (float(exact[at] / least[at]) * SMALL) ** 2 - SMALL**2
        norm = RecognizedNorm(exact.clone(), _epsilon(module, measured), is_offset)
        return norm if all(_alike(copied(x), _plain(norm, x)) for x in _inputs(weight)) else None
    except (RuntimeError, TypeError, ValueError, IndexError):  # a module that does not accept rows of floats is no norm
        return None


def _epsilon(module: torch.nn.Module, measured: float) -> float:
    """Return the module's float attribute close to the measured epsilon, which is inexact; by default the measured."""
    own = [value for value in vars(module).values() if isinstance(value, float)]
    near = [value for value in own if abs(value - measured) <= 1e-3 * value]
    return near[0] if near else max(measured, 0.0)


def _inputs(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    generator = torch.Generator(device=weight.device).manual_seed(0)
    for magnitude in MAGNITUDES:
        yield magnitude * torch.randn(4, len(weight), generator=generator, device=weight.device)


def _plain(norm: RecognizedNorm, x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, norm.scale.shape, norm.scale, norm.epsilon)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=ROUNDING, atol=ROUNDING)
