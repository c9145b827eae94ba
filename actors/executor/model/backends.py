"""The interface of attention backends, and the choice: the fastest on this device that supports the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedConfig

from cuelight.actors.executor.batch import Batch, BatchChunk
from cuelight.actors.executor.model import attention_flash
from cuelight.actors.executor.model.attention import Attention, PagedAttention
from cuelight.actors.executor.model.attention_flash import HEAD_DIM_MAX, HEAD_DIM_STEP, PAGE_TOKENS
from cuelight.actors.executor.model.attention_triton import Tiling, TritonBackend, TritonPlanner
from cuelight.actors.executor.model.folder import context_length
from cuelight.actors.executor.model.kv_pool import KVPool
from cuelight.actors.executor.options import CannotLoad
from cuelight.kernel import get_logger

log = get_logger("cuelight.executor")


@dataclass(frozen=True)
class AttentionSpec:
    """The attention that a model needs. `window` is the first window of a layer that is shorter than the context."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int | None = None
    softcap: float | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, block_size: int) -> AttentionSpec:
        """Return the spec of the model with this configuration."""
        text = config.get_text_config()
        heads: int = text.num_attention_heads
        return cls(
            device=device,
            dtype=dtype,
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            block_size=block_size,
            window=next(filter(None, (window_of(text, layer) for layer in range(text.num_hidden_layers))), None),
            softcap=getattr(text, "attn_logit_softcapping", None),
        )

    @property
    def query_groups(self) -> int:
        """Number of query heads that share a KV head."""
        return self.heads // self.kv_heads


def window_of(text: PreTrainedConfig, layer: int) -> int | None:
    """Return the window of a layer according to the configuration; None if no context exceeds it."""
    kinds: Sequence[str] = getattr(text, "layer_types", None) or ()
    if kinds and "sliding_attention" not in kinds[layer : layer + 1]:
        return None
    return cutting(getattr(text, "sliding_window", None), text)


def cutting(window: int | None, text: PreTrainedConfig) -> int | None:
    """Return the window; None if the model's context does not exceed it."""
    longest = context_length(text)
    return window if window and (longest is None or window < longest) else None


class AttentionBackend(Protocol):
    """Computes attention for a model. `is_token_major` is the layout of the pool that it needs."""

    name: str
    is_token_major: bool

    def step(self, pool: KVPool, batch: Batch) -> Attention:
        """Return the attention of one step, with its layout on the device."""


class BackendUnavailable(Exception):
    """This backend does not run here, or does not support the model; the message says why."""


class ReferenceBackend:
    """The backend "reference": plain torch, on any device."""

    name = "reference"
    is_token_major = False

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec

    def step(self, pool: KVPool, batch: Batch) -> Attention:
        spec = self._spec
        return PagedAttention(pool, batch, spec.query_groups, spec.dtype, spec.device)


def choose(name: str, spec: AttentionSpec, code_folder: Path | None) -> AttentionBackend:
    """Return the backend of this name, or for "auto" the fastest available; log the choice. Raises CannotLoad."""
    reasons: dict[str, str] = {}
    for candidate in _candidates(spec.device) if name == "auto" else (name,):
        try:
            backend = _make(candidate, spec, code_folder)
        except BackendUnavailable as unavailable:
            if name != "auto":
                raise CannotLoad(f"attention {name!r} is not available: {unavailable}") from unavailable
            reasons[candidate] = str(unavailable)
        else:
            break
    if reasons:
        reason = "; ".join(f"{candidate}: {why}" for candidate, why in reasons.items())
        log.warning("attention_backend", attention=backend.name, reason=reason)
    else:
        log.info("attention_backend", attention=backend.name)
    return backend


def _candidates(device: torch.device) -> tuple[str, ...]:
    """Return the backends for a device, the fastest first; the last is always available."""
    return {"cpu": ("cpu", "reference"), "cuda": ("triton", "flash", "reference")}.get(device.type, ("reference",))


def _make(name: str, spec: AttentionSpec, code_folder: Path | None) -> AttentionBackend:
    """Return the backend of this name. Raises BackendUnavailable, and CannotLoad for an unknown name."""
    match name:
        case "reference":
            return ReferenceBackend(spec)
        case "cpu":
            return _cpu(spec, code_folder)
        case "triton":
            return _triton(spec)
        case "flash":
            return _flash(spec)
        case _:
            raise CannotLoad(f"there is no attention {name!r}")


