"""Runs a cast of actors inside whatever asyncio loop is running, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
import typing
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Never, Self, TypeVar

import anyio

from cuelight.kernel.actor import Actor
from cuelight.kernel.clock import Clock, LoopClock
from cuelight.kernel.errors import ActorCrashed
from cuelight.kernel.events import Delivered, Tap
from cuelight.kernel.log import get_logger
from cuelight.kernel.mailbox import MailboxStatistics
from cuelight.kernel.ref import Ref
from cuelight.kernel.role import InLoop, Part, Role
from cuelight.kernel.stage import Seat, Stage
from cuelight.kernel.supervision import Verdict
from cuelight.kernel.worker import WorkerThread

if TYPE_CHECKING:
    from cuelight.kernel.wire import Packer

M = TypeVar("M")

TURN_MESSAGES = 64
"""After this many messages an actor yields, so that a busy one cannot starve the others or the host's tasks."""

SLOW_HANDLER_SECONDS = 0.1
"""A handler that takes longer than this is reported: all that time the event loop stood still."""

log = get_logger("cuelight.kernel")


class Performer:
    """One life of an actor, wherever it is lived. What is here suits one that never outlives its task."""

    async def perform(self) -> None:
        """Until the actor has stopped. Raises ActorCrashed."""

    def nudge(self) -> None:
        """The seat has changed: look."""

    def kill(self) -> None:
        """End at once, if there is a way."""

    async def gone(self) -> None:
        """Wait until nothing is left of it."""

    def abandon(self) -> None:
        """Wait for it no longer."""


