"""Host memory that outlives executors: what the next executor finds in it, and what it must not use."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import executors
import numpy as np
import pytest
import tiny_models
import torch
import transformers

from cuelight import Engine, Result
from cuelight.actors.executor import loading
from cuelight.actors.executor.host_memory import HostMemoryClaim, HostMemoryFile, HostMemoryMapping
from cuelight.actors.executor.model.kv_pool import HostPool, KVPool
from cuelight.actors.executor.model.loading import load as load_any
from cuelight.actors.executor.native.runner import NativeRunner
from cuelight.config import EngineConfig, EngineOptions
from cuelight.core.parts import EngineParts, lasting_memory
from cuelight.messages.request import BlockCopies, CopyKind, HostTier
from cuelight.testing import crash

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no such memory")

NET_SECONDS = 60.0


@pytest.fixture
def memory() -> Iterator[HostMemoryFile]:
    memory = HostMemoryFile(7)
    yield memory
    memory.close()


def files() -> int:
    """Files that are open or mapped."""
    maps = Path("/proc/self/maps").read_text()
    return len(list(Path("/proc/self/fd").iterdir())) + maps.count("cuelight host memory")


def tier() -> HostTier:
    return HostTier(3, 0.25, 0.5)


def begun(claim: HostMemoryClaim, contents: str = "these", size: int = 100) -> HostMemoryMapping:
    """Open the file and, if it is new, prepare it."""
    opened = claim.open(size, contents)
    assert opened is not None
    opened.tier(3, tier)
    return opened


def test_next_executor_finds_the_contents_and_measures_nothing(memory: HostMemoryFile) -> None:
    first = memory.claim().open(100, "these")
    assert first is not None
    measured = first.tier(3, tier)
    assert not first.has_survived
    assert measured == HostTier(3, 0.25, 0.5, first.number)
    first.data[:3] = b"abc"
    second = memory.claim().open(100, "these")
    assert second is not None
    assert second.has_survived
    assert bytes(second.data[:4]) == b"abc\0"
    assert second.tier(3, lambda: pytest.fail("measuring would overwrite the blocks")) == measured


def test_other_contents_have_another_number(memory: HostMemoryFile) -> None:
    numbers = [begun(memory.claim(), contents).number for contents in ("these", "those", "these")]
    assert len(set(numbers)) == 3
    assert HostMemoryFile(8).claim().open(1, "these").number not in numbers


def test_unfinished_preparation_starts_anew(memory: HostMemoryFile) -> None:
    """The first life ends while it measures."""
    first = memory.claim().open(100, "these")
    second = memory.claim().open(100, "these")
    assert first is not None and second is not None
    assert not second.has_survived
    assert second.number > first.number


def test_earlier_executor_can_no_longer_use_the_file(memory: HostMemoryFile) -> None:
    """Its thread may run on for a while, even while loading."""
    early, late = memory.claim(), memory.claim()
    opened = begun(late)
    with pytest.raises(RuntimeError, match="another executor"):
        early.open(100, "these")
    after = begun(memory.claim())
    assert after.has_survived
    with pytest.raises(RuntimeError, match="another executor"), opened.in_use():
        pass
    with after.in_use():
        pass


def test_file_grows_and_never_shrinks(memory: HostMemoryFile) -> None:
    begun(memory.claim(), "small", 10)
    large = begun(memory.claim(), "large", 100_000)
    large.data[-1] = 1
    small = begun(memory.claim(), "small", 10)
    assert len(small.data) == 10
    assert large.data[-1] == 1


CHILD = """
import os, pickle, signal, sys
opened = pickle.loads(sys.stdin.buffer.read()).claim().open(100, "these")
opened.tier(3, lambda: __import__("cuelight.messages.request").messages.request.HostTier(3, 0.25, 0.5))
opened.data[:6] = b"%06d" % os.getpid()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_process_leaves_the_file(memory: HostMemoryFile) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, env=environment)
    child.communicate(pickle.dumps(memory), timeout=NET_SECONDS)
    assert child.returncode == -signal.SIGKILL
    left = begun(memory.claim())
    assert left.has_survived
    assert bytes(left.data[:6]) == b"%06d" % child.pid


def test_unavailable_memory_is_no_error(memory: HostMemoryFile, tmp_path: Path) -> None:
    assert memory.claim().open(1 << 70, "these") is None
    elsewhere: HostMemoryFile = pickle.loads(pickle.dumps(memory))
    elsewhere.close()
    assert begun(memory.claim()).data is not None, "only its owner frees it"
    descriptor = int(memory._path.rpartition("/")[2])
    memory.close()
    memory.close()
    assert elsewhere.claim().open(100, "these") is None
    other = tmp_path / "other"
    other.write_bytes(b"mine")
    opened = os.open(other, os.O_RDWR)
    for each in {opened, os.dup2(opened, descriptor)}:
        assert elsewhere.claim().open(100, "these") is None, "the path is another file by now"
        os.close(each)
    assert other.read_bytes() == b"mine"


