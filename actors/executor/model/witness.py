"""Watches a model's first step: whoever would be computed wrongly, though it runs, is refused.

Knows models by what they do and by what their configurations say, never by their names.
"""

from __future__ import annotations

from inspect import signature

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from cuelight.actors.executor.model.attention import Attention, UnsupportedAttention
from cuelight.actors.executor.model.backends import Needs, cutting, window_of
from cuelight.actors.executor.options import CannotLoad

ROWS_APART = 0.05
"""How far the logits of two rows with the same token may be apart, as a share of the largest: rounding differs."""


class Witness:
    """One step's attention, which passes everything on.

    The backend was chosen, and the pool was made, for what a model `needs` as its configuration says. A layer that asks
    for anything else raises UnsupportedAttention.
    """

    def __init__(self, attention: Attention, needs: Needs, text: PreTrainedConfig) -> None:
        self._attention = attention
        self._needs = needs
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
        if softcap != self._needs.softcap:
            told = f"caps scores at {softcap}, and its configuration at {self._needs.softcap}"
            raise UnsupportedAttention(f"this model {told}, which is not supported")
        return self._attention.attend(layer, q, k, v, scaling, window, softcap)

    def judge(self, model: PreTrainedModel, logits: torch.Tensor) -> None:
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
        needs = self._needs
        shapes = [(tensor.shape[1], tensor.shape[2]) for tensor in (q, k, v)]
        if shapes != [(heads, needs.head_dim) for heads in (needs.heads, needs.kv_heads, needs.kv_heads)]:
            queries, keys, values = (f"{heads} of {width} numbers" for heads, width in shapes)
            raise UnsupportedAttention(
                f"this model's attention has {queries} as heads of queries, {keys} of keys and {values} of values, "
                f"and not {needs.heads}, {needs.kv_heads} and {needs.kv_heads} of {needs.head_dim}, as its "
                "configuration says: that is not supported yet"
            )

    def _check_window(self, layer: int, window: int | None) -> None:
        """Masks of the model's own never come here: without the window it would see everything."""
        text, asked = self._text, cutting(window, self._text)
        told = window_of(text, layer)
        # Some configurations hold a window that their models know nothing of.
        is_known = hasattr(type(text), text.attribute_map.get("sliding_window", "sliding_window"))
        if asked != told and (asked is not None or is_known):
            raise UnsupportedAttention(
                f"layer {layer} of this model asks for a window of {asked} tokens, and its configuration gives it one "
                f"of {told}, which is not supported"
            )
