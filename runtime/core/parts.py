"""The composition of an engine: the roles, and the specs of its five actors with the addresses each of them gets.

Specs are listed from sinks to sources: actors start in this order and stop in reverse.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Never, TypeVar

from cuelight.actors.cache.actor import CacheManager
from cuelight.actors.detokenizer.actor import Detokenizer
from cuelight.actors.executor.build import build_executor, load_model
from cuelight.actors.executor.device import Device
from cuelight.actors.executor.host_memory import HostMemoryFile
from cuelight.actors.executor.options import LoadOptions, may_have_gpu
from cuelight.actors.intake.actor import Intake, PromptTokenizer
from cuelight.actors.intake.admission import AdmissionLimits
from cuelight.actors.scheduler.actor import Scheduler
from cuelight.actors.scheduler.outbox import ExecutorRoles, Peers
from cuelight.actors.scheduler.planning import StepLimits
from cuelight.config import EngineConfig
from cuelight.errors import ModelUnavailable
from cuelight.kernel import ActorSpec, InLoop, InProcess, RestartPolicy, Role, Terminated, get_logger
from cuelight.messages.address import Address
from cuelight.messages.cache import CacheMessage
from cuelight.messages.detokenizer import DetokenizerMessage
from cuelight.messages.executor import ExecutorMessage
from cuelight.messages.intake import IntakeMessage
from cuelight.messages.observer import ObserverMessage
from cuelight.messages.request import FIRST_EXECUTOR, ExecutorId
from cuelight.messages.scheduler import Abort, Admit, FailRequest, RestoreState, SchedulerMessage, SetPolicy
from cuelight.models.cache import cache_directory
from cuelight.models.folder import ModelFacts, read_facts
from cuelight.models.tokenizer_cache import load_tokenizer

if TYPE_CHECKING:
    from cuelight.actors.executor.batch import Batch

B = TypeVar("B")

log = get_logger("cuelight.engine")

RESTART_POLICY = RestartPolicy(restarts_max=50, window_seconds=60.0, backoff_seconds=0.01, backoff_max_seconds=0.2)
"""A restart is cheap: a new actor restores its state from its peers."""

EXECUTOR_RESTART_POLICY = RestartPolicy(
    restarts_max=100, window_seconds=60.0, backoff_seconds=0.02, backoff_max_seconds=0.2, restarts_at_start=True
)
"""The default of `EngineConfig.restarts_max` is lower, so that the scheduler gives up first."""

TOKEN_BUDGET_CPU = 256
TOKEN_BUDGET_GPU = 2048

POOL_TOKENS_PER_REQUEST = 512
"""Tokens for each of `running_max` requests in the largest default KV pool of the native decoder; the pool has room for
at least one request of `context_length`. A fixed figure bounds the process's memory independently of the machine."""


@dataclass(frozen=True)
class EngineParts(Generic[B]):
    """The parts that are loaded before the actors start; the executor loads the weights on its own thread or process.

    With an executor in a process, `load_device` must be an importable function, or a `functools.partial` of one.
    """

    facts: ModelFacts
    encoder: PromptTokenizer
    decode: Callable[[Sequence[int]], str]
    load_device: Callable[..., Device[B]]
    """Called without arguments, or with a claim on `lasting` if there is one."""
    lasting: HostMemoryFile | None = None
    """Host memory that outlives executors, until it is closed."""


