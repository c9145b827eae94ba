"""Chooses who computes attention: the fastest that this device has and that does what the model asks."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedConfig

from cuelight.actors.executor.batch import Batch, Sequence
from cuelight.actors.executor.model import attention_flash
from cuelight.actors.executor.model.attention import Attention, PagedAttention
from cuelight.actors.executor.model.attention_flash import HEAD_DIM_MAX, HEAD_DIM_STEP, PAGE_TOKENS
from cuelight.actors.executor.model.attention_triton import Planner, Tiling, Triton
from cuelight.actors.executor.model.pool import KVPool
from cuelight.actors.executor.model.reading import context_length
from cuelight.actors.executor.options import CannotLoad
from cuelight.kernel import get_logger

log = get_logger("cuelight.executor")


@dataclass(frozen=True)
class Needs:
    """What a model asks of attention, and where: `window` is the smallest that cuts any context short, if one does."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int | None = None
    softcap: float | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, block_size: int) -> Needs:
        """Those of the model with this configuration."""
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
        """So many query heads share each KV head."""
        return self.heads // self.kv_heads


def window_of(text: PreTrainedConfig, layer: int) -> int | None:
    """The window that the configuration gives a layer, if it cuts any context short."""
    kinds: Many[str] = getattr(text, "layer_types", None) or ()
    if kinds and "sliding_attention" not in kinds[layer : layer + 1]:
        return None
    return cutting(getattr(text, "sliding_window", None), text)


def cutting(window: int | None, text: PreTrainedConfig) -> int | None:
    """The window, if it cuts any context short."""
    longest = context_length(text)
    return window if window and (longest is None or window < longest) else None


class Backend(Protocol):
    """Computes attention for one model. With `is_token_major` it wants a pool of that layout."""

    name: str
    is_token_major: bool

    def step(self, pool: KVPool, batch: Batch) -> Attention:
        """One step's attention, laid out and moved to the device."""


class Unavailable(Exception):
    """This backend is not to be had here, or does not do what the model asks; the message says why."""


class Reference:
    """Plain torch, on any device."""

    name = "reference"
    is_token_major = False

    def __init__(self, needs: Needs) -> None:
        self._needs = needs

    def step(self, pool: KVPool, batch: Batch) -> Attention:
        needs = self._needs
        return PagedAttention(pool, batch, needs.query_groups, needs.dtype, needs.device)


def choose(name: str, needs: Needs, code_folder: Path | None) -> Backend:
    """The backend of this name, or with "auto" the first that can; the choice is in the log. Raises CannotLoad."""
    reasons: dict[str, str] = {}
    for candidate in _candidates(needs.device) if name == "auto" else (name,):
        try:
            backend = _make(candidate, needs, code_folder)
        except Unavailable as unavailable:
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
    """The fastest first; the last can always be had."""
    return {"cpu": ("cpu", "reference"), "cuda": ("triton", "flash", "reference")}.get(device.type, ("reference",))


def _make(name: str, needs: Needs, code_folder: Path | None) -> Backend:
    """Raises Unavailable."""
    match name:
        case "reference":
            return Reference(needs)
        case "cpu":
            return _cpu(needs, code_folder)
        case "triton":
            return _triton(needs)
        case "flash":
            return _flash(needs)
        case _:
            raise CannotLoad(f"there is no attention {name!r}")


def _cpu(needs: Needs, code_folder: Path | None) -> Backend:
    from cuelight.actors.executor.model.attention_cpu import TYPES, Cpu
    from cuelight.actors.executor.native.build import NoNativeCode

    if needs.device.type != "cpu":
        raise Unavailable(f"it runs on the CPU, not on {needs.device}")
    if needs.dtype not in TYPES:
        raise Unavailable(f"it does not compute in {needs.dtype}")
    if needs.window is not None or needs.softcap is not None:
        raise Unavailable("it has neither sliding windows nor capped scores, and this model has them")
    try:
        return Cpu(code_folder)
    except NoNativeCode as error:
        raise Unavailable(str(error)) from error


