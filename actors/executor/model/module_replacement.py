"""Tools for replacing modules of a model: find its layers, replace modules, undo it, and compare logits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from cuelight.actors.executor.model.attention import attending
from cuelight.actors.executor.model.folder import context_length


@dataclass(frozen=True)
class ModuleReplacement:
    """A change to a model: `count` replacements, and a function that undoes them."""

    count: int
    undo: Callable[[], None]


def replace_modules(model: torch.nn.Module, places: dict[torch.nn.Module, torch.nn.Module]) -> Callable[[], None]:
    """Replace each key of `places` by its value, everywhere in the model; return a function that undoes it."""
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
    """Return the list of the model's attention layers; None if the model has no such list."""
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
    """Return the modules within a layer that have a `layer_idx`, among them its attention."""
    return [module for module in layer.modules() if isinstance(getattr(module, "layer_idx", None), int)]


def small_copy(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return a float32 copy with only the leading layers, up to the first of each kind; None without a layer list."""
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
    """Return the layer's module types and parameter shapes, equal for layers of the same structure."""
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    return modules, tuple((name, parameter.shape) for name, parameter in layer.named_parameters())


TOKENS = 8
"""Tokens of the probe: enough for positions and masks to matter, few enough to be cheap."""

STRIDE = 7919
"""Distance of the probe's token ids: a prime, so that they differ modulo nearly any vocabulary size."""


class DenseAttention:
    """Causal attention over a single row without a KV pool.

    Windows and caps are ignored, since comparing two forms of a model only needs the same attention for both.
    """

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, *_: object, **__: object
    ) -> torch.Tensor:
        """Attend; shapes as in `PagedAttention.attend`."""
        queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        out = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
        return out[0].transpose(0, 1)


@dataclass(eq=False)
class ModuleCall:
    """The calls of a module during a trace. Tensors are kept alive, so that their ids stay unique."""

    module: torch.nn.Module
    name: str
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[object] = field(default_factory=list)
    is_simple: bool = True
    """Whether each call had a single tensor as its input, and one as its output."""


class Probe:
    """A fixed row of a few tokens, computed on the model's device, to compare logits and trace modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        positions = context_length(model.config) or TOKENS
        vocabulary = vocabulary_of(model)
        where = torch.arange(min(TOKENS, positions), device=model.device)
        self._positions, self._token_ids = where[None], ((where + 1) * STRIDE % vocabulary)[None]

    @torch.inference_mode()
    def logits(self) -> torch.Tensor:
        """Return the logits [tokens, vocabulary] in float32."""
        with attending(DenseAttention()):
            output = self._model(input_ids=self._token_ids, position_ids=self._positions, use_cache=False)
        logits: torch.Tensor = output.logits[0]
        return logits.float()

    def trace(self, kinds: Callable[[torch.nn.Module], bool]) -> list[ModuleCall]:
        """Compute the row and return the calls of the modules that `kinds` selects, in the order of first calls."""
        calls: dict[torch.nn.Module, ModuleCall] = {}
        with _hooks(self._model, kinds, calls):
            self.logits()
        return list(calls.values())


@contextmanager
def _hooks(
    model: torch.nn.Module, kinds: Callable[[torch.nn.Module], bool], calls: dict[torch.nn.Module, ModuleCall]
) -> Iterator[None]:
    def note(
        name: str, module: torch.nn.Module, inputs: tuple[object, ...], named: dict[str, object], output: object
    ) -> None:
        call = calls.setdefault(module, ModuleCall(module, name))
        call.outputs.append(output)
        given = inputs[0] if len(inputs) == 1 and not named else None
        if isinstance(given, torch.Tensor) and isinstance(output, torch.Tensor):
            call.inputs.append(given)
        else:
            call.is_simple = False

    handles = [
        module.register_forward_hook(partial(note, name), with_kwargs=True)
        for name, module in model.named_modules()
        if kinds(module)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return the number of tokens in the model's embedding table."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]


def difference(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest deviation relative to the reference's largest magnitude; infinity if not all are finite."""
    if not (logits.isfinite().all() and reference.isfinite().all()):
        return float("inf")
    return float((logits - reference).abs().max() / reference.abs().max().clamp(min=1e-30))


def spread(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the L2 norm of the deviations relative to the reference's; infinity if not all are finite."""
    if not (logits.isfinite().all() and reference.isfinite().all()):
        return float("inf")
    return float((logits - reference).norm() / reference.norm().clamp(min=1e-30))
