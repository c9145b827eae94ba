"""The options of an engine, and their checks. Does not import torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypedDict, TypeGuard

from cuelight.errors import ConfigError

CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "dtype": ("auto", "float32", "bfloat16"),
    "quantization": (None, "int8", "int4"),
    "decoder": ("auto", "native", "transformers"),
    "kv_cache_dtype": ("auto", "float32", "bfloat16", "int8"),
    "attention": ("auto", "reference", "cpu", "triton", "flash"),
    "executor": ("auto", "thread", "process"),
}
OPTIONAL_COUNTS: Mapping[str, int] = {
    "token_budget": 1,
    "long_prefill_tokens": 1,
    "context_length": 2,
    "block_count": 2,
    "kv_cache_bytes": 1,
    "host_kv_cache_bytes": 1,
    "seed": 0,
}
"""Options that are None or a whole number, and the smallest allowed number."""
WEIGHT_MIN = 1e-6
WEIGHT_MAX = 1e6
"""Weights outside `WEIGHT_MIN` to `WEIGHT_MAX` would lose a tenant's service counter to rounding."""
SHOWN_MAX = 80
"""Largest number of characters of a value in an error message."""

POLICIES = ("fcfs", "priority", "deadline", "fair")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options of an engine. Raises ConfigError for a value or a combination that cannot work."""

    dtype: str = "auto"
    """Type of weights and KV cache: `"float32"`, `"bfloat16"`, or `"auto"` (float32 on the CPU, bfloat16 on CUDA).
    bfloat16 takes half the memory, and half the time on a CPU with AVX512-BF16.
    """
    quantization: str | None = None
    """Quantization of the weights: `"int8"`, `"int4"` (groups of 32 weights with a scale and an offset, 5 bits a
    weight; the head stays int8; native decoder only), or `None`.
    """
    kv_cache_dtype: str = "auto"
    """Type of the KV cache, with the native decoder: `"float32"`, `"bfloat16"`, `"int8"` (a scale per token and head),
    or `"auto"` (int8 beside quantized weights unless `dtype` is float32, else as `dtype`).
    """
    decoder: str = "auto"
    """`"native"` (Llama, Mistral, Qwen2 and Qwen3 on the CPU, compiled at the first start), `"transformers"` (any
    model), or `"auto"` (native where supported).
    """
    attention: str = "auto"
    """Attention of the transformers decoder, which any other value than `"auto"` selects: `"reference"` (plain torch),
    `"cpu"` (native code), `"triton"` (CUDA), `"flash"` (CUDA, with `block_size=256`), or `"auto"` (the first available
    of triton, flash, cpu, reference).
    """
    executor: str = "auto"
    """Placement of the device work: `"thread"` (in this process), `"process"` (a child process, whose death pauses
    requests and fails none), or `"auto"` (a process on CUDA, threads on the CPU).
    """
    device: str = "auto"
    """`"cpu"`, `"cuda"`, `"cuda:1"`, or `"auto"` (CUDA where available)."""
    token_budget: int | None = None
    """Largest number of tokens computed in one step; longer prompts are computed in chunks. `None` is 256 on the CPU,
    where larger steps gain next to nothing, and 2048 where there may be a GPU.
    """
    running_max: int = 64
    """Largest number of requests that hold blocks at once."""
    queue_limit: int = 1024
    """Largest number of accepted, unfinished requests; more are refused with `QueueFull`."""
    block_size: int = 16
    """Token slots per block of the KV cache."""
    block_count: int | None = None
    """Blocks of the KV cache; `None` sizes the cache by `kv_cache_bytes`."""
    kv_cache_bytes: int | None = None
    """Bytes of the KV cache. `None` takes, on the CPU, a quarter of the free memory (at most 2 GiB; with the native
    decoder at most the room for `running_max` requests of 512 tokens or one of `context_length`), and on CUDA the part
    of `memory_fraction` that weights, the largest step and graphs leave free, measured at the start.
    """
    memory_fraction: float = 0.9
    """Fraction of GPU memory that may be in use in total, by this engine and by other programs."""
    eager: bool | None = None
    """`True` starts the transformers decoder without compiling layers by `torch.compile` (up to a minute at a model's
    first start on a machine) or capturing graphs; `None` compiles on CUDA only.
    """
    host_block_count: int = 0
    """Blocks in host memory for evicted blocks, copied there and back where that is faster than recomputing."""
    host_kv_cache_bytes: int | None = None
    """Bytes of host memory for evicted blocks, in place of `host_block_count`."""
    watermark_fraction: float = 0.01
    """Fraction of the blocks kept free for running requests when a new request is admitted."""
    context_length: int | None = None
    """Largest number of tokens of a request, prompt and output; `None` is the model's own limit."""
    steps_in_flight: int = 2
    """Steps sent to the executor before the result of the first is read."""
    restarts_max: int = 8
    """Deaths of the executor in a row, with no step computed in between, before the engine gives up."""
    step_timeout_seconds: float | None = None
    """Seconds after which an executor in a process that has not answered a step is killed and replaced; `None` derives
    the limit from the duration of recent steps.
    """
    long_prefill_tokens: int | None = None
    """Largest number of tokens of one prompt in a step while other requests could use the budget; `None` is a quarter
    of the budget.
    """
    policy: str = "fcfs"
    """Order of service: `"fcfs"`, `"priority"`, `"deadline"` (earliest first), or `"fair"` (between tenants, by tokens
    served).
    """
    aging_seconds: float = 10.0
    """Waiting time that is worth one priority level under `"priority"`."""
    tenant_weights: Mapping[str, float] | None = None
    """Weights of the tenants, by name; requests of other tenants are refused. `None` serves any tenant, all with equal
    weight.
    """
    isolate_tenants: bool = False
    """Whether cached prefixes are shared within a tenant only: response times then reveal no other tenant's prompts."""
    seed: int | None = None
    """Seed of the engine's random numbers, from which requests without a seed get theirs; `None` differs at each start.
    """
    journal: str | os.PathLike[str] | None = None
    """File that records all messages to the actors, prompts and outputs too, for `cuelight replay`; an older journal
    there is overwritten, any other file is not. `None` records nothing.
    """
    resume: bool = False
    """Whether to continue the unfinished requests in the journal of an earlier process, see `Engine.resume`; the
    journal then keeps unfinished requests and the last 64 MiB or so.
    """
    resume_seconds: float = 60.0
    """Seconds after which resumed requests that no client has picked up are cancelled."""

    @classmethod
    def of(cls, options: Mapping[str, object]) -> EngineConfig:
        """Return the configuration with these options. Raises ConfigError for an unknown name, too."""
        names = [field.name for field in fields(cls)]
        for name in options:
            if name not in names:
                raise ConfigError(f"unknown option {name!r}; the options are {', '.join(names)}")
        return cls(**options)  # type: ignore[arg-type]  # __post_init__ checks the types

    @property
    def tenants(self) -> tuple[str, ...] | None:
        """The tenants whose requests are accepted; None accepts any tenant."""
        return None if self.tenant_weights is None else tuple(self.tenant_weights)

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if not is_one_of(allowed, value := getattr(self, name)):
                raise ConfigError(f"{name} must be one of {_listed(allowed)}, not {shown(value)}")
        if self.decoder == "native" and self.attention != "auto":
            raise ConfigError(
                f"attention {self.attention!r} needs decoder 'transformers', not 'native', which has its own attention"
            )
        if not isinstance(self.device, str):
            raise ConfigError(f"device must be a name such as 'cpu' or 'cuda', not {shown(self.device)}")
        if not isinstance(self.journal, str | os.PathLike | None):
            raise ConfigError(f"journal must be the path of a file, not {shown(self.journal)}")
        self._check_resume()
        check_policy(self.policy, self.aging_seconds, self.tenant_weights)
        if not isinstance(self.isolate_tenants, bool):
            raise ConfigError(f"isolate_tenants must be True or False, not {shown(self.isolate_tenants)}")
        if not isinstance(self.eager, bool | None):
            raise ConfigError(f"eager must be True, False or None, not {shown(self.eager)}")
        for name, at_least in OPTIONAL_COUNTS.items():
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), at_least=at_least)
        _check_count("restarts_max", self.restarts_max, at_least=0)
        if self.step_timeout_seconds is not None and not is_positive(self.step_timeout_seconds):
            raise ConfigError(f"step_timeout_seconds must be a number above 0, not {shown(self.step_timeout_seconds)}")
        for name in ("running_max", "queue_limit", "block_size", "steps_in_flight"):
            _check_count(name, getattr(self, name), at_least=1)
        self._check_memory()
        if not isinstance(self.watermark_fraction, int | float) or not 0 <= self.watermark_fraction < 1:
            raise ConfigError(f"watermark_fraction must be in [0, 1), not {shown(self.watermark_fraction)}")

    def _check_resume(self) -> None:
        if not isinstance(self.resume, bool):
            raise ConfigError(f"resume must be True or False, not {shown(self.resume)}")
        if self.resume and self.journal is None:
            raise ConfigError("resume needs a journal: give journal=..., too")
        if not is_positive(self.resume_seconds):
            raise ConfigError(f"resume_seconds must be a number above 0, not {shown(self.resume_seconds)}")

    def _check_memory(self) -> None:
        fraction: object = self.memory_fraction
        if not is_positive(fraction) or fraction > 1:
            raise ConfigError(f"memory_fraction must be a number above 0, at most 1, not {shown(fraction)}")
        _check_count("host_block_count", self.host_block_count, at_least=0)
        if self.host_kv_cache_bytes is not None and self.host_block_count:
            raise ConfigError("host_block_count and host_kv_cache_bytes both set the host memory: give one of them")


