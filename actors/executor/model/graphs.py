"""Graphs of decode steps: each padded size and attention key is captured once, then replayed on the same addresses.

Graphs need an attention backend that plans: see `PlanningBackend`. Prefill and mixed steps run without graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from cuelight.actors.executor.batch import Batch
from cuelight.actors.executor.batch import BatchChunk as Row
from cuelight.actors.executor.model.attention import Attention, attending
from cuelight.actors.executor.model.kv_pool import KVPool
from cuelight.kernel import get_logger
from cuelight.messages.request import NULL_BLOCK

log = get_logger("cuelight.executor")

SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16))
"""Numbers of rows that are captured; steps are padded to the next one. Larger steps hide the cost of launches."""

GRAPHS_MAX = 256
"""Maximum number of graphs, since each takes memory and time to capture; further steps run without graphs."""


def sizes_up_to(rows: int) -> Sequence[int]:
    """Return the part of `SIZES` that steps of at most `rows` rows use."""
    return SIZES[: bisect_left(SIZES, rows) + 1]


def kept_bytes(rows: int, vocabulary: int, logit_bytes: int) -> int:
    """Return the bytes of the logits that all graphs of up to `rows` rows write to, outside their shared memory."""
    return sizes_up_to(rows)[-1] * vocabulary * logit_bytes


class AttentionPlan(Protocol):
    """The attention of one step, laid out on the host.

    `numbers` is copied to the device once, with the other arrays of the step. `key` holds every integer that launches
    depend on: a graph captured with a plan is valid for every plan with an equal key, after its numbers have been
    copied to the same memory on the device. The count of numbers may differ.
    """

    @property
    def key(self) -> Hashable:
        """All integers that launches depend on."""

    @property
    def numbers(self) -> npt.NDArray[np.int32]:
        """The array [n] to copy to the device."""


@runtime_checkable
class PlanningBackend(Protocol):
    """An attention backend that lays steps out on the host and needs only the plan's numbers on the device."""

    def plan(self, batch: Batch, tokens: int | None = None) -> AttentionPlan:
        """Lay out a step, in numpy. Thread-safe.

        With `tokens`, the plan is padded to that many tokens, and its key varies little, for graphs.
        """

    def bind(self, pool: KVPool, key: Hashable, numbers: torch.Tensor) -> Attention:
        """Return the step's attention from a plan's numbers on the device, which may have a tail. Does not block."""


Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""The model: logits [len(keep), vocabulary] from token ids [1, T], positions [1, T] and flat indices `keep`."""


class Graph(Protocol):
    """Captured work, which reads and writes the memory that it was captured with."""

    def replay(self, work: Callable[[], None]) -> None:
        """Run the captured work, which has the effect of calling `work`. Does not block."""


class Capture(Protocol):
    """The capability to capture graphs."""

    def capture(self, work: Callable[[], None], memory: Mapping[str, torch.Tensor]) -> Graph:
        """Run `work`, which has been run before, and return it as a graph.

        `work` uses no memory but `memory` and its own allocations. Raises RuntimeError if it cannot be captured.
        """


class CudaGraph:
    """A graph of the CUDA driver."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self, work: Callable[[], None]) -> None:
        """As `Graph.replay`; `work` is not called."""
        self._graph.replay()


class CudaGraphs:
    """Capture by the CUDA driver. All graphs share the memory of their allocations, since only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None], memory: Mapping[str, torch.Tensor]) -> Graph:
        """As `Capture.capture`, in torch's current stream."""
        work()  # some libraries initialize as late as in their second run
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        # "thread_local", since the preparing thread continues to call the driver during the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            work()
        graph.replay()  # capturing does not run the work
        return CudaGraph(graph)


