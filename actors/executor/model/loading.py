"""Loads a transformers decoder and sizes its KV pool, and its host memory for blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from cuelight.actors.executor.batch import Batch, Ints, Sequence
from cuelight.actors.executor.model.attention import ATTENTION_NAME, Attention, PagedAttention, attending, register
from cuelight.actors.executor.model.attention_cpu import CpuAttention
from cuelight.actors.executor.model.costs import TOKENS_MAX, measure
from cuelight.actors.executor.model.host import HostPool
from cuelight.actors.executor.model.linear import pack
from cuelight.actors.executor.model.pool import KVPool
from cuelight.actors.executor.native.attention import AttentionKernels
from cuelight.actors.executor.native.build import NoNativeCode, load_native
from cuelight.actors.executor.options import CannotLoad, LoadOptions, cpu_budget
from cuelight.kernel import get_logger
from cuelight.messages.request import HostTier

log = get_logger("cuelight.executor")


@dataclass(frozen=True)
class LoadedModel:
    """A model with its pool, and host memory if it has some. `query_groups` query heads share each KV head."""

    model: PreTrainedModel
    pool: KVPool
    host: HostPool | None
    host_tier: HostTier
    query_groups: int
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: tuple[int, ...]
    cpu_kernels: AttentionKernels | None = None

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Logits [len(keep), vocabulary] after the flat tokens `keep`; `token_ids` and `positions` are [1, T]."""
        output = self.model(input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=keep)
        logits: torch.Tensor = output.logits[0]
        return logits

    def attention(self, batch: Batch) -> Attention:
        """One step's attention, by the backend that was chosen."""
        if self.cpu_kernels is not None:
            return CpuAttention(self.cpu_kernels, self.pool, batch)
        return PagedAttention(self.pool, batch, self.query_groups, self.dtype, self.device)


def load(options: LoadOptions) -> LoadedModel:
    """Load weights, allocate the pool, and run one token through both; measure what host memory costs, if it is used.

    Raises:
        CannotLoad: the folder, dtype, device or architecture cannot be served, or memory does not suffice.
    """
    device = _device(options.device)
    dtype = _dtype(options.dtype, device)
    register()
    config, model = _read(options.folder, dtype)
    torch.nn.Module.to(model, device)
    model.train(False).requires_grad_(False)
    if device.type == "cpu" and dtype is torch.float32:
        pack(model)
    pool, query_groups = _pool(options, config, dtype, device)
    host = _host(options, pool)
    kernels = _cpu_kernels(options, device)
    loaded = LoadedModel(model, pool, host, HostTier(), query_groups, dtype, device, options.eos_token_ids, kernels)
    _try(loaded)
    return loaded if host is None else replace(loaded, host_tier=_measured(loaded, host, config, options.now))


def _read(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedConfig, PreTrainedModel]:
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a folder it cannot load
        raise CannotLoad(f"transformers cannot load {folder}: {type(error).__name__}: {error}") from error
    _check(config)
    try:
        with _no_bars():
            read = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:
        raise CannotLoad(f"transformers cannot load {folder}: {type(error).__name__}: {error}") from error
    model, report = cast(tuple[PreTrainedModel, dict[str, set[str]]], read)
    if missing := report["missing_keys"]:  # transformers would go on with random numbers in their place
        raise CannotLoad(f"{folder} lacks weights: {', '.join(sorted(missing))}")
    return config, model


def _check(config: PreTrainedConfig) -> None:
    """Refuse what would run, and silently compute something else than the model."""
    text = config.get_text_config()
    if getattr(text, "num_attention_heads", None) is None:
        raise CannotLoad(f"{text.model_type} is no transformer with attention in each layer")
    for kind in getattr(text, "layer_types", None) or ():
        if kind != "full_attention":
            raise CannotLoad(f"this model has layers of {kind}, which is not supported yet")
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Its frequencies depend on the longest row of a batch, so rows would depend on each other.
        raise CannotLoad("this model's rotary embedding is longrope, which is not supported yet")


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keep transformers' progress bars, and the thread that each starts, out of the host program."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise CannotLoad(f"device {name!r} cannot be used: it has no memory, and computes nothing")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise CannotLoad(f"device {name!r} cannot be used: {error}") from error
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        # Without matrix units for bfloat16, a CPU computes it several times slower than float32.
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(name)
    if dtype is None:
        raise CannotLoad(f"dtype must be 'float32', 'bfloat16' or 'auto', not {name!r}")
    return dtype


