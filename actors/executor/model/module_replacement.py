"""The modules of a model: where its layers are, how to replace a module and undo that, a small copy for trials."""

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


TOKENS = 8
"""Enough for positions and masks to matter, few enough to cost nothing."""

STRIDE = 7919
"""Apart in the vocabulary: a prime, so that the tokens differ whatever its size is."""


class DenseAttention:
    """Causal attention over one row of tokens that are all there. Windows and caps are left out: who compares two
    forms of a model needs only the same for both."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, *_: object, **__: object
    ) -> torch.Tensor:
        """Shapes as `PagedAttention.attend`'s."""
        queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        out = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
        return out[0].transpose(0, 1)


@dataclass(eq=False)
class ModuleCall:
    """How a module was called during a trace. It keeps the tensors, so that none takes the place of another."""

    module: torch.nn.Module
    name: str
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[object] = field(default_factory=list)
    is_simple: bool = True
    """Each call gave it one tensor, and it gave one back."""


class Probe:
    """The same few tokens each time. For inference only, on the model's own device."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        positions = context_length(model.config) or TOKENS
        vocabulary = vocabulary_of(model)
        where = torch.arange(min(TOKENS, positions), device=model.device)
        self._positions, self._token_ids = where[None], ((where + 1) * STRIDE % vocabulary)[None]

    @torch.inference_mode()
    def logits(self) -> torch.Tensor:
        """[tokens, vocabulary], in float32."""
        with attending(DenseAttention()):
            output = self._model(input_ids=self._token_ids, position_ids=self._positions, use_cache=False)
        logits: torch.Tensor = output.logits[0]
        return logits.float()

    def trace(self, kinds: Callable[[torch.nn.Module], bool]) -> list[ModuleCall]:
        """How modules of these kinds are used, in the order of their first call."""
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
    """How many tokens the model has embeddings of."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]


def difference(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest deviation, as a share of the reference's largest magnitude; infinite where a number is none."""
    if not (logits.isfinite().all() and reference.isfinite().all()):
        return float("inf")
    return float((logits - reference).abs().max() / reference.abs().max().clamp(min=1e-30))


def spread(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """The size of the deviations in all, as a share of the reference's; infinite where a number is none."""
    if not (logits.isfinite().all() and reference.isfinite().all()):
        return float("inf")
    return float((logits - reference).norm() / reference.norm().clamp(min=1e-30))
