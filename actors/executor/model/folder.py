"""Reading of a model folder: its configuration, with features refused that would be computed wrongly, and its weights.

Also the choice of device and dtype. Every failure raises CannotLoad with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from cuelight.actors.executor.model.attention import ATTENTION_NAME
from cuelight.actors.executor.model.memory import DeviceMemory, gib
from cuelight.actors.executor.options import CannotLoad
from cuelight.actors.executor.safetensors_header import BadHeader, read_header

SERVED_LAYERS = ("full_attention", "sliding_attention")
CONVERTED_TYPES = ("F64", "F32", "F16", "BF16")
"""Types of weights that are converted to the chosen dtype; tensors of other types stay as they are."""


class _LoadingInfo(TypedDict):
    """transformers' report of weights that it could not read."""

    missing_keys: set[str]
    mismatched_keys: set[tuple[str, tuple[int, ...], tuple[int, ...]]]


def choose_device(name: str) -> torch.device:
    """Return the device of this name, or for "auto" CUDA if available, else the CPU. Raises CannotLoad."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise CannotLoad(f"device {name!r} cannot be used: it has no memory and computes nothing")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise CannotLoad(f"device {name!r} cannot be used: {error}") from error
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of this name, or for "auto" the fastest on the device. Raises CannotLoad."""
    if name == "auto":
        # Without matrix units for bfloat16, a CPU computes it several times slower than float32.
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(name)
    if dtype is None:
        raise CannotLoad(f"dtype must be 'float32', 'bfloat16' or 'auto', not {name!r}")
    try:
        one = torch.ones(1, 1, dtype=dtype, device=device)
        torch.mm(one, one)
    except (RuntimeError, TypeError) as error:
        raise CannotLoad(f"{device} does not compute in {name}: {error}") from error
    return dtype


def read_config(folder: Path) -> PreTrainedConfig:
    """Read the model's configuration. Raises CannotLoad, also for features that would silently be computed wrongly."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        text = config.get_text_config()
    except Exception as error:  # transformers raises many kinds for a folder it cannot load
        raise CannotLoad(f"transformers cannot load {folder}: {type(error).__name__}: {error}") from error
    if getattr(text, "num_attention_heads", None) is None:
        raise CannotLoad(f"{text.model_type} is no transformer with attention in each layer")
    if text.num_hidden_layers < 1:
        raise CannotLoad(f"{folder} cannot be served: its num_hidden_layers is {text.num_hidden_layers}")
    kinds = getattr(text, "layer_types", None) or ()
    for kind in kinds:
        if kind not in SERVED_LAYERS:
            raise CannotLoad(f"this model has layers of {kind}, which is not supported yet")
    if "sliding_attention" in kinds and not getattr(text, "sliding_window", None):
        raise CannotLoad("this model has layers of sliding_attention, but its configuration has no sliding_window")
    if getattr(text, "attn_temperature_tuning", False):
        raise CannotLoad(
            "this model's attention counts tokens by itself (attn_temperature_tuning), not by their positions"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    # Some configurations have separate parameters for each kind of layer.
    if any(each.get("rope_type") == "longrope" for each in (rope, *rope.values()) if isinstance(each, dict)):
        # Frequencies of longrope depend on the longest row of a batch, so rows would depend on each other.
        raise CannotLoad("this model's rotary embedding is longrope, which is not supported yet")
    return config


def context_length(config: PreTrainedConfig) -> int | None:
    """Return the maximum number of tokens in a row; None if the model's configuration has no limit."""
    length: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return length or None


def read_model(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, memory: DeviceMemory
) -> PreTrainedModel:
    """Load the model with its weights onto the device, in inference mode. Blocks. Raises CannotLoad."""
    needed, free = weights_bytes(folder, dtype), memory.free()
    if needed > free:
        raise CannotLoad(f"the model does not fit: its weights take {gib(needed)}, and {device} has {gib(free)} free")
    try:
        with _no_bars():
            read = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # otherwise transformers only logs the mismatches
            )
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
            raise CannotLoad(f"transformers' {config.model_type} does not support custom attention") from error
        if str(error).startswith("Unrecognized configuration class"):  # the text lists some hundred classes
            raise CannotLoad(f"transformers has no causal language model for {config.model_type}") from error
        raise CannotLoad(f"transformers cannot load {folder}: {type(error).__name__}: {error}") from error
    model, report = cast(tuple[PreTrainedModel, _LoadingInfo], read)
    # transformers would initialize either randomly and continue.
    if missing := report["missing_keys"]:
        raise CannotLoad(f"{folder} lacks weights: {', '.join(sorted(missing))}")
    if mismatched := report["mismatched_keys"]:
        name, found, wanted = min(mismatched)
        raise CannotLoad(f"{folder}: {name} has shape {[*found]} and should have {[*wanted]}")
    try:
        torch.nn.Module.to(model, device)
    except torch.OutOfMemoryError as error:
        raise CannotLoad(f"the model does not fit: its weights take {gib(needed)} on {device}: {error}") from error
    model.train(False).requires_grad_(False)
    return model


def weights_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Return the bytes of the folder's weights as `dtype`, from the files' headers; 0 if a header cannot be read."""
    try:
        return sum(_converted_bytes(path, dtype.itemsize) for path in folder.glob("*.safetensors"))
    except (OSError, BadHeader):
        return 0  # reading the weights raises a better error


def _converted_bytes(path: Path, item_bytes: int) -> int:
    entries = read_header(path).entries.values()
    return sum([item_bytes * math.prod(entry.shape) for entry in entries if entry.dtype in CONVERTED_TYPES])


@contextmanager
def _no_bars() -> Iterator[None]:
    """Within the block, disable transformers' progress bars, each of which starts a thread."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