def _cpu(spec: AttentionSpec, code_folder: Path | None) -> AttentionBackend:
    from cuelight.actors.executor.model.attention_cpu import TYPES, CpuBackend
    from cuelight.actors.executor.native.build import NoNativeCode

    if spec.device.type != "cpu":
        raise BackendUnavailable(f"it runs on the CPU, not on {spec.device}")
    if spec.dtype not in TYPES:
        raise BackendUnavailable(f"it does not compute in {spec.dtype}")
    if spec.window is not None or spec.softcap is not None:
        raise BackendUnavailable("it has neither sliding windows nor capped scores, and this model has them")
    try:
        return CpuBackend(code_folder)
    except NoNativeCode as error:
        raise BackendUnavailable(str(error)) from error


def _triton(spec: AttentionSpec) -> AttentionBackend:
    try:
        from cuelight.actors.executor.model import triton_kernels
    except ImportError as error:
        raise BackendUnavailable(f"triton cannot be imported: {error}") from error
    if spec.device.type != "cuda" and not triton_kernels.IS_INTERPRETED:
        raise BackendUnavailable(f"it runs on CUDA, not on {spec.device}")
    kernels = triton_kernels.TritonKernels()
    try:
        # A span of one key runs all kernels, the merge included, so that all are compiled before the first request.
        _try(TritonBackend(kernels, planner_for(spec, 1, span=1), spec.device), spec)
        backend = TritonBackend(kernels, planner_for(spec, _processors(spec.device)), spec.device)
        _try(backend, spec)
    except Exception as error:  # the compiler and the driver raise errors of many types
        raise BackendUnavailable(f"its kernels do not run here: {type(error).__name__}: {error}") from error
    return backend


def planner_for(spec: AttentionSpec, processors: int, span: int | None = None) -> TritonPlanner:
    """Return a planner with tiles that suit the model's heads; `span` as in `TritonPlanner`."""
    groups = spec.query_groups
    # At least 16, the minimum of matrix products, and at least a group; prefill chunks share keys among more rows.
    least = max(16, 1 << (groups - 1).bit_length())
    is_wide = spec.head_dim * spec.dtype.itemsize > 256
    tiling = Tiling(least, max(least, 32 if is_wide else 64), processors)
    return TritonPlanner(groups, spec.kv_heads, spec.block_size, tiling, span)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@torch.inference_mode()
def _try(backend: AttentionBackend, spec: AttentionSpec) -> None:
    """Compute a decode and a chunk of two tokens whose values are all ones, so the results must be ones, too."""
    pool = KVPool(
        layers=1,
        block_count=3,
        block_size=spec.block_size,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        dtype=spec.dtype,
        device=spec.device,
        is_token_major=backend.is_token_major,
    )
    for count in (1, 2):
        positions, table = np.arange(count), np.arange(1, 3)
        blocks, offsets = table[positions // spec.block_size], positions % spec.block_size
        batch = Batch(0, 0, positions, positions, blocks, offsets, chunks=[BatchChunk(0, count, count, table)])
        q = torch.ones((count, spec.heads, spec.head_dim), dtype=spec.dtype, device=spec.device)
        kv = q[:, : spec.kv_heads]
        for window in {None, spec.window}:
            out = backend.step(pool, batch).attend(0, q, kv, kv, 1.0, window, spec.softcap)
            if not bool(((out - 1).abs() < 0.01).all()):
                raise RuntimeError("attention over values of 1 does not return 1")


def _flash(spec: AttentionSpec) -> AttentionBackend:
    function = attention_flash.varlen_attention()
    if function is None:
        raise BackendUnavailable("this torch has no varlen_attn that reads block tables: 2.12 has")
    is_version_2 = attention_flash.is_version_2()
    if (reason := _unmet_by_flash(spec, is_version_2=is_version_2)) is not None:
        raise BackendUnavailable(reason)
    backend = attention_flash.FlashBackend(function, spec.device, is_version_2=is_version_2)
    try:
        _try(backend, spec)
    except Exception as error:
        raise BackendUnavailable(f"it does not run here: {type(error).__name__}: {error}") from error
    return backend


def _unmet_by_flash(spec: AttentionSpec, *, is_version_2: bool) -> str | None:
    if spec.device.type != "cuda":
        return f"it runs on CUDA, not on {spec.device}"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in half precision, not in {spec.dtype}"
    if spec.softcap is not None:
        return "it caps no scores, which this model needs"
    if spec.head_dim > HEAD_DIM_MAX or spec.head_dim % HEAD_DIM_STEP:
        return f"heads are a multiple of {HEAD_DIM_STEP} wide and at most {HEAD_DIM_MAX}, not {spec.head_dim}"
    if is_version_2 and spec.block_size % PAGE_TOKENS:
        return f"block_size must be a multiple of {PAGE_TOKENS} for FlashAttention 2, not {spec.block_size}"
    return None
