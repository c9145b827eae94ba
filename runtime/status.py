"""An engine's statistics and health: figures that survive restarts of the actors that report them."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeAlias, TypeVar, assert_never

import msgspec

from cuelight import errors
from cuelight.actors.executor.options import phase_facts
from cuelight.kernel import ActorCrashed, get_logger
from cuelight.messages import observer
from cuelight.messages.observer import BlockFigures, Recovered, RequestFigures

F = TypeVar("F", bound=msgspec.Struct)


@dataclass(frozen=True)
class EngineStats:
    """The present number of requests and blocks, and totals since the start.

    Attributes:
        running: requests that hold blocks.
        waiting: requests that wait for admission.
        blocks_total: blocks of the KV pool.
        blocks_free: blocks that no request holds, those with cached prefixes included.
        blocks_cached: blocks in the prefix cache, whether or not a request holds them.
        evictions: blocks removed from the prefix cache to be used for other tokens.
        steps: steps computed.
        preemptions: requests that lost their blocks to other requests.
        finished: requests that have ended.
        prompt_tokens: prompt tokens of ended requests.
        cached_tokens: those of `prompt_tokens` that were in the prefix cache at the first admission.
        output_tokens: output tokens of ended requests.
        scheduled_tokens: tokens computed in all steps, of `budget_tokens`.
        budget_tokens: the token budgets of all steps.
        tokens_looked_up: tokens of all admissions, those after a preemption included.
        tokens_found: tokens of `tokens_looked_up` that were cached.
        host_blocks_total: blocks in host memory.
        host_blocks_used: blocks in host memory that are in use.
        blocks_saved: blocks copied to host memory.
        blocks_loaded: blocks copied back from host memory.
        blocks_forked: half-full blocks copied for another sample of the same prompt.
    """

    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    evictions: int
    steps: int
    preemptions: int
    finished: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    scheduled_tokens: int
    budget_tokens: int
    tokens_looked_up: int
    tokens_found: int
    host_blocks_total: int
    host_blocks_used: int
    blocks_saved: int
    blocks_loaded: int
    blocks_forked: int


REQUEST_TOTALS: Final = (
    "steps",
    "preemptions",
    "finished",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "scheduled_tokens",
    "budget_tokens",
)
BLOCK_TOTALS: Final = (
    "evictions",
    "tokens_looked_up",
    "tokens_found",
    "blocks_saved",
    "blocks_loaded",
    "blocks_forked",
)


class _Counted(Generic[F]):
    """The latest figures of one actor; those named in `totals` include the totals of its earlier lives."""

    def __init__(self, zero: F, totals: tuple[str, ...]) -> None:
        self.latest = self._before = zero
        self._totals = totals

    def hear(self, figures: F) -> None:
        before = self._before
        sums: dict[str, int] = {name: getattr(before, name) + getattr(figures, name) for name in self._totals}
        self.latest = msgspec.structs.replace(figures, **sums)

    def life_over(self) -> None:
        self._before = self.latest


class Figures:
    """The latest figures of the scheduler (requests) and of the cache manager (blocks)."""

    def __init__(self) -> None:
        self._requests = _Counted(RequestFigures(), REQUEST_TOTALS)
        self._blocks = _Counted(BlockFigures(), BLOCK_TOTALS)

    def hear(self, figures: RequestFigures | BlockFigures) -> None:
        """Store an actor's figures, which count from the start of its present life."""
        if isinstance(figures, RequestFigures):
            self._requests.hear(figures)
        else:
            self._blocks.hear(figures)

    def life_over(self, actor: str) -> None:
        """Add the totals of an actor's life to those of the next, which counts from zero.

        Figures that the actor had not reported before it crashed are lost.
        """
        if actor == "scheduler":
            self._requests.life_over()
        elif actor == "cache":
            self._blocks.life_over()

    def clear(self) -> None:
        """Set running and waiting requests to zero and free all blocks; totals are kept."""
        self._requests.latest = msgspec.structs.replace(self._requests.latest, running=0, waiting=0)
        blocks = self._blocks.latest
        self._blocks.latest = msgspec.structs.replace(blocks, blocks_free=blocks.blocks_total)

    def stats(self) -> EngineStats:
        """Return the figures as one snapshot."""
        return _stats(self._requests.latest, self._blocks.latest)


