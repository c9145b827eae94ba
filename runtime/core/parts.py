"""Who plays in an engine, and who knows whom. Sinks first: the cast starts in this order and stops in reverse."""

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
"""A life is cheap: a new actor asks its peers, and goes on."""

EXECUTOR_RESTART_POLICY = RestartPolicy(
    restarts_max=100, window_seconds=60.0, backoff_seconds=0.02, backoff_max_seconds=0.2, restarts_at_start=True
)
"""The scheduler gives up sooner where nothing comes of it."""

TOKEN_BUDGET_CPU = 256
TOKEN_BUDGET_GPU = 2048

POOL_TOKENS_PER_REQUEST = 512
"""For so many tokens of each of `running_max` requests there is room by default, or for one of the longest. What is
shorter leaves room for prefixes; the memory that a process may grow to is then a choice, not what the machine has."""


@dataclass(frozen=True)
class EngineParts(Generic[B]):
    """All that is loaded before the cast starts; the executor loads the weights itself, on its own thread or process.

    For a process `load_device` must be a function that it can import, or a `functools.partial` of one.
    """

    facts: ModelFacts
    encoder: PromptTokenizer
    decode: Callable[[Sequence[int]], str]
    load_device: Callable[..., Device[B]]
    """Called without arguments, or with a claim on the memory that is `lasting`."""
    lasting: HostMemoryFile | None = None
    """Outlives executors, until it is given back."""


def load_parts(folder: Path, config: EngineConfig) -> EngineParts[Batch]:
    """Read the model folder's facts and tokenizer. Blocks. Raises ModelUnavailable."""
    facts = read_facts(folder)

    try:
        encoder, decode = load_tokenizer(folder)
    except Exception as error:  # transformers raises whatever the files make it stumble over
        raise ModelUnavailable(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    load = partial(load_model, load_options(folder, config, facts))
    return EngineParts(facts, encoder, decode, load, lasting_memory(config))


def load_options(folder: Path, config: EngineConfig, facts: ModelFacts) -> LoadOptions:
    """What the executor is to load."""
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
    """Whether the executor lives in a process of its own. Does not ask torch: one for a CPU after all does no harm."""
    return may_be_on_gpu(config) if config.executor == "auto" else config.executor == "process"


def may_be_on_gpu(config: EngineConfig) -> bool:
    """Whether the device is none, or is to be chosen and there may be one. Does not ask torch."""
    return config.device != "cpu" and (config.device != "auto" or may_have_gpu())


def step_tokens(config: EngineConfig) -> int:
    """The token budget of a step."""
    return config.token_budget or (TOKEN_BUDGET_GPU if may_be_on_gpu(config) else TOKEN_BUDGET_CPU)


@dataclass(frozen=True)
class Roles:
    """The roles, with mailboxes large enough for all that the protocol lets be under way at once."""

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
    """Who plays the executor now, and what a new scheduler must know of its model. Another model changes it."""

    roles: ExecutorRoles
    executor_id: ExecutorId = FIRST_EXECUTOR
    eos_token_ids: frozenset[int] = frozenset()
    context_length: int | None = None
    """None while it is the first one."""
    lasting: HostMemoryFile | None = None
    """What outlives it, until `release`."""

    @property
    def role(self) -> Role[ExecutorMessage]:
        """The role of the executor that computes."""
        return self.roles[self.executor_id]

    def release(self) -> None:
        """Nobody will play the executor any more."""
        if self.lasting is not None:
            self.lasting.close()


def executor_spec(
    load_device: Callable[..., Device[B]],
    lasting: HostMemoryFile | None,
    config: EngineConfig,
    executor_id: ExecutorId,
    cast: Roles,
) -> ActorSpec[ExecutorMessage]:
    """An executor that loads this and answers to the scheduler."""
    placement = InProcess() if lives_in_process(config) else InLoop()
    build = partial(build_executor, load_device, lasting, cast.scheduler, executor_id)
    return ActorSpec(cast.executors[executor_id], build, EXECUTOR_RESTART_POLICY, placement)


def lasting_memory(config: EngineConfig) -> HostMemoryFile | None:
    """For blocks in host memory, if there are to be some; None also where an executor's own must do."""
    if not config.host_block_count and config.host_kv_cache_bytes is None:
        return None
    try:
        return HostMemoryFile(random.getrandbits(40))
    except OSError as reason:
        log.info("host_memory_does_not_last", reason=str(reason))
        return None


def _code_folder() -> Path | None:
    """Where compiled code is kept; None where there is no place for it, which is no reason not to serve a folder."""
    try:
        return cache_directory() / "native"
    except ModelUnavailable as error:
        log.warning("native_code_not_kept", reason=str(error))
        return None


def context_length(facts: ModelFacts, config: EngineConfig) -> int:
    """Tokens that a request may hold."""
    return min(facts.context_length, config.context_length or facts.context_length)


def roles(config: EngineConfig) -> Roles:
    """A live request has at most a few messages of its own under way on an edge; steps are bounded by credit."""
    requests = config.queue_limit
    return Roles(
        detokenizer=Role("detokenizer", DetokenizerMessage, capacity=4 * requests + 64),
        executor=Role("executor", ExecutorMessage, capacity=4 * config.steps_in_flight + 128),
        cache=Role("cache", CacheMessage, capacity=4 * requests + 64),
        # What comes of requests must not be overtaken by what came later of them, and overtakes the results of steps.
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
    """The five parts. `active` is what changes when another model takes over."""
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
