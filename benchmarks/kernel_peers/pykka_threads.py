"""Pykka: actors on threads, messages as named tuples through an unbounded inbox, answers as futures."""

from __future__ import annotations

import gc
import time
from typing import NamedTuple

import pykka  # type: ignore[import-not-found]  # lives in an environment of its own

from benchmarks.kernel_peers import (
    ASKERS,
    ASKS,
    BURST,
    ROUNDS,
    TIMEOUT_SECONDS,
    Effort,
    Outcome,
    asked,
    blocking_rate,
    crowded,
    memory_kib,
    spawned,
    told,
)


class Count(NamedTuple):
    """Add to the total. Not answered."""

    amount: int


class Total(NamedTuple):
    """Answered with the total."""


class Echo(NamedTuple):
    """Answered with the same value."""

    value: int


class Replier(pykka.ThreadingActor):  # type: ignore[misc]  # the same
    """Counts, and answers."""

    use_daemon_thread = True

    def __init__(self) -> None:
        super().__init__()
        self._total = 0

    def on_receive(self, message: Count | Total | Echo) -> int | None:
        match message:
            case Count(amount=amount):
                self._total += amount
                return None
            case Total():
                return self._total
            case Echo(value=value):
                return value


def tell(effort: Effort) -> Outcome:
    """Bursts of messages without an answer, each followed by a question after their number."""
    ref = Replier.start()
    sent = 0

    def burst() -> None:
        nonlocal sent
        for _ in range(BURST):
            ref.tell(Count(1))
        sent += BURST
        assert ref.ask(Total(), timeout=TIMEOUT_SECONDS) == sent

    return told(blocking_rate(burst, effort.seconds))


def ask(effort: Effort) -> Outcome:
    """One question, its answer, the next question."""
    ref = Replier.start()

    def batch() -> None:
        for value in range(ASKS):
            assert ref.ask(Echo(value), timeout=TIMEOUT_SECONDS) == value

    return asked(blocking_rate(batch, effort.seconds))


def crowd(effort: Effort) -> Outcome:
    """As many futures at once, instead of as many threads that ask."""
    ref = Replier.start()

    def batch() -> None:
        for _ in range(ROUNDS):
            futures = [ref.ask(Echo(value), block=False) for value in range(ASKERS)]
            assert pykka.get_all(futures, timeout=TIMEOUT_SECONDS) == list(range(ASKERS))

    return crowded(blocking_rate(batch, effort.seconds))


def spawn(effort: Effort) -> Outcome:
    """Start many actors, each with a thread of its own."""
    gc.collect()
    kib = memory_kib()
    begin = time.perf_counter()
    refs = [Replier.start() for _ in range(effort.actors)]
    assert refs[-1].ask(Echo(-1), timeout=TIMEOUT_SECONDS) == -1
    seconds = time.perf_counter() - begin
    for value, ref in enumerate(refs):
        assert ref.ask(Echo(value), timeout=TIMEOUT_SECONDS) == value
    gc.collect()
    return spawned(len(refs), seconds, memory_kib() - kib)
