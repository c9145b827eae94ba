"""A Llama-like decoder through the native kernels: its packed weights, its pool, and a step in one call.

Knows tokens, slots and block tables as arrays; not requests or sampling.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cuelight.actors.executor.native.attention import BF16, FLOAT32, CueKv, CueSequences, CueSlots, StepLayout
from cuelight.actors.executor.native.linear import Arena, LinearKernels, WeightFormat, aligned
from cuelight.actors.executor.native.model_folder import Architecture, NotNative, Tensor, as_float32, stacked

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

PARTS = ("embed", "norm", "qkv", "rope", "attention", "output", "mlp", "head")
"""The parts of a step whose seconds are counted."""


class CueLayer(ctypes.Structure):
    """As `decoder.h` has it."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in (
            *("qkv", "output", "gate_up", "down"),
            *("qkv_bias", "output_bias", "attention_norm", "mlp_norm", "query_norm", "key_norm"),
        )
    )


class CueDecoder(ctypes.Structure):
    """As `decoder.h` has it."""

    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("pools", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("embedding", "embedding_scales", "final_norm", "head")),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines")),
        *((name, ctypes.c_int64) for name in ("vocabulary", "positions")),
        *(
            (name, ctypes.c_int32)
            for name in ("layer_count", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "rotary")
        ),
        *((name, ctypes.c_int32) for name in ("embedding_type", "quantized")),
        *((name, ctypes.c_float) for name in ("epsilon", "scale")),
    )


class CueStep(ctypes.Structure):
    """As `decoder.h` has it."""

    _fields_ = (
        ("token_ids", ctypes.c_void_p),
        ("slots", CueSlots),
        ("sequences", CueSequences),
        ("logit_rows", ctypes.c_void_p),
        ("logit_row_count", ctypes.c_int32),
    )


@dataclass(frozen=True)
class NativeWeights:
    """The model as the kernels want it. Keeps its memory."""

    architecture: Architecture
    kind: WeightFormat
    layers: ctypes.Array[CueLayer]
    embedding: Tensor
    final_norm: Floats
    head: int
    kept: list[object] = field(repr=False)

    @classmethod
    def pack(
        cls,
        library: ctypes.CDLL,
        architecture: Architecture,
        tensors: Mapping[str, Tensor],
        kind: WeightFormat,
        packed_one: Callable[[], object] = lambda: None,
    ) -> NativeWeights:
        """`packed_one` is called after each layer. Raises NotNative where a tensor is missing or of another shape."""
        packing = _WeightPacker(LinearKernels(library), architecture, tensors, kind)
        layers = (CueLayer * architecture.layers)()
        for number, layer in enumerate(packing.layers()):
            layers[number] = layer
            packed_one()
        shape = architecture.vocabulary, architecture.hidden
        table = packing.take("model.embed_tokens.weight", *shape)
        embedding = table.copy() if table.dtype == np.uint16 else as_float32(table)
        # A model with tied weights may have both all the same; if they differ, transformers does not tie them.
        is_tied = architecture.is_tied and "lm_head.weight" not in tensors
        # In four bits the head would cost more of the model's sense than it saves time.
        head_kind = WeightFormat.INT8 if kind is WeightFormat.INT4 else kind
        head = packing.packed(table if is_tied else packing.take("lm_head.weight", *shape), head_kind)
        norm = packing.vector("model.norm.weight", architecture.hidden)
        return cls(architecture, kind, layers, embedding, norm, head, packing.kept)