def test_file_is_closed_with_its_owner_and_its_users() -> None:
    before = files()
    memory = HostMemoryFile(1)
    opened = begun(memory.claim())
    del memory, opened
    assert files() == before


def test_no_file_where_it_is_unwanted_or_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lasting_memory(EngineConfig()) is None
    for wanted in (EngineConfig(host_block_count=1), EngineConfig(host_kv_cache_bytes=1 << 20)):
        found = lasting_memory(wanted)
        assert found is not None
        found.close()
    monkeypatch.delattr(os, "memfd_create")
    assert lasting_memory(EngineConfig(host_block_count=1)) is None


# Blocks in the file.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_models.save(transformers.LlamaConfig(**tiny_models.GROUPED), folder)
    return folder


KINDS: dict[str, dict[str, object]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
}


def load(folder: Path, memory: HostMemoryFile, **others: object) -> NativeRunner:
    asked = {"block_size": 16, "block_count": 9, "host_block_count": 5, "now": executors.Ticks(), **others}
    runner = loading.load_device(replace(tiny_models.options(folder, **asked), host_memory=memory.claim()))
    assert isinstance(runner, NativeRunner)
    return runner


def copied(runner: NativeRunner, copying: CopyKind, sources: tuple[int, ...], targets: tuple[int, ...]) -> None:
    runner.copy(BlockCopies(copying, sources, targets))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_saved_by_one_executor_are_loaded_by_the_next(folder: Path, memory: HostMemoryFile, kind: str) -> None:
    first = load(folder, memory, **KINDS[kind])
    before, chance = first._pool._device, np.random.default_rng(1)
    before.numbers[:] = chance.integers(-100, 100, before.numbers.shape)
    before.scales[:] = chance.random(before.scales.shape)
    copied(first, CopyKind.SAVE, (3, 8, 5), (4, 0, 2))
    second = load(folder, memory, **KINDS[kind])
    after = second._pool._device
    assert second.host == first.host != HostTier()
    assert not after.numbers.any()
    copied(second, CopyKind.LOAD, (0, 2, 4), (6, 7, 1))
    for source, target in ((8, 6), (5, 7), (3, 1)):
        np.testing.assert_array_equal(after.numbers[target], before.numbers[source])
        if before.scales.size:
            np.testing.assert_array_equal(after.scales[target], before.scales[source])
    with pytest.raises(RuntimeError, match="another executor"):
        copied(first, CopyKind.SAVE, (1,), (0,))
    copied(first, CopyKind.FORK, (1,), (2,))


