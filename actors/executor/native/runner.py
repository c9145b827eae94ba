"""Choosing tokens from a step's logits by the native kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cuelight.actors.executor.batch import Batch, DeviceRows, SamplingRow
from cuelight.actors.executor.native.attention import StepLayout, layout
from cuelight.actors.executor.native.decoder import NativeDecoder
from cuelight.actors.executor.native.kv_pool import NativeKVPool
from cuelight.actors.executor.rng import key
from cuelight.messages.executor import ExecuteStep
from cuelight.messages.request import BlockCopies, HostTier
from cuelight.messages.scheduler import StepDone

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]


class SampleKernel:
    """The library's function on numpy arrays."""

    def __init__(self, library: ctypes.CDLL) -> None:
        p, i64 = ctypes.c_void_p, ctypes.c_int64
        self._sample = library.cue_sample
        self._sample.argtypes, self._sample.restype = (p, i64, i64, i64, p, p, p, p, p), None

    def sample(self, logits: Floats, temperatures: Doubles, top_k: Ints, top_p: Doubles, keys: Keys, out: Ints) -> None:
        """`out[i]` becomes a token of row i of logits, unless its temperature is 0; -1 if no logit is finite.

        The options are as in `Sampling`, one for each row, and so are the keys, of seed and position. Raises
        `ValueError` on arrays that do not fit.
        """
        rows, n = logits.shape
        if logits.dtype != np.float32 or logits.strides[1:] != (4,) or logits.strides[0] % 4 or not 0 < n < 2**31:
            raise ValueError(f"logits are rows of float32, not {logits.dtype} {logits.shape}")
        options = [
            _address(array, kind, rows)
            for array, kind in ((temperatures, "f8"), (top_k, "i8"), (top_p, "f8"), (keys, "u8"), (out, "i8"))
        ]
        self._sample(logits.ctypes.data, logits.strides[0] // 4, rows, n, *options)


def _address(array: Doubles | Ints | Keys, kind: str, rows: int) -> int:
    if array.dtype != np.dtype(kind) or array.shape != (rows,) or not array.flags.c_contiguous:
        raise ValueError(f"needed {rows} numbers of type {kind}, not {array.dtype} {array.shape}")
    return array.ctypes.data


class Sampler:
    """Chooses the tokens of a step."""

    def __init__(self, library: ctypes.CDLL, eos_token_ids: Sequence[int]) -> None:
        self._kernel = SampleKernel(library)
        self._eos_token_ids = eos_token_ids

    def choose(self, logits: Floats, best: Ints, sampling_rows: Sequence[SamplingRow]) -> Ints:
        """A token for each row of logits [rows, vocabulary], which it may change; -1 for a row without finite logits.

        `best` is the most probable token of each, or -1, and becomes the answer.
        """
        sampled = []
        for row, sampling_row in enumerate(sampling_rows):
            if best[row] < 0:
                continue
            if sampling_row.output_index < sampling_row.sampling.min_tokens:
                best[row] = self._forbid_ends(logits[row], sampling_row)
            if sampling_row.sampling.temperature > 0:
                sampled.append(row)
        if sampled:
            self._sample(logits, best, sampling_rows, sampled)
        return best

    def _forbid_ends(self, logits: Floats, sampling_row: SamplingRow) -> int:
        """The most probable of the other tokens, or -1."""
        sampling = sampling_row.sampling
        logits[[*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_token_ids)]] = -np.inf
        best = int(logits.argmax())
        return best if logits[best] > -np.inf else -1

    def _sample(self, logits: Floats, best: Ints, sampling_rows: Sequence[SamplingRow], sampled: Sequence[int]) -> None:
        temperatures, top_p = np.zeros((2, len(sampling_rows)))
        top_k, keys = np.zeros(len(sampling_rows), np.int64), np.zeros(len(sampling_rows), np.uint64)
        for row in sampled:
            sampling_row = sampling_rows[row]
            sampling = sampling_row.sampling
            temperatures[row], top_k[row], top_p[row] = sampling.temperature, sampling.top_k, sampling.top_p
            keys[row] = key(sampling.seed or 0, sampling_row.position)
        self._kernel.sample(logits, temperatures, top_k, top_p, keys, best)


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
