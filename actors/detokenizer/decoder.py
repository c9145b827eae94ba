"""Load a model folder's tokenizer as a decode function. No other module of the detokenizer uses tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_DecodeIds: TypeAlias = Callable[[list[int]], str]


class Decoder:
    """Decodes token ids as the model's tokenizer does, without special tokens. Unknown ids have no text.

    `byte_tokens` are the ids of byte fallback, whose text depends on the other byte tokens beside them.
    """

    def __init__(self, decode: _DecodeIds, vocabulary: dict[str, int]) -> None:
        self._decode = decode
        self._id_limit = max(vocabulary.values(), default=-1) + 1
        self.byte_tokens = _byte_tokens(decode, vocabulary)

    def __call__(self, token_ids: Sequence[int]) -> str:
        limit = self._id_limit
        return self._decode([token_id for token_id in token_ids if 0 <= token_id < limit])


def load_decoder(folder: Path) -> Decoder:
    """Load the tokenizer of a Hugging Face model folder. Takes seconds; raises what transformers raises.

    Loading goes through transformers, although reading tokenizer.json would be faster: for some model families
    transformers builds a different tokenizer, and the engine's text must equal that of transformers.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        return _of_backend(tokenizer.backend_tokenizer)

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    return Decoder(decode, tokenizer.get_vocab())  # type: ignore[no-untyped-call]  # transformers leaves it untyped


def load_cached_decoder(file: Path) -> Decoder:
    """Load a tokenizer that transformers has built, from its cached file. Raises what reading the file raises."""
    from tokenizers import Tokenizer

    return _of_backend(Tokenizer.from_file(str(file)))


def _of_backend(backend: Tokenizer) -> Decoder:
    return Decoder(partial(backend.decode, skip_special_tokens=True), backend.get_vocab())


def _byte_tokens(decode: _DecodeIds, vocabulary: dict[str, int]) -> frozenset[int]:
    """Return the ids of `<0x00>` to `<0xFF>` if the tokenizer decodes them as bytes, not as their names."""
    lone_continuation = vocabulary.get("<0x80>")
    if lone_continuation is None or decode([lone_continuation]) != "\ufffd":
        return frozenset()
    names = (f"<0x{byte:02X}>" for byte in range(256))
    return frozenset(vocabulary[name] for name in names if name in vocabulary)
