"""The torch device: the forward pass of a transformers model over one flat batch, and sampling.

Each step uses three streams: its arrays are sent to the device on `prepare`, it is computed on `compute`, and its
tokens are fetched on `read`. The only thread that waits for the device is the thread that reads the tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import assert_never

import numpy as np
import torch

from cuelight.actors.executor.batch import Batch, DeviceRows, Ints
from cuelight.actors.executor.device import DeviceLost
from cuelight.actors.executor.model.attention import Attention, attending
from cuelight.actors.executor.model.graphs import (
    SIZES,
    AttentionPlan,
    Capture,
    CudaGraphs,
    DecodeGraphs,
    PlanningBackend,
    sizes_up_to,
)
from cuelight.actors.executor.model.loading import LoadedModel, load
from cuelight.actors.executor.model.sampling import SamplingPlan, choose
from cuelight.actors.executor.options import LoadOptions, current_phases
from cuelight.actors.executor.streams import DeviceEvent, DeviceStreams, Numbers, Staging, StagingPool, ThreadStream
from cuelight.kernel import get_logger
from cuelight.messages.executor import ExecuteStep
from cuelight.messages.request import BlockCopies, CopyKind, HostTier
from cuelight.messages.scheduler import StepDone

log = get_logger("cuelight.executor")

POISON = -1
"""With `debug_poison`, the last token in a free slot."""

DEBUG_VARIABLE = "CUELIGHT_DEBUG_POISON"
"""Environment variable that turns `debug_poison` on."""


@dataclass(kw_only=True)
class ModelBatch(Batch):
    """A step's batch with its arrays in `staging`, which are on the device after the event `moved`.

    Slots are below `slot_count`. `size` is the size of the graph that the step is padded for; None if it runs without a
    graph. A planning backend sets `plan`, any other backend `attention`.
    """

    staging: Staging
    sampling: SamplingPlan
    slot_count: int
    plan: AttentionPlan | None = None
    size: int | None = None
    attention: Attention | None = None
    moved: DeviceEvent | None = None


class ModelRunner:
    """A device that prepares batches and runs them with torch.

    Sampled tokens stay on the device in `_last_tokens`, indexed by slot, and feed the next step from there. A slot can
    be reused by another row without waiting, because its token is read and written in a single stream.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        streams: DeviceStreams | None = None,
        graphs: DecodeGraphs | None = None,
        *,
        debug_poison: bool | None = None,
    ) -> None:
        """Use the best streams for the device if `streams` is None.

        With `debug_poison`, a step that reads the token of a free slot fails, at some cost to every step; by default
        the environment variable decides.
        """
        self._loaded = loaded
        self._planning = loaded.backend if isinstance(loaded.backend, PlanningBackend) else None
        self._streams = streams or _streams(loaded.device)
        self._graphs = graphs
        self._debugs = DEBUG_VARIABLE in os.environ if debug_poison is None else debug_poison
        self._rows = DeviceRows(loaded.pool.block_size)
        self._staging = StagingPool(loaded.device, is_shared=self._streams.prepare is None)
        self._last_tokens = torch.zeros(0, dtype=torch.int64, device=loaded.device)

    @property
    def block_count(self) -> int:
        """Number of blocks in the KV pool, including the null block."""
        return self._loaded.pool.block_count

    @property
    def block_size(self) -> int:
        """Number of token slots per block."""
        return self._loaded.pool.block_size

    @property
    def host(self) -> HostTier:
        """Host memory for blocks that leave the pool, and the cost of using it."""
        return self._loaded.host_tier

    def warm_up(self) -> None:
        """Capture graphs of all sizes, if graphs are in use. Call before the first step. Blocks."""
        if self._graphs is not None:
            self._streams.compute.enqueue(torch.inference_mode()(self._graphs.warm_up))
            self._streams.compute.record().wait()

    def prepare(self, step: ExecuteStep) -> Batch:
        """Lay out one step on the host and send its arrays to the device."""
        with _typed_failures():
            return self._prepare(step)

    def _prepare(self, step: ExecuteStep) -> ModelBatch:
        batch = self._rows.prepare(step)
        size = None if self._graphs is None else self._graphs.size(batch)
        prepared = ModelBatch(
            **vars(batch),
            staging=self._staging.take(),
            sampling=SamplingPlan.of(batch.sampling_rows, self._loaded.eos_token_ids),
            slot_count=max(self._rows.slot_count, 1 + max(batch.freed_slots, default=-1)),
            plan=None if self._planning is None else self._planning.plan(batch, size),
            size=size,
        )
        arrays: dict[str, Numbers] = {"token ids": batch.token_ids, "positions": batch.positions, **_slots(batch)}
        arrays.update(prepared.sampling.arrays)
        if prepared.plan is not None:
            arrays["attention"] = prepared.plan.numbers
        prepared.staging.fill(arrays, len(batch.sampling_rows) + self._debugs)
        self._send(prepared)
        return prepared

    def _send(self, batch: ModelBatch) -> None:
        def attend() -> None:
            # The batch holds the attention until the step is done: its memory belongs to this stream, and another
            # stream reads it.
            batch.attention = self._loaded.attention(batch)

        stream = self._streams.prepare
        if batch.plan is None and stream is None:
            attend()
        elif batch.plan is None and stream is not None:
            stream.enqueue(attend)
        batch.moved = batch.staging.send(stream)

    def copy(self, copies: BlockCopies) -> DeviceEvent:
        """Enqueue the copies of whole blocks in the compute stream, ahead of later steps."""
        assert copies.copying is CopyKind.FORK or self._loaded.host is not None, "saving and loading need host memory"
        with _typed_failures():
            self._streams.compute.enqueue(partial(self._copy, copies))
        return self._streams.compute.record()

    @torch.inference_mode()
    def _copy(self, copies: BlockCopies) -> None:
        pool, host = self._loaded.pool, self._loaded.host
        if copies.copying is CopyKind.FORK:
            pool.fork(copies.sources, copies.targets)
            return
        assert host is not None
        match copies.copying:
            case CopyKind.SAVE:
                host.save(copies.sources, copies.targets)
            case CopyKind.LOAD:
                host.load(copies.sources, copies.targets)
            case _:
                assert_never(copies.copying)

    def run(self, batch: Batch) -> PendingStep:
        """Enqueue one forward pass, and the sampling of a token for each row that reaches its end. Does not block."""
        assert isinstance(batch, ModelBatch), "batches come from `prepare`"
        compute, staging = self._streams.compute, batch.staging
        if batch.moved is not None:
            compute.follow(batch.moved)
        with _typed_failures():
            compute.enqueue(partial(self._compute, batch))
        computed = compute.record()
        fetched = staging.fetch(self._streams.read, computed)
        events = [event for event in (batch.moved, computed, fetched) if event is not None]
        return PendingStep(batch, events, self._staging)

    @torch.inference_mode()
    def _compute(self, batch: ModelBatch) -> None:
        """Compute the step. Runs in the compute stream."""
        self._make_room(batch.slot_count)
        on_device, samples = batch.staging.on_device, len(batch.sampling_rows)
        results = batch.staging.results()
        if self._debugs and batch.freed_slots:
            self._last_tokens.index_fill_(0, on_device("freed slots"), POISON)
        if batch.fed:
            self._feed(batch, results)
        elif self._debugs:
            results[samples:].zero_()
        logits = self._forward(batch)
        if samples:
            token_ids = choose(logits, batch.sampling, on_device)
            results[:samples].copy_(token_ids)
            # The scheduler ends a row without a valid token (negative id); until then the row computes token 0.
            self._last_tokens.index_copy_(0, on_device("sampled slots"), token_ids.clamp_(min=0))

    def _feed(self, batch: ModelBatch, results: torch.Tensor) -> None:
        fed = self._last_tokens.index_select(0, batch.staging.on_device("fed slots"))
        if self._debugs:
            results[-1:].copy_((fed == POISON).sum())
            fed.clamp_(min=0)
        batch.staging.on_device("token ids").index_copy_(0, batch.staging.on_device("fed"), fed)

    def _forward(self, batch: ModelBatch) -> torch.Tensor:
        """Return logits [samples, vocabulary] of the rows that sample; partial chunks have none (`partial-chunk`)."""
        on_device = batch.staging.on_device
        token_ids, positions = on_device("token ids"), on_device("positions")
        if batch.size is not None:
            assert self._graphs is not None and batch.plan is not None, "only a step for a graph is padded"
            return self._graphs.run(batch.plan.key, batch.size, token_ids, positions, on_device("attention"))
        with attending(self._attention(batch)):
            return self._loaded.forward(token_ids[None], positions[None], on_device("sampled"))

    def _attention(self, batch: ModelBatch) -> Attention:
        if batch.attention is not None:
            return batch.attention
        assert self._planning is not None and batch.plan is not None, "a backend that does not plan has set `attention`"
        return self._planning.bind(self._loaded.pool, batch.plan.key, batch.staging.on_device("attention"))

    def _make_room(self, slot_count: int) -> None:
        missing = slot_count - len(self._last_tokens)
        if missing > 0:
            fresh = self._last_tokens.new_full((max(missing, len(self._last_tokens)),), POISON if self._debugs else 0)
            self._last_tokens = torch.cat([self._last_tokens, fresh])


