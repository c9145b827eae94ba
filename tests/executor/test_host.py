"""Copies of blocks within the pool, to host memory and back: in the stub and in real pools, with sizes and costs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count
from typing import TypeAlias

import pytest
import torch
from support import Recorder

from cuelight.actors.executor.model.kv_pool import HostPool, KVPool
from cuelight.actors.executor.model.memory import BLOCKS_MAX, TOKENS_MAX, measure_costs
from cuelight.actors.executor.stub import StubDevice, hashed_token, stub_host
from cuelight.config import EngineConfig
from cuelight.errors import ConfigError
from cuelight.messages.executor import ExecuteStep, Row, RowChunk
from cuelight.messages.request import BlockCopies, CopyKind, HostTier, RequestId, Sampling
from cuelight.testing import stub_parts

SIZE = 4
SAVE, LOAD, FORK = CopyKind.SAVE, CopyKind.LOAD, CopyKind.FORK

Blocks: TypeAlias = tuple[int, ...]


class Stubbed:
    """A stub with a pool of 9 blocks and host memory for 4; every row enters anew, alone, and samples one token."""

    def __init__(self) -> None:
        self.device = StubDevice(10, SIZE, host=stub_host(4))
        self._steps = count()

    def sample(self, token_ids: Sequence[int], computed_tokens: int, block_ids: tuple[int, ...]) -> int:
        row = Row(RequestId(1), tuple(token_ids), len(token_ids), computed_tokens, block_ids, Sampling())
        chunk = RowChunk(RequestId(1), len(token_ids) - computed_tokens)
        epoch = next(self._steps)
        step = ExecuteStep(epoch, 0, 0, (), (row,), (), (chunk,), Recorder())
        done = self.device.run(self.device.prepare(step))
        return done.token_ids[0]

    def copy(self, copying: CopyKind, sources: tuple[int, ...], targets: tuple[int, ...]) -> None:
        self.device.copy(BlockCopies(copying, sources, targets))


FIRST = tuple(range(100, 109))
OTHER = tuple(range(200, 209))


@pytest.fixture
def moved() -> Stubbed:
    """Put the first row's two full blocks into host blocks 3 and 0, and another row into its blocks in the pool."""
    stubbed = Stubbed()
    stubbed.sample(FIRST, 0, (1, 2, 3))
    stubbed.copy(SAVE, (1, 2), (3, 0))
    stubbed.sample(OTHER, 0, (1, 2, 3))
    return stubbed


def test_stub_finds_saved_tokens_where_they_are_loaded(moved: Stubbed) -> None:
    moved.copy(LOAD, (0, 3), (6, 5))
    assert moved.sample(FIRST, 8, (5, 6, 9)) == hashed_token(FIRST, 1000)
    assert moved.sample(OTHER, 8, (1, 2, 4)) == hashed_token(OTHER, 1000), "the blocks of the other row are unchanged"


def test_stub_finds_forked_tokens_in_both_places(moved: Stubbed) -> None:
    moved.copy(FORK, (2,), (7,))
    for block_ids in ((1, 7, 3), (1, 2, 4)):
        assert moved.sample(OTHER, 8, block_ids) == hashed_token(OTHER, 1000)


@pytest.mark.parametrize(
    "copies",
    [
        [],
        [(LOAD, (3, 0), (6, 5))],  # exchanged
        [(LOAD, (3, 1), (5, 6))],  # never saved
        [(LOAD, (3,), (5,))],
        [(FORK, (1, 2), (5, 6))],  # of the other row
        [(SAVE, (1,), (3,)), (LOAD, (3, 0), (5, 6))],  # overwritten meanwhile
    ],
)
def test_stub_detects_a_wrong_copy(moved: Stubbed, copies: list[tuple[CopyKind, Blocks, Blocks]]) -> None:
    for each in copies:
        moved.copy(*each)
    with pytest.raises(AssertionError, match="this row's tokens and nothing else"):
        moved.sample(FIRST, 8, (5, 6, 9))


IMPOSSIBLE: list[tuple[CopyKind, Blocks, Blocks]] = [
    (SAVE, (0,), (1,)),
    (LOAD, (1,), (0,)),
    (FORK, (0,), (1,)),
    (FORK, (1,), (0,)),
    (FORK, (1, 2), (2, 3)),
    (SAVE, (1,), (4,)),
    (SAVE, (10,), (1,)),
    (LOAD, (4,), (1,)),
    (LOAD, (-1,), (1,)),
    (LOAD, (1,), (-1,)),
    (FORK, (1,), (10,)),
]


@pytest.mark.parametrize("copies", IMPOSSIBLE)
def test_stub_refuses_impossible_copies(copies: tuple[CopyKind, Blocks, Blocks]) -> None:
    with pytest.raises(AssertionError):
        Stubbed().copy(*copies)


