"""Decode steps that are captured once for each kind, and then replayed from the addresses that they were captured with.

An attention backend takes part if it plans: see `PlanningBackend`. Prefill and mixed steps never come here.
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
"""Rows of the steps that are captured: others are padded to the next. Larger ones have work enough to hide launches."""

GRAPHS_MAX = 256
"""More kinds of steps than this are not captured: each graph takes memory, and its capture time."""


def sizes_up_to(rows: int) -> Sequence[int]:
    """Those of `SIZES` that steps of at most so many rows use."""
    return SIZES[: bisect_left(SIZES, rows) + 1]


def kept_bytes(rows: int, vocabulary: int, logit_bytes: int) -> int:
    """Memory that graphs of steps up to so many rows keep, beside what they allocate and share."""
    return sizes_up_to(rows)[-1] * vocabulary * logit_bytes


class AttentionPlan(Protocol):
    """One step's attention, laid out on the host.

    `numbers` is moved to the device with the rest of the step, and only once. `key` holds every integer that launches
    have baked in: a graph that was captured with one plan serves every other of an equal key, if only the numbers on
    the device are overwritten. Their count may differ.
    """

    @property
    def key(self) -> Hashable:
        """What must be equal."""

    @property
    def numbers(self) -> npt.NDArray[np.int32]:
        """[n]"""


@runtime_checkable
class PlanningBackend(Protocol):
    """An attention backend that lays a step out on the host, and then needs nothing but its numbers on the device."""

    def plan(self, batch: Batch, tokens: int | None = None) -> AttentionPlan:
        """On any thread, in numpy alone. With `tokens`, padded to so many, and with few keys: for graphs."""

    def bind(self, pool: KVPool, key: Hashable, numbers: torch.Tensor) -> Attention:
        """The step's attention from a plan's numbers on the device, perhaps followed by more. Waits for nothing."""


Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""The model: logits [len(keep), vocabulary] from token ids [1, T], positions [1, T] and the flat tokens to `keep`."""


class Graph(Protocol):
    """A captured piece of work. It reads and writes the memory that it was captured with."""

    def replay(self, work: Callable[[], None]) -> None:
        """Do it again, which is what `work` would do. Waits for nothing."""


class Capture(Protocol):
    """Whoever can capture."""

    def capture(self, work: Callable[[], None], memory: Mapping[str, torch.Tensor]) -> Graph:
        """Do `work`, which was done before, and keep it. It touches `memory`, what it makes itself, and nothing else.

        Raises RuntimeError if it cannot be kept.
        """


class CudaGraph:
    """One of the driver's."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self, work: Callable[[], None]) -> None:
        """As `Graph.replay`; the driver takes our word for it."""
        self._graph.replay()


class CudaGraphs:
    """Capture by the driver. All graphs share the memory for what they allocate, since they run one after the other."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None], memory: Mapping[str, torch.Tensor]) -> Graph:
        """As `Capture.capture`, in torch's current stream."""
        work()  # for libraries that settle down in their second run only
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        # The preparing thread goes on while this one captures, so only this one's calls must be harmless.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            work()
        graph.replay()  # to capture is not to run
        return CudaGraph(graph)


@dataclass
class _GraphInputs:
    """What every graph reads and writes, always in the same place; a graph uses the beginning of each."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    numbers: torch.Tensor
    logits: torch.Tensor | None = None

    def memory(self) -> dict[str, torch.Tensor]:
        """By name."""
        return {name: value for name, value in vars(self).items() if value is not None}


class DecodeGraphs:
    """The graphs of one model, made when they are first needed or all at once by `warm_up`."""

    def __init__(
        self,
        capture: Capture,
        backend: PlanningBackend,
        pool: KVPool,
        forward: Forward,
        weights: Mapping[str, torch.Tensor],
        sizes: Sequence[int] = SIZES,
    ) -> None:
        """`weights`: all other memory that `forward` touches."""
        self._capture, self._backend, self._pool, self._forward = capture, backend, pool, forward
        self._sizes = sorted(sizes)
        self._weights = weights
        self._graphs: dict[Hashable, Graph] = {}
        self._is_off = False
        most, device = self._sizes[-1], pool.keys[0].device
        # A step's tables are no longer than the pool, unless rows share blocks.
        numbers = self._planned(most).numbers.size + pool.block_count
        self._inputs = _GraphInputs(
            token_ids=torch.zeros(most, dtype=torch.int64, device=device),
            positions=torch.zeros(most, dtype=torch.int64, device=device),
            rows=torch.arange(most, device=device),
            numbers=torch.zeros(numbers, dtype=torch.int32, device=device),
        )

    @property
    def count(self) -> int:
        """How many graphs there are."""
        return len(self._graphs)

    def size(self, batch: Batch) -> int | None:
        """To how many tokens this step is padded; None if it is no decode step, or too large."""
        tokens = len(batch.token_ids)
        # As many rows as tokens that all sample: every row decodes.
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
        """Logits [tokens, vocabulary] of a step that is padded to `size` tokens; `key` and `numbers` are the plan's.

        They lie where the last step's lay.
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
        assert inputs.logits is not None, "the work has made them"
        return inputs.logits[:tokens]

    def warm_up(self) -> None:
        """Capture a step of each size, the largest first: the smaller fit into its memory. The null block is clean."""
        for size in reversed(self._sizes):
            plan = self._planned(size)
            ids, positions = self._inputs.token_ids[:size], self._inputs.positions[:size]
            numbers = torch.from_numpy(plan.numbers).to(ids.device)
            self.run(plan.key, size, ids, positions, numbers)
        null = torch.tensor([NULL_BLOCK], device=self._inputs.rows.device)
        for layer in range(len(self._pool.keys)):
            self._pool.clear(layer, null)

    def _planned(self, size: int) -> AttentionPlan:
        """Of a step of `size` rows with a token each, in the null block."""
        zeros, table = np.zeros(size, np.int64), np.full(1, NULL_BLOCK, np.int64)
        rows = [Row(start, start + 1, 1, table) for start in range(size)]
        return self._backend.plan(Batch(0, 0, zeros, zeros, zeros, zeros, chunks=rows), size)

    def _make_room(self, count: int) -> None:
        """Rows that share many blocks have longer tables than the pool. Then addresses change, and all graphs go."""
        numbers = self._inputs.numbers
        if count > len(numbers):
            self._graphs.clear()
            self._inputs.numbers = torch.zeros(2 * count, dtype=numbers.dtype, device=numbers.device)

    def _run_and_capture(self, size: int, key: Hashable) -> None:
        work = self._work(size, key)
        work()  # and there are logits, which no graph is to allocate, since all write to the same
        try:
            self._graphs[size, key] = self._capture.capture(work, {**self._weights, **self._inputs.memory()})
        except RuntimeError as error:  # such as a model that has to wait for what it computed
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
