"""Makes a loaded model faster without changing what it computes: passes, each judged by the untouched model.

A pass finds its places by structure, never by a class's name. What differs, or does not run, is undone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from cuelight.actors.executor.model.passes_merge import merge_linears
from cuelight.actors.executor.model.passes_norm import fuse_norms
from cuelight.actors.executor.model.probing import Probe, difference
from cuelight.actors.executor.model.surgery import ModuleReplacement, small_copy
from cuelight.kernel import get_logger

log = get_logger("cuelight.executor")

TOLERANCE = 1e-4
"""How far the logits of a pass may be off in float32, as a share of the largest."""

COARSE_TOLERANCE = 0.15
"""In half precision, where the same sums in another order are off by hundredths after many layers."""


@dataclass(frozen=True)
class Pass:
    """`find` changes the model and says what it did; None where it found nothing."""

    name: str
    find: Callable[[PreTrainedModel, Probe], ModuleReplacement | None]


def standard_passes(library: ctypes.CDLL | None = None) -> tuple[Pass, ...]:
    """All that there are. With a library, its kernels are used where they serve."""
    return Pass("merged_linears", merge_linears), Pass("fused_norms", partial(fuse_norms, library=library))


def apply_passes(model: PreTrainedModel, passes: Sequence[Pass]) -> dict[str, int]:
    """Change the model in place. Gives the passes that were kept, and how many places each changed.

    They are judged in float32. A model in half precision is judged by a copy in float32 of a few of its layers first,
    and then, coarsely, itself.
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
    """How far the logits of a form of this model may be off."""
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
    """Whether the model computes the same; if not, the change is undone."""
    try:
        off = difference(probe.logits(), reference)
        reason = "" if off <= tolerance else f"its logits are off by {off:.2g} of the largest, beyond {tolerance:g}"
    except Exception as error:  # whatever the model's code makes of modules that it does not know
        reason = f"{type(error).__name__}: {error}"
    if reason:
        change.undo()
        log.warning("pass_undone", name=name, reason=reason)
    return not reason
