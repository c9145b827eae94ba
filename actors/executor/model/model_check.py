"""Checks the first step of a model, and refuses a model that runs and would be computed wrongly.

Knows models by what they do and by what their configurations say, never by their names.
"""

from __future__ import annotations

from inspect import signature

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from cuelight.actors.executor.model.attention import Attention, UnsupportedAttention
from cuelight.actors.executor.model.backends import AttentionSpec, cutting, window_of
from cuelight.actors.executor.options import CannotLoad

ROWS_APART = 0.05
"""How far the logits of two rows with the same token may be apart, as a share of the largest: rounding differs."""


class ModelCheck:
    """One step's attention, which passes everything on.

    The backend and the pool suit `spec`, which is what the model's configuration says. A layer that asks for anything
    else raises UnsupportedAttention.
    """

    def __init__(self, attention: Attention, spec: AttentionSpec, text: PreTrainedConfig) -> None:
        self._attention = attention
        self._spec = spec
        self._text = text
        self._layers: list[int] = []

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """As `PagedAttention.attend`."""
        self._layers.append(layer)
        self._check_heads(q, k, v)
        self._check_window(layer, window)
        if softcap != self._spec.softcap:
            what = f"caps scores at {softcap}, and its configuration at {self._spec.softcap}"
            raise UnsupportedAttention(f"this model {what}, which is not supported")
        return self._attention.attend(layer, q, k, v, scaling, window, softcap)

    def check(self, model: PreTrainedModel, logits: torch.Tensor) -> None:
        """After the step, whose `logits` are those of two rows with the same token. Raises CannotLoad."""
        name, layers = type(model).__name__, range(self._text.num_hidden_layers)
        if sorted(self._layers) != [*layers]:
            served = sum(self._layers.count(layer) == 1 for layer in layers)
            raise CannotLoad(f"only {served} of {name}'s {len(layers)} layers can be served: each has to attend once")
        if "position_ids" not in signature(model.forward).parameters:  # it would take each token for the first
            raise CannotLoad(f"{name} cannot be told its tokens' positions")
        if len(logits) != 2:
            raise CannotLoad(f"{name} cannot be told which tokens' logits are wanted")
        one, other = logits.float().nan_to_num()
        if not torch.allclose(one, other, rtol=0.0, atol=ROWS_APART * float(one.abs().max())):
            raise CannotLoad(f"{name} mixes its tokens elsewhere than in its attention, which is not supported yet")

    def _check_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        spec = self._spec
        shapes = [(tensor.shape[1], tensor.shape[2]) for tensor in (q, k, v)]
        if shapes != [(heads, spec.head_dim) for heads in (spec.heads, spec.kv_heads, spec.kv_heads)]:
            queries, keys, values = (f"{heads} of {width} numbers" for heads, width in shapes)
            raise UnsupportedAttention(
                f"this model's attention has {queries} as heads of queries, {keys} of keys and {values} of values, "
                f"and not {spec.heads}, {spec.kv_heads} and {spec.kv_heads} of {spec.head_dim}, as its "
                "configuration says: that is not supported yet"
            )

    def _check_window(self, layer: int, window: int | None) -> None:
        """Masks of the model's own never come here: without the window it would see everything."""
        text, asked = self._text, cutting(window, self._text)
        configured = window_of(text, layer)
        # Some configurations hold a window that their models know nothing of.
        is_known = hasattr(type(text), text.attribute_map.get("sliding_window", "sliding_window"))
        if asked != configured and (asked is not None or is_known):
            raise UnsupportedAttention(
                f"layer {layer} of this model asks for a window of {asked} tokens, and its configuration gives it one "
                f"of {configured}, which is not supported"
            )
