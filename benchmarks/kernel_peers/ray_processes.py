"""Ray: every actor is a process, on a cluster of this machine alone that starts and ends with the experiment."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray  # type: ignore[import-not-found]  # lives in an environment of its own, and reads the variable here

from benchmarks.kernel_peers import (
    ASK,
    ASKERS,
    ASKS,
    BURST,
    PROCESS,
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

ACTORS_MAX = 20
STORE_BYTES = 200 * 1024 * 1024


class Replier:
    """Counts, and answers."""

    def __init__(self) -> None:
        self._total = 0

    def count(self, amount: int) -> None:
        """Add to the total."""
        self._total += amount

    def total(self) -> int:
        """Return the number of counted calls."""
        return self._total

    def echo(self, value: int) -> int:
        """The same value."""
        return value

    def process_id(self) -> int:
        """Whose memory is the actor's."""
        return os.getpid()


RemoteReplier = ray.remote(Replier)


@contextmanager
def _cluster() -> Iterator[None]:
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=STORE_BYTES,
    )
    try:
        yield
    finally:
        ray.shutdown()


def tell(effort: Effort) -> Outcome:
    """Send bursts of calls without fetching their results, each burst followed by a call that returns their number."""
    sent = 0
    with _cluster():
        actor = RemoteReplier.remote()

        def burst() -> None:
            nonlocal sent
            for _ in range(BURST):
                actor.count.remote(1)
            sent += BURST
            assert ray.get(actor.total.remote(), timeout=TIMEOUT_SECONDS) == sent

        return told(blocking_rate(burst, effort.seconds))


def _ask(effort: Effort, figure: str) -> Outcome:
    with _cluster():
        actor = RemoteReplier.remote()

        def batch() -> None:
            for value in range(ASKS):
                assert ray.get(actor.echo.remote(value), timeout=TIMEOUT_SECONDS) == value

        return asked(blocking_rate(batch, effort.seconds), figure)


def ask(effort: Effort) -> Outcome:
    """One question, its answer, the next question."""
    return _ask(effort, ASK)


def process(effort: Effort) -> Outcome:
    """The same: its actors are processes anyway."""
    return _ask(effort, PROCESS)


def crowd(effort: Effort) -> Outcome:
    """As many results awaited together, instead of as many that ask."""
    with _cluster():
        actor = RemoteReplier.remote()

        def batch() -> None:
            for _ in range(ROUNDS):
                results = [actor.echo.remote(value) for value in range(ASKERS)]
                assert ray.get(results, timeout=TIMEOUT_SECONDS) == list(range(ASKERS))

        return crowded(blocking_rate(batch, effort.seconds))


def spawn(effort: Effort) -> Outcome:
    """A few actors, so a few processes, which start side by side."""
    with _cluster():
        begin = time.perf_counter()
        actors = [RemoteReplier.remote() for _ in range(min(effort.actors, ACTORS_MAX))]
        answers = ray.get([actor.echo.remote(value) for value, actor in enumerate(actors)], timeout=TIMEOUT_SECONDS)
        seconds = time.perf_counter() - begin
        assert answers == list(range(len(actors)))
        kib = sum(memory_kib(process) for process in ray.get([actor.process_id.remote() for actor in actors]))
        return spawned(len(actors), seconds, kib)
