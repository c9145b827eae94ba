"""What an engine opens and closes: the actors' system, journal and board; and what crashes mean for its clients."""

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
"""People are told so often what a start is still at."""


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
    """From nothing to a system that serves, and back; a crash or a host that cancels all tasks may end it as well."""

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
        """Raises as `Engine.start`; then nothing is left."""
        self._availability.begin()
        try:
            with self._reminding():
                await self._start(LoadPhases().timed_by(time.monotonic))
        except BaseException as error:
            self._progress.close()
            is_stopped = self._availability.is_closed
            self.health.enter("unavailable", str(error))
            await self.stop()
            if is_stopped and isinstance(error, errors.EngineError):  # whatever the stop has made of the start
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
            ready = await asyncio.shield(board.ready)  # which actors tell of, even where nobody waits any more
        self._availability.check_starting()
        self._open(running, past)
        log.info("engine_ready", model=self._name, token_capacity=ready.token_capacity, **phases.facts())

    def _find(
        self, cast: Roles, board: StatusBoard, active: ActiveExecutor
    ) -> tuple[Origin, tuple[ActorSpec[Never], ...]]:
        """Find the model and the actors that serve it. Blocks."""
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
        """Loading may take as long as it needs, but not unnoticed."""
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
        """Open the journal, if there is to be one, and read what an earlier process has left in it."""
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
            reason = f"its process has not said a word for {REPORT_SECONDS:g} s"
            raise errors.ModelUnavailable(f"the executor does not come up: {reason}") from error
        except NotSendable as error:
            raise errors.ConfigError(str(error)) from error
        except ActorCrashed as crash:
            raise broken(crash) from crash

    def _open(self, running: RunningEngine, past: RestoredState | None) -> None:
        """Serve, first of all the requests that an earlier process had not finished."""
        if isinstance(running.journal, RotatingJournal):
            running.journal.allow_rotation()
        if past is not None:
            running.requests.restore(past)
        self._availability.open()
        self.health.enter("serving")

    async def stop(self) -> None:
        """As `Engine.stop`."""
        self._ended()
        self.health.enter("closed")
        if self.running is not None:
            # What is being computed is for nobody, so a process need not be waited for.
            is_apart = lives_in_process(self._config)
            await self.running.system.stop(drop=True, timeout_seconds=LINGER_SECONDS if is_apart else None)
        self._close_journal()

    async def drain(self, seconds: float) -> int:
        """As `Engine.drain`."""
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
            availability.check_open()  # all have ended, and not in good order
        left = requests.left
        await self.stop()
        return left

    def _switched(self, origin: Origin) -> None:
        """Record that another model serves."""
        self._name = origin.name
        if self.running is not None and isinstance(self.running.journal, RotatingJournal):
            self.running.journal.model_changed(origin)

    def _resend(self) -> None:
        """Send a new intake all requests again."""
        if self.running is not None:
            self.running.requests.resend_soon()

    def _actor_crashed(self, crash: ActorCrashed) -> None:
        """An actor is gone, and mostly another one comes."""
        assert self.running is not None, "actors start after the engine was put together"
        self.health.crashed(crash)
        self.running.board.life_over(crash.actor)
        if crash.actor == self.running.roles.scheduler.name:
            asyncio.get_running_loop().call_soon(self.running.models.repeat)
        self.running.requests.attribute_crash(crash)

    def _actor_failed(self, crash: ActorCrashed) -> None:
        """An actor is gone for good: whoever waits must hear of it."""
        self._is_broken = True
        self.health.enter("unavailable", str(crash))
        self._end_service(partial(broken, crash))

    def _gave_up(self, reason: str) -> None:
        """Nobody will be served any more, so all that was taken up for it is given back."""
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
        """If this process is killed, the next one must know all that a client has been given."""
        if self.running is not None and isinstance(self.running.journal, RotatingJournal):
            self.running.journal.flush()

    def _close_journal(self) -> None:
        if self.running is not None and self.running.journal is not None:
            self.running.journal.close()

    def _ended(self) -> None:
        """Nobody serves any more, whether it was `stop` that said so or a host that cancelled all tasks."""
        if not self._is_broken:
            self.health.enter("closed")
            self._end_service(closed)

    def _end_service(self, reason: Callable[[], errors.EngineUnavailable]) -> None:
        """Tell every client, from now on and those that wait, each with an exception of its own."""
        self._availability.end(reason)
        if self.running is not None:
            self.running.board.fail(reason())
            self.running.board.clear()
            self.running.requests.end(reason)
            self.running.models.end(reason)


def _close_opened(begun: tuple[Journal | RotatingJournal | None, RestoredState | None]) -> None:
    """The start was given up meanwhile, and nobody records."""
    if begun[0] is not None:
        begun[0].close()
