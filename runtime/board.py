"""What an engine's actors tell their opener: the latest figures, whether it is ready, and how it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from cuelight import errors
from cuelight.actors.executor.phases import phase_facts
from cuelight.figures import EngineStats, Figures
from cuelight.health import HealthRecord
from cuelight.kernel import get_logger
from cuelight.messages import observer

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
                self.fail(errors.ModelUnavailable(f"the executor does not come up: {reason}"))
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