def pool(seed: int) -> KVPool:
    pool = KVPool(
        layers=3, block_count=9, block_size=4, kv_heads=2, head_dim=5, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_(generator=torch.Generator().manual_seed(seed))
    return pool


def test_tensors_saved_by_one_executor_are_loaded_by_the_next(memory: HostMemoryFile) -> None:
    size = 5 * 2 * 3 * 4 * 2 * 5 * 2
    before, after = pool(1), pool(2)
    first = HostPool(before, 5, begun(memory.claim(), size=size))
    first.save((3, 8, 5), (4, 0, 2))
    second = HostPool(after, 5, begun(memory.claim(), size=size))
    second.load((0, 2, 4), (6, 7, 1))
    for mine, theirs in zip((*after.keys, *after.values), (*before.keys, *before.values), strict=True):
        assert torch.equal(mine[[6, 7, 1]], theirs[[8, 5, 3]])
    with pytest.raises(RuntimeError, match="another executor"):
        first.save((1,), (0,))
    with pytest.raises(RuntimeError, match="another executor"):
        first.load((0,), (1,))


@pytest.mark.parametrize(
    "others", [{"block_size": 8}, {"host_block_count": 6}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str
)
def test_other_storage_format_starts_anew(folder: Path, memory: HostMemoryFile, others: dict[str, object]) -> None:
    assert load(folder, memory, **others).host.memory != load(folder, memory).host.memory


def test_another_model_starts_anew(folder: Path, tmp_path: Path, memory: HostMemoryFile) -> None:
    """In another folder, or in place of the first one."""
    first = load(folder, memory).host.memory
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    second = load(tmp_path, memory).host.memory
    weights = tmp_path / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    third = load(tmp_path, memory).host.memory
    assert len({first, second, third}) == 3


def test_plain_host_memory_never_survives(folder: Path) -> None:
    assert loading.load_device(tiny_models.options(folder, host_block_count=5)).host.memory == 0


@pytest.mark.usefixtures("one_thread")
def test_transformers_decoder_uses_the_file_too(folder: Path, memory: HostMemoryFile) -> None:
    options = tiny_models.options(folder, host_block_count=5)
    first, second = (load_any(replace(options, host_memory=memory.claim())) for _ in range(2))
    assert first.host_tier == second.host_tier
    assert first.host_tier.memory != 0
    first.host.keys[1][4] = 7.0
    with pytest.raises(RuntimeError, match="another executor"):
        first.host.save((1,), (0,))
    assert second.host.keys[1][4].eq(7.0).all()


class Driver:
    """The part of CUDA's driver API that pinning needs."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.pinned: set[int] = set()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.error:
            self.pinned.add(address)
        return self.error

    def cudaHostUnregister(self, address: int) -> None:
        self.pinned.remove(address)


@pytest.mark.parametrize("error", [0, 712])
def test_file_is_pinned_where_the_driver_can(
    error: int, memory: HostMemoryFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(error)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    opened = begun(memory.claim(), size=64)
    host = HostPool.__new__(HostPool)
    host._pool = type("Pool", (), {"keys": [torch.zeros(1)]})()
    host._pin(torch.frombuffer(opened.data, dtype=torch.uint8))
    assert len(driver.pinned) == (error == 0)
    del host
    assert not driver.pinned


# In an engine.


OPTIONS: EngineOptions = {"dtype": "float32", "device": "cpu", "block_size": 16, "host_block_count": 40}
PROMPTS = [[random.Random(seed).randrange(2, 100) for _ in range(50)] for seed in range(6)]
TOKENS = 24


async def served(engine: Engine, prompts: list[list[int]]) -> list[Result]:
    return [await engine.generate(prompt, max_tokens=TOKENS, ignore_eos=True) for prompt in prompts]


@pytest.mark.parametrize("executor", ["process", "thread"])
async def test_host_memory_is_loaded_after_an_executors_death(folder: Path, executor: str) -> None:
    """The pool has room for two prompts: its contents are lost, and the blocks saved to host memory are not."""
    gather = partial(executors.of_model, folder)
    async with asyncio.timeout(NET_SECONDS):
        async with Engine.from_parts("tiny", gather, block_count=100, **OPTIONS) as engine:
            calm = await served(engine, PROMPTS)
        before = files()
        engine = Engine.from_parts("tiny", gather, executor=executor, block_count=11, **OPTIONS)
        async with engine:
            await served(engine, PROMPTS)
            saved = engine.stats()
            assert saved.blocks_saved > 10
            stream = engine.stream(PROMPTS[0], max_tokens=TOKENS, ignore_eos=True)
            while not stream.inbox.token_ids:  # noqa: ASYNC110  # waits for a state
                await asyncio.sleep(0)
            loaded = engine.stats().blocks_loaded
            crash(engine, "executor")
            results = [await stream.result(), *await served(engine, PROMPTS[1:3])]
            stats = engine.stats()
            assert engine.health().restarts == {"executor": 1}
        assert files() == before, "everything is freed while the engine still runs"
    assert [each.token_ids for each in results] == [each.token_ids for each in calm[:3]]
    assert stats.blocks_loaded - loaded >= 3 * 3
    assert all(each.usage.cached_tokens >= 48 for each in results[1:])


async def test_another_model_has_its_own_host_memory(folder: Path) -> None:
    def gather(config: EngineConfig) -> EngineParts[object]:
        return executors.of_model(folder, config)

    async with asyncio.timeout(NET_SECONDS):
        before = files()
        others = lambda _name, config: gather(config)  # noqa: E731
        engine = Engine.from_parts("tiny", gather, others, executor="thread", block_count=11, **OPTIONS)
        async with engine:
            await served(engine, PROMPTS)
            assert engine.stats().host_blocks_used > 10
            with_one = files()
            await engine.reload("other")
            assert engine.stats().host_blocks_used == 0
            calm = await served(engine, PROMPTS)
            assert files() == with_one
            loaded = engine.stats().blocks_loaded
            crash(engine, "executor")
            again = await served(engine, PROMPTS[:2])  # the third prompt's first block was still in the pool
            assert engine.stats().blocks_loaded - loaded >= 2 * 3
            assert engine.health().restarts == {"executor 2": 1}
        assert files() == before
    assert [each.token_ids for each in again] == [each.token_ids for each in calm[:2]]
