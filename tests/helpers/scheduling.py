"""What the scheduler's tests share: a device that keeps its steps, and checks that hold after every single message."""

from __future__ import annotations

from collections.abc import Iterable

from support import Core

from cuelight.actors.cache.actor import CacheManager
from cuelight.actors.cache.hashing import HashChain
from cuelight.actors.cache.tables import BlockTables
from cuelight.actors.executor.stub import StubDevice, stub_host
from cuelight.actors.scheduler import recovery
from cuelight.actors.scheduler.actor import Scheduler
from cuelight.actors.scheduler.request import Request
from cuelight.messages import detokenizer
from cuelight.messages.executor import ExecuteStep
from cuelight.messages.request import RequestId, Sampling, Service
from cuelight.messages.scheduler import Admit, Explain, Explanation, SetPolicy


class WatchedDevice(StubDevice):
    """Keeps every step it ran; raises in those that hold one of `poison`, and in the next `failures`."""

    def __init__(self, block_count: int, block_size: int, host_block_count: int = 0) -> None:
        super().__init__(block_count, block_size, host=stub_host(host_block_count))
        self.seen: list[ExecuteStep] = []
        self.poison: set[int] = set()
        self.failures = 0

    def run(self, batch):  # type: ignore[no-untyped-def]  # as the base
        self.seen.append(batch.step)
        if self.failures or any(chunk.request_id in self.poison for chunk in batch.step.chunks):
            self.failures = max(0, self.failures - 1)
            raise RuntimeError("a step that fails")
        return super().run(batch)

    def order(self) -> list[int]:
        """Requests in the order in which they were first computed."""
        return list(dict.fromkeys(chunk.request_id for step in self.seen for chunk in step.chunks))

    def computed(self, request_ids: Iterable[int] | None = None) -> int:
        """Tokens computed for these requests, or for all."""
        chosen = None if request_ids is None else set(request_ids)
        chunks = (chunk for step in self.seen for chunk in step.chunks)
        return sum(chunk.token_count for chunk in chunks if chosen is None or chunk.request_id in chosen)


def scheduler_of(core: Core) -> Scheduler:
    assert isinstance(core.scheduler.actor, Scheduler)
    return core.scheduler.actor


def tables_of(core: Core) -> BlockTables:
    assert isinstance(core.cache.actor, CacheManager)
    return core.cache.actor._tables


def tracked(number: int, service: Service | None = None, *, prompt: int = 4, at: float = 0.0) -> Request:
    """A request as the scheduler keeps it."""
    admit = Admit(RequestId(number), (7,) * prompt, Sampling(max_tokens=4), 1000, service or Service(), at)
    return Request(number, admit)


def policy(name: str, aging_seconds: float = 10.0, **weights: float) -> SetPolicy:
    return SetPolicy(name, aging_seconds, tuple(weights.items()))


def explained(core: Core, request_id: int) -> Explanation:
    """The scheduler's own answer, with no message left over."""
    answers: list[Explanation] = []

    class Reader:
        def tell(self, message: Explanation, /) -> None:
            answers.append(message)

    scheduler_of(core).handle(Explain(RequestId(request_id), Reader()))
    (answer,) = answers
    return answer


def is_running(core: Core, request_id: int) -> bool:
    return RequestId(request_id) in scheduler_of(core)._state.running


def is_live(core: Core, request_id: int) -> bool:
    return RequestId(request_id) in scheduler_of(core)._state.requests


def running(core: Core) -> int:
    return len(scheduler_of(core)._state.running)


def preemptions(core: Core) -> int:
    return scheduler_of(core)._outbox.counts["preemptions"]


def end_order(core: Core) -> list[int]:
    return [m.request_id for m in core.detokenizer.messages if isinstance(m, detokenizer.RequestEnded)]


def step_until(core: Core, happens: object, steps_max: int = 100_000) -> None:
    """Deliver until `happens()`, checking after each message."""
    assert callable(happens)
    for _ in range(steps_max):
        if happens():
            return
        assert core.step(), "all is at rest, and it has not happened"
        check(core)
    raise AssertionError("it never happens")


def finish(core: Core, steps_max: int = 200_000) -> None:
    """Deliver until all is at rest, checking after each message; then everybody has ended and every block is free."""
    for _ in range(steps_max):
        if not core.step():
            break
        check(core)
    else:
        raise AssertionError("the core never comes to rest")
    scheduler = scheduler_of(core)
    assert not scheduler._state.requests, f"live at rest: {sorted(scheduler._state.requests)}"
    assert len(scheduler._state._queue) == 0 and not scheduler._state.running
    assert core.blocks().blocks_free == core.blocks().blocks_total
    core.ends()


def check(core: Core) -> None:
    """What holds after every message: counts, bounds, and that nothing idles which could run."""
    scheduler, tables = scheduler_of(core), tables_of(core)
    tables.check()
    assert len(scheduler._state.running) <= scheduler._state._gate.running_max
    assert len(scheduler._state.running) + len(scheduler._state._queue) == len(scheduler._state.requests)
    assert len(scheduler._state._steps) <= scheduler._state._steps._steps_max
    for plan in scheduler._state._steps:
        assert 0 < sum(count for _, count, _ in plan) <= scheduler._state._budget.most
    assert all(
        request.request_id in scheduler._state.requests for request in scheduler._state._gate.prefix_waiters._leaders
    )
    if core.engine.waiting("scheduler") or core.engine.waiting("cache") or not scheduler._state.pool:
        return  # it is about to hear something
    assert scheduler._state._block_requests.asked is None, "nobody answers"
    if len(scheduler._state._steps) == scheduler._state._steps._steps_max:
        return
    assert scheduler._state._steps or not scheduler._state.requests, "nothing runs"
    plan = scheduler._state._planner.planned(scheduler._state.running.values(), others_wait=False)
    assert not plan or not recovery.may_be_in_flight(plan, scheduler._state._steps), (
        f"{[request.request_id for request, _ in plan]} could run, and the executor has room"
    )
    _check_admissions(scheduler, tables)


def _check_admissions(scheduler: Scheduler, tables: BlockTables) -> None:
    """The first in line, as far as it is not set aside for good reason, does not fit."""
    if any(request.suspect for request in scheduler._state.running.values()):
        return
    if len(scheduler._state.running) >= scheduler._state._gate.running_max:
        return
    for request in scheduler._state._queue.head(len(scheduler._state._queue)):
        if request.pending:
            return
        missing, is_promised = _lacks(tables, request)
        if request in scheduler._state._gate.prefix_waiters:
            assert is_promised, f"{request.request_id} waits for a prefix that nobody computes"
            continue
        assert missing > 0, f"{request.request_id} could be admitted, and the executor has room"
        return


def _lacks(tables: BlockTables, request: Request) -> tuple[int, bool]:
    """By how many blocks the pool is too small for this one, and whether what it would begin with is being computed."""
    chain = HashChain(request.token_ids, tables._block_size, request.salt)
    hits = tables._find_prefix(chain)
    held = sum(block is not None and tables.pool.is_held(block) for block in hits)
    watermark = tables._watermark_blocks if tables._tables else 0
    missing = tables._blocks_for(len(request.token_ids)) - held + watermark - tables.pool.free_count
    return missing, tables.is_being_computed(request.admission())
