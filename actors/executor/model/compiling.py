"""Compiles a model's layers, one by one, with `torch.compile`, and keeps what came out for the next start.

Attention is one operation that the compiler does not look into; which layer it is for comes as a tensor, so that all
layers share one piece of code. Where compiling fails, the model stays as it is.
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
"""What torch.compile hands the code to that it traced."""

COMPILED_NAME = "cuelight_compiled"
"""Under which transformers finds the attention of compiled layers."""

WARM_TOKENS = (37, 1)
"""Steps that are compiled before the first request. One of a size that is no other size of a model, which shows what
depends on the number of tokens; one of a single token, which torch always compiles apart."""


KINDS_MAX = 64
"""Of so many kinds of layers, in all the models of a process, may there be compiled code. torch gives up at 8."""


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
    """As the attention that a model was tried with; whether it can be served was seen then."""
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    number: torch.Tensor = module.layer_number  # type: ignore[assignment]  # `compile_layers` gives it one
    out: torch.Tensor = torch.ops.cuelight.attend(q, k, v, number, scaling, sliding_window, softcap)
    return out[None], None


def compile_layers(
    model: PreTrainedModel, warm: Callable[[int], None], folder: Path | None, backend: str | CompileBackend = "inductor"
) -> bool:
    """Compile, and `warm` each size once; whether the layers are compiled now.

    `warm` computes a step of so many tokens. What was compiled is kept in the folder, if there is one.
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
    except Exception as error:  # a compiler that is missing, or a model's code that torch cannot follow
        reason = _first_lines(error)
    if reason:
        undo()
        log.warning("not_compiled", reason=reason)
    elif store is not None:
        store.save()
    return not reason


def _norms_ahead(layers: torch.nn.ModuleList, probe: Probe) -> list[FusedNorm | None]:
    """The norm that takes what the first layer is given, and for each layer the one that takes what it gives.

    None where norms and layers do not follow each other like that.
    """
    members = {*layers}
    calls = probe.trace(lambda module: module in members or isinstance(module, FusedNorm))
    outputs = {call.module: call.outputs[0] for call in calls if call.module in members and len(call.outputs) == 1}
    takers = {
        id(call.inputs[0]): call.module
        for call in reversed(calls)  # of several that take the same, the first
        if isinstance(call.module, FusedNorm) and len(call.inputs) == 1
    }
    following = [takers.get(id(outputs.get(layer))) for layer in layers]
    # What leads the last layer leads the first.
    leads = [name for name, module in layers[-1].named_modules() if module in following]
    first = dict(layers[0].named_modules()).get(leads[0]) if len(leads) == 1 else None
    return [first if isinstance(first, FusedNorm) else None, *following]


def _compile(layers: torch.nn.ModuleList, norms: Sequence[FusedNorm | None], backend: str | CompileBackend) -> None:
    """Each layer computes the norm after it, too, where there is one. That before the first is computed apart, so that
    the first has the same code as the others."""
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
    """Make attention opaque, with a number for each layer; the function gives the layers back as they were."""
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
    """Within, tell the compiler of each tensor that the layer is given which of its sizes is the number of tokens."""

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
    """A file with what torch compiled for a model of this make on this machine."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        kind = hashlib.sha256()
        parts = (torch.__version__, transformers.__version__, _machine(model.device), model.config.to_json_string())
        kinds = [f"{name} {type(module).__name__}" for name, module in model.named_modules()]
        for part in (*parts, str(model.dtype), *kinds):
            kind.update(f"{part}\0".encode())
        self._path = folder / f"layers-{kind.hexdigest()[:24]}.bin"

    def load(self) -> None:
        """Give torch what is there. A file that is no good is as none."""
        try:
            reason = "" if torch.compiler.load_cache_artifacts(self._path.read_bytes()) else "torch cannot read it"
        except FileNotFoundError:
            return
        except Exception as error:  # whatever a damaged file makes torch stumble over
            reason = _first_lines(error)
        if reason:
            log.warning("compiled_layers_unread", path=str(self._path), reason=reason)
            self._path.unlink(missing_ok=True)

    def save(self) -> None:
        """Keep what was compiled, unless it is there already. The name comes into being complete."""
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
    """What went wrong; torch goes on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([f"{type(error).__name__}:", *lines[:3]])
