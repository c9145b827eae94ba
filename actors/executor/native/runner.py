"""The device on a CPU: the native decoder over one flat batch, and sampling. Loads neither torch nor transformers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuelight.actors.executor.batch import Batch, DeviceRows
from cuelight.actors.executor.native.attention import StepLayout, layout
from cuelight.actors.executor.native.decoder import NativeDecoder
from cuelight.actors.executor.native.pool import NativeKVPool
from cuelight.actors.executor.native.sampler import Ints, Sampler
from cuelight.messages.executor import ExecuteStep
from cuelight.messages.request import BlockCopies, HostTier
from cuelight.messages.scheduler import StepDone


@dataclass(kw_only=True)
class NativeBatch(Batch):
    """A step's batch, and how the kernels read it."""

    layout: StepLayout
    sampled: Ints


class NativeRunner:
    """Prepares batches of rows and runs them.

    Sampled tokens stay in `_last_tokens`, by slot, and feed the next step from there.
    """

    def __init__(self, decoder: NativeDecoder, pool: NativeKVPool, sampler: Sampler, host: HostTier) -> None:
        self._decoder = decoder
        self._pool = pool
        self._sampler = sampler
        self.host = host
        self._rows = DeviceRows(pool.block_size)
        self._last_tokens: Ints = np.zeros(0, np.int64)

    @property
    def block_count(self) -> int:
        """Blocks in the KV pool, the null block included."""
        return self._pool.block_count

    @property
    def block_size(self) -> int:
        """Token slots per block."""
        return self._pool.block_size

    def copy(self, copies: BlockCopies) -> None:
        """Copy whole blocks."""
        self._pool.copy(copies)

    def prepare(self, step: ExecuteStep) -> Batch:
        """Lay out one step on the host."""
        batch = self._rows.prepare(step)
        chunks = [(each.start, each.stop, each.context_length) for each in batch.chunks]
        tables = [each.block_ids for each in batch.chunks]
        laid_out = layout(batch.positions, batch.blocks, batch.offsets, chunks, tables)
        sampled = np.array([row.index for row in batch.sampling_rows], np.int64)
        return NativeBatch(**vars(batch), layout=laid_out, sampled=sampled)

    def run(self, batch: Batch) -> StepDone:
        """One forward pass and one sampled token for each row that reached its end."""
        assert isinstance(batch, NativeBatch), "batches come from `prepare`"
        if batch.fed:
            batch.token_ids[batch.fed] = self._last_tokens[batch.fed_slots]
        logits, best = self._decoder.decode(batch.token_ids, batch.layout, batch.sampled)
        token_ids: list[int] = self._sampler.choose(logits, best, batch.sampling_rows).tolist()
        for row, token_id in zip(batch.sampling_rows, token_ids, strict=True):
            self._keep(row.slot, token_id)
        return batch.done(token_ids)

    def _keep(self, slot: int, token_id: int) -> None:
        if slot >= len(self._last_tokens):
            self._last_tokens = np.concatenate([self._last_tokens, np.zeros(slot + 1, np.int64)])
        # A row without a usable token is ended by the scheduler; until then any valid id will do.
        self._last_tokens[slot] = max(token_id, 0)
