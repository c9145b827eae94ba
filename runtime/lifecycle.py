"""What an engine opens and closes: the actors' system, journal and board; and what crashes mean for its clients."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Never, TypeVar

from cuelight import errors
from cuelight.actors.executor.phases import Phases
from cuelight.actors.scheduler.patience import REPORT_SECONDS
from cuelight.availability import Availability, broken, closed
from cuelight.board import Alarms, Board
from cuelight.config import EngineConfig
from cuelight.drain import Drain
from cuelight.ensemble import Ensemble, Lead, casting, lives_in_process, roles
from cuelight.fingerprint import Fingerprint, fingerprint
from cuelight.health import HealthRecord
from cuelight.kernel import ActorCrashed, ActorSpec, NotSendable, System, get_logger
from cuelight.kernel.journal import Journal
from cuelight.past import Past
from cuelight.progress import Progress
from cuelight.record import Record, begin
from cuelight.reload import LINGER_SECONDS, Models, Stage, Successor
from cuelight.replay import Origin
from cuelight.submissions import Submissions
from cuelight.threads import in_thread

B = TypeVar("B")

log = get_logger("cuelight.engine")

REMIND_SECONDS = 60.0
"""People are told so often what a start is still at."""


class Lifecycle:
    """From nothing to a system that serves, and back; a crash or a host that cancels all tasks may end it as well."""

    def __init__(self, name: str, progress: Progress, availability: Availability, requests: Submissions) -> None:
        """What is to be played is said by `play`."""
        self.health = HealthRecord(time.monotonic)
        self.system: System | None = None
        self.board: Board | None = None
        self._name = name
        self._progress = progress
        self._availability = availability
        self._requests = requests
        self._origin: Origin | None = None
        self._journal: Journal | Record | None = None
        self._is_broken = False
        self._farewell: asyncio.Task[None] | None = None

    def play(
        self,
        config: EngineConfig,
        find: Callable[[EngineConfig], tuple[Ensemble[B], Path | None]],
        find_other: Callable[[object, EngineConfig], Successor],
    ) -> None:
        """What `find` finds, and the folder that it is from, is to be played; `find_other` is for reloads."""

        def gather(config: EngineConfig) -> Ensemble[B]:
            """And leave behind what a journal must say of it."""
            ensemble, folder = find(config)
            # Only for the sake of a journal, or of a reload, which does it then.
            mark = Fingerprint(self._name, self._name) if folder is None else fingerprint(folder)
            self._origin = Origin(self._name, folder, config, ensemble.facts, mark)
            return ensemble

        self._config = config
        self._casting = casting(gather)
        self.models = Models(config, find_other)

    async def start(self) -> None:
        """Raises as `Engine.start`; then nothing is left."""
        self._availability.begin()
        try:
            with self._reminding():
                await self._start(Phases().timed_by(time.monotonic))
        except BaseException as error:
            self._progress.close()
            is_stopped = self._availability.is_closed
            self.health.enter("unavailable", str(error))
            await self.stop()
            if is_stopped and isinstance(error, errors.EngineError):  # whatever the stop has made of the start
                raise closed() from error
            raise

    async def _start(self, phases: Phases) -> None:
        self._loop = asyncio.get_running_loop()
        alarms = Alarms(self._requests.repeat_soon, self._gave_up, self._progress.phase, self._progress.note)
        self.board = board = Board(self.health, alarms)
        self.health.loading("find model")
        with phases("find model"):
            self._cast = cast = roles(self._config)
            lead = Lead(cast.executors)
            parts = await in_thread(partial(self._casting, self._config, cast, board, lead))
            self._availability.check_starting()
        past = await self._begin_journal()
        self._availability.check_starting()
        self.health.loading("start actors")
        with phases("start actors"):
            system = await self._start_system(parts)
        self.models.begin(Stage(system, cast, lead), self._origin, self._taken_over)
        self.intake, self.scheduler = system.find(cast.intake), system.find(cast.scheduler)
        self.cache = system.find(cast.cache)
        self._requests.begin(self.intake, self._flush)
        with phases("load model"):
            ready = await asyncio.shield(board.ready)  # which actors tell of, even where nobody waits any more
        self._availability.check_starting()
        self._open(past)
        log.info("engine_ready", model=self._name, token_capacity=ready.token_capacity, **phases.facts())

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

    async def _begin_journal(self) -> Past | None:
        """The journal, if there is to be one, and what an earlier process has left in it."""
        if self._config.journal is None or self._origin is None:
            return None
        work = partial(begin, self._origin, self._loop.time, self._requests.unfinished)
        self._journal, past = await in_thread(work, too_late=_close_begun)
        return past

    async def _start_system(self, parts: tuple[ActorSpec[Never], ...]) -> System:
        self.system = system = System(
            parts,
            chance=random.Random(self._config.seed),
            tap=self._journal,
            on_crash=self._one_crashed,
            on_failure=self._crashed,
            on_end=self._actors_ended,
        )
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
        return system

    def _open(self, past: Past | None) -> None:
        """Serve, first of all those whom an earlier process had not finished."""
        if isinstance(self._journal, Record):
            self._journal.settle()
        if past is not None:
            self._requests.go_on(past)
        self._availability.open()
        self.health.enter("serving")

    async def stop(self) -> None:
        """As `Engine.stop`."""
        self._ended()
        self.health.enter("closed")
        if self.system is not None:
            # What is being computed is for nobody, so a process need not be waited for.
            is_apart = lives_in_process(self._config)
            await self.system.stop(drop=True, timeout_seconds=LINGER_SECONDS if is_apart else None)
        self._close_journal()

    async def drain(self, seconds: float) -> int:
        """As `Engine.drain`."""
        availability, requests = self._availability, self._requests
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

    def _taken_over(self, origin: Origin) -> None:
        """Another model serves."""
        self._origin, self._name = origin, origin.name
        if isinstance(self._journal, Record):
            self._journal.taken_over(origin)

    def _one_crashed(self, crash: ActorCrashed) -> None:
        """An actor is gone, and mostly another one comes."""
        assert self.board is not None
        self.health.crashed(crash)
        self.board.life_over(crash.actor)
        if crash.actor == self._cast.scheduler.name:
            self._loop.call_soon(self.models.repeat)
        self._requests.hear_of_crash(crash)

    def _crashed(self, crash: ActorCrashed) -> None:
        """An actor is gone for good: whoever waits must hear of it."""
        self._is_broken = True
        self.health.enter("unavailable", str(crash))
        self._end_service(partial(broken, crash))

    def _gave_up(self, reason: str) -> None:
        """Nobody will be served any more, so all that was taken up for it is given back."""
        assert self.system is not None
        self._is_broken = True
        self.health.enter("unavailable", reason)
        log.error("gave_up", reason=reason)
        self._end_service(lambda: errors.EngineGaveUp(reason))
        stopping = self.system.stop(drop=True, timeout_seconds=LINGER_SECONDS)
        self._farewell = self._loop.create_task(stopping, name="cuelight farewell")

    def _actors_ended(self) -> None:
        self._ended()
        self._close_journal()

    def _flush(self) -> None:
        """If this process is killed, the next one must know all that a client has been given."""
        if isinstance(self._journal, Record):
            self._journal.flush()

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _ended(self) -> None:
        """Nobody serves any more, whether it was `stop` that said so or a host that cancelled all tasks."""
        if not self._is_broken:
            self.health.enter("closed")
            self._end_service(closed)

    def _end_service(self, reason: Callable[[], errors.EngineUnavailable]) -> None:
        """Tell every client, from now on and those that wait, each with an exception of its own."""
        self._availability.end(reason)
        if self.board is not None:
            self.board.fail(reason())
            self.board.clear()
        self._requests.end(reason)
        self.models.end(reason)


def _close_begun(begun: tuple[Journal | Record | None, Past | None]) -> None:
    """The start was given up meanwhile, and nobody records."""
    if begun[0] is not None:
        begun[0].close()