def _triton(needs: Needs) -> Backend:
    try:
        from cuelight.actors.executor.model import triton_kernels
    except ImportError as error:
        raise Unavailable(f"triton cannot be imported: {error}") from error
    if needs.device.type != "cuda" and not triton_kernels.IS_INTERPRETED:
        raise Unavailable(f"it runs on CUDA, not on {needs.device}")
    kernels = triton_kernels.TritonKernels()
    try:
        # With so short a span all kernels there are run, and are compiled before the first request.
        _try(Triton(kernels, planner_for(needs, 1, span=1), needs.device), needs)
        backend = Triton(kernels, planner_for(needs, _processors(needs.device)), needs.device)
        _try(backend, needs)
    except Exception as error:  # a compiler and a driver fail with errors of many kinds
        raise Unavailable(f"its kernels do not run here: {type(error).__name__}: {error}") from error
    return backend


def planner_for(needs: Needs, processors: int, span: int | None = None) -> Planner:
    """Of the tiles that suit the model's heads; `span` as `Planner`'s."""
    groups = needs.query_groups
    # The least that products of matrices take, unless a group is larger; and more where a chunk shares its keys.
    least = max(16, 1 << (groups - 1).bit_length())
    is_wide = needs.head_dim * needs.dtype.itemsize > 256
    tiling = Tiling(least, max(least, 32 if is_wide else 64), processors)
    return Planner(groups, needs.kv_heads, needs.block_size, tiling, span)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@torch.inference_mode()
def _try(backend: Backend, needs: Needs) -> None:
    """A token that decodes, and a chunk of two, where all values are one and so is what is seen of them."""
    pool = KVPool(
        layers=1,
        block_count=3,
        block_size=needs.block_size,
        kv_heads=needs.kv_heads,
        head_dim=needs.head_dim,
        dtype=needs.dtype,
        device=needs.device,
        is_token_major=backend.is_token_major,
    )
    for count in (1, 2):
        positions, table = np.arange(count), np.arange(1, 3)
        blocks, offsets = table[positions // needs.block_size], positions % needs.block_size
        batch = Batch(0, 0, positions, positions, blocks, offsets, sequences=[Sequence(0, count, count, table)])
        q = torch.ones((count, needs.heads, needs.head_dim), dtype=needs.dtype, device=needs.device)
        kv = q[:, : needs.kv_heads]
        for window in {None, needs.window}:
            out = backend.step(pool, batch).attend(0, q, kv, kv, 1.0, window, needs.softcap)
            if not bool(((out - 1).abs() < 0.01).all()):
                raise RuntimeError("a mean of ones is not one")


def _flash(needs: Needs) -> Backend:
    function = attention_flash.varlen_attention()
    if function is None:
        raise Unavailable("this torch has no varlen_attn that reads block tables: 2.12 has")
    is_version_2 = attention_flash.is_version_2()
    if (reason := _unmet_by_flash(needs, is_version_2=is_version_2)) is not None:
        raise Unavailable(reason)
    backend = attention_flash.Flash(function, needs.device, is_version_2=is_version_2)
    try:
        _try(backend, needs)
    except Exception as error:
        raise Unavailable(f"it does not run here: {type(error).__name__}: {error}") from error
    return backend


def _unmet_by_flash(needs: Needs, *, is_version_2: bool) -> str | None:
    if needs.device.type != "cuda":
        return f"it runs on CUDA, not on {needs.device}"
    if needs.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in half precision, not in {needs.dtype}"
    if needs.softcap is not None:
        return "it caps no scores, and this model wants them capped"
    if needs.head_dim > HEAD_DIM_MAX or needs.head_dim % HEAD_DIM_STEP:
        return f"heads are a multiple of {HEAD_DIM_STEP} wide and at most {HEAD_DIM_MAX}, not {needs.head_dim}"
    if is_version_2 and needs.block_size % PAGE_TOKENS:
        return f"block_size must be a multiple of {PAGE_TOKENS} for FlashAttention 2, not {needs.block_size}"
    return None
