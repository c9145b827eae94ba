"""Runs a cast of actors inside whatever asyncio loop is running, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from cuelight.kernel.stage import INTERRUPTS, Seat, Stage
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
        self._patience = anyio.CancelScope()
        for part in self._cast:
            self._add_seat(part)
        for seat in self._seats.values():
            self._prepare_to_send(seat)
        try:
            for seat in self._seats.values():
                self._performers[seat.name] = await self._enter(seat)
        except BaseException:
            self._drop = True
            await self._clear()
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

        Nobody restarts any more. After `timeout_seconds` the rest is dropped, child processes are killed, and threads
        whose work does not return are left to themselves. Without it, waits as long as the actors need. Harmless when
        done twice.
        """
        if self._host is None:
            return
        if not self._host.done():  # maybe long ago, in a loop that is closed by now
            self._drop = self._drop or drop
            self._closing.set()
            hurry = None if timeout_seconds is None else self.clock.call_later(timeout_seconds, self._hurry)
            with anyio.CancelScope(shield=True):  # a cancelled scope around the system would not let it end
                await asyncio.wait([self._host])
            if hurry is not None:
                hurry.cancel()
        if not self._host.cancelled() and (error := self._host.exception()) is not None:
            raise error

    async def __aenter__(self) -> Self:
        await self.start()
        if self.failure is not None:  # before there was a body to cancel
            await self.stop()
            raise self.failure
        self._opener = asyncio.current_task()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop. Raises ActorCrashed where that ended the system: its body was cancelled then."""
        opener, self._opener = self._opener, None
        # Whoever else has cancelled the body is to find it cancelled.
        is_ours = self._was_interrupted and opener is not None and opener.uncancel() == 0
        await self.stop(drop=error is not None)
        if self.failure is not None and (error is None or (is_ours and isinstance(error, asyncio.CancelledError))):
            raise self.failure

    def statistics(self) -> dict[str, MailboxStatistics]:
        """Each actor's mailbox, by the role's name."""
        return {name: seat.mailbox.statistics() for name, seat in self._seats.items()}

    def spawn(self, part: Part[M]) -> Ref[M]:
        """Add an actor at the source's end of the running cast, and return its address.

        Raises:
            ActorCrashed: its constructor raised; nothing is added. Where it lives elsewhere, that is a crash later.
            NotSendable: it cannot live where it should.
        """
        assert self._host is not None, "the system runs"
        seat = self._add_seat(typing.cast(Part[object], part))
        if self._closing.is_set():
            seat.mailbox.close(drop=True)
            return seat.ref
        try:
            self._prepare_to_send(seat)
            is_here = isinstance(part.placement, InLoop)
            performer = InTheLoop(self, seat, self._build(seat)) if is_here else None
        except BaseException:
            seat.mailbox.close(drop=True)
            if seat.life is not None:
                seat.life.end(drop=True)
            self._leave_cast(seat)
            raise
        self._begin(seat, performer)
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
        self._performers[seat.name] = placed  # it may have to be killed before it is there
        try:
            await placed.open()
        except BaseException:
            del self._performers[seat.name]
            raise
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
            self._closing.set()
            for seat in self._seats.values():
                seat.mailbox.close(drop=True)
            if self._on_end is not None:
                self._on_end()
            await self._clear()

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
        self._end(seat, crash)

    def _end(self, seat: Seat, crash: ActorCrashed | None) -> None:
        self._performers.pop(seat.name, None)
        self._end_life(seat, crash, drop=self._drop)
        if seat.is_over and not self._closing.is_set():
            self._leave_cast(seat)

    def _leave_cast(self, seat: Seat) -> None:
        super()._leave_cast(seat)
        self._tasks.pop(seat.name, None)
        self._packers.pop(seat.name, None)

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
        if self._closing.is_set():
            for name in verdict.names:
                self._seats[name].restart = None
            return
        task = self._group.create_task(self._restart(verdict), name="cuelight restart")
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def _restart(self, verdict: Verdict) -> None:
        def concerned(names: Iterable[str]) -> Iterator[Seat]:
            """Those that no greater restart has taken over meanwhile."""
            return (self._seats[name] for name in names if name in self._seats and self._seats[name].restart is verdict)

        for seat in concerned(reversed(verdict.names)):
            # Twice where a lesser restart is just bringing it back.
            while seat.restart is verdict and not self._tasks[seat.name].done():
                seat.is_leaving = True
                seat.mailbox.wake()
                if (performer := self._performers.get(seat.name)) is not None:
                    performer.nudge()
                await _all_done([self._tasks[seat.name]])
        await self._pause(verdict.delay_seconds)
        for seat in concerned(verdict.names):
            await self._begin_again(seat, verdict)

    async def _begin_again(self, seat: Seat, verdict: Verdict) -> None:
        performer = crash = None
        self._tasks[seat.name] = typing.cast("asyncio.Task[None]", asyncio.current_task())
        try:
            performer = await self._enter(seat)
        except ActorCrashed as error:
            crash = error
        if seat.restart is verdict:
            seat.restart = None
        if performer is not None:
            self._begin(seat, performer)
        else:
            self._end(seat, crash)

    async def _pause(self, seconds: float) -> None:
        over = asyncio.Event()
        timer = self.clock.call_later(seconds, over.set)
        try:
            await over.wait()
        finally:
            timer.cancel()

    def _hurry(self) -> None:
        """The time for an orderly stop is over."""
        self._drop = True
        self._patience.cancel()
        for seat in self._seats.values():
            seat.mailbox.close(drop=True)
        for performer in list(self._performers.values()):
            performer.kill()
            performer.abandon()
        for worker in self._workers:
            worker.close(drop=True)

    def report_slow(self, actor: str, message_type: str, seconds: float) -> None:
        """A handler has kept its event loop from everything else for that long."""
        log.warning("slow_handler", actor=actor, message_type=message_type, seconds=round(seconds, 3))

    async def _clear(self) -> None:
        """End whatever the lives have left behind."""
        with anyio.CancelScope(shield=True):
            for performer in list(self._performers.values()):
                performer.kill()
                await performer.gone()
            for seat in self._seats.values():
                if seat.life is not None:  # it was cancelled
                    seat.life.end(drop=self._drop)
            for worker in self._workers:
                worker.close(drop=self._drop)
            with self._patience:
                for worker in self._workers:
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
        take, (urgent, ordinary) = mailbox.take, mailbox.lanes
        message, hook = None, "started"
        try:
            assert seat.life is not None
            moment.acting, moment.seconds = seat.name, seat.life.seconds
            actor.started()
            moment.acting = ""
            while True:
                await mailbox.wait()
                if seat.is_leaving:
                    break
                moment.acting, began = seat.name, now()
                for _ in range(TURN_MESSAGES):
                    if not urgent and not ordinary:
                        break
                    _, sender, message = take()
                    moment.seconds = began
                    if tap is not None:
                        tap(Delivered(began, sender, seat.name, message))
                    actor.handle(message)
                    ended = now()
                    if ended - began > slow:
                        self._system.report_slow(seat.name, type(message).__qualname__, ended - began)
                    began = ended
                moment.acting = ""
                message = None  # an idle actor keeps nothing alive
                if urgent or ordinary:
                    await asyncio.sleep(0)
                elif mailbox.closed:
                    break
            moment.acting, moment.seconds = seat.name, now()
            seat.life.ended_seconds, hook = moment.seconds, "stopped"
            actor.stopped()
        except BaseException as error:
            # Between messages it is the task that ends, not the actor.
            if moment.acting != seat.name or isinstance(error, INTERRUPTS):
                raise
            raise ActorCrashed(seat.name, hook if message is None else type(message).__qualname__, error) from error
        finally:
            moment.acting = ""


async def _all_done(tasks: Iterable[asyncio.Task[None]]) -> None:
    if pending := [task for task in tasks if not task.done()]:
        await asyncio.wait(pending)