def _stats(requests: RequestFigures, blocks: BlockFigures) -> EngineStats:
    return EngineStats(
        running=requests.running,
        waiting=requests.waiting,
        blocks_total=blocks.blocks_total,
        blocks_free=blocks.blocks_free,
        blocks_cached=blocks.blocks_cached,
        evictions=blocks.evictions,
        steps=requests.steps,
        preemptions=requests.preemptions,
        finished=requests.finished,
        prompt_tokens=requests.prompt_tokens,
        cached_tokens=requests.cached_tokens,
        output_tokens=requests.output_tokens,
        scheduled_tokens=requests.scheduled_tokens,
        budget_tokens=requests.budget_tokens,
        tokens_looked_up=blocks.tokens_looked_up,
        tokens_found=blocks.tokens_found,
        host_blocks_total=blocks.host_blocks_total,
        host_blocks_used=blocks.host_blocks_used,
        blocks_saved=blocks.blocks_saved,
        blocks_loaded=blocks.blocks_loaded,
        blocks_forked=blocks.blocks_forked,
    )


NO_STATS: Final = _stats(RequestFigures(), BlockFigures())
"""The statistics of an engine before its start."""


State: TypeAlias = Literal["starting", "serving", "recovering", "draining", "unavailable", "closed"]

CRASHES_REMEMBERED: Final = 8
ERROR_CHARS_MAX: Final = 500


@dataclass(frozen=True)
class Crash:
    """One crash of an actor, and how long ago it was."""

    actor: str
    error: str
    seconds_ago: float


@dataclass(frozen=True)
class Recovery:
    """The duration of a recovery in seconds, by phase.

    Attributes:
        start_seconds: from the loss of the computed blocks until a new executor ran.
        load_seconds: the time for which that executor loaded the model.
        recompute_seconds: from then until the first step was done.
    """

    start_seconds: float
    load_seconds: float
    recompute_seconds: float


@dataclass(frozen=True)
class Health:
    """An engine's state, recent crashes and last recovery.

    Attributes:
        state: `"starting"`, `"serving"`, `"recovering"` (requests wait until lost blocks are recomputed), `"draining"`
            (present requests are finished, new ones refused), `"unavailable"` (the engine broke or failed to start),
            or `"closed"`.
        reason: why the engine is recovering or became unavailable; empty otherwise.
        phase: the present phase of the engine's or an executor's start; empty when none is starting.
        load_phases: seconds of each phase of the executor's last start.
        restarts: the number of crashes, by actor.
        crashes: the last eight crashes, oldest first.
        last_recovery: the duration of the last recovery from a loss of the executor or the cache manager.
    """

    state: State
    reason: str
    phase: str
    load_phases: Mapping[str, float]
    restarts: Mapping[str, int]
    crashes: tuple[Crash, ...]
    last_recovery: Recovery | None


class HealthRecord:
    """The present state and the recent crashes of an engine, from which `snapshot` makes a `Health`."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._state: State = "starting"
        self._reason = ""
        self._phase = ""
        self._load_phases: Mapping[str, float] = {}
        self._recovery: Recovery | None = None
        self._restarts: Counter[str] = Counter()
        self._crashes: deque[tuple[float, str, str]] = deque(maxlen=CRASHES_REMEMBERED)

    def enter(self, state: State, reason: str = "") -> None:
        """Change the state, unless the engine has ended: "unavailable" only becomes "closed", and keeps its reason."""
        if self._state == "closed" or (self._state == "unavailable" and state != "closed"):
            return
        self._reason = reason or (self._reason if state == "closed" else "")
        self._state = state

    def loading(self, phase: str) -> None:
        """Set the present phase of a start."""
        self._phase = phase

    def loaded(self, phases: Mapping[str, float]) -> None:
        """Record the duration of each phase of an executor's start, which is done."""
        self._phase = ""
        self._load_phases = phases

    def recovering(self, reason: str) -> None:
        """Change the state to "recovering", unless the engine drains or does not serve."""
        if self._state in ("serving", "recovering"):
            self.enter("recovering", reason)

    def recovered(self, recovered: Recovered) -> None:
        """Record the duration of a recovery that is done, and change the state back to "serving"."""
        self._phase = ""
        self._recovery = Recovery(recovered.start_seconds, recovered.load_seconds, recovered.recompute_seconds)
        if self._state == "recovering":
            self.enter("serving")

    def crashed(self, crash: ActorCrashed) -> None:
        """Record an actor's crash."""
        self._restarts[crash.actor] += 1
        # As text, since the exception's traceback keeps the dead actor's objects alive.
        self._crashes.append((self._now(), crash.actor, str(crash)[:ERROR_CHARS_MAX]))

    def snapshot(self) -> Health:
        """Return the present health."""
        now = self._now()
        return Health(
            state=self._state,
            reason=self._reason,
            phase=self._phase if self._state in ("starting", "recovering", "draining") else "",
            load_phases=dict(self._load_phases),
            restarts=dict(self._restarts),
            crashes=tuple(Crash(actor, error, now - seconds) for seconds, actor, error in self._crashes),
            last_recovery=self._recovery,
        )


