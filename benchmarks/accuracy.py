"""Measure the accuracy of quantized models: perplexity, and the distance from the same model in more bits.

    python -m benchmarks.accuracy [--chunk 256] [--text FILE] [--json FILE]

Every token of a text of our own is predicted from those before it in its chunk, by the native decoder in all its forms
and by transformers. The divergence is KL(reference || form), in nats a token; the reference is the native decoder with
float32 or bfloat16 weights. Keys and values are kept in bfloat16, or float32 with float32 weights, unless it says int8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.common import options, report
from cuelight import model_path
from cuelight.actors.executor.native.attention import BF16, FLOAT32, INT8, layout, wants_vnni_pairs
from cuelight.actors.executor.native.build import load_native
from cuelight.actors.executor.native.decoder import NativeDecoder, NativeWeights
from cuelight.actors.executor.native.kv_pool import NativeKVPool
from cuelight.actors.executor.native.linear import WeightFormat
from cuelight.actors.executor.native.model_folder import Architecture, read_architecture, read_weights
from cuelight.models.cache import cache_directory

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]
Form: TypeAlias = Callable[[Ints], Floats]
"""Log probabilities [tokens, vocabulary] of what follows each token of a chunk, which stands alone."""

NATIVE = {
    "float32": (WeightFormat.F32, FLOAT32),
    "bfloat16": (WeightFormat.BF16, BF16),
    "bfloat16, int8 cache": (WeightFormat.BF16, INT8),
    "int8": (WeightFormat.INT8, BF16),
    "int8, int8 cache": (WeightFormat.INT8, INT8),
    "int4": (WeightFormat.INT4, BF16),
    "int4, int8 cache": (WeightFormat.INT4, INT8),
}
"""Weights, and how keys and values are kept."""
BLOCK_SIZE = 16


class Native:
    """The decoder that the engine uses, over a pool of one chunk."""

    def __init__(self, folder: Path, architecture: Architecture, kind: WeightFormat, cache: int, chunk: int) -> None:
        kernels = load_native(cache_directory() / "native")
        weights = NativeWeights.pack(kernels, architecture, read_weights(folder), kind)
        block_count = 1 + -(-chunk // BLOCK_SIZE)
        vnni_pairs = wants_vnni_pairs(kernels, cache, BLOCK_SIZE, architecture.head_dim)
        self._pool = NativeKVPool(architecture, block_count, BLOCK_SIZE, cache, vnni_pairs=vnni_pairs)
        self._decoder = NativeDecoder(kernels, weights, self._pool.structures(), chunk)

    def __call__(self, token_ids: Ints) -> Floats:
        count = len(token_ids)
        positions, table = np.arange(count), np.arange(1, 1 + -(-count // BLOCK_SIZE))
        blocks, offsets = table[positions // BLOCK_SIZE], positions % BLOCK_SIZE
        step = layout(positions, blocks, offsets, [(0, count, count)], [table])
        logits, _ = self._decoder.decode(token_ids, step, positions)
        return log_probabilities(logits)


def general(folder: Path, dtype: str) -> Form:
    """transformers' own forward."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).train(False)

    def predict(token_ids: Ints) -> Floats:
        with torch.inference_mode():
            logits = model(torch.from_numpy(token_ids)[None]).logits[0].float()
        return log_probabilities(np.asarray(logits.numpy(), np.float32))

    return predict


def log_probabilities(logits: Floats) -> Floats:
    shifted: Floats = logits - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return shifted


def chunks_of(token_ids: Sequence[int], size: int) -> Iterator[Ints]:
    """A last one that predicts nothing is left out."""
    for start in range(0, len(token_ids) - 1, size):
        yield np.array(token_ids[start : start + size], np.int64)


class Score:
    """One form of the model over all chunks."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._agreed: dict[str, list[bool]] = {}
        self._divergence: dict[str, list[float]] = {}

    def add(self, token_ids: Ints, predicted: Floats, references: dict[str, Floats]) -> None:
        self._losses += (-predicted[np.arange(len(token_ids) - 1), token_ids[1:]]).tolist()
        for name, reference in references.items():
            agreed = reference.argmax(axis=-1) == predicted.argmax(axis=-1)
            self._agreed.setdefault(name, []).extend(agreed.tolist())
            divergence = (np.exp(reference) * (reference - predicted)).sum(axis=-1, dtype=np.float64)
            self._divergence.setdefault(name, []).extend(divergence.tolist())

    def row(self, form: str) -> dict[str, object]:
        row: dict[str, object] = {"form": form, "perplexity": f"{np.exp(np.mean(self._losses)):.3f}"}
        for name, agreed in self._agreed.items():
            row[f"top-1 as {name}"] = f"{100 * np.mean(agreed):.1f} %"
            row[f"KL from {name}"] = f"{max(0.0, float(np.mean(self._divergence[name]))):.2g}"
        return row


def main() -> None:
    text_file = str(Path(__file__).with_name("text.txt"))
    arguments = options(__doc__, chunk=256, text=text_file, model="smollm2-135m-instruct")
    from tokenizers import Tokenizer

    folder = model_path(arguments.model)
    architecture = read_architecture(folder)
    forms: dict[str, Form] = {
        f"native {name}": Native(folder, architecture, kind, cache, arguments.chunk)
        for name, (kind, cache) in NATIVE.items()
    }
    forms |= {f"transformers {dtype}": general(folder, dtype) for dtype in ("float32", "bfloat16")}
    text = Path(arguments.text).read_text(encoding="utf-8")
    token_ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    scores = {name: Score() for name in forms}
    for chunk in chunks_of(token_ids, arguments.chunk):
        predicted = {name: form(chunk) for name, form in forms.items()}
        references = {name: predicted[f"native {name}"] for name in ("float32", "bfloat16")}
        for name, score in scores.items():
            score.add(chunk, predicted[name], references)
    rows = [score.row(name) for name, score in scores.items()]
    report(rows, arguments.json, words=len(text.split()), tokens=len(token_ids), chunk=arguments.chunk)


if __name__ == "__main__":
    main()