class EngineOptions(TypedDict, total=False):
    """The keyword options of `Engine`, for type checkers. The fields are written by `python .ci/options.py`."""

    # [[options EngineConfig]]
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    decoder: str
    attention: str
    executor: str
    device: str
    token_budget: int | None
    running_max: int
    queue_limit: int
    block_size: int
    block_count: int | None
    kv_cache_bytes: int | None
    memory_fraction: float
    eager: bool | None
    host_block_count: int
    host_kv_cache_bytes: int | None
    watermark_fraction: float
    context_length: int | None
    steps_in_flight: int
    restarts_max: int
    step_timeout_seconds: float | None
    long_prefill_tokens: int | None
    policy: str
    aging_seconds: float
    tenant_weights: Mapping[str, float] | None
    isolate_tenants: bool
    seed: int | None
    journal: str | os.PathLike[str] | None
    resume: bool
    resume_seconds: float
    # [[end]]


class SamplingOptions(TypedDict, total=False):
    """The sampling options of a request, for type checkers. The fields are written by `python .ci/options.py`."""

    # [[options Sampling]]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    # [[end]]


class ServiceOptions(TypedDict, total=False):
    """The service options of a request, for type checkers. The fields are written by `python .ci/options.py`."""

    # [[options Service]]
    tenant: str
    priority: int
    queue_seconds: float | None
    deadline_seconds: float | None
    cache_salt: str
    # [[end]]


