"""A GGUF file made here becomes the model it was written from: weights, tokenizer, end tokens."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cuelight.actors.executor.model.gguf import CHECK_TEXTS, ConversionFailed, check_tokenizer, read_metadata
from cuelight.errors import ModelUnavailable
from cuelight.models import store

HEADS, KV_HEADS, WIDTH, LAYERS = 4, 2, 32, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
MERGES = ["2 0", "2 6", "t h", "th e"]
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def vocabulary() -> list[str]:
    return SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(merge.split()) for merge in MERGES]


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder rows of llama's query and key projections as GGUF stores them."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: LlamaForCausalLM, architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(48)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(vocabulary()) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        if (target := gguf_name(name)) is not None:
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(target.split(".")[-2])
            writer.add_tensor(target, (interleaved(tensor, heads) if heads else tensor).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str | None:
    match name.removeprefix("model.").removesuffix(".weight").split(".", 2):
        case ["embed_tokens"]:
            return "token_embd.weight"
        case ["norm"]:
            return "output_norm.weight"
        case ["layers", index, part]:
            return f"blk.{index}.{LAYER_NAMES[part]}.weight"
    assert name == "lm_head.weight", name  # tied to the embedding
    return None


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def source(place: Path) -> Path:
    return write_gguf(place / "tiny.gguf", tiny_llama())


@pytest.fixture(scope="module")
def folder(place: Path, source: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUELIGHT_CACHE", str(place / "cache"))
        return store.model_path(source)


def test_weights_are_those_of_the_model(folder: Path) -> None:
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert converted.dtype == torch.float32
    ids = torch.arange(1, 60).unsqueeze(0)
    with torch.inference_mode():
        expected, actual = tiny_llama()(ids).logits, converted(ids).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_tokenizer_splits_digits_and_round_trips_texts(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("2026") == ["2", "0", "2", "6"]
    assert tokenizer.tokenize("the") == ["the"]
    assert tokenizer("<|im_start|>").input_ids == [1]
    for text in CHECK_TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_end_of_turn_and_end_of_text_both_end_an_answer(folder: Path) -> None:
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]
    assert generation["pad_token_id"] == 2
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 2


def test_chat_template_is_kept(folder: Path) -> None:
    turns = [{"role": "user", "content": "the"}]
    rendered = AutoTokenizer.from_pretrained(folder).apply_chat_template(turns, tokenize=False)
    assert rendered == "<|im_start|>user\nthe<|im_end|>\n"


def test_folder_does_not_contain_its_origin(folder: Path) -> None:
    text = "".join(path.read_text() for path in folder.glob("*.json"))
    assert str(folder.parent) not in text
    assert "partial" not in text


def test_check_detects_a_lost_digit_split_and_a_wrong_end(folder: Path, source: Path, tmp_path: Path) -> None:
    metadata = read_metadata(source)
    broken = shutil.copytree(folder, tmp_path / "broken")
    content = json.loads((broken / "tokenizer.json").read_text())
    assert content["pre_tokenizer"]["pretokenizers"].pop(0)["type"] == "Digits"
    (broken / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConversionFailed, match="digits"):
        check_tokenizer(broken, metadata)
    with pytest.raises(ConversionFailed, match="end token is 1"):
        check_tokenizer(folder, metadata | {"tokenizer.ggml.eos_token_id": 1})


def test_truncated_file_is_refused_at_any_length(source: Path, tmp_path: Path) -> None:
    size = source.stat().st_size
    for kept in (size - 1, size // 2, 1000, 30, 5):
        cut = tmp_path / f"cut-{kept}.gguf"
        shutil.copy(source, cut)
        os.truncate(cut, kept)
        with pytest.raises(ConversionFailed, match="cut short"):
            read_metadata(cut)


def test_unknown_architecture_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUELIGHT_CACHE", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "strange.gguf", tiny_llama(), architecture="lamp")
    with pytest.raises(ModelUnavailable, match="architecture lamp"):
        store.model_path(path)


def test_converter_ends_with_its_parent(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", store.CONVERTER, "--watch-stdin", str(source), str(tmp_path / "out")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stage 0 6 reading\n"
        process.communicate()
    assert process.returncode == 1
    assert not (tmp_path / "out" / "config.json").exists()


def test_converter_explains_its_usage() -> None:
    result = subprocess.run([sys.executable, "-m", store.CONVERTER], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("usage:")
