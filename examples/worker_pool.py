"""A pool of worker processes that survives its jobs, of which one kills its process at first, and one every time.

    python examples/worker_pool.py [LIMIT ...]

A job counts the primes below LIMIT. A foreman gives each worker one job at a time and watches it. When a process dies,
the system starts another one, and the foreman queues the job again, or after two deaths sets it aside.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, assert_never

from cuelight.kernel import (
    Actor,
    ActorSpec,
    Context,
    InProcess,
    Recipient,
    RestartPolicy,
    Role,
    System,
    Terminated,
    ask,
)

ATTEMPTS_MAX = 2


@dataclass(frozen=True)
class Job:
    """Count primes. Its first `deaths` attempts kill the process, as a bug in native code would."""

    limit: int
    deaths: int = 0


@dataclass(frozen=True)
class Attempt:
    """To a worker. Answered by `Counted`, unless it dies."""

    job: Job
    number: int
    reply_to: Recipient[Counted]


@dataclass(frozen=True)
class Counted:
    worker: str
    prime_count: int


@dataclass(frozen=True)
class Run:
    """To the foreman. Answered once all is done: jobs with their numbers of primes, None if set aside."""

    jobs: tuple[Job, ...]
    reply_to: Recipient[list[tuple[Job, int | None]]]


ForemanMessage: TypeAlias = Run | Counted | Terminated
FOREMAN = Role[ForemanMessage]("foreman", ForemanMessage, capacity=100)
WORKERS = [Role[Attempt](f"worker {number}", Attempt, capacity=1) for number in range(2)]


class PrimeCounter(Actor[Attempt]):
    def __init__(self, context: Context[Attempt]) -> None:
        self._name = context.ref.name

    def handle(self, message: Attempt) -> None:
        if message.number <= message.job.deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        count = sum(all(n % divisor for divisor in range(2, int(n**0.5) + 1)) for n in range(2, message.job.limit))
        message.reply_to.tell(Counted(self._name, count))


class Foreman(Actor[ForemanMessage]):
    """Owns the queue and the assignment of jobs to workers."""

    def __init__(self, context: Context[ForemanMessage]) -> None:
        self._me = context.ref
        self._workers = {role.name: context.find(role) for role in WORKERS}
        self._busy: dict[str, Attempt] = {}
        self._queue: deque[Attempt] = deque()
        self._outcomes: list[tuple[Job, int | None]] = []
        self._run: Run | None = None
        for role in WORKERS:
            context.watch(role)

    def handle(self, message: ForemanMessage) -> None:
        match message:
            case Run(jobs):
                self._run = message
                self._queue.extend(Attempt(job, 1, self._me) for job in jobs)
            case Counted(name, prime_count):
                self._outcomes.append((self._busy.pop(name).job, prime_count))
            case Terminated(actor=name):
                if name in self._busy:
                    self._retry(self._busy.pop(name))
            case _:
                assert_never(message)
        for name, worker in self._workers.items():
            if self._queue and name not in self._busy:
                self._busy[name] = self._queue.popleft()
                worker.tell(self._busy[name])
        if self._run is not None and len(self._outcomes) == len(self._run.jobs):
            self._run.reply_to.tell(self._outcomes)

    def _retry(self, attempt: Attempt) -> None:
        if attempt.number < ATTEMPTS_MAX:
            self._queue.append(Attempt(attempt.job, attempt.number + 1, self._me))
        else:
            self._outcomes.append((attempt.job, None))


async def main(*jobs: Job) -> None:
    workers = [ActorSpec(role, PrimeCounter, RestartPolicy(restarts_max=10), InProcess()) for role in WORKERS]
    async with System([*workers, ActorSpec(FOREMAN, Foreman)], slow_handler_seconds=60.0) as system:
        for job, count in await ask(system.find(FOREMAN), partial(Run, jobs), timeout_seconds=60):
            print(f"{job}: {'set aside' if count is None else count}")


if __name__ == "__main__":
    bad = Job(50, deaths=9), Job(100, deaths=1)
    asyncio.run(main(*bad, *(Job(int(limit)) for limit in sys.argv[1:] or ["1000", "10000", "30000"])))
