"""A check of a model's first step, which refuses models that run but would be computed wrongly.

The check compares the model's calls of attention with its configuration; it does not depend on model names.
"""

from __future__ import annotations

from inspect import signature

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from cuelight.actors.executor.model.attention import Attention, UnsupportedAttention
from cuelight.actors.executor.model.backends import AttentionSpec, cutting, window_of
from cuelight.actors.executor.options import CannotLoad

ROWS_APART = 0.05
"""Largest difference of the logits of two rows with the same token, relative to the largest; rounding may differ."""


class ModelCheck:
    """The attention of one step, which checks each call and delegates to `attention`.

    `spec` is the attention according to the model's configuration, which the backend and the pool support. A layer that
    calls attention with anything else raises UnsupportedAttention.
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
        """As `PagedAttention.attend`. Raises UnsupportedAttention."""
        self._layers.append(layer)
        self._check_heads(q, k, v)
        self._check_window(layer, window)
        if softcap != self._spec.softcap:
            what = f"caps scores at {softcap}, but its configuration says {self._spec.softcap}"
            raise UnsupportedAttention(f"this model {what}, which is not supported")
        return self._attention.attend(layer, q, k, v, scaling, window, softcap)

    def check(self, model: PreTrainedModel, logits: torch.Tensor) -> None:
        """Check the step after it has run. `logits` are those of two rows with the same token. Raises CannotLoad."""
        name, layers = type(model).__name__, range(self._text.num_hidden_layers)
        if sorted(self._layers) != [*layers]:
            served = sum(self._layers.count(layer) == 1 for layer in layers)
            raise CannotLoad(f"only {served} of {name}'s {len(layers)} layers can be served: each has to attend once")
        if "position_ids" not in signature(model.forward).parameters:  # every token would be at position 0
            raise CannotLoad(f"{name} cannot be served: its forward() takes no position_ids")
        if len(logits) != 2:
            raise CannotLoad(f"{name} cannot be served: its forward() ignores logits_to_keep")
        one, other = logits.float().nan_to_num()
        if not torch.allclose(one, other, rtol=0.0, atol=ROWS_APART * float(one.abs().max())):
            raise CannotLoad(f"{name} mixes its tokens outside its attention, which is not supported yet")

    def _check_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        spec = self._spec
        shapes = [(tensor.shape[1], tensor.shape[2]) for tensor in (q, k, v)]
        if shapes != [(heads, spec.head_dim) for heads in (spec.heads, spec.kv_heads, spec.kv_heads)]:
            queries, keys, values = (f"{heads} of {width} numbers" for heads, width in shapes)
            raise UnsupportedAttention(
                f"this model's attention has {queries} as heads of queries, {keys} of keys and {values} of values, "
                f"but its configuration says {spec.heads}, {spec.kv_heads} and {spec.kv_heads} of {spec.head_dim}, "
                "which is not supported yet"
            )

    def _check_window(self, layer: int, window: int | None) -> None:
        """Check the window, since the model's own mask is not used: without a window, a token attends to all before."""
        text, asked = self._text, cutting(window, self._text)
        configured = window_of(text, layer)
        # Some configurations have a window that their models ignore.
        is_known = hasattr(type(text), text.attribute_map.get("sliding_window", "sliding_window"))
        if asked != configured and (asked is not None or is_known):
            raise UnsupportedAttention(
                f"layer {layer} of this model attends with a window of {asked} tokens, but its configuration says "
                f"{configured}, which is not supported"
            )
