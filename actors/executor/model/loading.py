"""Loading of a transformers model: read it, optimize it, size its KV pool, and allocate host memory for blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from cuelight.actors.executor.batch import Batch, BatchChunk, Ints
from cuelight.actors.executor.model.attention import Attention, UnsupportedAttention, attending, register
from cuelight.actors.executor.model.backends import AttentionBackend, AttentionSpec, choose
from cuelight.actors.executor.model.compiling import compile_layers
from cuelight.actors.executor.model.folder import choose_device, choose_dtype, context_length, read_config, read_model
from cuelight.actors.executor.model.graphs import PlanningBackend, kept_bytes, sizes_up_to
from cuelight.actors.executor.model.kv_pool import HostPool, KVPool
from cuelight.actors.executor.model.linear import pack, quantize
from cuelight.actors.executor.model.memory import (
    TOKENS_MAX,
    DeviceMemory,
    MemoryBudget,
    count_blocks,
    measure_costs,
    measure_memory,
    memory_of,
)
from cuelight.actors.executor.model.model_check import ModelCheck
from cuelight.actors.executor.model.module_replacement import Probe, spread, vocabulary_of
from cuelight.actors.executor.model.passes import apply_passes, standard_passes
from cuelight.actors.executor.model.sampling import peak_bytes
from cuelight.actors.executor.native.build import NoNativeCode, load_native
from cuelight.actors.executor.options import CannotLoad, LoadOptions, current_phases
from cuelight.kernel import get_logger
from cuelight.messages.request import NULL_BLOCK, HostTier

log = get_logger("cuelight.executor")

CONTEXT_LENGTH_MAX = 1 << 17
"""Context length, in tokens, of a model whose configuration has none."""

INT8_TOLERANCE = 0.2
"""Largest relative deviation of the logits by quantization: suitable models have 0.02, random weights up to 0.06."""

LOGIT_BYTES = 8
"""Bytes for each logit of the forward pass: in the model's dtype, in float32, and a mask."""