class RequestOptions(SamplingOptions, ServiceOptions, total=False):
    """The keyword options of a request, for type checkers."""


def check_policy(policy: object, aging_seconds: object, tenant_weights: object) -> None:
    """Raise ConfigError for an unknown policy, and for invalid aging seconds or tenant weights."""
    if not is_one_of(POLICIES, policy):
        raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, not {shown(policy)}")
    if not is_positive(aging_seconds):
        raise ConfigError(f"aging_seconds must be a number above 0, not {shown(aging_seconds)}")
    if tenant_weights is None:
        return
    if not isinstance(tenant_weights, Mapping) or not tenant_weights:
        raise ConfigError(f"tenant_weights must map names of tenants to numbers, not {shown(tenant_weights)}")
    for tenant, weight in tenant_weights.items():
        if not isinstance(tenant, str) or not is_positive(weight) or not WEIGHT_MIN <= float(weight) <= WEIGHT_MAX:
            raise ConfigError(
                f"the weight of tenant {shown(tenant)} must be a number from {WEIGHT_MIN} to {WEIGHT_MAX}, "
                f"not {shown(weight)}"
            )


def _listed(allowed: Iterable[str | None]) -> str:
    return ", ".join(map(repr, allowed))


def is_one_of(names: Iterable[str | None], value: object) -> bool:
    """Return whether `value` is one of `names`. Never raises, whereas comparing arbitrary objects may."""
    return isinstance(value, str | None) and value in tuple(names)


def shown(value: object) -> str:
    """Return a short text of any value for an error message. Never raises."""
    try:
        text = repr(value)
    except Exception:  # from the caller's own `__repr__`, or an integer with more digits than Python converts
        return f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"


def is_positive(value: object) -> TypeGuard[int | float]:
    """Return whether `value` is a number above 0 that fits a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _check_count(name: str, value: object, *, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigError(f"{name} must be a whole number of at least {at_least}, not {shown(value)}")
