"""An engine's figures: requests and blocks at this moment, and totals that survive whoever counts them."""

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
    """Requests and blocks now, totals since the start. A block that is only cached counts as free.

    Of `budget_tokens`, the token budgets of all steps, `scheduled_tokens` were used. Of `tokens_looked_up`, those of
    all admissions, those after a preemption too, `tokens_found` were cached.
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
    """What one actor says, with the `totals` of its earlier lives on top."""

    def __init__(self, nothing: F, totals: tuple[str, ...]) -> None:
        self.latest = self._before = nothing
        self._totals = totals

    def hear(self, told: F) -> None:
        before = self._before
        sums: dict[str, int] = {name: getattr(before, name) + getattr(told, name) for name in self._totals}
        self.latest = msgspec.structs.replace(told, **sums)

    def life_over(self) -> None:
        self._before = self.latest


class Figures:
    """The latest figures of whoever counts requests and blocks."""

    def __init__(self) -> None:
        self._requests = _Counted(RequestFigures(), REQUEST_TOTALS)
        self._blocks = _Counted(BlockFigures(), BLOCK_TOTALS)

    def hear(self, told: RequestFigures | BlockFigures) -> None:
        """From an actor, about its present life."""
        if isinstance(told, RequestFigures):
            self._requests.hear(told)
        else:
            self._blocks.hear(told)

    def life_over(self, actor: str) -> None:
        """The next life of this actor counts from nothing. What this one had not said yet is not in the totals."""
        if actor == "scheduler":
            self._requests.life_over()
        elif actor == "cache":
            self._blocks.life_over()

    def clear(self) -> None:
        """Nothing runs, waits or holds blocks any more; the totals stay."""
        self._requests.latest = msgspec.structs.replace(self._requests.latest, running=0, waiting=0)
        blocks = self._blocks.latest
        self._blocks.latest = msgspec.structs.replace(blocks, blocks_free=blocks.blocks_total)

    def stats(self) -> EngineStats:
        """Of requests and blocks."""
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
"""Before the start."""


State: TypeAlias = Literal["starting", "serving", "recovering", "draining", "unavailable", "closed"]

CRASHES_REMEMBERED: Final = 8
ERROR_CHARS_MAX: Final = 500


@dataclass(frozen=True)
class Crash:
    """One end of an actor that was not in order, and how long ago it was."""

    actor: str
    error: str
    seconds_ago: float


@dataclass(frozen=True)
class Recovery:
    """Seconds from the loss of what was computed until a new executor lived, that it loaded for, and from then on until
    a first step was done.
    """

    start_seconds: float
    load_seconds: float
    recompute_seconds: float


@dataclass(frozen=True)
class Health:
    """An engine at this moment.

    Attributes:
        state: "starting"; "serving"; "recovering" (requests wait until what was lost is computed again); "draining"
            (those under way are finished, new ones refused); "unavailable" (it has given up); "closed".
        reason: why it does not just serve; empty where it does.
        phase: of the engine's start, or an executor's, while that is under way.
        load_phases: how many seconds each phase of its last start took.
        restarts: how often each actor has crashed and was replaced.
        crashes: the last eight, oldest first.
        last_recovery: how long it took to compute again after the executor or the cache manager was lost.
    """

    state: State
    reason: str
    phase: str
    load_phases: Mapping[str, float]
    restarts: Mapping[str, int]
    crashes: tuple[Crash, ...]
    last_recovery: Recovery | None


class HealthRecord:
    """What has been heard so far."""

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
        """The engine is in this state from now on. One that has ended stays so, and keeps its reason."""
        if self._state == "closed" or (self._state == "unavailable" and state != "closed"):
            return
        self._reason = reason or (self._reason if state == "closed" else "")
        self._state = state

    def loading(self, phase: str) -> None:
        """The start has come to this phase."""
        self._phase = phase

    def loaded(self, phases: Mapping[str, float]) -> None:
        """The executor is there."""
        self._phase = ""
        self._load_phases = phases

    def recovering(self, reason: str) -> None:
        """What was computed is lost. A drain goes on meanwhile."""
        if self._state in ("serving", "recovering"):
            self.enter("recovering", reason)

    def recovered(self, told: Recovered) -> None:
        """It has been computed again, as far as anybody needs it."""
        self._phase = ""
        self._recovery = Recovery(told.start_seconds, told.load_seconds, told.recompute_seconds)
        if self._state == "recovering":
            self.enter("serving")

    def crashed(self, crash: ActorCrashed) -> None:
        """An actor has come to an end."""
        self._restarts[crash.actor] += 1
        # In words: the crash itself holds all that the actor has held.
        self._crashes.append((self._now(), crash.actor, str(crash)[:ERROR_CHARS_MAX]))

    def snapshot(self) -> Health:
        """As of now."""
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
    """Whom the board calls, within an actor's handler."""

    intake_restarted: Callable[[], object]
    """Intake is new, and knows of no request."""
    gave_up: Callable[[str], object]
    """The scheduler will serve nobody any more."""
    phase: Callable[[str], object] = lambda _: None
    """What the executor is at while the engine starts, for people."""
    note: Callable[[str], object] = lambda _: None
    """What came of it."""


class StatusBoard:
    """The engine's own address: keeps the latest figures and wakes whoever waits for the start."""

    def __init__(self, health: HealthRecord, callbacks: StatusCallbacks) -> None:
        self._figures = Figures()
        self.ready: asyncio.Future[observer.Ready] = asyncio.get_running_loop().create_future()
        self._health = health
        self._callbacks = callbacks
        self._cleared = False
        self._loaded: observer.Loaded | None = None

    def tell(self, message: observer.ObserverMessage, /) -> None:
        """Hear from the actors."""
        if self._cleared:
            return
        match message:
            case observer.RequestFigures() | observer.BlockFigures():
                self._figures.hear(message)
            case observer.Ready():
                self._hear_ready(message)
            case observer.Loading(phase):
                self._health.loading(phase)
                if not self.ready.done():  # later nobody waits for it
                    self._callbacks.phase(phase)
            case observer.Loaded():
                self._hear_loaded(message)
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

    def _hear_ready(self, ready: observer.Ready) -> None:
        if not self.ready.done():
            self.ready.set_result(ready)
        elif self.ready.exception() is None:
            self._callbacks.intake_restarted()

    def _hear_loaded(self, loaded: observer.Loaded) -> None:
        if loaded == self._loaded:  # told again by a new scheduler
            return
        self._loaded = loaded
        self._health.loaded(dict(loaded.phases))
        log.info("executor_ready", seconds=round(loaded.seconds, 3), **phase_facts(loaded.phases))
        if not self.ready.done():
            spent = ", ".join([f"{name} {seconds:.1f} s" for name, seconds in loaded.phases])
            self._callbacks.note(f"loaded the model in {loaded.seconds:.1f} s" + (f": {spent}" if spent else ""))

    def life_over(self, actor: str) -> None:
        """The next life of this actor counts from nothing."""
        self._figures.life_over(actor)

    def fail(self, error: errors.EngineError) -> None:
        """The engine will not become ready."""
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # whoever waited may be gone, which is no reason to complain

    def clear(self) -> None:
        """Nothing runs, waits or holds blocks any more; the totals stay."""
        self._cleared = True
        self._figures.clear()

    def stats(self) -> EngineStats:
        """The figures, of requests and blocks."""
        return self._figures.stats()