class _WeightPacker:
    def __init__(
        self, kernels: LinearKernels, architecture: Architecture, tensors: Mapping[str, Tensor], kind: WeightFormat
    ) -> None:
        self._kernels = kernels
        self._a, self._tensors, self._kind = architecture, tensors, kind
        self._arena = Arena()
        self.kept: list[object] = []

    def layers(self) -> Iterator[CueLayer]:
        a = self._a
        queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
        for number in range(a.layers):
            name = f"model.layers.{number}."
            attention, mlp = f"{name}self_attn.", f"{name}mlp."
            qkv = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
            gate_up = {"gate_proj": a.intermediate, "up_proj": a.intermediate}
            yield CueLayer(
                qkv=self._merged(attention, qkv, a.hidden),
                output=self._merged(attention, {"o_proj": a.hidden}, queries),
                gate_up=self._merged(mlp, gate_up, a.hidden, gated=True),
                down=self._merged(mlp, {"down_proj": a.hidden}, a.intermediate),
                qkv_bias=self._biases(attention, qkv) if a.has_qkv_bias else None,
                output_bias=self._biases(attention, {"o_proj": a.hidden}) if a.has_output_bias else None,
                attention_norm=self._kept(self.vector(f"{name}input_layernorm.weight", a.hidden)),
                mlp_norm=self._kept(self.vector(f"{name}post_attention_layernorm.weight", a.hidden)),
                query_norm=self._head_norm(f"{attention}q_norm.weight"),
                key_norm=self._head_norm(f"{attention}k_norm.weight"),
            )

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in self._tensors:
            raise NotNative(f"it lacks the weights {name}")
        tensor = self._tensors[name]
        if tensor.shape != shape:
            raise NotNative(f"{name} has shape {list(tensor.shape)} and should have {list(shape)}")
        return tensor

    def vector(self, name: str, size: int) -> Floats:
        return as_float32(self.take(name, size))

    def packed(self, weights: Tensor, kind: WeightFormat, *, gated: bool = False) -> int:
        """Where they lie."""
        outputs, inputs = weights.shape
        try:
            memory = self._arena.take(self._kernels.packed_bytes(kind, outputs, inputs, gated))
        except ValueError as error:
            raise NotNative(str(error)) from error
        self.kept.append(memory)
        return self._kernels.pack(weights, kind, gated, memory).buffer.ctypes.data

    def _merged(self, prefix: str, outputs: Mapping[str, int], inputs: int, *, gated: bool = False) -> int:
        parts = [self.take(f"{prefix}{name}.weight", count, inputs) for name, count in outputs.items()]
        return self.packed(stacked(parts), self._kind, gated=gated)

    def _biases(self, prefix: str, outputs: Mapping[str, int]) -> int:
        parts = [self.vector(f"{prefix}{name}.bias", count) for name, count in outputs.items()]
        return self._kept(np.concatenate(parts))

    def _head_norm(self, name: str) -> int | None:
        return self._kept(self.vector(name, self._a.head_dim)) if self._a.has_head_norms else None

    def _kept(self, vector: Floats) -> int:
        self.kept.append(vector)
        return vector.ctypes.data


class NativeDecoder:
    """Weights over a pool, for steps of up to `tokens_max` tokens. For one caller at a time."""

    def __init__(
        self,
        library: ctypes.CDLL,
        weights: NativeWeights,
        pools: Sequence[CueKv],
        tokens_max: int,
        *,
        timed: bool = False,
    ) -> None:
        a = weights.architecture
        self._decode, scratch_bytes = library.cue_decode, library.cue_decoder_scratch_bytes
        self._decode.argtypes = (ctypes.c_void_p,) * 6
        scratch_bytes.argtypes, scratch_bytes.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_int64
        self._weights = weights
        self._pools = (CueKv * len(pools))(*pools)
        # No text is longer than the pool, and no step larger, whatever the configuration allows.
        slots = pools[0].blocks * pools[0].block_size
        self._tokens_max = min(tokens_max, slots)
        self.positions = min(a.positions, slots)
        """Positions that exist."""
        self._cosines, self._sines = a.rotary_tables(self.positions)
        self._decoder = CueDecoder(
            layers=ctypes.addressof(weights.layers),
            pools=ctypes.addressof(self._pools),
            embedding=weights.embedding.ctypes.data,
            final_norm=weights.final_norm.ctypes.data,
            head=weights.head,
            cosines=self._cosines.ctypes.data,
            sines=self._sines.ctypes.data,
            vocabulary=a.vocabulary,
            positions=self.positions,
            layer_count=a.layers,
            hidden=a.hidden,
            heads=a.heads,
            kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            intermediate=a.intermediate,
            rotary=a.head_dim,
            embedding_type=BF16 if weights.embedding.dtype == np.uint16 else FLOAT32,
            quantized=weights.kind in (WeightFormat.INT8, WeightFormat.INT4),
            epsilon=a.epsilon,
            scale=a.head_dim**-0.5,
        )
        self._scratch = aligned(scratch_bytes(ctypes.addressof(self._decoder), self._tokens_max))
        self._logits = np.zeros((0, a.vocabulary), np.float32)
        self.seconds = np.zeros(len(PARTS)) if timed else None
        """Spent in each of `PARTS` so far, where that is counted."""

    def decode(self, token_ids: Ints, layout: StepLayout, sampled: Ints) -> tuple[Floats, Ints]:
        """Logits [samples, vocabulary] after the tokens at `sampled` (ascending), valid until the next call, and the
        most probable token of each, or -1 where they are not finite."""
        assert len(token_ids) == layout.token_count <= self._tokens_max, "a step is as large as was said"
        if len(sampled) > len(self._logits):
            self._logits = np.zeros((2 * len(sampled), self._logits.shape[1]), np.float32)
        best = np.zeros(len(sampled), np.int64)
        step = CueStep(token_ids.ctypes.data, layout.slots, layout.chunks, sampled.ctypes.data, len(sampled))
        status: int = self._decode(
            ctypes.addressof(self._decoder),
            ctypes.addressof(step),
            self._scratch.ctypes.data,
            self._logits.ctypes.data,
            best.ctypes.data,
            None if self.seconds is None else self.seconds.ctypes.data,
        )
        assert status == 0, "a step names tokens and slots that exist"
        return self._logits[: len(sampled)], best
