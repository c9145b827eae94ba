"""The pool's size from the memory that steps take, with a fake device memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import structlog
import torch
import transformers
from tiny_models import GROUPED, options, save

from cuelight.actors.executor.model import loading
from cuelight.actors.executor.model.loading import load
from cuelight.actors.executor.model.memory import (
    GRAPH_BYTES,
    MemoryBudget,
    SystemMemory,
    count_blocks,
    gib,
    measure_memory,
    memory_of,
)
from cuelight.actors.executor.model.sampling import peak_bytes
from cuelight.actors.executor.options import CannotLoad, phase_facts
from cuelight.config import EngineConfig
from cuelight.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")

GIB = 1 << 30
BLOCK_BYTES = 2 * 2 * 2 * 8 * 4 * 4
"""2 layers of keys and values of 2 heads of 8 numbers of 4 bytes, in blocks of 4."""

NAMES = ("read config", "read weights", "KV pool", "warm up", "pack weights", "compile", "host memory")
PHASES = set(phase_facts([(name, 0.0) for name in NAMES]))


@dataclass
class FakeMemory:
    """Device memory with `others` bytes of other processes and `weights` bytes of tensors; each work takes a `use`."""

    size: int
    others: int = 0
    weights: int = 0
    reserve: int = 0
    uses: list[int] = field(default_factory=list)
    is_measured: bool = True
    calls: list[str] = field(default_factory=list)

    def total(self) -> int:
        return self.size

    def free(self) -> int:
        return self.size - self.others - self.weights - self.reserve

    def allocated(self) -> int:
        return self.weights

    def peak(self) -> int:
        self.calls.append("peak")
        self.reserve = use = self.uses.pop(0)  # an allocator keeps freed memory
        return self.weights + use

    def begin(self) -> None:
        self.calls.append("begin")
        self.reserve = 0


def works(memory: FakeMemory, *names: str) -> list[Callable[[], None]]:
    return [lambda name=name: memory.calls.append(name) for name in names]  # type: ignore[misc]


def test_pool_takes_the_memory_left_by_weights_steps_and_graphs() -> None:
    memory = FakeMemory(100 * GIB, others=3 * GIB, weights=16 * GIB, reserve=9 * GIB, uses=[5 * GIB, 2 * GIB])
    step, decode = works(memory, "step", "decode")
    budget = measure_memory(memory, 0.9, step, sampling=GIB, decode=decode, graph_count=10)
    graphs = 2 * GIB + 10 * GRAPH_BYTES
    assert budget == MemoryBudget(100 * GIB, 0.9, used=19 * GIB, weights=16 * GIB, step=5 * GIB, graphs=graphs)
    assert budget.pool == 90 * GIB - 19 * GIB - 5 * GIB - graphs
    # The peak is that of the work alone, and freed memory is returned before it is measured.
    assert memory.calls == ["begin", "step", "peak", "begin", "decode", "peak", "begin"]


def test_sampling_counts_where_it_takes_more_than_the_forward_pass() -> None:
    memory = FakeMemory(100, weights=10, uses=[20])
    (step,) = works(memory, "step")
    budget = measure_memory(memory, 1.0, step, sampling=30, decode=None, graph_count=99)
    assert (budget.step, budget.graphs, budget.pool) == (30, 0, 60)


def test_model_that_does_not_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    budget = MemoryBudget(24 * GIB, 0.5, used=10 * GIB, weights=9 * GIB, step=GIB, graphs=GIB)
    assert budget.pool == 0
    with pytest.raises(CannotLoad) as raised:
        count_blocks(options(tmp_path), 1 << 20, budget)
    assert str(raised.value) == (
        "the model does not fit: of 24.00 GiB it may take 12.00 GiB (memory_fraction); 10.00 GiB are in use (9.00 GiB "
        "by the weights), a step takes up to 1.00 GiB and graphs 1.00 GiB; 0.00 MiB are left for the KV cache, of "
        "which a block takes 1048576 bytes"
    )
    roomy = MemoryBudget(24 * GIB, 0.5, used=10 * GIB, weights=9 * GIB, step=GIB, graphs=0)
    assert count_blocks(options(tmp_path), 1 << 20, roomy) == 1024


def test_step_out_of_memory_is_refused_with_the_numbers() -> None:
    def step() -> None:
        raise torch.OutOfMemoryError("tried to allocate 7 GiB")

    memory = FakeMemory(16 * GIB, others=GIB, weights=14 * GIB)
    with pytest.raises(CannotLoad, match=r"of 16.00 GiB its weights take 14.00 GiB, 15.00 GiB are in use.* 7 GiB"):
        measure_memory(memory, 0.9, step, sampling=0, decode=None, graph_count=0)


def test_gib_formats_bytes() -> None:
    assert [gib(0), gib(3 << 20), gib(10 << 20), gib(5 * GIB)] == ["0.00 MiB", "3.00 MiB", "0.01 GiB", "5.00 GiB"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(transformers.LlamaConfig(**GROUPED), tmp_path)
    return tmp_path


def test_model_is_loaded_with_a_pool_of_the_memory_left_by_its_largest_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[list[int]] = []
    compute = loading._compute

    def spy(loaded: loading.LoadedModel, counts: list[int], *rest: object) -> object:
        computed.append(list(counts))
        return compute(loaded, counts, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "_compute", spy)
    memory = FakeMemory(64 << 20, others=4 << 20, weights=1 << 20, uses=[20 << 20])
    asked = options(folder, block_count=None, token_budget=50, running_max=8, memory_fraction=0.75)
    with structlog.testing.capture_logs() as entries:
        loaded = load(asked, lambda _: memory)
    assert computed == [[1], [43, 1, 1, 1, 1, 1, 1, 1]], "all of the budget, and every request"
    assert loaded.pool.block_count == (48 - 5 - 20 << 20) // BLOCK_BYTES
    assert all(not tensor.any() for tensor in (*loaded.pool.keys, *loaded.pool.values))
    (facts,) = (entry for entry in entries if entry["event"] == "model_loaded")
    assert "of 0.06 GiB it may take" in facts["memory"]
    seconds = {name for name in facts if name.endswith("_seconds")}
    assert seconds == PHASES | {"measure_memory_seconds"}


def test_sampling_of_every_request_at_once_is_counted(folder: Path) -> None:
    memory = FakeMemory(64 << 20, weights=1 << 20, uses=[0])
    loaded = load(options(folder, block_count=None, running_max=8, memory_fraction=1.0), lambda _: memory)
    sampling = loading.LOGIT_BYTES * 8 * 100 + peak_bytes(8, 100)
    assert loaded.pool.block_count == ((63 << 20) - sampling) // BLOCK_BYTES


def test_huge_token_budget_gives_a_bounded_step(folder: Path) -> None:
    memory = FakeMemory(64 << 20, uses=[0])
    asked = options(folder, block_count=None, token_budget=1 << 62, running_max=2)
    assert load(asked, lambda _: memory).pool.block_count > 0


def test_model_that_does_not_fit_is_refused(folder: Path) -> None:
    with pytest.raises(CannotLoad, match=r"does not fit: its weights take 0\.\d+ MiB, and cpu has 0.01 MiB free"):
        load(options(folder), lambda _: FakeMemory(10 << 10))
    memory = FakeMemory(64 << 20, uses=[60 << 20])
    with pytest.raises(CannotLoad, match=r"does not fit: .* a step takes up to 0.06 GiB .* are left for the KV cache"):
        load(options(folder, block_count=None), lambda _: memory)


def test_out_of_memory_at_any_point_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 5 GiB")

    monkeypatch.setattr(loading, "apply_passes", full)
    with pytest.raises(CannotLoad, match="the model does not fit: tried to allocate 5 GiB"):
        load(options(folder))


@pytest.mark.parametrize("asked", [{"block_count": 7}, {"block_count": None, "kv_cache_bytes": 7 * BLOCK_BYTES}])
def test_given_size_is_not_measured(folder: Path, asked: dict[str, object]) -> None:
    memory = FakeMemory(1 << 40)
    assert load(options(folder, **asked), lambda _: memory).pool.block_count == 7
    assert memory.calls == []


def test_phases_are_timed_one_by_one(folder: Path) -> None:
    looks = itertools.count()
    with structlog.testing.capture_logs() as entries:
        load(options(folder, now=lambda: float(next(looks))))
    (facts,) = (entry for entry in entries if entry["event"] == "model_loaded")
    assert {name: facts[name] for name in facts if name.endswith("_seconds")} == dict.fromkeys(PHASES, 1.0)
    assert facts["passes"]["merged_linears"] == 4


def test_free_host_memory_is_that_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of(torch.device("cpu"))
    assert isinstance(memory, SystemMemory) and not memory.is_measured
    assert 0 < memory.free() <= memory.total()
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr("cuelight.actors.executor.model.memory.MEMINFO", meminfo)
    assert memory.free() > 0, "there may be no such file"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:       5 kB\n")
    assert memory.free() == 5 << 10


@pytest.mark.parametrize("fraction", [0, -0.1, 1.01, float("nan"), "0.9", True, None])
def test_invalid_fraction_is_refused(fraction: object) -> None:
    with pytest.raises(ConfigError, match="memory_fraction must be a number above 0, at most 1"):
        EngineConfig(memory_fraction=fraction)  # type: ignore[arg-type]


def test_options_reach_the_loader() -> None:
    assert EngineConfig(memory_fraction=1).memory_fraction == 1
    with pytest.raises(ConfigError, match="eager must be True, False or None"):
        EngineConfig(eager="yes")  # type: ignore[arg-type]
