"""Compiling of a model's layers with `torch.compile`, with the compiled code cached in a file for the next start.

Attention is a custom operation that the compiler does not trace. The layer's index is passed to it as a tensor, so that
all layers share the same code. If compiling fails, the model is left unchanged.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import torch
import transformers
from torch import library
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from cuelight.actors.executor.model.attention import attend
from cuelight.actors.executor.model.module_replacement import (
    Probe,
    decoder_layers,
    difference,
    modules_with_layer_index,
)
from cuelight.actors.executor.model.passes import FusedNorm, tolerance_of
from cuelight.kernel import get_logger

log = get_logger("cuelight.executor")

CompileBackend: TypeAlias = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., object]]
"""A backend of torch.compile: returns a callable for a traced graph and example inputs."""

COMPILED_NAME = "cuelight_compiled"
"""Name of the attention function of compiled layers, as registered with transformers."""

WARM_TOKENS = (37, 1)
"""Token counts of the steps that are compiled before the first request.

The first equals no other size in a model, so it identifies the dimensions that depend on the number of tokens. torch
always compiles a dimension of 1 separately.
"""


KINDS_MAX = 64
"""Maximum number of kinds of layers that are compiled in a process, over all models. torch's default is 8."""


@library.custom_op("cuelight::attend", mutates_args=())
def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    return attend(int(layer), q, k, v, scaling, window, softcap).contiguous()


@_attend.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    return q.new_empty(q.shape)


def _opaque_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """As `attention._paged_attention`, without its checks, which the model has passed before it is compiled."""
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    number: torch.Tensor = module.layer_number  # type: ignore[assignment]  # `compile_layers` gives it one
    out: torch.Tensor = torch.ops.cuelight.attend(q, k, v, number, scaling, sliding_window, softcap)
    return out[None], None


def compile_layers(
    model: PreTrainedModel, warm: Callable[[int], None], folder: Path | None, backend: str | CompileBackend = "inductor"
) -> bool:
    """Compile the layers, call `warm` for each of `WARM_TOKENS`, and return whether the layers are compiled.

    `warm(n)` computes a step of n tokens. Compiled code is cached in `folder`, if given. Blocks.
    """
    layers = decoder_layers(model)
    if layers is None:
        log.warning("not_compiled", reason=f"{type(model).__name__} has no list of layers that attend")
        return False
    store = _CompiledLayersFile(folder, model) if folder is not None and backend == "inductor" else None
    if store is not None:
        store.load()
    probe = Probe(model)
    reference, norms = probe.logits(), _norms_ahead(layers, probe)
    undo = _install(model, layers)
    try:
        _compile(layers, norms, backend)
        with _sizes_free(layers[0]), torch._dynamo.config.patch(recompile_limit=KINDS_MAX):
            for token_count in WARM_TOKENS:
                warm(token_count)
        off = difference(probe.logits(), reference)
        reason = "" if off <= tolerance_of(model) else f"the model's logits are off by {off:.2g} of the largest"
    except Exception as error:  # a missing compiler, or code of the model that torch cannot trace
        reason = _first_lines(error)
    if reason:
        undo()
        log.warning("not_compiled", reason=reason)
    elif store is not None:
        store.save()
    return not reason


def _norms_ahead(layers: torch.nn.ModuleList, probe: Probe) -> list[FusedNorm | None]:
    """Return the norm applied to the first layer's input, then for each layer the norm applied to its output.

    An entry is None if there is no such norm.
    """
    members = {*layers}
    calls = probe.trace(lambda module: module in members or isinstance(module, FusedNorm))
    outputs = {call.module: call.outputs[0] for call in calls if call.module in members and len(call.outputs) == 1}
    takers = {
        id(call.inputs[0]): call.module
        for call in reversed(calls)  # reversed, so that the first of several norms with the same input wins
        if isinstance(call.module, FusedNorm) and len(call.inputs) == 1
    }
    following = [takers.get(id(outputs.get(layer))) for layer in layers]
    # The first layer's leading norm has the same name within the layer as the last layer's.
    leads = [name for name, module in layers[-1].named_modules() if module in following]
    first = dict(layers[0].named_modules()).get(leads[0]) if len(leads) == 1 else None
    return [first if isinstance(first, FusedNorm) else None, *following]


