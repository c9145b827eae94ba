"""The device with a real model on it: the transformers forward over one flat batch, and sampling.

What a step needs goes to the device beforehand, on one way; its tokens come back behind it, on another. Between them
the device computes one step after the other, and nobody on the host waits for it but who reads the tokens.
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
"""With `debug_poison`, the last token of a row that belongs to nobody."""

DEBUG_VARIABLE = "CUELIGHT_DEBUG_POISON"
"""Set in the environment, it turns `debug_poison` on."""


@dataclass(kw_only=True)
class ModelBatch(Batch):
    """A step's batch, with what has been laid out for the device and, once `moved`, is there.

    The arrays lie in `staging`. Slots are below `slot_count`. `size` is that of the graph that the step is padded for;
    None if it runs without. A backend that does not plan makes its `attention` in one go.
    """

    staging: Staging
    sampling: SamplingPlan
    slot_count: int
    plan: AttentionPlan | None = None
    size: int | None = None
    attention: Attention | None = None
    moved: DeviceEvent | None = None


class ModelRunner:
    """Prepares batches of rows and runs them.

    Sampled tokens stay on the device in `_last_tokens`, by slot, and feed the next step from there. Another row takes a
    slot over without a wait: all that reads and writes its token is in one stream.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        streams: DeviceStreams | None = None,
        graphs: DecodeGraphs | None = None,
        *,
        debug_poison: bool | None = None,
    ) -> None:
        """Without `streams`, those that the device is best served by. With `debug_poison`, a step that is fed the token
        of a row that belongs to nobody fails, at some cost to each; by default as the environment says.
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
        """Blocks in the KV pool, the null block included."""
        return self._loaded.pool.block_count

    @property
    def block_size(self) -> int:
        """Token slots per block."""
        return self._loaded.pool.block_size

    @property
    def host(self) -> HostTier:
        """Host memory for blocks that leave the pool, and what its use costs."""
        return self._loaded.host_tier

    def warm_up(self) -> None:
        """Capture graphs of all sizes, if there are graphs. Blocks. Before the first step."""
        if self._graphs is not None:
            self._streams.compute.enqueue(torch.inference_mode()(self._graphs.warm_up))
            self._streams.compute.record().wait()

    def prepare(self, step: ExecuteStep) -> Batch:
        """Lay out one step on the host, and send it to the device."""
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
            # Kept until the step is over, since the memory is this stream's and another one reads it.
            batch.attention = self._loaded.attention(batch)

        stream = self._streams.prepare
        if batch.plan is None and stream is None:
            attend()
        elif batch.plan is None and stream is not None:
            stream.enqueue(attend)
        batch.moved = batch.staging.send(stream)

    def copy(self, copies: BlockCopies) -> DeviceEvent:
        """Copy whole blocks, before what is computed later."""
        assert copies.copying is CopyKind.FORK or self._loaded.host is not None, (
            "blocks are moved only where there is memory for them"
        )
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
        """One forward pass and one sampled token for each row that reached its end. Waits for nothing."""
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
        """In the computing stream."""
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
            # A row without a usable token is ended by the scheduler; until then any valid id will do.
            self._last_tokens.index_copy_(0, on_device("sampled slots"), token_ids.clamp_(min=0))

    def _feed(self, batch: ModelBatch, results: torch.Tensor) -> None:
        fed = self._last_tokens.index_select(0, batch.staging.on_device("fed slots"))
        if self._debugs:
            results[-1:].copy_((fed == POISON).sum())
            fed.clamp_(min=0)
        batch.staging.on_device("token ids").index_copy_(0, batch.staging.on_device("fed"), fed)

    def _forward(self, batch: ModelBatch) -> torch.Tensor:
        """Logits [samples, vocabulary] after which to sample; partial chunks have none (rule `partial-chunk`)."""
        on_device = batch.staging.on_device
        token_ids, positions = on_device("token ids"), on_device("positions")
        if batch.size is not None:
            assert self._graphs is not None and batch.plan is not None, "who padded the step has graphs"
            return self._graphs.run(batch.plan.key, batch.size, token_ids, positions, on_device("attention"))
        with attending(self._attention(batch)):
            return self._loaded.forward(token_ids[None], positions[None], on_device("sampled"))

    def _attention(self, batch: ModelBatch) -> Attention:
        if batch.attention is not None:
            return batch.attention
        assert self._planning is not None and batch.plan is not None, "who does not plan has made it"
        return self._planning.bind(self._loaded.pool, batch.plan.key, batch.staging.on_device("attention"))

    def _make_room(self, slot_count: int) -> None:
        missing = slot_count - len(self._last_tokens)
        if missing > 0:
            fresh = self._last_tokens.new_full((max(missing, len(self._last_tokens)),), POISON if self._debugs else 0)
            self._last_tokens = torch.cat([self._last_tokens, fresh])


class PendingStep:
    """A step on its way through the device."""

    def __init__(self, batch: ModelBatch, events: list[DeviceEvent], staging: StagingPool) -> None:
        self._batch, self._events, self._staging = batch, events, staging

    def wait(self) -> StepDone:
        """As `Pending.wait`: until the tokens are on the host, and the device is through with the step."""
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
        assert len(results) == len(batch.sampling_rows) or results.pop() == 0, (
            "no step is fed a token of a row that is gone"
        )
        return batch.done(results)


@contextmanager
def _typed_failures() -> Iterator[None]:
    """What torch raises, as the kinds of failure that a device knows of."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error
    except torch.AcceleratorError as error:  # whatever is asked of this process's device from now on fails as well
        raise DeviceLost(str(error)) from error


def _slots(batch: Batch) -> dict[str, Ints]:
    """Which tokens and rows the step is about, for the device."""
    return {
        "fed": np.array(batch.fed, np.int64),
        "fed slots": np.array(batch.fed_slots, np.int64),
        "sampled": np.array([row.index for row in batch.sampling_rows], np.int64),
        "sampled slots": np.array([row.slot for row in batch.sampling_rows], np.int64),
        "freed slots": np.array(batch.freed_slots, np.int64),
    }


def _streams(device: torch.device, compute: ThreadStream | None = None) -> DeviceStreams:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what has been loaded so far was loaded in another stream
        return DeviceStreams.cuda(device)
    compute = compute or ThreadStream("cuelight compute")
    if device.type == "cpu":
        return DeviceStreams(compute)
    return DeviceStreams(compute, ThreadStream("cuelight prepare"), ThreadStream("cuelight read"))


def graphs_of(loaded: LoadedModel, capture: Capture, sizes: Sequence[int] = SIZES) -> DecodeGraphs | None:
    """Graphs of decode steps with so many rows; None where the attention backend takes no part."""
    if not isinstance(loaded.backend, PlanningBackend):
        return None
    weights = dict(chain(loaded.model.named_parameters(), loaded.model.named_buffers()))
    for name, layers in (("keys", loaded.pool.keys), ("values", loaded.pool.values)):
        weights.update({f"{name} {layer}": tensor for layer, tensor in enumerate(layers)})
    return DecodeGraphs(capture, loaded.backend, loaded.pool, loaded.forward, weights, sizes)


def load_runner(options: LoadOptions) -> ModelRunner:
    """The model on its device, ready to run. Raises CannotLoad."""
    # On the CPU the thread that loads is the one that computes: each that ever does gets a team of threads, and these
    # would be in each other's way.
    stream = ThreadStream("cuelight compute")
    try:
        loaded = stream.call(partial(copy_context().run, load, options))  # so that its phases are told
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