@dataclass
class _GraphInputs:
    """The memory that all graphs read and write; each graph uses the beginning of every tensor."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    numbers: torch.Tensor
    logits: torch.Tensor | None = None

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


class DecodeGraphs:
    """The graphs of a model, each captured when first needed, or in advance by `warm_up`."""

    def __init__(
        self,
        capture: Capture,
        backend: PlanningBackend,
        pool: KVPool,
        forward: Forward,
        weights: Mapping[str, torch.Tensor],
        sizes: Sequence[int] = SIZES,
    ) -> None:
        """Capture no graph yet. `weights` is all other memory that `forward` uses."""
        self._capture, self._backend, self._pool, self._forward = capture, backend, pool, forward
        self._sizes = sorted(sizes)
        self._weights = weights
        self._graphs: dict[Hashable, Graph] = {}
        self._is_off = False
        most, device = self._sizes[-1], pool.keys[0].device
        # The block tables of a step have no more entries than the pool has blocks, unless rows share blocks.
        numbers = self._planned(most).numbers.size + pool.block_count
        self._inputs = _GraphInputs(
            token_ids=torch.zeros(most, dtype=torch.int64, device=device),
            positions=torch.zeros(most, dtype=torch.int64, device=device),
            rows=torch.arange(most, device=device),
            numbers=torch.zeros(numbers, dtype=torch.int32, device=device),
        )

    @property
    def count(self) -> int:
        """Number of graphs captured so far."""
        return len(self._graphs)

    def size(self, batch: Batch) -> int | None:
        """Return the number of tokens that this step is padded to; None if it is no decode step, or too large."""
        tokens = len(batch.token_ids)
        # In a decode step every row has a single token and samples.
        if (
            self._is_off
            or not 0 < tokens <= self._sizes[-1]
            or not tokens == len(batch.chunks) == len(batch.sampling_rows)
        ):
            return None
        return self._sizes[bisect_left(self._sizes, tokens)]

    def run(
        self, key: Hashable, size: int, token_ids: torch.Tensor, positions: torch.Tensor, numbers: torch.Tensor
    ) -> torch.Tensor:
        """Run a step padded to `size` tokens and return its logits [tokens, vocabulary]; `key`, `numbers`: the plan's.

        The logits are valid until the next call, which overwrites them.
        """
        tokens = len(token_ids)
        self._make_room(len(numbers))
        inputs = self._inputs
        inputs.token_ids[:tokens].copy_(token_ids)
        inputs.positions[:tokens].copy_(positions)
        inputs.numbers[: len(numbers)].copy_(numbers)
        if (graph := self._graphs.get((size, key))) is not None:
            graph.replay(self._work(size, key))
        elif self._is_off or len(self._graphs) >= GRAPHS_MAX:
            self._work(size, key)()
        else:
            self._run_and_capture(size, key)
        assert inputs.logits is not None, "the work has allocated them"
        return inputs.logits[:tokens]

    def warm_up(self) -> None:
        """Capture a step of each size, the largest first, since smaller ones fit into its memory. Blocks.

        The null block is zeroed afterwards.
        """
        for size in reversed(self._sizes):
            plan = self._planned(size)
            ids, positions = self._inputs.token_ids[:size], self._inputs.positions[:size]
            numbers = torch.from_numpy(plan.numbers).to(ids.device)
            self.run(plan.key, size, ids, positions, numbers)
        null = torch.tensor([NULL_BLOCK], device=self._inputs.rows.device)
        for layer in range(len(self._pool.keys)):
            self._pool.clear(layer, null)

    def _planned(self, size: int) -> AttentionPlan:
        """Return the plan of a step of `size` rows with a token each, in the null block."""
        zeros, table = np.zeros(size, np.int64), np.full(1, NULL_BLOCK, np.int64)
        rows = [Row(start, start + 1, 1, table) for start in range(size)]
        return self._backend.plan(Batch(0, 0, zeros, zeros, zeros, zeros, chunks=rows), size)

    def _make_room(self, count: int) -> None:
        """Grow the memory for the plan's numbers if needed, and drop all graphs, which use the old address.

        Block tables have more entries than the pool has blocks only if rows share many blocks.
        """
        numbers = self._inputs.numbers
        if count > len(numbers):
            self._graphs.clear()
            self._inputs.numbers = torch.zeros(2 * count, dtype=numbers.dtype, device=numbers.device)

    def _run_and_capture(self, size: int, key: Hashable) -> None:
        work = self._work(size, key)
        work()  # allocates the logits outside any graph, since all graphs share them
        try:
            self._graphs[size, key] = self._capture.capture(work, {**self._weights, **self._inputs.memory()})
        except RuntimeError as error:  # such as a model whose code reads results on the host
            self._is_off = True
            log.warning("graphs_unavailable", reason=f"this model's steps cannot be captured: {error}")
            work()
        else:
            log.debug("graph_captured", tokens=size, graphs=len(self._graphs))

    def _work(self, size: int, key: Hashable) -> Callable[[], None]:
        inputs = self._inputs

        def work() -> None:
            with attending(self._backend.bind(self._pool, key, inputs.numbers)):
                token_ids, positions = inputs.token_ids[:size], inputs.positions[:size]
                logits = self._forward(token_ids[None], positions[None], inputs.rows[:size])
            if inputs.logits is None:
                inputs.logits = logits.new_zeros(self._sizes[-1], logits.shape[-1])
            inputs.logits[:size].copy_(logits)

        return work
