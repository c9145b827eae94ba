"""The draws before a simulated run: the engine's options, and its faults and kills."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Final

from cuelight.config import POLICIES, EngineConfig
from cuelight.kernel.faults import Faults
from cuelight.messages.request import RequestId
from cuelight.trial_device import POISON_EFFECTS, FaultPlan

ACTORS: Final = ("detokenizer", "executor", "cache", "scheduler", "intake")


def draw_config(rng: random.Random) -> EngineConfig:
    """Draw the options of a small engine, where everything happens sooner."""
    config = EngineConfig(
        token_budget=rng.choice((3, 16, 64, 512)),
        running_max=rng.choice((1, 3, 16)),
        queue_limit=rng.choice((4, 100, 100)),
        block_size=rng.choice((1, 4, 16)),
        block_count=rng.choice((16, 32, 64, 1000)),
        watermark_fraction=rng.choice((0.0, 0.01, 0.2)),
        steps_in_flight=rng.choice((1, 2, 3)),
        host_block_count=rng.choice((0, 8, 64)),
        policy=rng.choice(POLICIES),
        isolate_tenants=rng.random() < 0.2,
        executor=rng.choice(("thread", "process")),
        restarts_max=50,
    )
    return with_tight_pool(config) if rng.random() < 0.3 else config


def with_tight_pool(config: EngineConfig) -> EngineConfig:
    """Return the options with a pool so small that blocks move to host memory and back all the time."""
    return replace(config, running_max=16, block_size=4, block_count=16, host_block_count=64)


def draw_fault_plan(rng: random.Random, config: EngineConfig, request_count: int) -> FaultPlan:
    """Draw the executor's faults; hangs only in a process, which can be killed."""
    plan = FaultPlan(rng, step_failure_rate=rng.choice((0.0, 0.0, 0.05, 0.3)))
    if rng.random() < 0.3:
        plan.device_loss_rate = rng.choice((0.01, 0.1))
    if rng.random() < 0.2:
        plan.step_tokens_max = rng.choice((1, 2, 10, 40))
    if config.host_block_count:
        plan.save_death_rate = rng.choice((0.0, 0.0, 0.05, 0.3))
    is_apart = config.executor == "process"
    if is_apart and rng.random() < 0.3:
        plan.hang_rate = rng.choice((0.01, 0.1))
    if is_apart and rng.random() < 0.3:
        plan.load_failure_rate = 0.3
    if rng.random() < 0.2:
        plan.poison = RequestId(int(rng.random() * request_count))
        plan.poison_effect = rng.choice(POISON_EFFECTS if is_apart else POISON_EFFECTS[:1])
    return plan


def draw_message_faults(rng: random.Random) -> Faults:
    """Draw the simulation's faults: crashes, kills and delays at any message."""
    return Faults(
        crash=rng.choice((0.0, 0.0, 0.003, 0.01, 0.03)),
        kill=rng.choice((0.0, 0.0, 0.01, 0.05)),
        delay_seconds_max=rng.choice((0.0, 0.001, 0.1)),
    )


def draw_kills(rng: random.Random) -> dict[int, str]:
    """Draw the actors to kill, by delivery: often in a row, so that one dies while another restarts."""
    kills: dict[int, str] = {}
    for _ in range(rng.choice((0, 0, 1, 3, 8))):
        delivery = int(rng.random() * rng.choice((30, 300, 3000)))
        for _ in range(rng.choice((1, 1, 2, 4))):
            kills[delivery] = rng.choice(ACTORS)
            delivery += 1 + int(rng.random() * 12)
    return kills