def load_parts(folder: Path, config: EngineConfig) -> EngineParts[Batch]:
    """Read the model folder's facts and tokenizer. Blocks. Raises ModelUnavailable."""
    facts = read_facts(folder)

    try:
        encoder, decode = load_tokenizer(folder)
    except Exception as error:  # transformers raises many types for damaged files
        raise ModelUnavailable(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    load = partial(load_model, load_options(folder, config, facts))
    return EngineParts(facts, encoder, decode, load, lasting_memory(config))


def load_options(folder: Path, config: EngineConfig, facts: ModelFacts) -> LoadOptions:
    """Return the options with which the executor loads the model in `folder`."""
    return LoadOptions(
        folder=folder,
        decoder=config.decoder,
        dtype=config.dtype,
        quantization=config.quantization,
        attention=config.attention,
        device=config.device,
        block_size=config.block_size,
        block_count=config.block_count,
        kv_cache_bytes=config.kv_cache_bytes,
        host_block_count=config.host_block_count,
        host_kv_cache_bytes=config.host_kv_cache_bytes,
        kv_cache_dtype=config.kv_cache_dtype,
        pool_tokens=max(config.running_max * POOL_TOKENS_PER_REQUEST, context_length(facts, config)),
        eos_token_ids=facts.eos_token_ids,
        token_budget=step_tokens(config),
        running_max=config.running_max,
        memory_fraction=config.memory_fraction,
        eager=config.eager,
        code_folder=_code_folder(),
        now=time.perf_counter,
    )


def lives_in_process(config: EngineConfig) -> bool:
    """Return whether the executor runs in a child process.

    Decided without importing torch; a child process that turns out to compute on the CPU works as well.
    """
    return may_be_on_gpu(config) if config.executor == "auto" else config.executor == "process"


def may_be_on_gpu(config: EngineConfig) -> bool:
    """Return whether the device is a GPU, or is `"auto"` on a machine that may have one. Does not import torch."""
    return config.device != "cpu" and (config.device != "auto" or may_have_gpu())


def step_tokens(config: EngineConfig) -> int:
    """Return the token budget of a step."""
    return config.token_budget or (TOKEN_BUDGET_GPU if may_be_on_gpu(config) else TOKEN_BUDGET_CPU)


@dataclass(frozen=True)
class Roles:
    """The roles of the five actors, with mailboxes for all messages that the protocol allows in flight at once."""

    detokenizer: Role[DetokenizerMessage]
    executor: Role[ExecutorMessage]
    cache: Role[CacheMessage]
    scheduler: Role[SchedulerMessage]
    intake: Role[IntakeMessage]

    @property
    def executors(self) -> ExecutorRoles:
        """The roles of the first executor and of those that take over from it."""
        return ExecutorRoles(self.executor)


@dataclass
class ActiveExecutor:
    """The executor that serves, and the facts of its model that a new scheduler starts with; a reload changes them."""

    roles: ExecutorRoles
    executor_id: ExecutorId = FIRST_EXECUTOR
    eos_token_ids: frozenset[int] = frozenset()
    context_length: int | None = None
    """The context length of a model that has taken over; None for the first model."""
    lasting: HostMemoryFile | None = None
    """Host memory that outlives the executor, until `release`."""

    @property
    def role(self) -> Role[ExecutorMessage]:
        """The role of the executor that serves."""
        return self.roles[self.executor_id]

    def release(self) -> None:
        """Close the host memory: there will be no other executor."""
        if self.lasting is not None:
            self.lasting.close()


def executor_spec(
    load_device: Callable[..., Device[B]],
    lasting: HostMemoryFile | None,
    config: EngineConfig,
    executor_id: ExecutorId,
    cast: Roles,
) -> ActorSpec[ExecutorMessage]:
    """Return the spec of an executor that calls `load_device` and reports to the scheduler."""
    placement = InProcess() if lives_in_process(config) else InLoop()
    build = partial(build_executor, load_device, lasting, cast.scheduler, executor_id)
    return ActorSpec(cast.executors[executor_id], build, EXECUTOR_RESTART_POLICY, placement)


def lasting_memory(config: EngineConfig) -> HostMemoryFile | None:
    """Return host memory for blocks that outlives executors.

    None without host blocks, or where such memory cannot be allocated: then each executor allocates its own.
    """
    if not config.host_block_count and config.host_kv_cache_bytes is None:
        return None
    try:
        return HostMemoryFile(random.getrandbits(40))
    except OSError as reason:
        log.info("host_memory_does_not_last", reason=str(reason))
        return None


def _code_folder() -> Path | None:
    """Return the folder for compiled code; None without a cache folder, which does not prevent serving."""
    try:
        return cache_directory() / "native"
    except ModelUnavailable as error:
        log.warning("native_code_not_kept", reason=str(error))
        return None


def context_length(facts: ModelFacts, config: EngineConfig) -> int:
    """Return the largest number of tokens of a request: the model's limit, or the option if that is lower."""
    return min(facts.context_length, config.context_length or facts.context_length)


def roles(config: EngineConfig) -> Roles:
    """Return the roles of an engine with these options.

    A request has a small fixed number of messages in flight between two actors, and `steps_in_flight` bounds those of
    steps, so that capacities follow from the options.
    """
    requests = config.queue_limit
    return Roles(
        detokenizer=Role("detokenizer", DetokenizerMessage, capacity=4 * requests + 64),
        executor=Role("executor", ExecutorMessage, capacity=4 * config.steps_in_flight + 128),
        cache=Role("cache", CacheMessage, capacity=4 * requests + 64),
        # Intake's messages about requests are urgent: they stay in order, and overtake the results of steps.
        scheduler=Role(
            "scheduler",
            SchedulerMessage | Terminated,
            capacity=8 * requests + 64,
            urgent=(Admit, Abort, FailRequest, SetPolicy, RestoreState),
        ),
        intake=Role("intake", IntakeMessage, capacity=8 * requests + 64),
    )


def actor_specs(
    parts: EngineParts[B],
    config: EngineConfig,
    cast: Roles,
    observer: Address[ObserverMessage],
    active: ActiveExecutor,
) -> tuple[ActorSpec[Never], ...]:
    """Return the specs of the five actors. `active` is set to the first model's facts, and read at each restart."""
    facts = parts.facts
    active.eos_token_ids, active.lasting = frozenset(facts.eos_token_ids), parts.lasting
    longest = context_length(facts, config)
    limits = AdmissionLimits(facts.vocab_size, longest, config.queue_limit, config.tenants, config.isolate_tenants)
    token_budget = step_tokens(config)
    long_prefill_tokens = config.long_prefill_tokens or -(-token_budget // 4)
    step_limits = StepLimits(
        token_budget=token_budget,
        running_max=config.running_max,
        steps_in_flight=config.steps_in_flight,
        long_prefill_tokens=long_prefill_tokens,
        restarts_max=config.restarts_max,
        step_timeout_seconds=config.step_timeout_seconds,
    )
    is_apart = lives_in_process(config)
    policy = SetPolicy(config.policy, config.aging_seconds, tuple((config.tenant_weights or {}).items()))
    return (
        ActorSpec(
            cast.detokenizer,
            lambda context: Detokenizer(context, parts.decode, context.find(cast.scheduler), context.find(cast.intake)),
            RESTART_POLICY,
        ),
        executor_spec(parts.load_device, parts.lasting, config, FIRST_EXECUTOR, cast),
        ActorSpec(cast.cache, lambda _: CacheManager(observer, config.watermark_fraction), RESTART_POLICY),
        ActorSpec(
            cast.scheduler,
            lambda context: Scheduler(
                context,
                step_limits,
                active.eos_token_ids,
                Peers(
                    cache=context.find(cast.cache),
                    executor=context.find(active.role),
                    detokenizer=context.find(cast.detokenizer),
                    intake=context.find(cast.intake),
                    observer=observer,
                    cache_role=cast.cache,
                    executor_id=active.executor_id,
                    executor_roles=active.roles,
                    kill_executor=partial(context.kill, active.role) if is_apart else None,
                ),
                policy,
                active.context_length,
            ),
            RESTART_POLICY,
        ),
        ActorSpec(
            cast.intake,
            lambda context: Intake(
                context,
                parts.encoder,
                limits,
                context.find(cast.scheduler),
                context.find(cast.detokenizer),
                observer,
            ),
            RESTART_POLICY,
        ),
    )
