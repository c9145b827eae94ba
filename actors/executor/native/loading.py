"""Loads a model's folder for the native decoder: compiles the kernels, packs the weights, sizes the pool."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from statistics import median

import numpy as np

from cuelight.actors.executor.host_memory import HostMemoryMapping
from cuelight.actors.executor.native.attention import BF16, FLOAT32, INT8, layout, wants_vnni_pairs
from cuelight.actors.executor.native.build import NoNativeCode, load_native
from cuelight.actors.executor.native.decoder import NativeDecoder, NativeWeights
from cuelight.actors.executor.native.kv_pool import NativeKVPool
from cuelight.actors.executor.native.linear import WeightFormat
from cuelight.actors.executor.native.model_folder import (
    Architecture,
    BadWeights,
    NotNative,
    read_architecture,
    read_weights,
)
from cuelight.actors.executor.native.runner import NativeRunner, Sampler
from cuelight.actors.executor.options import CannotLoad, LoadOptions, current_phases
from cuelight.kernel import get_logger
from cuelight.messages.request import BlockCopies, CopyKind, HostTier

FORMATS = {None: WeightFormat.F32, "int8": WeightFormat.INT8, "int4": WeightFormat.INT4}
CACHES = {"float32": FLOAT32, "bfloat16": BF16, "int8": INT8}

MEASURED_TOKENS = 64
MEASURED_BLOCKS = 8
MEASURED_TIMES = 5

log = get_logger("cuelight.executor")


class Unsuitable(Exception):
    """The native decoder cannot serve this model here; the general path may. The message says why."""


def load(options: LoadOptions) -> NativeRunner:
    """Raises Unsuitable; CannotLoad where no other path could do better."""
    phases = current_phases(options.now)
    try:
        architecture = read_architecture(options.folder)
        with phases("compile"):
            kernels = load_native(options.code_folder)
        with phases("read and pack weights"):
            tensors = read_weights(options.folder)
            weights = NativeWeights.pack(kernels, architecture, tensors, _weight_format(options), tensors.leave_memory)
    except (NotNative, NoNativeCode, BadWeights) as reason:  # transformers reads more formats
        raise Unsuitable(str(reason)) from reason
    with phases("KV pool"):
        pool, host_memory = _pool(options, architecture, kernels)
    decoder = NativeDecoder(kernels, weights, pool.structures(), options.token_budget)
    with phases("warm up"):
        host = _host(options, pool, decoder, host_memory)
    log.info(
        "native_decoder",
        weights=weights.kind.name,
        blocks=pool.block_count,
        host_blocks=host.block_count,
        **phases.facts(),
    )
    return NativeRunner(decoder, pool, Sampler(kernels, options.eos_token_ids), host)


def _weight_format(options: LoadOptions) -> WeightFormat:
    if options.quantization is None and options.dtype == "bfloat16":
        return WeightFormat.BF16
    return FORMATS[options.quantization]


def _cache(options: LoadOptions) -> int:
    """How keys and values are stored."""
    if options.kv_cache_dtype != "auto":
        return CACHES[options.kv_cache_dtype]
    if _weight_format(options) is WeightFormat.F32 or options.dtype == "float32":
        return FLOAT32
    # In int8 keys and values lose a tenth of what the weights do in as many bits.
    return BF16 if options.quantization is None else INT8


def _pool(
    options: LoadOptions, architecture: Architecture, kernels: ctypes.CDLL
) -> tuple[NativeKVPool, HostMemoryMapping | None]:
    kind = _cache(options)
    vnni_pairs = wants_vnni_pairs(kernels, kind, options.block_size, architecture.head_dim)
    block_bytes = NativeKVPool.block_bytes(architecture, options.block_size, kind)
    block_count = options.blocks(block_bytes, options.useful_budget(block_bytes))
    host_block_count = options.host_blocks(block_bytes)
    host_bytes = host_block_count * block_bytes
    host_memory = options.map_host_memory(host_bytes, "native", kind, vnni_pairs, host_block_count, architecture)
    try:
        return NativeKVPool(
            architecture, block_count, options.block_size, kind, host_block_count, host_memory, vnni_pairs
        ), host_memory
    except MemoryError as error:
        needed = (block_count + host_block_count) * block_bytes
        raise CannotLoad(f"no memory for a KV cache of {needed} bytes: {error}") from error


def _host(
    options: LoadOptions, pool: NativeKVPool, decoder: NativeDecoder, host_memory: HostMemoryMapping | None
) -> HostTier:
    """What host memory costs; a step runs either way, so that the first request meets warm code and threads."""
    count = min(MEASURED_TOKENS, options.token_budget, decoder.positions, (pool.block_count - 1) * pool.block_size)
    table = np.arange(1, 1 + -(-count // pool.block_size))
    positions = np.arange(count)
    blocks, offsets = table[positions // pool.block_size], positions % pool.block_size
    step = layout(positions, blocks, offsets, [(0, count, count)], [table])
    sampled = np.array([count - 1])

    def prefill() -> None:
        decoder.decode(np.zeros(count, np.int64), step, sampled)

    prefill()
    host_blocks = pool.host_block_count
    if host_blocks == 0:
        pool.clear(table.tolist())
        return HostTier()
    moved = min(MEASURED_BLOCKS, host_blocks, pool.block_count - 1)
    # In opposite orders: blocks that are neighbours in both memories are copied at once, which is rare in use.
    stored, kept = tuple(range(1, 1 + moved)), tuple(range(moved))[::-1]

    def move() -> None:
        pool.copy(BlockCopies(CopyKind.SAVE, stored, kept))
        pool.copy(BlockCopies(CopyKind.LOAD, kept, stored))

    def measure() -> HostTier:
        recompute_seconds = _seconds(prefill, 1, options.now) / count
        move_seconds = _seconds(move, MEASURED_TIMES, options.now) / moved
        return HostTier(host_blocks, move_seconds, recompute_seconds)

    tier = measure() if host_memory is None else host_memory.tier(host_blocks, measure)
    pool.clear([*table.tolist(), *stored])
    return tier


def _seconds(work: Callable[[], None], times: int, now: Callable[[], float]) -> float:
    """The median time it takes, once it is warm."""
    work()
    measured: list[float] = []
    for _ in range(times):
        began = now()
        work()
        measured.append(now() - began)
    return median(measured)