log = get_logger("cuelight.engine")


@dataclass(frozen=True)
class StatusCallbacks:
    """Functions that the board calls within an actor's handler."""

    intake_restarted: Callable[[], object]
    """Called when a new intake, which has no requests, is ready."""
    gave_up: Callable[[str], object]
    """Called with the reason when the scheduler has given up on the executor."""
    phase: Callable[[str], object] = lambda _: None
    """Called with each phase of the executor's load during the engine's start, to be shown."""
    note: Callable[[str], object] = lambda _: None
    """Called with a line that sums up the executor's load during the engine's start, to be shown."""


class StatusBoard:
    """The observer's address: stores the actors' figures and health, and completes `ready` when the engine is ready."""

    def __init__(self, health: HealthRecord, callbacks: StatusCallbacks) -> None:
        self._figures = Figures()
        self.ready: asyncio.Future[observer.Ready] = asyncio.get_running_loop().create_future()
        self._health = health
        self._callbacks = callbacks
        self._cleared = False
        self._loaded: observer.Loaded | None = None

    def tell(self, message: observer.ObserverMessage, /) -> None:
        """Receive a message from an actor."""
        if self._cleared:
            return
        match message:
            case observer.RequestFigures() | observer.BlockFigures():
                self._figures.hear(message)
            case observer.Ready():
                self._on_ready(message)
            case observer.Loading(phase):
                self._health.loading(phase)
                if not self.ready.done():  # phases of later starts are not shown
                    self._callbacks.phase(phase)
            case observer.Loaded():
                self._on_loaded(message)
            case observer.LoadFailed(error):
                self.fail(errors.ModelUnavailable(error))
            case observer.Recovering(reason):
                log.warning("recovering", reason=reason)
                self._health.recovering(reason)
            case observer.Recovered():
                log.warning(
                    "recovered",
                    start_seconds=round(message.start_seconds, 3),
                    load_seconds=round(message.load_seconds, 3),
                    recompute_seconds=round(message.recompute_seconds, 3),
                )
                self._health.recovered(message)
            case observer.GaveUp(reason):
                self.fail(errors.ModelUnavailable(f"the executor does not start: {reason}"))
                if self.ready.exception() is None:
                    self._callbacks.gave_up(reason)
            case _:
                assert_never(message)

    def _on_ready(self, ready: observer.Ready) -> None:
        if not self.ready.done():
            self.ready.set_result(ready)
        elif self.ready.exception() is None:
            self._callbacks.intake_restarted()

    def _on_loaded(self, loaded: observer.Loaded) -> None:
        if loaded == self._loaded:  # repeated by a new scheduler
            return
        self._loaded = loaded
        self._health.loaded(dict(loaded.phases))
        log.info("executor_ready", seconds=round(loaded.seconds, 3), **phase_facts(loaded.phases))
        if not self.ready.done():
            phases = ", ".join([f"{name} {seconds:.1f} s" for name, seconds in loaded.phases])
            self._callbacks.note(f"loaded the model in {loaded.seconds:.1f} s" + (f": {phases}" if phases else ""))

    def life_over(self, actor: str) -> None:
        """Add the totals of an actor's life to those of the next, which counts from zero."""
        self._figures.life_over(actor)

    def fail(self, error: errors.EngineError) -> None:
        """Fail `ready`, unless it is done."""
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # a cancelled start does not retrieve it, which asyncio would log

    def clear(self) -> None:
        """Set running and waiting requests to zero, free all blocks, and ignore later messages; totals are kept."""
        self._cleared = True
        self._figures.clear()

    def stats(self) -> EngineStats:
        """Return the latest figures."""
        return self._figures.stats()