class System(Stage):
    """A cast of actors, started sink to source and stopped source to sink.

    All tasks live under one host task of the system's own, so it may be opened and closed from different tasks. It
    belongs to the loop and the thread it was started in, and installs no signal handler.

    Args:
        cast: the parts, sinks first.
        clock, chance: what the actors see as time and randomness; by default the loop's clock and a fresh generator.
        tap: sees every life and every delivery. What it raises is logged, and ends the tapping.
        on_failure: told once when an actor has crashed beyond what its fate provides for; every actor is stopped then.
        on_end: called once when the actors have ended: stopped, crashed, or cancelled by a host that ends all tasks.
        slow_handler_seconds: a handler that takes longer is logged as `slow_handler`, with actor, message and time.
    """

    def __init__(
        self,
        cast: Sequence[Part[Never]],
        *,
        clock: Clock | None = None,
        chance: random.Random | None = None,
        tap: Tap | None = None,
        on_failure: Callable[[ActorCrashed], None] | None = None,
        on_end: Callable[[], None] | None = None,
        slow_handler_seconds: float = SLOW_HANDLER_SECONDS,
    ) -> None:
        super().__init__(cast, chance, tap)
        self._own_clock = clock
        self._on_failure = on_failure
        self._on_end = on_end
        self.slow_handler_seconds = slow_handler_seconds
        self._performers: dict[str, Performer] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._packers: dict[str, Packer] = {}
        self._restarts: set[asyncio.Task[None]] = set()
        self._workers: list[WorkerThread[object]] = []
        self._host: asyncio.Task[None] | None = None
        self._opener: asyncio.Task[object] | None = None
        self._was_interrupted = False
        self._drop = False
        self._is_abandoned = False
        self.failure: ActorCrashed | None = None
        """The crash that ended the system."""

    async def start(self) -> None:
        """Build every actor, then run them.

        Raises:
            ActorCrashed: a constructor raised, or the process of an actor did not come up; nothing is left running.
        """
        assert self._host is None, "a system is started once"
        self.clock = self._own_clock or LoopClock(asyncio.get_running_loop())
        self._closing = asyncio.Event()
        for part in self._cast:
            self._add_seat(part)
        for seat in self._seats.values():
            self._prepare_to_send(seat)
        try:
            for seat in self._seats.values():
                self._performers[seat.name] = await self._enter(seat)
        except BaseException:
            self._drop = True
            with anyio.CancelScope(shield=True):
                await self._kill_all()
                await self._dismiss_workers()
            raise
        started = asyncio.Event()
        self._host = asyncio.create_task(self._run(started), name="cuelight system")
        try:
            await started.wait()
        except asyncio.CancelledError:
            await self.stop(drop=True)  # nobody else will: to its opener it never started
            raise

    async def stop(self, *, drop: bool = False, timeout_seconds: float | None = None) -> None:
        """Stop every actor, sources first, after it has handled what waits for it (with `drop`, without).

        After `timeout_seconds` the rest is dropped, child processes are killed, and threads whose work does not
        return are left to themselves. Without it, waits as long as the actors need. Harmless when done twice.
        """
        if self._host is None:
            return
        self._drop = self._drop or drop
        self._closing.set()
        hurry = None if timeout_seconds is None else self.clock.call_later(timeout_seconds, self._hurry)
        with anyio.CancelScope(shield=True):  # a cancelled scope around the system would not let it end
            if not self._host.done():  # maybe long ago, in a loop that is closed by now
                await asyncio.wait([self._host])
        if hurry is not None:
            hurry.cancel()
        if not self._host.cancelled() and (error := self._host.exception()) is not None:
            raise error

    async def __aenter__(self) -> Self:
        await self.start()
        self._opener = asyncio.current_task()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop. Raises ActorCrashed where that ended the system: its body was cancelled then."""
        opener, self._opener = self._opener, None
        await self.stop(drop=error is not None)
        if self.failure is None:
            return
        if self._was_interrupted and opener is not None and opener.uncancel() > 0:
            return  # somebody else has cancelled the body as well
        if error is None or isinstance(error, asyncio.CancelledError):
            raise self.failure

    def statistics(self) -> dict[str, MailboxStatistics]:
        """Each actor's mailbox, by the role's name."""
        return {name: seat.mailbox.statistics() for name, seat in self._seats.items()}

    def spawn(self, part: Part[M]) -> Ref[M]:
        """Add an actor at the source's end of the running cast, and return its address.

        Raises:
            ActorCrashed: its constructor raised; nothing is added. Where it lives elsewhere, that is a crash later.
        """
        assert self._host is not None, "the system runs"
        seat = self._add_seat(typing.cast(Part[object], part))
        self._prepare_to_send(seat)
        if self._closing.is_set():
            seat.mailbox.close(drop=True)
            return seat.ref
        if not isinstance(part.placement, InLoop):
            self._begin(seat, None)
            return seat.ref
        try:
            self._begin(seat, InTheLoop(self, seat, self._build(seat)))
        except ActorCrashed:
            seat.mailbox.close(drop=True)
            assert seat.life is not None
            seat.life.end(drop=True)
            del self._seats[seat.name]
            raise
        return seat.ref

    def dismiss(self, role: Role[Never], *, drop: bool = False) -> None:
        """Stop one actor, once it has handled what waits for it (with `drop`, before); its role is free again then.

        Raises KeyError for a role outside the cast.
        """
        seat = self._seats[role.name]
        seat.mailbox.close(drop=drop)
        if seat.life is None and seat.restart is not None:
            self._leave_cast(seat)  # it was waiting for its next life

    def hire(self, name: str, post: Callable[[object], None]) -> WorkerThread[object]:
        """A thread whose results go to `post`; the system ends it."""
        worker = WorkerThread(f"cuelight {name}", post, asyncio.get_running_loop())
        self._workers = [each for each in self._workers if each.is_alive]
        self._workers.append(worker)
        return worker

    @property
    def is_dropping(self) -> bool:
        """Whether what waits is to be forgotten at the end."""
        return self._drop

    def parts(self) -> list[Part[object]]:
        """The cast as it is now, sinks first."""
        return [seat.part for seat in self._seats.values()]

    def known(self, name: str) -> Ref[object] | None:
        """The address of the actor of this name, if there is one."""
        return self._seats[name].ref if name in self._seats else None

    def _prepare_to_send(self, seat: Seat) -> None:
        """Messages to an actor that lives elsewhere are made ready at their senders."""
        if not isinstance(seat.part.placement, InLoop):
            from cuelight.kernel.placement import packer

            self._packers[seat.name] = packer(self, seat)
            seat.mailbox.pack = self._packers[seat.name].pack

    async def _enter(self, seat: Seat) -> Performer:
        """Bring a new life into being, wherever it is to be lived."""
        if isinstance(seat.part.placement, InLoop):
            return InTheLoop(self, seat, self._build(seat))
        from cuelight.kernel.placement import Placed

        placed = Placed(self, seat, self._packers[seat.name], self._begin_life(seat))
        await placed.open()
        return placed

    def _begin(self, seat: Seat, performer: Performer | None) -> None:
        if performer is not None:
            self._performers[seat.name] = performer
        task = self._group.create_task(self._live(seat, performer), name=f"cuelight {seat.name}")
        self._tasks[seat.name] = task

    async def _run(self, started: asyncio.Event) -> None:
        """The host task: everything the system runs ends before this does."""
        try:
            async with asyncio.TaskGroup() as self._group:
                for seat in self._seats.values():
                    self._begin(seat, self._performers[seat.name])
                started.set()
                await self._closing.wait()
                await self._close()
        finally:
            for seat in self._seats.values():
                seat.mailbox.close(drop=True)
            if self._on_end is not None:
                self._on_end()
            with anyio.CancelScope(shield=True):
                await self._kill_all()
                await self._dismiss_workers()

    async def _close(self) -> None:
        for restart in self._restarts:
            restart.cancel()
        await _all_done(self._restarts)
        for seat in reversed(list(self._seats.values())):
            seat.mailbox.close(drop=self._drop)
            if (performer := self._performers.get(seat.name)) is not None:
                performer.nudge()
            if (task := self._tasks.get(seat.name)) is not None:
                await _all_done([task])

    async def _live(self, seat: Seat, performer: Performer | None) -> None:
        """One life of an actor: the only place that awaits on its behalf."""
        crash = None
        try:
            if performer is None:
                performer = self._performers[seat.name] = await self._enter(seat)
            await performer.perform()
        except ActorCrashed as error:
            crash = error
        except asyncio.CancelledError:
            # Not our doing, and the others cannot go on without this one.
            self._drop = True
            self._closing.set()
            seat.mailbox.close(drop=True)
            raise
        self._performers.pop(seat.name, None)
        self._end_life(seat, crash, drop=self._drop)
        if seat.is_over and not self._closing.is_set():
            self._leave_cast(seat)

    def _leave_cast(self, seat: Seat) -> None:
        """A dismissed actor's role is free again."""
        seat.is_over, seat.restart = True, None
        del self._seats[seat.name]
        self._tasks.pop(seat.name, None)
        self._packers.pop(seat.name, None)
        self._supervision.forget(seat.name)

    def _fail(self, crash: ActorCrashed) -> None:
        """Stop everyone, and tell whoever opened the system."""
        self._drop = True
        self._closing.set()
        if self._seats.get(crash.actor) is not None:
            self._seats[crash.actor].mailbox.close(drop=True)
        if self.failure is not None:
            return
        self.failure = crash
        if self._opener is not None:
            self._was_interrupted = self._opener.cancel()
        if self._on_failure is not None:
            self._on_failure(crash)

    def _begin_restart(self, verdict: Verdict) -> None:
        task = self._group.create_task(self._restart(verdict), name="cuelight restart")
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def _restart(self, verdict: Verdict) -> None:
        def concerned(names: Iterable[str]) -> list[Seat]:
            return [self._seats[name] for name in names if name in self._seats and self._seats[name].restart is verdict]

        for seat in concerned(reversed(verdict.names)):
            seat.is_leaving = True
            seat.mailbox.wake()
            if (performer := self._performers.get(seat.name)) is not None:
                performer.nudge()
            await _all_done([self._tasks[seat.name]])
        await self._pause(verdict.delay_seconds)
        for seat in concerned(verdict.names):
            try:
                performer = await self._enter(seat)
            except ActorCrashed as crash:
                seat.restart = None
                self._end_life(seat, crash)
            else:
                seat.restart = None
                self._begin(seat, performer)

    async def _pause(self, seconds: float) -> None:
        over = asyncio.Event()
        timer = self.clock.call_later(seconds, over.set)
        try:
            await over.wait()
        finally:
            timer.cancel()

    def _hurry(self) -> None:
        """The time for an orderly stop is over."""
        self._drop = self._is_abandoned = True
        for seat in self._seats.values():
            seat.mailbox.close(drop=True)
        for performer in list(self._performers.values()):
            performer.kill()
            performer.abandon()

    def report_slow(self, actor: str, message_type: str, seconds: float) -> None:
        """A handler has kept its event loop from everything else for that long."""
        log.warning("slow_handler", actor=actor, message_type=message_type, seconds=round(seconds, 3))

    async def _kill_all(self) -> None:
        for performer in list(self._performers.values()):
            performer.kill()
            await performer.gone()

    async def _dismiss_workers(self) -> None:
        for worker in self._workers:
            worker.close(drop=self._drop)
        for worker in self._workers:
            if not self._is_abandoned:
                await worker.ended()


