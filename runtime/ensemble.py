"""Who plays in an engine, and who knows whom. Sinks first: the cast starts in this order and stops in reverse."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Never, TypeAlias, TypeVar

from cuelight.actors.cache.actor import CacheManager
from cuelight.actors.detokenizer.actor import Detokenizer
from cuelight.actors.executor.actor import Executor
from cuelight.actors.executor.device import Device
from cuelight.actors.executor.options import LoadOptions
from cuelight.actors.intake.actor import Encoder, Intake, Limits
from cuelight.actors.scheduler.actor import Scheduler
from cuelight.actors.scheduler.outbox import Neighbours
from cuelight.actors.scheduler.planning import Limits as StepLimits
from cuelight.config import EngineConfig, ModelFacts, read_facts
from cuelight.errors import ModelUnavailable
from cuelight.kept_tokenizer import load_tokenizer
from cuelight.kernel import Part, Role
from cuelight.messages.address import Address
from cuelight.messages.cache import CacheMessage
from cuelight.messages.detokenizer import DetokenizerMessage
from cuelight.messages.executor import ExecutorMessage
from cuelight.messages.intake import IntakeMessage
from cuelight.messages.observer import ObserverMessage
from cuelight.messages.scheduler import Abort, Admit, SchedulerMessage, SetPolicy
from cuelight.model_cache import cache_directory

if TYPE_CHECKING:
    from cuelight.actors.executor.batch import Batch

B = TypeVar("B")

Casting: TypeAlias = Callable[["EngineConfig", "Roles", Address[ObserverMessage]], tuple[Part[Never], ...]]
"""Finds all that an engine plays with and gives the parts. Blocks, so it is called on a thread."""


POOL_TOKENS_PER_REQUEST = 512
"""For so many tokens of each of `running_max` requests there is room by default, or for one of the longest. What is
shorter leaves room for prefixes; the memory that a process may grow to is then a choice, not what the machine has."""


@dataclass(frozen=True)
class Ensemble(Generic[B]):
    """All that is loaded before the cast starts; the executor loads the weights itself, on its own thread."""

    facts: ModelFacts
    encoder: Encoder
    decode: Callable[[Sequence[int]], str]
    load_device: Callable[[], Device[B]]


def casting(gather: Callable[[EngineConfig], Ensemble[B]]) -> Casting:
    """The five parts over what `gather` finds: a model's folder, or a stand-in for one."""
    return lambda config, cast, observer: assemble(gather(config), config, cast, observer)


def gather(folder: Path, config: EngineConfig) -> Ensemble[Batch]:
    """Read the model folder's facts and tokenizer. Blocks. Raises ModelUnavailable."""
    facts = read_facts(folder)

    def load_device() -> Device[Batch]:
        from cuelight.actors.executor import loading

        return loading.load_device(
            LoadOptions(
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
                token_budget=config.token_budget,
                running_max=config.running_max,
                memory_fraction=config.memory_fraction,
                eager=config.eager,
                code_folder=_code_folder(),
                now=time.perf_counter,
            )
        )

    try:
        encoder, decode = load_tokenizer(folder)
    except Exception as error:  # transformers raises whatever the files make it stumble over
        raise ModelUnavailable(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    return Ensemble(facts, encoder, decode, load_device)


@dataclass(frozen=True)
class Roles:
    """The roles, with mailboxes large enough for all that the protocol lets be under way at once."""

    detokenizer: Role[DetokenizerMessage]
    executor: Role[ExecutorMessage]
    cache: Role[CacheMessage]
    scheduler: Role[SchedulerMessage]
    intake: Role[IntakeMessage]


def _code_folder() -> Path | None:
    """Where compiled code is kept; None where there is no place for it, which is no reason not to serve a folder."""
    try:
        return cache_directory() / "native"
    except ModelUnavailable:
        return None


def context_length(facts: ModelFacts, config: EngineConfig) -> int:
    """Tokens that a request may hold."""
    return min(facts.context_length, config.context_length or facts.context_length)


def roles(config: EngineConfig) -> Roles:
    """A live request has at most a few messages of its own under way on an edge; steps are bounded by credit."""
    requests = config.queue_limit
    return Roles(
        detokenizer=Role("detokenizer", DetokenizerMessage, capacity=4 * requests + 64),
        executor=Role("executor", ExecutorMessage, capacity=4 * config.steps_in_flight + 8),
        cache=Role("cache", CacheMessage, capacity=4 * requests + 64),
        # An Abort must not overtake its Admit, so both overtake the results of steps.
        scheduler=Role("scheduler", SchedulerMessage, capacity=4 * requests + 64, urgent=(Admit, Abort, SetPolicy)),
        intake=Role("intake", IntakeMessage, capacity=8 * requests + 64),
    )


def assemble(
    ensemble: Ensemble[B], config: EngineConfig, cast: Roles, observer: Address[ObserverMessage]
) -> tuple[Part[Never], ...]:
    """The five parts."""
    facts = ensemble.facts
    longest = context_length(facts, config)
    intake_limits = Limits(facts.vocab_size, longest, config.queue_limit, config.tenants, config.isolate_tenants)
    long_prefill_tokens = config.long_prefill_tokens or -(-config.token_budget // 4)
    step_limits = StepLimits(config.token_budget, config.running_max, config.steps_in_flight, long_prefill_tokens)
    policy = SetPolicy(config.policy, config.aging_seconds, tuple((config.tenant_weights or {}).items()))
    return (
        Part(cast.detokenizer, lambda context: Detokenizer(ensemble.decode, context.find(cast.scheduler))),
        Part(
            cast.executor,
            lambda context: Executor(context, ensemble.load_device, context.find(cast.scheduler), observer),
        ),
        Part(cast.cache, lambda _: CacheManager(observer, config.watermark_fraction)),
        Part(
            cast.scheduler,
            lambda context: Scheduler(
                context,
                step_limits,
                frozenset(facts.eos_token_ids),
                Neighbours(
                    cache=context.find(cast.cache),
                    executor=context.find(cast.executor),
                    detokenizer=context.find(cast.detokenizer),
                    intake=context.find(cast.intake),
                    observer=observer,
                ),
                policy,
            ),
        ),
        Part(
            cast.intake,
            lambda context: Intake(
                context,
                ensemble.encoder,
                intake_limits,
                context.find(cast.scheduler),
                context.find(cast.detokenizer),
                observer,
            ),
        ),
    )
