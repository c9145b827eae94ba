"""The native decoder against the whole model in float64, in every form that this machine can run."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from tiny_models import NATIVE, edit_config, save

from cuelight.actors.executor.native.attention import BF16, FLOAT32, INT8, layout, wants_vnni_pairs
from cuelight.actors.executor.native.decoder import PARTS, NativeDecoder, NativeWeights
from cuelight.actors.executor.native.kv_pool import NativeKVPool
from cuelight.actors.executor.native.linear import LinearKernels, WeightFormat
from cuelight.actors.executor.native.model_folder import (
    Architecture,
    Tensor,
    as_float32,
    read_architecture,
    read_weights,
)

Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's model, saved once."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("model")
            save(NATIVE[family](), made[family])
        return made[family]

    return folder


def norm(x: Array, weight: Array, epsilon: float) -> Array:
    normed: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight
    return normed


@dataclass
class Whole:
    """The model in float64: one text at once, without a KV cache."""

    architecture: Architecture
    weights: dict[str, Array]

    @classmethod
    def of(cls, folder: Path) -> Whole:
        tensors = {name: as_float32(each).astype(np.float64) for name, each in read_weights(folder).items()}
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
        return cls(read_architecture(folder), tensors)

    def rounded(self, kernels: LinearKernels, kind: WeightFormat) -> Whole:
        """The same model with the weights as they are after packing."""
        weights = dict(self.weights)
        for name, weight in weights.items():
            if weight.ndim == 2 and name != "model.embed_tokens.weight":
                is_head = name == "lm_head.weight"
                packed = kernels.pack(
                    weight.astype(np.float32), WeightFormat.INT8 if is_head and kind is WeightFormat.INT4 else kind
                )
                weights[name] = kernels.linear(packed, np.eye(weight.shape[1], dtype=np.float32)).T.astype(np.float64)
        return Whole(self.architecture, weights)

    def logits(self, tokens: Sequence[int]) -> Array:
        """[tokens, vocabulary]"""
        a, w = self.architecture, self.weights
        x = w["model.embed_tokens.weight"][list(tokens)]
        for number in range(a.layers):
            name = f"model.layers.{number}."
            x = x + self._attention(name, norm(x, w[f"{name}input_layernorm.weight"], a.epsilon))
            normed = norm(x, w[f"{name}post_attention_layernorm.weight"], a.epsilon)
            gate = self._linear(f"{name}mlp.gate_proj", normed)
            up = self._linear(f"{name}mlp.up_proj", normed)
            x = x + self._linear(f"{name}mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
        return self._linear("lm_head", norm(x, w["model.norm.weight"], a.epsilon))

    def _linear(self, name: str, x: Array) -> Array:
        y: Array = x @ self.weights[f"{name}.weight"].T
        return y + self.weights.get(f"{name}.bias", 0.0)

    def _heads(self, name: str, x: Array, which: str) -> Array:
        """[heads, tokens, head_dim], with rotary embedding."""
        a = self.architecture
        heads = self._linear(f"{name}self_attn.{which}_proj", x).reshape(len(x), -1, a.head_dim)
        weight = self.weights.get(f"{name}self_attn.{which}_norm.weight")
        heads = (heads if weight is None else norm(heads, weight, a.epsilon)).swapaxes(0, 1)
        if which == "v":
            return heads
        angles = np.arange(len(x))[:, None] * a.inverse_frequencies.astype(np.float64)
        first, second = np.split(heads, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _attention(self, name: str, x: Array) -> Array:
        a = self.architecture
        q, k, v = (self._heads(name, x, which) for which in "qkv")
        k, v = (np.repeat(each, a.heads // a.kv_heads, axis=0) for each in (k, v))
        scores = q @ k.swapaxes(1, 2) / np.sqrt(a.head_dim) + np.triu(np.full((len(x), len(x)), -np.inf), 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = weights / weights.sum(-1, keepdims=True) @ v
        return self._linear(f"{name}self_attn.o_proj", out.swapaxes(0, 1).reshape(len(x), -1))


class Steps:
    """Texts through a decoder in mixed steps, over scattered blocks of stale numbers; logits after each token."""

    def __init__(
        self, native: ctypes.CDLL, folder: Path, kind: WeightFormat, block_size: int = 4, stored: int = FLOAT32
    ) -> None:
        self.architecture = read_architecture(folder)
        tensors: dict[str, Tensor] = dict(read_weights(folder))
        weights = NativeWeights.pack(native, self.architecture, tensors, kind)
        vnni_pairs = wants_vnni_pairs(native, stored, block_size, self.architecture.head_dim)
        self.pools = NativeKVPool(self.architecture, 60, block_size, stored, vnni_pairs=vnni_pairs)
        self.pools._device.numbers[:] = {FLOAT32: 1000, BF16: 0x7FC0, INT8: 127}[stored]
        self.pools._device.scales[:] = np.nan
        self.decoder = NativeDecoder(native, weights, self.pools.structures(), 64)
        self.chance = random.Random(1)
        self.free = self.chance.sample(range(1, 60), 59)

    def run(self, texts: Sequence[Sequence[int]]) -> list[Array]:
        """Logits for each text: [tokens, vocabulary]."""
        size = self.pools.block_size
        done = [0] * len(texts)
        tables = [[self.free.pop() for _ in range(-(-len(text) // size))] for text in texts]
        logits = [np.zeros((len(text), self.architecture.vocabulary), np.float32) for text in texts]
        while unfinished := [i for i, text in enumerate(texts) if done[i] < len(text)]:
            chosen = self.chance.sample(unfinished, self.chance.randint(1, len(unfinished)))
            counts = [self.chance.choice([1, self.chance.randint(1, len(texts[i]) - done[i])]) for i in chosen]
            chunks = [(i, done[i], done[i] + count) for i, count in zip(chosen, counts, strict=True)]
            got = self._step(texts, tables, chunks)
            for i, begin, end in chunks:
                logits[i][begin:end], got = got[: end - begin], got[end - begin :]
                done[i] = end
        return logits

    def _step(
        self, texts: Sequence[Sequence[int]], tables: list[list[int]], chunks: list[tuple[int, int, int]]
    ) -> Array:
        size = self.pools.block_size
        positions = np.concatenate([np.arange(begin, end) for _, begin, end in chunks])
        blocks = np.concatenate([np.array(tables[i])[np.arange(begin, end) // size] for i, begin, end in chunks])
        stops = np.cumsum([end - begin for _, begin, end in chunks]).tolist()
        sequences = [(stop - end + begin, stop, end) for stop, (_, begin, end) in zip(stops, chunks, strict=True)]
        used = [np.array(tables[i][: -(-end // size)]) for i, _, end in chunks]
        token_ids = np.concatenate([np.array(texts[i][begin:end]) for i, begin, end in chunks])
        step = layout(positions, blocks, positions % size, sequences, used)
        logits, best = self.decoder.decode(token_ids, step, np.arange(len(token_ids)))
        np.testing.assert_array_equal(best, logits.argmax(-1))
        return logits.copy()


def texts_of(vocabulary: int) -> list[list[int]]:
    chance = random.Random(7)
    return [[chance.randrange(vocabulary) for _ in range(length)] for length in (1, 2, 4, 5, 9, 13, 30)]


def apart(got: Array, expected: Array) -> float:
    """Root mean square of the difference, relative to that of the expected logits."""
    return float(np.sqrt(((got - expected) ** 2).mean() / (expected**2).mean()))


@pytest.mark.parametrize("family", NATIVE)
def test_logits_match_the_whole_model(family: str, form: ctypes.CDLL, folder_of: Callable[[str], Path]) -> None:
    whole = Whole.of(folder_of(family))
    texts = texts_of(whole.architecture.vocabulary)
    for text, got in zip(texts, Steps(form, folder_of(family), WeightFormat.F32).run(texts), strict=True):
        np.testing.assert_allclose(got, whole.logits(text), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", NATIVE)
def test_whole_model_matches_transformers(family: str, folder_of: Callable[[str], Path]) -> None:
    whole = Whole.of(folder_of(family))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder_of(family), dtype=torch.float32)
    for text in texts_of(whole.architecture.vocabulary):
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([text]), use_cache=False).logits[0].numpy()
        np.testing.assert_allclose(whole.logits(text), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "llama, tied", "llama, odd", "qwen2", "qwen3, biases", "qwen3, wide"])
@pytest.mark.parametrize(
    ("kind", "stored", "of_weights", "of_rows"),
    [
        (WeightFormat.F32, BF16, 1e-12, 0.015),
        (WeightFormat.F32, INT8, 1e-12, 0.02),
        (WeightFormat.BF16, BF16, 0.02, 0.015),
        (WeightFormat.INT8, FLOAT32, 0.06, 0.06),
        (WeightFormat.INT8, BF16, 0.06, 0.06),
        (WeightFormat.INT8, INT8, 0.06, 0.06),
        (WeightFormat.INT4, BF16, 0.6, 0.06),
    ],
)
def test_narrower_types_give_nearly_the_same_logits(
    family: str,
    kind: WeightFormat,
    stored: int,
    of_weights: float,
    of_rows: float,
    form: ctypes.CDLL,
    folder_of: Callable[[str], Path],
) -> None:
    """Random weights of width 64 lose far more than real ones; the packed weights are known exactly."""
    check_narrower(form, folder_of(family), kind, stored, of_weights, of_rows)


@pytest.mark.parametrize("family", ["llama, odd", "qwen3, wide"])
def test_bf16_rows_give_nearly_the_same_logits(
    family: str, avx512_bf16: ctypes.CDLL, folder_of: Callable[[str], Path]
) -> None:
    check_narrower(avx512_bf16, folder_of(family), WeightFormat.BF16, BF16, 0.02, 0.02)


@pytest.mark.parametrize(
    ("kind", "stored", "of_weights", "of_rows"),
    [(WeightFormat.BF16, BF16, 0.02, 0.02), (WeightFormat.INT8, INT8, 0.06, 0.06)],
)
def test_paired_pool_gives_nearly_the_same_logits(
    native: ctypes.CDLL,
    folder_of: Callable[[str], Path],
    kind: WeightFormat,
    stored: int,
    of_weights: float,
    of_rows: float,
) -> None:
    if not wants_vnni_pairs(native, stored, 16, 32):
        pytest.skip("this machine has no VNNI pairs of these")
    check_narrower(native, folder_of("qwen3, wide"), kind, stored, of_weights, of_rows, 16)


def check_narrower(
    native: ctypes.CDLL,
    folder: Path,
    kind: WeightFormat,
    stored: int,
    of_weights: float,
    of_rows: float,
    block_size: int = 3,
) -> None:
    whole = Whole.of(folder)
    rounded = whole.rounded(LinearKernels(native), kind)
    texts = texts_of(whole.architecture.vocabulary)
    steps = Steps(native, folder, kind, block_size=block_size, stored=stored)
    got, exact, near = (
        np.concatenate(list(each)) for each in (steps.run(texts), map(whole.logits, texts), map(rounded.logits, texts))
    )
    assert apart(near, exact) <= of_weights
    assert 1e-4 < apart(got, near) < of_rows


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_stored_in_half_precision_are_read(dtype: torch.dtype, native: ctypes.CDLL, tmp_path: Path) -> None:
    save(NATIVE["qwen3, biases"](), tmp_path).to(dtype).save_pretrained(tmp_path)
    stored = np.float16 if dtype is torch.float16 else np.uint16
    assert {each.dtype for each in read_weights(tmp_path).values()} == {np.dtype(stored)}
    whole = Whole.of(tmp_path)
    texts = texts_of(whole.architecture.vocabulary)
    for text, got in zip(texts, Steps(native, tmp_path, WeightFormat.F32).run(texts), strict=True):
        np.testing.assert_allclose(got, whole.logits(text), rtol=0, atol=1e-4)


def test_untied_head_is_used_where_the_configuration_says_tied(native: ctypes.CDLL, tmp_path: Path) -> None:
    """As transformers does, which does not tie differing weights."""
    save(NATIVE["llama"](), tmp_path)
    edit_config(tmp_path, tie_word_embeddings=True)
    text = texts_of(100)[-1]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([text]), use_cache=False).logits[0].numpy()
    (got,) = Steps(native, tmp_path, WeightFormat.F32).run([text])
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


def test_invalid_arguments_are_refused(native: ctypes.CDLL, folder_of: Callable[[str], Path]) -> None:
    steps = Steps(native, folder_of("llama"), WeightFormat.F32)

    def decode(
        token: int = 5, position: int = 0, block: int = 1, offset: int = 0, entry: int = 1, drawn: int = 0
    ) -> None:
        where = [np.array([each]) for each in (position, block, offset)]
        step = layout(*where, [(0, 1, position + 1)], [np.array([entry] * (position // 4 + 1))])
        steps.decoder.decode(np.array([token]), step, np.array([drawn]))

    decode()
    decode(position=255 - 20)
    for wrong in (
        {"token": 100},
        {"token": -1},
        {"position": 256},
        {"block": 60},
        {"block": -1},
        {"offset": 4},
        {"entry": 60},
        {"entry": -1},
        {"drawn": 1},
        {"drawn": -1},
    ):
        with pytest.raises(AssertionError, match="that exist"):
            decode(**wrong)
    with pytest.raises(AssertionError, match="as large as was said"):
        steps.decoder.decode(
            np.zeros(2, np.int64),
            layout(*np.zeros((3, 1), np.int64), [(0, 1, 1)], [np.array([1])]),
            np.zeros(1, np.int64),
        )


def test_tables_and_scratch_are_no_larger_than_the_pool(native: ctypes.CDLL, folder_of: Callable[[str], Path]) -> None:
    architecture = replace(read_architecture(folder_of("llama")), positions=1 << 30)
    weights = NativeWeights.pack(native, architecture, read_weights(folder_of("llama")), WeightFormat.INT8)
    assert NativeDecoder(native, weights, NativeKVPool(architecture, 9, 4, BF16).structures(), 1 << 62).positions == 36


def test_parts_of_a_step_are_timed_on_request(native: ctypes.CDLL, folder_of: Callable[[str], Path]) -> None:
    steps = Steps(native, folder_of("qwen3"), WeightFormat.INT4)
    assert steps.decoder.seconds is None
    architecture = steps.architecture
    weights = NativeWeights.pack(native, architecture, read_weights(folder_of("qwen3")), WeightFormat.INT4)
    steps.decoder = NativeDecoder(native, weights, steps.pools.structures(), 64, timed=True)
    steps.run(texts_of(100))
    assert steps.decoder.seconds is not None
    assert len(steps.decoder.seconds) == len(PARTS)
    assert (steps.decoder.seconds > 0).all()