@dataclass(frozen=True)
class LoadedModel:
    """A model with its KV pool, and host memory for blocks if there is any."""

    model: PreTrainedModel
    pool: KVPool
    host: HostPool | None
    host_tier: HostTier
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: tuple[int, ...]
    backend: AttentionBackend

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Return logits [len(keep), vocabulary] at the flat indices `keep`; `token_ids` and `positions` are [1, T]."""
        output = self.model(input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=keep)
        logits: torch.Tensor = output.logits[0]
        return logits

    def attention(self, batch: Batch) -> Attention:
        """Return the attention of one step, from the chosen backend."""
        return self.backend.step(self.pool, batch)


def load(options: LoadOptions, memory: Callable[[torch.device], DeviceMemory] = memory_of) -> LoadedModel:
    """Load the weights, optimize the model, and allocate the pool; with host memory, measure the cost of using it.

    Blocks. The log has the seconds of each phase.

    Raises:
        CannotLoad: the folder, dtype, device or architecture cannot be served, or memory does not suffice.
    """
    try:
        return _TransformersLoader(options, memory).load()
    except torch.OutOfMemoryError as error:
        raise CannotLoad(f"the model does not fit: {error}") from error


class _TransformersLoader:
    """The phases of loading, in order."""

    def __init__(self, options: LoadOptions, memory: Callable[[torch.device], DeviceMemory]) -> None:
        self._options = options
        self._phases = current_phases(options.now)
        with self._phases("read config"):
            self._device = choose_device(options.device)
            self._dtype = choose_dtype(options.dtype, self._device)
            self._config = read_config(options.folder)
        self._text = self._config.get_text_config()
        self._memory = memory(self._device)
        try:
            self._spec = AttentionSpec.of(self._config, self._device, self._dtype, options.block_size)
        except RuntimeError as error:  # raised by transformers for layers with different configurations
            raise CannotLoad(
                f"this model's layers differ from each other, which is not supported yet: {error}"
            ) from error

    def load(self) -> LoadedModel:
        """Run all phases; as the function `load`."""
        options, phases = self._options, self._phases
        register()
        with phases("read weights"):
            model = read_model(options.folder, self._config, self._dtype, self._device, self._memory)
        backend = choose(options.attention, self._spec, options.code_folder)
        # A pool that takes the memory that a step leaves free is allocated after measuring; until then it has only the
        # null block.
        with phases("KV pool"):
            pool = self._pool(backend, 1 if self._is_measured else count_blocks(options, self._block_bytes, None))
        loaded = LoadedModel(model, pool, None, HostTier(), self._dtype, self._device, options.eos_token_ids, backend)
        with phases("warm up"):
            _try(loaded, self._spec)
        with phases("pack weights"):
            passes = self._make_fast(loaded)
        with phases("compile"):
            is_compiled = self._wants_compiling and compile_layers(model, partial(_warm, loaded), options.code_folder)
        budget = None
        if self._is_measured:
            with phases("measure memory"):
                budget = self._budget(loaded)
            with phases("KV pool"):
                loaded = replace(loaded, pool=self._pool(backend, count_blocks(options, self._block_bytes, budget)))
        with phases("host memory"):
            loaded = self._with_host(loaded)
        log.info(
            "model_loaded",
            passes=passes,
            quantization=options.quantization,
            compiled=is_compiled,
            block_count=loaded.pool.block_count,
            memory=None if budget is None else str(budget),
            **phases.facts(),
        )
        return loaded

    @property
    def _is_measured(self) -> bool:
        """Whether the pool takes the memory that the largest step leaves free."""
        options = self._options
        return self._memory.is_measured and options.block_count is None and options.kv_cache_bytes is None

    @property
    def _wants_compiling(self) -> bool:
        return self._device.type == "cuda" if self._options.eager is None else not self._options.eager

    def _make_fast(self, loaded: LoadedModel) -> dict[str, int]:
        library = self._library()
        kept = apply_passes(loaded.model, standard_passes(library))
        if self._options.quantization == "int8":
            kept["int8_linears"] = self._quantize(loaded, library)
        elif self._device.type == "cpu" and self._dtype is torch.float32:
            kept["packed_linears"] = pack(loaded.model)
            _warm(loaded, 1)  # the model's own code may not accept such layers
        return kept

    def _quantize(self, loaded: LoadedModel, library: ctypes.CDLL | None) -> int:
        probe = Probe(loaded.model)
        reference = probe.logits()
        count = quantize(loaded.model, library)
        _warm(loaded, 1)
        off = spread(probe.logits(), reference)
        log.info("quantized", linears=count, logits_off=round(off, 4), kernels="torch" if library is None else "native")
        if off > INT8_TOLERANCE:
            raise CannotLoad(
                f"quantization 'int8' does not suit this model: its logits are off by {off:.2g} of their size, "
                f"more than {INT8_TOLERANCE:g}; load it without quantization"
            )
        return count

    def _library(self) -> ctypes.CDLL | None:
        """Return the native kernels for norms and linear layers; None if unavailable, so that torch computes these."""
        if self._device.type != "cpu":
            return None
        try:
            return load_native(self._options.code_folder)
        except NoNativeCode as error:
            log.warning("native_kernels_missing", instead="torch", reason=str(error))
            return None

    def _pool(self, backend: AttentionBackend, block_count: int) -> KVPool:
        spec = self._spec
        try:
            return KVPool(
                layers=self._text.num_hidden_layers,
                block_count=block_count,
                block_size=spec.block_size,
                kv_heads=spec.kv_heads,
                head_dim=spec.head_dim,
                dtype=spec.dtype,
                device=spec.device,
                is_token_major=backend.is_token_major,
            )
        except (RuntimeError, TypeError) as error:  # torch.OutOfMemoryError, and sizes beyond int64
            raise CannotLoad(f"no memory for a KV cache of {block_count * self._block_bytes} bytes: {error}") from error

    @property
    def _block_bytes(self) -> int:
        spec = self._spec
        return KVPool.block_bytes(
            layers=self._text.num_hidden_layers,
            block_size=spec.block_size,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            dtype=spec.dtype,
        )

    def _budget(self, loaded: LoadedModel) -> MemoryBudget:
        """Measure the memory of the largest steps: a long chunk with a token of each other row, and a decode graph."""
        options = self._options
        rows = min(options.running_max, options.token_budget)
        longest = context_length(self._config) or CONTEXT_LENGTH_MAX
        tokens = min(options.token_budget, rows * longest)
        vocabulary, graphs = vocabulary_of(loaded.model), sizes_up_to(rows)
        has_graphs = isinstance(loaded.backend, PlanningBackend) and not options.eager

        def step() -> None:
            _compute(loaded, [tokens - rows + 1, *[1] * (rows - 1)])

        def decode() -> None:
            _compute(loaded, [1] * graphs[-1])

        budget = measure_memory(
            self._memory,
            options.memory_fraction,
            step,
            sampling=LOGIT_BYTES * rows * vocabulary + peak_bytes(rows, vocabulary),
            decode=decode if has_graphs else None,
            graph_count=len(graphs),
        )
        kept = kept_bytes(rows, vocabulary, self._dtype.itemsize) if has_graphs else 0
        return replace(budget, graphs=budget.graphs + kept)

    def _with_host(self, loaded: LoadedModel) -> LoadedModel:
        pool = loaded.pool
        block_bytes = sum(tensor[0].nbytes for tensor in (*pool.keys, *pool.values))
        if (block_count := self._options.host_blocks(block_bytes)) == 0:
            return loaded
        try:
            host_memory = self._options.map_host_memory(
                block_count * block_bytes, "transformers", self._spec, block_count, len(pool.keys)
            )
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # copies of an earlier executor may be in progress
            host = HostPool(pool, block_count, host_memory)
        except (RuntimeError, TypeError) as error:
            needed = block_count * block_bytes
            raise CannotLoad(f"no memory for {needed} bytes of the KV cache on the host: {error}") from error
        longest = context_length(self._config) or TOKENS_MAX

        def prefill(token_count: int) -> None:
            _compute(loaded, [token_count], np.arange(1, 1 + -(-token_count // pool.block_size)))

        measure = partial(measure_costs, pool, host, longest, prefill, self._options.now)
        with torch.inference_mode():
            tier = measure() if host_memory is None else host_memory.tier(block_count, measure)
        return replace(loaded, host=host, host_tier=tier)


def _try(loaded: LoadedModel, spec: AttentionSpec) -> None:
    """Compute four tokens in the null block, so that an unsupported model fails now, not at the first request.

    Each token is a row of its own. The second and the last are equal, and only their logits are computed. Raises
    CannotLoad.
    """
    batch, vocabulary = _batch([1] * 4, loaded.pool.block_size, None), vocabulary_of(loaded.model)
    batch.token_ids[:] = [1 % vocabulary, 2 % vocabulary, 0, 2 % vocabulary]
    model_check = ModelCheck(loaded.attention(batch), spec, loaded.model.config.get_text_config())
    logits = _forward(loaded, batch, model_check, np.array([1, 3]))
    model_check.check(loaded.model, logits)
    _clear_null_block(loaded.pool)


def _warm(loaded: LoadedModel, token_count: int) -> None:
    """Compute a row of `token_count` tokens in the null block. Raises CannotLoad."""
    _compute(loaded, [token_count])
    _clear_null_block(loaded.pool)


def _clear_null_block(pool: KVPool) -> None:
    for tensor in (*pool.keys, *pool.values):
        tensor[NULL_BLOCK].zero_()


def _compute(loaded: LoadedModel, counts: Sequence[int], block_ids: Ints | None = None) -> None:
    """Compute rows of `counts[i]` tokens each, and the logits of their last tokens.

    A single row may use the blocks `block_ids`; by default all rows overwrite the null block. Raises CannotLoad.
    """
    batch = _batch(counts, loaded.pool.block_size, block_ids)
    _forward(loaded, batch, loaded.attention(batch), np.array([each.stop - 1 for each in batch.chunks]))


def _forward(loaded: LoadedModel, batch: Batch, attention: Attention, keep: Ints) -> torch.Tensor:
    """Return the logits at the flat indices `keep`. Raises CannotLoad."""
    # The values do not matter here, but positions must be within the model's context.
    limit = context_length(loaded.model.config) or CONTEXT_LENGTH_MAX
    given = (batch.token_ids, batch.positions % limit, keep)
    token_ids, positions, kept = (torch.from_numpy(array).to(loaded.device) for array in given)
    try:
        with torch.inference_mode(), attending(attention):
            return loaded.forward(token_ids[None], positions[None], kept)
    except torch.OutOfMemoryError:
        raise
    except UnsupportedAttention as error:
        raise CannotLoad(str(error)) from error
    except Exception as error:
        raise CannotLoad(f"this model does not run: {error}") from error


def _batch(counts: Sequence[int], block_size: int, block_ids: Ints | None) -> Batch:
    batch = Batch(0, 0, *(np.zeros((4, sum(counts)), np.int64)))
    start = 0
    for count in counts:
        stop, positions = start + count, np.arange(count)
        table = np.full(-(-count // block_size), NULL_BLOCK, np.int64) if block_ids is None else block_ids
        batch.positions[start:stop] = positions
        batch.blocks[start:stop], batch.offsets[start:stop] = table[positions // block_size], positions % block_size
        batch.chunks.append(BatchChunk(start, stop, count, table))
        start = stop
    return batch
