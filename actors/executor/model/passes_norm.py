"""Puts one operation in the place of a norm by the root of the mean square, which a model's own code spells in six.

What a module is, its numbers say: it scales x * rsqrt(mean(x²) + epsilon) by its weight w, or by 1 + w.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from cuelight.actors.executor.model.probing import Probe
from cuelight.actors.executor.model.surgery import ModuleReplacement, replace_modules
from cuelight.actors.executor.native.ops import SmallKernels

LARGE = 1024.0
"""Inputs so large that no epsilon shows: the norm gives its scale."""

SMALL = 1e-6
"""Inputs so small that the norm gives away its epsilon."""

MAGNITUDES = (1e-3, 1.0, 30.0)
"""What a norm is tried with."""

ROUNDING = 1e-5
"""How far float32 may be off."""


@dataclass(frozen=True)
class RecognizedNorm:
    """What a module turned out to compute. `scale` is float32; `is_offset` where the weight is that less 1."""

    scale: torch.Tensor
    epsilon: float
    is_offset: bool


class FusedNorm(torch.nn.Module):
    """A norm in one operation, in float32 within. Through the native kernels where there are some, on the CPU."""

    def __init__(self, norm: RecognizedNorm, dtype: torch.dtype, kernels: SmallKernels | None) -> None:
        super().__init__()
        # 1 + w is not rounded to the weight's type: near 1 a type of few digits has none left for w.
        self.weight = torch.nn.Parameter(norm.scale if norm.is_offset else norm.scale.to(dtype), requires_grad=False)
        self.epsilon, self._kernels = norm.epsilon, kernels
        self._ahead: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, n] → […, n]."""
        if self._ahead is not None:
            known, y = self._ahead
            self._ahead = None
            if known is x:
                return y
        return self._compute(x)

    def compute_ahead(self, x: torch.Tensor) -> torch.Tensor:
        """Compute for this very tensor now: the code that makes it and this may be compiled into one."""
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
    """Replace every norm of this kind; with a library, its kernels serve those of float32."""
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
    """What norm a module with a single vector as its weight is; None if it is another thing."""
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
    except (RuntimeError, TypeError, ValueError, IndexError):  # a module that takes no rows of numbers is no norm
        return None


def _epsilon(module: torch.nn.Module, measured: float) -> float:
    """The module's own number where it has one that is like what was measured: that is rounded."""
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