class PendingStep:
    """The pending result of a step on the device."""

    def __init__(self, batch: ModelBatch, events: list[DeviceEvent], staging: StagingPool) -> None:
        self._batch, self._events, self._staging = batch, events, staging

    def wait(self) -> StepDone:
        """Block until the device has finished the step and its tokens are on the host; as `Pending.wait`."""
        error: BaseException | None = None
        for event in self._events:
            try:
                event.wait()
            except BaseException as raised:
                error = error or raised
        batch = self._batch
        results = [] if error else batch.staging.fetched()
        self._staging.give_back(batch.staging)
        if error is not None:
            with _typed_failures():
                raise error
        assert len(results) == len(batch.sampling_rows) or results.pop() == 0, "no step reads the token of a free slot"
        return batch.done(results)


@contextmanager
def _typed_failures() -> Iterator[None]:
    """Convert torch's errors to those of the `Device` protocol: MemoryError and DeviceLost."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error
    except torch.AcceleratorError as error:  # every later call on this process's device fails, too
        raise DeviceLost(str(error)) from error


def _slots(batch: Batch) -> dict[str, Ints]:
    """Return the index arrays of the step: flat indices of its tokens, and slots of its rows."""
    return {
        "fed": np.array(batch.fed, np.int64),
        "fed slots": np.array(batch.fed_slots, np.int64),
        "sampled": np.array([row.index for row in batch.sampling_rows], np.int64),
        "sampled slots": np.array([row.slot for row in batch.sampling_rows], np.int64),
        "freed slots": np.array(batch.freed_slots, np.int64),
    }


def _streams(device: torch.device, compute: ThreadStream | None = None) -> DeviceStreams:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the model was loaded in another stream
        return DeviceStreams.cuda(device)
    compute = compute or ThreadStream("cuelight compute")
    if device.type == "cpu":
        return DeviceStreams(compute)
    return DeviceStreams(compute, ThreadStream("cuelight prepare"), ThreadStream("cuelight read"))


def graphs_of(loaded: LoadedModel, capture: Capture, sizes: Sequence[int] = SIZES) -> DecodeGraphs | None:
    """Return graphs of decode steps with `sizes` rows; None if the attention backend does not plan."""
    if not isinstance(loaded.backend, PlanningBackend):
        return None
    weights = dict(chain(loaded.model.named_parameters(), loaded.model.named_buffers()))
    for name, layers in (("keys", loaded.pool.keys), ("values", loaded.pool.values)):
        weights.update({f"{name} {layer}": tensor for layer, tensor in enumerate(layers)})
    return DecodeGraphs(capture, loaded.backend, loaded.pool, loaded.forward, weights, sizes)


def load_runner(options: LoadOptions) -> ModelRunner:
    """Load the model onto its device, ready to run. Blocks. Raises CannotLoad."""
    # On the CPU the same thread loads and computes: torch starts a thread pool for each thread that computes, and two
    # pools would compete for the cores.
    stream = ThreadStream("cuelight compute")
    try:
        loaded = stream.call(partial(copy_context().run, load, options))  # in this context, which has the load phases
    except BaseException:
        stream.close()
        raise
    if loaded.device.type != "cuda":
        return ModelRunner(loaded, _streams(loaded.device, stream))
    stream.close()
    graphs = None
    if not options.eager:
        graphs = graphs_of(loaded, CudaGraphs(), sizes_up_to(min(options.running_max, options.token_budget)))
    runner = ModelRunner(loaded, graphs=graphs)
    reserved = torch.cuda.memory_reserved(loaded.device)
    phases = current_phases(options.now)
    with phases("graphs"):
        runner.warm_up()
    log.info(
        "graphs",
        count=0 if graphs is None else graphs.count,
        seconds=round(phases.seconds["graphs"], 3),
        bytes=torch.cuda.memory_reserved(loaded.device) - reserved,
    )
    return runner
