"""The start and the end of an engine: its actor system, journal and status board, and its reactions to crashes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Never

from cuelight import errors
from cuelight.actors.executor.options import LoadPhases
from cuelight.actors.scheduler.watchdog import REPORT_SECONDS
from cuelight.config import EngineConfig
from cuelight.core.availability import Availability, Drain, broken, closed
from cuelight.core.loaders import ModelLoader, in_thread
from cuelight.core.open_requests import OpenRequests
from cuelight.core.parts import ActiveExecutor, Roles, lives_in_process, roles
from cuelight.core.reload import LINGER_SECONDS, Models, ReloadTarget
from cuelight.core.requests import RequestRouter
from cuelight.journal.origin import Origin
from cuelight.journal.restore import RestoredState
from cuelight.journal.rotating import RotatingJournal, open_journal
from cuelight.kernel import ActorCrashed, ActorSpec, NotSendable, System, get_logger
from cuelight.kernel.journal.writer import Journal
from cuelight.models.progress import Progress
from cuelight.status import HealthRecord, StatusBoard, StatusCallbacks

log = get_logger("cuelight.engine")

REMIND_SECONDS = 60.0
"""Interval of the log messages that name the phase of a start."""


@dataclass(frozen=True)
class RunningEngine:
    """The parts of an engine that exist once its model has been found: the actors' system and what surrounds it."""

    roles: Roles
    system: System
    board: StatusBoard
    models: Models
    requests: RequestRouter
    journal: Journal | RotatingJournal | None


