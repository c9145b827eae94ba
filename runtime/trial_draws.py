"""What is drawn of a history before it begins: the engine's options, and what goes wrong when."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Final

from cuelight.config import POLICIES, EngineConfig
from cuelight.kernel.faults import Faults
from cuelight.messages.request import RequestId
from cuelight.trial_device import POISONS, Mischief

ACTORS: Final = ("detokenizer", "executor", "cache", "scheduler", "intake")


def drawn_config(chance: random.Random) -> EngineConfig:
    """Small ones, where everything happens sooner."""
    config = EngineConfig(
        token_budget=chance.choice((3, 16, 64, 512)),
        running_max=chance.choice((1, 3, 16)),
        queue_limit=chance.choice((4, 100, 100)),
        block_size=chance.choice((1, 4, 16)),
        block_count=chance.choice((16, 32, 64, 1000)),
        watermark_fraction=chance.choice((0.0, 0.01, 0.2)),
        steps_in_flight=chance.choice((1, 2, 3)),
        host_block_count=chance.choice((0, 8, 64)),
        policy=chance.choice(POLICIES),
        isolate_tenants=chance.random() < 0.2,
        executor=chance.choice(("thread", "process")),
        restarts_max=50,
    )
    return crowded(config) if chance.random() < 0.3 else config


def crowded(config: EngineConfig) -> EngineConfig:
    """Blocks leave such a pool for host memory, and come back, all the time."""
    return replace(config, running_max=16, block_size=4, block_count=16, host_block_count=64)


def drawn_mischief(chance: random.Random, config: EngineConfig, request_count: int) -> Mischief:
    """Only in a process can what never ends be ended."""
    mischief = Mischief(chance, fails=chance.choice((0.0, 0.0, 0.05, 0.3)))
    if chance.random() < 0.3:
        mischief.loses = chance.choice((0.01, 0.1))
    if chance.random() < 0.2:
        mischief.fits = chance.choice((1, 2, 10, 40))
    if config.host_block_count:
        mischief.dies_saving = chance.choice((0.0, 0.0, 0.05, 0.3))
    is_apart = config.executor == "process"
    if is_apart and chance.random() < 0.3:
        mischief.hangs = chance.choice((0.01, 0.1))
    if is_apart and chance.random() < 0.3:
        mischief.misloads = 0.3
    if chance.random() < 0.2:
        mischief.poison = RequestId(int(chance.random() * request_count))
        mischief.poison_does = chance.choice(POISONS if is_apart else POISONS[:1])
    return mischief


def drawn_faults(chance: random.Random) -> Faults:
    """What the simulation does to any actor, at any message."""
    return Faults(
        crash=chance.choice((0.0, 0.0, 0.003, 0.01, 0.03)),
        kill=chance.choice((0.0, 0.0, 0.01, 0.05)),
        delay_seconds_max=chance.choice((0.0, 0.001, 0.1)),
    )


def drawn_kills(chance: random.Random) -> dict[int, str]:
    """With which delivery whom: often one after another, so that one dies while another is coming back."""
    kills: dict[int, str] = {}
    for _ in range(chance.choice((0, 0, 1, 3, 8))):
        delivery = int(chance.random() * chance.choice((30, 300, 3000)))
        for _ in range(chance.choice((1, 1, 2, 4))):
            kills[delivery] = chance.choice(ACTORS)
            delivery += 1 + int(chance.random() * 12)
    return kills
