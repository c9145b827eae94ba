"""How an engine is: what it is doing, what has crashed, and how long the last recovery took."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from cuelight.kernel import ActorCrashed
from cuelight.messages.observer import Recovered

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