def test_stub_engine_has_the_configured_host_memory() -> None:
    assert stub_parts(EngineConfig(host_block_count=7)).load_device().host == HostTier(7, 0.0, 1.0)
    assert stub_parts(EngineConfig()).load_device().host == HostTier()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"host_block_count": -1}, "host_block_count"),
        ({"host_block_count": None}, "host_block_count"),
        ({"host_block_count": 2.0}, "host_block_count"),
        ({"host_block_count": True}, "host_block_count"),
        ({"host_kv_cache_bytes": 0}, "host_kv_cache_bytes"),
        ({"host_kv_cache_bytes": "1 GB"}, "host_kv_cache_bytes"),
        ({"host_block_count": 1, "host_kv_cache_bytes": 1 << 30}, "give one of them"),
    ],
)
def test_invalid_sizes_of_host_memory_are_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        EngineConfig.of(options)


def test_host_memory_is_sized_by_blocks_or_by_bytes() -> None:
    assert EngineConfig(host_block_count=0, host_kv_cache_bytes=1).host_kv_cache_bytes == 1
    assert EngineConfig(host_block_count=3).host_kv_cache_bytes is None


def random_pool(seed: int, block_count: int = 12) -> KVPool:
    pool = KVPool(
        layers=3,
        block_count=block_count,
        block_size=SIZE,
        kv_heads=2,
        head_dim=5,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return pool


def contents(pool: KVPool | HostPool) -> list[list[torch.Tensor]]:
    """The contents of each block: keys and values of every layer."""
    return [[tensor[block].clone() for tensor in (*pool.keys, *pool.values)] for block in range(pool.block_count)]


def assert_same(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for block, (mine, wanted) in enumerate(zip(found, expected, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(mine, wanted, strict=True)), f"block {block}"


@pytest.mark.parametrize("seed", range(10))
def test_copies_equal_copying_one_block_after_the_other(seed: int) -> None:
    """Adjacent blocks are copied at once, so ids are drawn both consecutive and in any order."""
    chance = random.Random(seed)
    pool = random_pool(seed)
    host = HostPool(pool, 9)
    assert not any(tensor.any() for tensor in (*host.keys, *host.values))
    in_pool, in_host = contents(pool), contents(host)
    for _ in range(30):
        copying = chance.choice([SAVE, LOAD, FORK])
        places, others = list(range(1, 12)), list(range(9))
        if chance.random() < 0.7:
            chance.shuffle(places)
            chance.shuffle(others)
        number = chance.randint(0, 5)
        if copying is SAVE:
            sources, targets = places[:number], others[-number:] if number else []
            host.save(sources, targets)
            read, written = in_pool, in_host
        elif copying is LOAD:
            sources, targets = others[:number], places[:number]
            host.load(sources, targets)
            read, written = in_host, in_pool
        else:
            sources = [chance.choice(places[5:]) for _ in range(number)]
            targets = places[:number]
            pool.fork(sources, targets)
            read = written = in_pool
        for source, target in zip(sources, targets, strict=True):
            written[target] = list(read[source])
        assert_same(contents(pool), in_pool)
        assert_same(contents(host), in_host)


@pytest.mark.parametrize("copies", IMPOSSIBLE)
def test_impossible_copies_are_refused(copies: tuple[CopyKind, Blocks, Blocks]) -> None:
    pool = random_pool(0, block_count=10)
    host = HostPool(pool, 4)
    before = contents(pool), contents(host)
    copying, sources, targets = copies
    with pytest.raises(AssertionError):
        {SAVE: host.save, LOAD: host.load, FORK: pool.fork}[copying](sources, targets)
    assert_same(contents(pool), before[0])
    assert_same(contents(host), before[1])


class Clock:
    """A clock that advances a second per reading, and many seconds once, as on a busy machine."""

    def __init__(self, late: int) -> None:
        self._seconds = self._ticks()
        self._late = late

    def _ticks(self) -> Iterator[float]:
        seconds = 0.0
        for tick in count():
            yield seconds
            seconds += 100.0 if tick == self._late else 1.0

    def __call__(self) -> float:
        return next(self._seconds)


@pytest.mark.parametrize(
    ("block_count", "host_block_count", "token_limit", "moved", "computed"),
    [
        (100, 100, 1000, BLOCKS_MAX, TOKENS_MAX),
        (100, 3, 30, 3, 30),
        (5, 100, 1000, 4, 16),
        (2, 1, 1, 1, 1),
    ],
)
def test_costs_are_per_block_and_per_token_and_measuring_leaves_nothing(
    block_count: int, host_block_count: int, token_limit: int, moved: int, computed: int
) -> None:
    pool = random_pool(1, block_count)
    for layer in range(3):
        pool.clear(layer, torch.arange(block_count))
    host = HostPool(pool, host_block_count)
    asked = []

    def prefill(token_count: int) -> None:
        asked.append(token_count)
        blocks = -(-token_count // SIZE)
        for tensor in (*pool.keys, *pool.values):
            tensor[1 : 1 + blocks] = torch.nan

    tier = measure_costs(pool, host, token_limit, prefill, Clock(late=4))
    assert tier == HostTier(host_block_count, 1.0 / moved, 1.0 / computed), "one late copy does not count"
    assert set(asked) == {computed}
    assert not any(tensor.any() for tensor in (*pool.keys, *pool.values, *host.keys, *host.values))