class Lifecycle:
    """Starts, drains and stops an engine.

    The engine also ends when an actor fails for good, or when the host program cancels all tasks.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        loader: ModelLoader,
        progress: Progress,
        availability: Availability,
    ) -> None:
        self.health = HealthRecord(time.monotonic)
        self.open_requests = OpenRequests(config.queue_limit if config.resume else 0, config.resume_seconds)
        self.running: RunningEngine | None = None
        self._name = name
        self._config = config
        self._loader = loader
        self._progress = progress
        self._availability = availability
        self._is_broken = False
        self._stopping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start as `Engine.start`. After an error, everything that was opened is closed again."""
        self._availability.begin()
        try:
            with self._reminding():
                await self._start(LoadPhases().timed_by(time.monotonic))
        except BaseException as error:
            self._progress.close()
            is_stopped = self._availability.is_closed
            self.health.enter("unavailable", str(error))
            await self.stop()
            if is_stopped and isinstance(error, errors.EngineError):  # the start failed because of the stop
                raise closed() from error
            raise

    async def _start(self, phases: LoadPhases) -> None:
        self.health.loading("find model")
        with phases("find model"):
            board = StatusBoard(
                self.health, StatusCallbacks(self._resend, self._gave_up, self._progress.phase, self._progress.note)
            )
            cast = roles(self._config)
            active = ActiveExecutor(cast.executors)
            origin, specs = await in_thread(partial(self._find, cast, board, active))
            self._availability.check_starting()
        journal, past = await self._begin_journal(origin)
        system = self._make_system(specs, journal)
        self.running = running = self._build_running(cast, system, board, active, origin, journal)
        self._availability.check_starting()
        self.health.loading("start actors")
        with phases("start actors"):
            await self._start_system(system)
        with phases("load model"):
            ready = await asyncio.shield(board.ready)  # the board sets its result even if this task is cancelled
        self._availability.check_starting()
        self._open(running, past)
        log.info("engine_ready", model=self._name, token_capacity=ready.token_capacity, **phases.facts())

    def _find(
        self, cast: Roles, board: StatusBoard, active: ActiveExecutor
    ) -> tuple[Origin, tuple[ActorSpec[Never], ...]]:
        """Find the model and build the specs of the actors that serve it. Blocks."""
        found = self._loader.find(self._config)
        return found.origin, found.build_actors(self._config, cast, board, active)

    def _build_running(
        self,
        cast: Roles,
        system: System,
        board: StatusBoard,
        active: ActiveExecutor,
        origin: Origin,
        journal: Journal | RotatingJournal | None,
    ) -> RunningEngine:
        requests = RequestRouter(self._config, self.open_requests, self._availability, system, cast.intake, self._flush)
        models = Models(ReloadTarget(system, cast, active), origin, self._loader, self._switched)
        return RunningEngine(cast, system, board, models, requests, journal)

    @contextmanager
    def _reminding(self) -> Iterator[None]:
        """Log the start's phase once a minute, since loading has no time limit."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        reminder: asyncio.TimerHandle

        def remind() -> None:
            nonlocal reminder
            seconds, phase = round(loop.time() - began), self.health.snapshot().phase
            log.warning("still_starting", model=self._name, seconds=seconds, phase=phase)
            reminder = loop.call_later(REMIND_SECONDS, remind)

        reminder = loop.call_later(REMIND_SECONDS, remind)
        try:
            yield
        finally:
            reminder.cancel()

    async def _begin_journal(self, origin: Origin) -> tuple[Journal | RotatingJournal | None, RestoredState | None]:
        """Open the journal, if one is configured, and read the unfinished requests of an earlier process from it."""
        if self._config.journal is None:
            return None, None
        work = partial(open_journal, origin, asyncio.get_running_loop().time, self.open_requests.unfinished)
        return await in_thread(work, too_late=_close_opened)

    def _make_system(self, specs: tuple[ActorSpec[Never], ...], journal: Journal | RotatingJournal | None) -> System:
        return System(
            specs,
            chance=random.Random(self._config.seed),
            tap=journal,
            on_crash=self._actor_crashed,
            on_failure=self._actor_failed,
            on_end=self._actors_ended,
        )

    async def _start_system(self, system: System) -> None:
        try:
            async with asyncio.timeout(REPORT_SECONDS):
                await system.start()
        except TimeoutError as error:
            reason = f"its process sent no message for {REPORT_SECONDS:g} s"
            raise errors.ModelUnavailable(f"the executor does not start: {reason}") from error
        except NotSendable as error:
            raise errors.ConfigError(str(error)) from error
        except ActorCrashed as crash:
            raise broken(crash) from crash

    def _open(self, running: RunningEngine, past: RestoredState | None) -> None:
        """Accept requests, after submitting those that an earlier process had not finished."""
        if isinstance(running.journal, RotatingJournal):
            running.journal.allow_rotation()
        if past is not None:
            running.requests.restore(past)
        self._availability.open()
        self.health.enter("serving")

    async def stop(self) -> None:
        """Stop as `Engine.stop`, without its check of thread and loop."""
        self._ended()
        self.health.enter("closed")
        if self.running is not None:
            # The result of a step in progress is not needed, so a process is killed if it does not end in time.
            is_apart = lives_in_process(self._config)
            await self.running.system.stop(drop=True, timeout_seconds=LINGER_SECONDS if is_apart else None)
        self._close_journal()

    async def drain(self, seconds: float) -> int:
        """Drain as `Engine.drain`; the caller has made its checks."""
        assert self.running is not None, "the caller has checked that the engine serves"
        availability, requests = self._availability, self.running.requests
        availability.drain = Drain(lambda: requests.are_over)
        self.health.enter("draining")
        try:
            await availability.drain.over(seconds)
        except BaseException:
            availability.drain = None
            self.health.enter("serving")
            raise
        if self._is_broken:
            availability.check_open()  # the requests failed rather than finished
        left = requests.left
        await self.stop()
        return left

    def _switched(self, origin: Origin) -> None:
        """Record in logs and journal that another model serves."""
        self._name = origin.name
        if self.running is not None and isinstance(self.running.journal, RotatingJournal):
            self.running.journal.model_changed(origin)

    def _resend(self) -> None:
        """Send all open requests to a new intake."""
        if self.running is not None:
            self.running.requests.resend_soon()

    def _actor_crashed(self, crash: ActorCrashed) -> None:
        """Record a crash, fail the request at fault, and repeat a reload to a new scheduler."""
        assert self.running is not None, "actors start after `running` is set"
        self.health.crashed(crash)
        self.running.board.life_over(crash.actor)
        if crash.actor == self.running.roles.scheduler.name:
            asyncio.get_running_loop().call_soon(self.running.models.repeat)
        self.running.requests.attribute_crash(crash)

    def _actor_failed(self, crash: ActorCrashed) -> None:
        """Fail all requests with EngineBroken: an actor crashed and will not be restarted."""
        self._is_broken = True
        self.health.enter("unavailable", str(crash))
        self._end_service(partial(broken, crash))

    def _gave_up(self, reason: str) -> None:
        """Fail all requests with EngineGaveUp and stop the actors: the scheduler has given up on the executor."""
        assert self.running is not None
        self._is_broken = True
        self.health.enter("unavailable", reason)
        log.error("gave_up", reason=reason)
        self._end_service(lambda: errors.EngineGaveUp(reason))
        stopping = self.running.system.stop(drop=True, timeout_seconds=LINGER_SECONDS)
        self._stopping = asyncio.get_running_loop().create_task(stopping, name="cuelight stop")

    def _actors_ended(self) -> None:
        self._ended()
        self._close_journal()

    def _flush(self) -> None:
        """Write the journal's buffer to its file before a client receives output.

        So a process that resumes from the journal has all output that clients have, even after a kill.
        """
        if self.running is not None and isinstance(self.running.journal, RotatingJournal):
            self.running.journal.flush()

    def _close_journal(self) -> None:
        if self.running is not None and self.running.journal is not None:
            self.running.journal.close()

    def _ended(self) -> None:
        """Fail all requests with EngineClosed, after `stop` or when the host program has cancelled all tasks."""
        if not self._is_broken:
            self.health.enter("closed")
            self._end_service(closed)

    def _end_service(self, reason: Callable[[], errors.EngineUnavailable]) -> None:
        """Fail open requests and later calls, each with a new exception from `reason`."""
        self._availability.end(reason)
        if self.running is not None:
            self.running.board.fail(reason())
            self.running.board.clear()
            self.running.requests.end(reason)
            self.running.models.end(reason)


def _close_opened(begun: tuple[Journal | RotatingJournal | None, RestoredState | None]) -> None:
    """Close a journal that was opened after the start had been cancelled."""
    if begun[0] is not None:
        begun[0].close()