class InTheLoop(Performer):
    """A life lived in the system's own event loop."""

    def __init__(self, system: System, seat: Seat, actor: Actor[object]) -> None:
        self._system = system
        self._seat = seat
        self._actor = actor

    async def perform(self) -> None:
        """Deliver messages until the mailbox is closed and empty, or the seat is to be left. Raises ActorCrashed."""
        seat, moment, now, actor = self._seat, self._system.moment, self._system.clock.now, self._actor
        mailbox, tap, slow = seat.mailbox, self._system.tap, self._system.slow_handler_seconds
        message: object = None
        try:
            moment.acting, moment.seconds = seat.name, now()
            actor.started()
            moment.acting = ""
            while True:
                await mailbox.wait()
                if seat.is_leaving:
                    break
                moment.acting, began = seat.name, now()
                for _ in range(min(TURN_MESSAGES, len(mailbox))):
                    moment.seconds = began
                    _, sender, message = mailbox.take()
                    if tap is not None:
                        tap(Delivered(began, sender, seat.name, message))
                    actor.handle(message)
                    ended = now()
                    if ended - began > slow:
                        self._system.report_slow(seat.name, type(message).__qualname__, ended - began)
                    began = ended
                moment.acting = ""
                message = None  # an idle actor keeps nothing alive
                if len(mailbox):
                    await asyncio.sleep(0)
                elif mailbox.closed:
                    break
            moment.acting, moment.seconds = seat.name, now()
            actor.stopped()
        except Exception as error:
            raise ActorCrashed(seat.name, type(message).__qualname__, error) from error
        finally:
            moment.acting = ""


async def _all_done(tasks: Iterable[asyncio.Task[None]]) -> None:
    if pending := [task for task in tasks if not task.done()]:
        await asyncio.wait(pending)