def _pool(
    options: LoadOptions, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> tuple[KVPool, int]:
    text = config.get_text_config()
    heads: int = text.num_attention_heads
    kv_heads: int = getattr(text, "num_key_value_heads", None) or heads
    head_dim: int = getattr(text, "head_dim", None) or text.hidden_size // heads
    layers: int = text.num_hidden_layers
    block_bytes = KVPool.block_bytes(
        layers=layers, block_size=options.block_size, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype
    )
    block_count = options.blocks(block_bytes, _budget(device))
    try:
        pool = KVPool(
            layers=layers,
            block_count=block_count,
            block_size=options.block_size,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
        )
    except (RuntimeError, TypeError) as error:  # torch.OutOfMemoryError, and numbers that torch cannot hold
        raise CannotLoad(f"no memory for a KV cache of {block_count * block_bytes} bytes: {error}") from error
    return pool, heads // kv_heads


def _host(options: LoadOptions, pool: KVPool) -> HostPool | None:
    tensors = (*pool.keys, *pool.values)
    block_bytes = sum(tensor[0].nbytes for tensor in tensors)
    if (block_count := options.host_blocks(block_bytes)) == 0:
        return None
    try:
        return HostPool(pool, block_count)
    except (RuntimeError, TypeError) as error:
        asked = block_count * block_bytes
        raise CannotLoad(f"no memory for {asked} bytes of the KV cache on the host: {error}") from error


def _budget(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.8)
    return cpu_budget()


def _try(loaded: LoadedModel) -> None:
    """One token through the model, into the null block: what cannot be served shows now, not at the first request."""
    attention = _compute(loaded, 1, np.zeros(1, np.int64))
    if attention.layers_attended != len(loaded.pool.keys):
        name = type(loaded.model).__name__
        raise CannotLoad(f"only {attention.layers_attended} of {name}'s {len(loaded.pool.keys)} layers can be served")
    for tensor in (*loaded.pool.keys, *loaded.pool.values):
        tensor[0].zero_()


def _measured(loaded: LoadedModel, host: HostPool, config: PreTrainedConfig, now: Callable[[], float]) -> HostTier:
    pool = loaded.pool
    context_length: int = getattr(config.get_text_config(), "max_position_embeddings", None) or TOKENS_MAX

    def prefill(token_count: int) -> None:
        _compute(loaded, token_count, np.arange(1, 1 + -(-token_count // pool.block_size)))

    with torch.inference_mode():
        return measure(pool, host, context_length, prefill, now)


def _cpu_kernels(options: LoadOptions, device: torch.device) -> AttentionKernels | None:
    """The native kernels, if attention is to be theirs; the choice is in the log."""
    if options.attention == "cpu" and device.type != "cpu":
        raise CannotLoad(f"attention 'cpu' runs on the CPU, not on {device}")
    kernels, reason = None, ""
    if options.attention != "reference" and device.type == "cpu":
        try:
            kernels = AttentionKernels(load_native(options.code_folder))
        except NoNativeCode as error:
            reason = str(error)
            if options.attention == "cpu":
                raise CannotLoad(f"attention 'cpu' is not available: {reason}") from error
    if reason:
        log.warning("attention_backend", attention="reference", reason=reason)
    else:
        log.info("attention_backend", attention="reference" if kernels is None else "cpu")
    return kernels


def _compute(loaded: LoadedModel, token_count: int, block_ids: Ints) -> Attention:
    """One row of so many tokens, from nothing to the logits of its last."""
    positions, size = np.arange(token_count), loaded.pool.block_size
    row = Sequence(0, token_count, token_count, block_ids)
    blocks, offsets = block_ids[positions // size], positions % size
    batch = Batch(0, 0, np.zeros(token_count, np.int64), positions, blocks, offsets, sequences=[row])
    attention = loaded.attention(batch)
    token_ids, where = (torch.from_numpy(array).to(loaded.device) for array in (batch.token_ids, positions))
    try:
        with torch.inference_mode(), attending(attention):
            loaded.forward(token_ids[None], where[None], where[-1:])
    except Exception as error:
        raise CannotLoad(f"this model does not run: {error}") from error
    return attention
