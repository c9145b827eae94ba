"""The modules of a model: where its layers are, how to replace a module and undo that, a small copy for trials."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModuleReplacement:
    """What was done to a model: in so many places, and how to undo it."""

    count: int
    undo: Callable[[], None]


def replace_modules(model: torch.nn.Module, places: dict[torch.nn.Module, torch.nn.Module]) -> Callable[[], None]:
    """Put each value where its key is, wherever in the model that is; the function undoes it."""
    done: list[tuple[torch.nn.Module, str, torch.nn.Module]] = []
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and child in places:
                setattr(parent, name, places[child])
                done.append((parent, name, child))

    def undo() -> None:
        for parent, name, child in done:
            setattr(parent, name, child)

    return undo


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList | None:
    """The list of layers, each of which attends; None where the model has no such list."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if (
            isinstance(module, torch.nn.ModuleList)
            and len(module) == count
            and all(map(modules_with_layer_index, module))
        ):
            return module
    return None


def modules_with_layer_index(layer: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules within that know which layer they belong to; who attends is among them."""
    return [module for module in layer.modules() if isinstance(getattr(module, "layer_idx", None), int)]


def small_copy(model: PreTrainedModel) -> PreTrainedModel | None:
    """A float32 copy with the first layers only, as many as it takes to have one of each kind."""
    layers = decoder_layers(model)
    if layers is None:
        return None
    kinds = [_kind(layer) for layer in layers]
    count = max(kinds.index(kind) for kind in kinds) + 1
    kept = torch.nn.ModuleList(copy.deepcopy(layer) for layer in layers[:count])
    copied: PreTrainedModel = copy.deepcopy(model, {id(layers): kept})
    torch.nn.Module.float(copied)
    return copied


def _kind(layer: torch.nn.Module) -> tuple[object, ...]:
    """The same for layers that are made alike."""
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    return modules, tuple((name, parameter.shape) for name, parameter in layer.named_parameters())