def _compile(layers: torch.nn.ModuleList, norms: Sequence[FusedNorm | None], backend: str | CompileBackend) -> None:
    """Compile each layer together with the norm of its output, if any.

    The norm before the first layer is computed separately, so that the first layer shares the code of the others.
    """
    for layer, norm in zip(layers, norms[1:], strict=True):
        layer.forward = torch.compile(layer.forward if norm is None else _then(layer.forward, norm), backend=backend)
    if norms[0] is not None:
        layers[0].forward = _before(norms[0], layers[0].forward)


def _then(forward: Callable[..., torch.Tensor], norm: FusedNorm) -> Callable[..., torch.Tensor]:
    def both(*inputs: object, **named: object) -> torch.Tensor:
        y = forward(*inputs, **named)
        norm.compute_ahead(y)
        return y

    return both


def _before(norm: FusedNorm, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def both(x: torch.Tensor, *inputs: object, **named: object) -> torch.Tensor:
        _free_sizes(norm.compute_ahead(x))
        return forward(x, *inputs, **named)

    return both


def _install(model: PreTrainedModel, layers: torch.nn.ModuleList) -> Callable[[], None]:
    """Make attention opaque, with the layer's index as a tensor; return a function that restores the layers."""
    AttentionInterface.register(COMPILED_NAME, _opaque_attention)
    configs = [config for module in model.modules() if isinstance(config := _config(module), PreTrainedConfig)]
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = COMPILED_NAME
    for layer in layers:
        for module in modules_with_layer_index(layer):
            module.layer_number = torch.tensor(module.layer_idx)

    def undo() -> None:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name
        for layer in layers:
            vars(layer).pop("forward", None)

    return undo


def _config(module: torch.nn.Module) -> object:
    return getattr(module, "config", None)


@contextmanager
def _sizes_free(layer: torch.nn.Module) -> Iterator[None]:
    """Within the block, mark the dimensions of the layer's inputs that are the number of tokens as dynamic."""

    def mark(_: torch.nn.Module, inputs: tuple[object, ...], named: dict[str, object]) -> None:
        for tensor in _tensors((*inputs, *named.values())):
            _free_sizes(tensor)

    handle = layer.register_forward_pre_hook(mark, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _free_sizes(tensor: torch.Tensor) -> None:
    for dimension, size in enumerate(tensor.shape):
        if size == WARM_TOKENS[0]:
            torch._dynamo.mark_dynamic(tensor, dimension)


def _tensors(values: tuple[object, ...]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(tuple(value))


class _CompiledLayersFile:
    """A file with torch's compiled code for models of this architecture on this kind of machine."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        kind = hashlib.sha256()
        parts = (torch.__version__, transformers.__version__, _machine(model.device), model.config.to_json_string())
        kinds = [f"{name} {type(module).__name__}" for name, module in model.named_modules()]
        for part in (*parts, str(model.dtype), *kinds):
            kind.update(f"{part}\0".encode())
        self._path = folder / f"layers-{kind.hexdigest()[:24]}.bin"

    def load(self) -> None:
        """Load the file into torch's cache, if it exists. An unreadable file is removed."""
        try:
            reason = "" if torch.compiler.load_cache_artifacts(self._path.read_bytes()) else "torch cannot read it"
        except FileNotFoundError:
            return
        except Exception as error:  # a damaged file can make torch raise any error
            reason = _first_lines(error)
        if reason:
            log.warning("compiled_layers_unread", path=str(self._path), reason=reason)
            self._path.unlink(missing_ok=True)

    def save(self) -> None:
        """Save torch's compiled code, unless the file exists. The file is renamed into place when complete."""
        if self._path.exists() or (artifacts := torch.compiler.save_cache_artifacts()) is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(
                prefix=self._path.name, suffix=".partial", dir=self._path.parent
            ) as scratch:
                whole = Path(scratch) / self._path.name
                whole.write_bytes(artifacts[0])
                whole.replace(self._path)
        except OSError as error:
            log.warning("compiled_layers_unsaved", path=str(self._path), reason=str(error))


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.version.cuda}"
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"


def _first_lines(error: BaseException) -> str:
    """Return the error's type and its first three lines, since torch's messages have pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([f"{type(error).__name__}:", *lines[:3]])
