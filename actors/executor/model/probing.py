"""A few tokens through a model without a pool: what its modules are given, and what comes out in the end.

Serves those that change a model: they find their places by what happens in it, and are judged by what it gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from cuelight.actors.executor.model.attention import attending
from cuelight.actors.executor.model.reading import context_length

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
