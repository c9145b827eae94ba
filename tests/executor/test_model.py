"""The device with real tensors: paged attention against dense, small random models against `transformers`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tiny_models import (
    GROUPED,
    SHAPE,
    VOCABULARY,
    YARN,
    CopyingDriver,
    Driver,
    edit_config,
    greedy_alone,
    options,
    random_prompts,
    remove_tensor,
    save,
)
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from cuelight.actors.executor.batch import Batch
from cuelight.actors.executor.batch import BatchChunk as BatchSequence
from cuelight.actors.executor.device import DeviceLost
from cuelight.actors.executor.model import loading
from cuelight.actors.executor.model.attention import PagedAttention
from cuelight.actors.executor.model.backends import AttentionSpec
from cuelight.actors.executor.model.kv_pool import KVPool
from cuelight.actors.executor.model.loading import load
from cuelight.actors.executor.options import CannotLoad
from cuelight.actors.executor.runner import ModelBatch, ModelRunner
from cuelight.messages.request import BlockCopies, CopyKind, HostTier

CPU = torch.device("cpu")
HEAD_DIM = 8


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    """Dense attention: the last queries of one row over all its keys, one head at a time."""
    count, heads, _ = q.shape
    groups, context = heads // k.shape[1], len(k)
    out = torch.empty_like(q)
    for head in range(heads):
        for index in range(count):
            seen = context - count + index + 1
            scores = k[:seen, head // groups] @ q[index, head] * scaling
            out[index, head] = scores.softmax(-1) @ v[:seen, head // groups]
    return out


class Paged:
    """Rows with random keys and values, in blocks scattered over a pool of stale numbers."""

    def __init__(self, seed: int, *, block_size: int, kv_heads: int, groups: int) -> None:
        self.chance = random.Random(seed)
        self.torch_chance = torch.Generator().manual_seed(seed)
        self.groups, self.kv_heads = groups, kv_heads
        self.pool = KVPool(
            layers=2,
            block_count=800,
            block_size=block_size,
            kv_heads=kv_heads,
            head_dim=HEAD_DIM,
            dtype=torch.float32,
            device=CPU,
        )
        # The contents of used blocks, padded slots and the null block must not matter.
        for tensor in (*self.pool.keys, *self.pool.values):
            tensor.copy_(self.random(*tensor.shape) * 100)
        self.free = list(range(1, 800))
        self.chance.shuffle(self.free)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.torch_chance)

    def check(self, rows: Sequence[tuple[int, int]]) -> None:
        """Check rows of (tokens in all, tokens computed now)."""
        size = self.pool.block_size
        chunks, blocks, offsets, start = [], [], [], 0
        for context, count in rows:
            table = np.array([self.free.pop() for _ in range(-(-context // size))])
            positions = np.arange(context - count, context)
            chunks.append(BatchSequence(start, start + count, context, table))
            blocks.append(table[positions // size])
            offsets.append(positions % size)
            start += count
        zeros = np.zeros(start, np.int64)
        batch = Batch(0, 0, zeros, zeros, np.concatenate(blocks), np.concatenate(offsets), chunks=chunks)
        attention = PagedAttention(self.pool, batch, self.groups, torch.float32, CPU)
        q = self.random(start, self.kv_heads * self.groups, HEAD_DIM)
        for layer in range(2):
            keys = [self.random(context, self.kv_heads, HEAD_DIM) for context, _ in rows]
            values = [self.random(context, self.kv_heads, HEAD_DIM) for context, _ in rows]
            for chunk, k, v in zip(chunks, keys, values, strict=True):
                before = np.arange(len(k) - chunk.stop + chunk.start)
                where = torch.from_numpy(chunk.block_ids[before // size]), torch.from_numpy(before % size)
                self.pool.write(layer, *where, k[: len(before)], v[: len(before)])
            new_k, new_v = (
                torch.cat([t[len(t) - count :] for t, (_, count) in zip(all_, rows, strict=True)])
                for all_ in (keys, values)
            )
            out = attention.attend(layer, q, new_k, new_v, 0.3)
            for chunk, k, v in zip(chunks, keys, values, strict=True):
                mine = slice(chunk.start, chunk.stop)
                torch.testing.assert_close(out[mine], dense(q[mine], k, v, 0.3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("kv_heads", "groups"), [(2, 1), (3, 3), (1, 4)])
def test_paged_attention_matches_dense_attention(block_size: int, kv_heads: int, groups: int) -> None:
    paged = Paged(block_size * 10 + groups, block_size=block_size, kv_heads=kv_heads, groups=groups)
    paged.check([(1, 1)])
    paged.check([(5, 5), (1, 1), (16, 16)])
    # Decodes of mixed lengths are padded with the null block.
    paged.check([(1, 1), (2, 1), (15, 1), (16, 1), (17, 1), (40, 1), (41, 1), (60, 1)])
    # Decodes first, then chunks with context, one whole prompt, and a chunk of a single token.
    paged.check([(9, 1), (33, 1), (20, 7), (31, 2), (12, 12), (18, 1)])


@pytest.mark.parametrize("seed", range(8))
def test_paged_attention_matches_dense_attention_for_any_batch(seed: int) -> None:
    chance = random.Random(seed)
    paged = Paged(
        seed, block_size=chance.choice([1, 2, 4, 16]), kv_heads=chance.randint(1, 3), groups=chance.choice([1, 3, 4])
    )
    contexts = [chance.randint(1, 50) for _ in range(chance.randint(1, 12))]
    paged.check([(context, chance.choice([1, 1, chance.randint(1, context)])) for context in contexts])


UNTIED = {"head_dim": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": False}
"""For Gemma models, which repeat the last token where the head is tied to its embedding."""

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "llama, tied": lambda: transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "llama, yarn": lambda: transformers.LlamaConfig(**GROUPED, rope_parameters=YARN),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=16),
    "qwen3 moe": lambda: transformers.Qwen3MoeConfig(
        **GROUPED, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "olmo2": lambda: transformers.Olmo2Config(**GROUPED),
    "phi3": lambda: transformers.Phi3Config(**GROUPED),
    "gemma": lambda: transformers.GemmaConfig(**GROUPED, head_dim=8),
    "mistral with a window": lambda: transformers.MistralConfig(**GROUPED, sliding_window=8),
    "qwen2 with a window": lambda: transformers.Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "gemma2": lambda: transformers.Gemma2Config(**GROUPED, **UNTIED, sliding_window=8, attn_logit_softcapping=3.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **GROUPED, **UNTIED, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "granite": lambda: transformers.GraniteConfig(**GROUPED),
    "llama with a window that it does not know": lambda: transformers.LlamaConfig(**GROUPED, sliding_window=8),
    "gpt neox": lambda: transformers.GPTNeoXConfig(**SHAPE),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=48, n_layer=2, n_head=6, n_positions=256, bos_token_id=0, eos_token_id=1
    ),
}
LONGROPE: dict[str, object] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}
REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "layers without attention": (
        lambda: transformers.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]),
        "layers of conv",
    ),
    "no attention at all": (
        lambda: transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=2),
        "mamba",
    ),
    "attention of its own": (
        lambda: transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=48, n_layer=2, n_head=6),
        "0 of BloomForCausalLM's 2 layers",
    ),
    "no room for another attention": (
        lambda: transformers.GPTNeoConfig(
            vocab_size=VOCABULARY, hidden_size=48, num_layers=2, num_heads=6, attention_types=[[["global"], 2]]
        ),
        "transformers' gpt_neo does not support custom attention",
    ),
    "positions that it counts itself": (
        lambda: transformers.BartConfig(
            vocab_size=VOCABULARY,
            d_model=48,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=6,
            decoder_attention_heads=6,
        ),
        r"BartForCausalLM cannot be served: its forward\(\) takes no position_ids",
    ),
    "both ways": (
        lambda: transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=64
        ),
        "attend to those after them",
    ),
    "longrope": (
        lambda: transformers.Phi3Config(**GROUPED, original_max_position_embeddings=32, rope_parameters=LONGROPE),
        "longrope",
    ),
    "longrope in some layers": (
        lambda: transformers.Gemma3TextConfig(
            **GROUPED,
            **UNTIED,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}},
        ),
        "longrope",
    ),
    "masks that it makes itself": (lambda: transformers.DogeConfig(**GROUPED), "masks of its own"),
    "layers that are used again": (
        lambda: transformers.CONFIG_MAPPING["hrm_text"](**SHAPE, head_dim=8, H_cycles=1, L_cycles=1),
        r"only 0 of HrmTextForCausalLM's \d+ layers",
    ),
    "layers that slide without a window": (
        lambda: transformers.Qwen2Config(**GROUPED, layer_types=["sliding_attention", "full_attention"]),
        "no sliding_window",
    ),
    "a window in its masks alone": (
        lambda: transformers.PhimoeConfig(**GROUPED, num_local_experts=4, sliding_window=8),
        "layer 0 of this model attends with a window of None tokens, but its configuration says 8",
    ),
    "a window in layers that see all": (
        lambda: transformers.MiniMaxConfig(
            **GROUPED, head_dim=8, num_local_experts=4, sliding_window=8, layer_types=["full_attention"] * 2
        ),
        "layer 0 of this model attends with a window of 8 tokens, but its configuration says None",
    ),
    "attention that counts tokens": (
        lambda: transformers.Llama4TextConfig(
            **GROUPED, head_dim=8, num_local_experts=2, intermediate_size_mlp=64, layer_types=["full_attention"] * 2
        ),
        "attn_temperature_tuning",
    ),
    "keys and values of other sizes": (
        lambda: transformers.DeepseekV3Config(
            **SHAPE,
            num_key_value_heads=6,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            first_k_dense_replace=2,
        ),
        "6 of 24 numbers as heads of queries, 6 of 24 numbers of keys and 6 of 16 numbers of values",
    ),
    "layers that differ": (
        lambda: transformers.CONFIG_MAPPING["gemma4_text"](
            **GROUPED, head_dim=8, global_head_dim=16, hidden_size_per_layer_input=0, vocab_size_per_layer_input=9
        ),
        "layers differ from each other",
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_batches_give_the_output_of_transformers_alone(family: str, tmp_path: Path) -> None:
    model = save(FAMILIES[family](), tmp_path)
    prompts = random_prompts(3)
    driver = Driver(ModelRunner(load(options(tmp_path))), prompts, seed=5)
    driver.run(output_tokens=10)
    assert driver.failed == {}
    for index, prompt in enumerate(prompts):
        assert driver.outputs[index] == greedy_alone(model, prompt, 10)
    assert len({token for tokens in driver.outputs.values() for token in tokens}) > 5, "the models' outputs vary"


def test_step_of_partial_chunks_samples_nothing(tmp_path: Path) -> None:
    save(FAMILIES["llama"](), tmp_path)
    driver = Driver(ModelRunner(load(options(tmp_path))), random_prompts(3), seed=0)
    driver._run([(4, 10), (5, 10)])
    assert not any(driver.outputs.values())


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_would_be_computed_wrongly_are_refused(family: str, tmp_path: Path) -> None:
    make, why = REFUSED[family]
    save(make(), tmp_path)
    with pytest.raises(CannotLoad, match=why):
        load(options(tmp_path))


@pytest.mark.parametrize("why", ["mixes its tokens outside its attention", "ignores logits_to_keep"])
def test_models_whose_rows_depend_on_each_other_are_refused(why: str, tmp_path: Path) -> None:
    save(FAMILIES["llama"](), tmp_path)
    loaded = load(options(tmp_path))
    spec = AttentionSpec.of(loaded.model.config, CPU, torch.float32, 4)
    loading._try(loaded, spec)
    if "outside" in why:
        embedding = loaded.model.get_input_embeddings()
        embedding.register_forward_hook(lambda _, __, output: output + output.roll(1, dims=1))
    else:
        loaded.model.register_forward_pre_hook(
            lambda _, given, named: (given, {**named, "logits_to_keep": 0}), with_kwargs=True
        )
    with pytest.raises(CannotLoad, match=why):
        loading._try(loaded, spec)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_packed_weights_can_be_inspected_but_not_multiplied(
    quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looks(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        assert self.up_proj.weight.shape[1] == x.shape[-1]
        return forward(self, x.to(self.up_proj.weight.device, self.up_proj.weight.dtype))

    def computes(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.nn.functional.linear(x, self.up_proj.weight))

    save(FAMILIES["llama"](), tmp_path)
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", looks)
    load(options(tmp_path, quantization=quantization))
    monkeypatch.setattr(LlamaMLP, "forward", computes)
    with pytest.raises(CannotLoad, match="does not run"):
        load(options(tmp_path, quantization=quantization))


BREAKAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "cannot load"),
    "a config that is not JSON": (lambda folder: (folder / "config.json").write_text("{"), "cannot load"),
    "an unknown architecture": (lambda folder: edit_config(folder, model_type="nonesuch"), "nonesuch"),
    "code of its own": (
        lambda folder: edit_config(
            folder, model_type="nonesuch", auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
        ),
        "trust_remote_code",
    ),
    "no model for text alone": (
        lambda folder: edit_config(folder, model_type="t5"),
        "transformers has no causal language model for t5",
    ),
    "other shapes": (
        lambda folder: edit_config(folder, intermediate_size=32),
        r"down_proj\.weight has shape \[48, 64\] and should have \[48, 32\]",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "cannot load"),
    "broken weights": (lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 99), "cannot load"),
    "a tensor too few": (
        lambda folder: remove_tensor(folder, "model.layers.1.mlp.up_proj.weight"),
        r"lacks weights: model\.layers\.1\.mlp\.up_proj\.weight",
    ),
    "a layer too few": (lambda folder: edit_config(folder, num_hidden_layers=3), r"lacks weights: model\.layers\.2"),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_broken_folder_is_refused(breakage: str, tmp_path: Path) -> None:
    save(FAMILIES["llama"](), tmp_path)
    break_it, why = BREAKAGES[breakage]
    break_it(tmp_path)
    with pytest.raises(CannotLoad, match=why):
        load(options(tmp_path))


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    save(FAMILIES["llama, tied"](), tmp_path)
    assert load(options(tmp_path)).pool.block_count == 128


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"device": "nonesuch"}, "device 'nonesuch'"),
        ({"dtype": "int4"}, "dtype"),
        ({"block_count": None, "kv_cache_bytes": 10}, "a KV cache of 10 bytes is too small"),
        ({"block_count": 1 << 50}, "no memory"),
        ({"block_count": 1 << 70}, "no memory"),
        ({"host_block_count": 1 << 50}, r"no memory for \d+ bytes of the KV cache on the host"),
        ({"host_block_count": 1 << 70}, r"no memory for \d+ bytes of the KV cache on the host"),
        ({"host_kv_cache_bytes": 10}, "host_kv_cache_bytes=10 holds no block"),
        ({"device": "meta"}, "device 'meta' cannot be used: it has no memory"),
    ],
)
def test_impossible_options_are_refused(others: dict[str, object], why: str, tmp_path: Path) -> None:
    save(FAMILIES["llama"](), tmp_path)
    with pytest.raises(CannotLoad, match=why):
        load(options(tmp_path, **others))


def test_pool_takes_the_given_bytes(tmp_path: Path) -> None:
    save(FAMILIES["llama"](), tmp_path)
    # 2 layers of keys and values of 2 heads of 8 numbers of 4 bytes, in blocks of 4.
    pool = load(options(tmp_path, block_count=None, kv_cache_bytes=10 * 2 * 2 * 2 * 8 * 4 * 4 + 5)).pool
    assert pool.block_count == 10
    assert all(not tensor.any() for tensor in (*pool.keys, *pool.values)), "the trial run's blocks are zeroed"


def test_host_memory_takes_the_given_blocks_or_bytes_and_measures_costs(tmp_path: Path) -> None:
    save(FAMILIES["llama"](), tmp_path)
    looks = itertools.count()
    loaded = load(options(tmp_path, host_block_count=3, now=lambda: float(next(looks))))
    assert loaded.host_tier == HostTier(3, move_seconds=1 / 3, recompute_seconds=1 / 64)
    by_bytes = load(options(tmp_path, host_kv_cache_bytes=10 * 2 * 2 * 2 * 8 * 4 * 4 + 5))
    assert ModelRunner(by_bytes).host.block_count == 10
    assert by_bytes.host_tier.move_seconds > 0 < by_bytes.host_tier.recompute_seconds
    for one in (loaded, by_bytes):
        assert one.host is not None
        pools = (*one.pool.keys, *one.pool.values, *one.host.keys, *one.host.values)
        assert not any(tensor.any() for tensor in pools), "measured blocks are zeroed"


def test_costs_are_measured_within_the_model_context_and_pool(tmp_path: Path) -> None:
    looks = itertools.count()
    now = lambda: float(next(looks))  # noqa: E731
    save(transformers.GPT2Config(vocab_size=9, n_embd=48, n_layer=1, n_head=6, n_positions=10), tmp_path)
    short = load(options(tmp_path, host_block_count=1, now=now))
    assert short.host_tier.recompute_seconds == 1 / 10
    small = load(options(tmp_path, host_block_count=1, block_count=3, now=now))
    assert small.host_tier.recompute_seconds == 1 / 8


def test_nothing_is_measured_without_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "measure_costs", None)
    save(FAMILIES["llama"](), tmp_path)
    runner = ModelRunner(load(options(tmp_path)))
    assert runner.host == HostTier()
    runner.copy(BlockCopies(CopyKind.FORK, (1,), (2,))).wait()
    with pytest.raises(AssertionError, match="saving and loading need host memory"):
        runner.copy(BlockCopies(CopyKind.SAVE, (1,), (0,)))


@pytest.mark.parametrize("seed", range(4))
def test_moved_and_forked_rows_give_the_same_output(seed: int, tmp_path: Path) -> None:
    model = save(FAMILIES["llama"](), tmp_path)
    prompts = random_prompts(3)
    loaded = load(options(tmp_path, host_block_count=64))

    def spoil(blocks: list[int]) -> None:
        for tensor in (*loaded.pool.keys, *loaded.pool.values):
            tensor[blocks] = 1000.0

    mover = CopyingDriver(ModelRunner(loaded), prompts, seed, spoil)
    mover.run(output_tokens=10)
    assert min(mover.moves.values()) > 5
    for index, prompt in enumerate(prompts):
        assert mover.outputs[index] == greedy_alone(model, prompt, 10)


def test_bfloat16_matches_float32_in_the_first_token(tmp_path: Path) -> None:
    """Rounding decides near ties, so only clear choices are compared."""
    model = save(FAMILIES["llama"](), tmp_path)
    prompts = random_prompts(3)
    driver = Driver(ModelRunner(load(options(tmp_path, dtype="bfloat16"))), prompts, seed=5)
    driver.run(output_tokens=1)
    compared = 0
    for index, prompt in enumerate(prompts):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        if best - second > 0.05 * float(logits.abs().max()):
            compared += 1
            assert driver.outputs[index] == [int(logits.argmax())]
    assert compared > 1


def test_rule_errors_stay_alone_non_finite_logits_fail_their_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save(FAMILIES["llama"](), tmp_path)
    prompts = random_prompts(3)
    sound = ModelRunner._forward

    def spoilt(runner: ModelRunner, batch: ModelBatch) -> torch.Tensor:
        logits = sound(runner, batch)
        for row, sampling_row in enumerate(batch.sampling_rows):
            if sampling_row.request_id == 3 and sampling_row.output_index == 4:
                logits[row, 7] = torch.nan
        return logits

    monkeypatch.setattr(ModelRunner, "_forward", spoilt)
    driver = Driver(ModelRunner(load(options(tmp_path))), prompts, seed=5)
    driver.run(output_tokens=10)
    assert driver.failed == {3: "the model's logits are not finite numbers"}
    for index, prompt in enumerate(prompts):
        expected = greedy_alone(model, prompt, 10)
        assert driver.outputs[index] == (expected[:4] if index == 3 else expected)


@pytest.mark.parametrize(
    ("raised", "told"),
    [(torch.OutOfMemoryError("no room"), MemoryError), (torch.AcceleratorError("an illegal address"), DeviceLost)],
    ids=["out of memory", "lost"],
)
def test_device_errors_are_distinguished(
    raised: Exception, told: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(runner: ModelRunner, batch: ModelBatch) -> torch.Tensor:
        raise raised

    save(FAMILIES["llama"](), tmp_path)
    monkeypatch.setattr(ModelRunner, "_forward", fails)
    driver = Driver(ModelRunner(load(options(tmp_path))), random_prompts(1), seed=5)
    with pytest.raises(told, match=str(raised)):
        driver.run(output_tokens=1)


def test_nan_in_the_hidden_state_of_a_row_stays_in_that_row(tmp_path: Path) -> None:
    """The embedding of one token is NaN: rows that hold it fail, and their blocks do not affect the others."""
    model = save(FAMILIES["llama"](), tmp_path)
    prompts = random_prompts(3)
    prompts[2][1] = 99
    expected = {i: greedy_alone(model, prompt, 10) for i, prompt in enumerate(prompts) if i != 2}
    loaded = load(options(tmp_path))
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[99] = torch.nan
    driver = Driver(ModelRunner(loaded), prompts, seed=5)
    driver.run(output_tokens=10)
    hit = {2} | {i for i, tokens in expected.items() if 99 in tokens[:-1] or 99 in prompts[i]}
    assert set(driver.failed) == hit
    for index in set(expected) - hit:
        assert driver.outputs[index] == expected[index]


def test_rule_zeroed_pool_blocks_that_held_nan_do_not_affect_their_next_rows(tmp_path: Path) -> None:
    model = save(FAMILIES["llama"](), tmp_path)
    prompts = random_prompts(3)
    expected = [greedy_alone(model, prompt, 10) for prompt in prompts]
    loaded = load(options(tmp_path, block_count=1 + 55))
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[99] = torch.nan
    runner = ModelRunner(loaded)
    spoilers = Driver(runner, [[99] * 40] * 5, seed=1)
    spoilers.run(output_tokens=1)
    assert len(spoilers.failed) == 5
    driver = Driver(runner, prompts, seed=2, epoch=1)
    driver.run(output_tokens=10)
    sound = [index for index, prompt in enumerate(prompts) if 99 not in prompt + expected[index]]
    assert len(sound) > 3
    assert [driver.outputs[index] for index in sound] == [expected[index] for index in sound]
