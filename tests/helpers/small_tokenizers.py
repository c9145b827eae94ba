"""Small tokenizers made in the tests, and prompts for them."""

from __future__ import annotations

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from cuelight.messages.request import Conversation, Turn

TEMPLATE = (
    "{%- for message in messages %}{%- if message.role == 'tool' %}{{ raise_exception('no tools here') }}{%- endif %}"
    "<turn>{{ message.role }}: {{ message.content | trim }}{%- endfor %}"
    "{%- if add_generation_prompt %}<turn>assistant:{%- endif %}"
)


CHAT = Conversation((Turn("system", "be brief"), Turn("user", " two ships? <turn> naïve 😀 ")))


TEXTS = ["hello world", "", "  spaces\n\t", "día 😀 日本", "a<turn>b<start>", "2026"]


PLENTY = 10_000


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<start>", "<turn>"]
    )
    tokenizer.train_from_iterator(["hello world, two ships"], trainer)
    start = tokenizer.token_to_id("<start>")
    tokenizer.post_processor = processors.TemplateProcessing("<start> $A", special_tokens=[("<start>", start)])
    return tokenizer


def reference(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token="<start>")
    tokenizer.chat_template = template
    return tokenizer


def fallback(*, every_byte: bool = True) -> Tokenizer:
    pieces = ["<unk>", "▁", "hello", *(f"<0x{byte:02X}>" for byte in range(256 if every_byte else 128))]
    model = models.BPE({piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>", fuse_unk=True)
    model.byte_fallback = True
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer
