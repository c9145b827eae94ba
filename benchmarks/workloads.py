"""The engine's workloads: fixed numbers of tokens and fixed arrivals, other text in each variant.

`W1` is one stream, `W2` a mixed batch, `W3` the same requests as they come by a Poisson process, `W4` a batch with a
common prefix, and `even` 32 equal requests, which all run at once from the first token to the last.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from benchmarks.common import MIXED, sentences

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ARRIVALS_PER_SECOND = 1.7
ARRIVALS_SEED = 12
COMMON_TOKENS = 512


@dataclass(frozen=True)
class Ask:
    """A prompt, how many tokens to produce whatever they are, and when, in seconds from the beginning."""

    token_ids: list[int]
    output_tokens: int
    at: float = 0.0


class Workload(Protocol):
    """Requests in variants of other text: 0 warms up, the others are measured in turn."""

    @property
    def name(self) -> str: ...
    @property
    def one_after_another(self) -> bool: ...
    @property
    def variants(self) -> int: ...

    def asks(self, variant: int) -> list[Ask]:
        """In order of arrival."""


@dataclass(frozen=True)
class OwnWorkload:
    """Requests of these (prompt, output) tokens; of each prompt `common` tokens are those of all others."""

    name: str
    folder: Path
    shapes: tuple[tuple[int, int], ...]
    one_after_another: bool = False
    arrivals_per_second: float | None = None
    common: int = 0
    variants: int = 4

    def asks(self, variant: int) -> list[Ask]:
        chance = random.Random(f"{self.name} {variant}")
        tokenizer = _tokenizer(self.folder)
        prefix = _prompt(tokenizer, chance, f"Handbook {variant}.", self.common)
        arrivals = self._arrivals()
        asks = []
        for number, (prompt_tokens, output_tokens) in enumerate(self.shapes):
            # The beginning differs, so that no request finds another's blocks in the prefix cache.
            own = _prompt(tokenizer, chance, f"{chance.randrange(10**6)}: note {number}.", prompt_tokens - self.common)
            asks.append(Ask(prefix + own, output_tokens, arrivals[number]))
        return asks

    def _arrivals(self) -> list[float]:
        if self.arrivals_per_second is None:
            return [0.0] * len(self.shapes)
        chance, at = random.Random(ARRIVALS_SEED), 0.0
        arrivals = []
        for _ in self.shapes:
            arrivals.append(at)
            at += chance.expovariate(self.arrivals_per_second)
        return arrivals


class _Shape(msgspec.Struct):
    max_new: int
    arrival: float = 0.0


class _Document(msgspec.Struct):
    mode: str
    shapes: list[_Shape]
    variants: list[list[list[int]]]
    rate_req_s: float | None = None


class FileWorkload:
    """Prompts as they stand in a JSON file: `shapes`, `variants`, `mode`, and for arrivals `rate_req_s`."""

    def __init__(self, path: Path) -> None:
        self._document = document = msgspec.json.decode(path.read_bytes(), type=_Document)
        self.name = path.stem
        self.one_after_another = document.mode == "sequential"
        self.variants = len(document.variants)

    def asks(self, variant: int) -> list[Ask]:
        shapes, rate = self._document.shapes, self._document.rate_req_s
        return [
            Ask(token_ids, shape.max_new, shape.arrival / rate if rate else 0.0)
            for token_ids, shape in zip(self._document.variants[variant], shapes, strict=True)
        ]


def own_workloads(folder: Path) -> dict[str, OwnWorkload]:
    """By name, in the words of this model's tokenizer."""
    mixed, online = OwnWorkload("W2", folder, MIXED), ARRIVALS_PER_SECOND
    prefixed = OwnWorkload("W4", folder, ((COMMON_TOKENS + 32, 32),) * 32, common=COMMON_TOKENS)
    workloads = (
        OwnWorkload("W1", folder, ((128, 128),) * 5, one_after_another=True),
        mixed,
        OwnWorkload("W3", folder, MIXED, arrivals_per_second=online),
        prefixed,
        OwnWorkload("even", folder, ((64, 64),) * 32),
    )
    return {workload.name: workload for workload in workloads}


@cache
def _tokenizer(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _prompt(tokenizer: Tokenizer, chance: random.Random, beginning: str, token_count: int) -> list[int]:
    if token_count == 0:
        return []
    token_ids: list[int] = tokenizer.encode(f"{beginning} {sentences(chance, token_count // 4 + 8)}").ids
    assert len(token_ids) >= token_count, "there is text enough"
    return token_ids[:token_count]
