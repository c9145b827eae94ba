"""The asyncio driver: one task for each actor, start and stop in order, restarts after a back-off."""

import asyncio
import random
import socket
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Never, Self
from weakref import WeakSet

import anyio

from cuelight.kernel.actor import ActorSpec, InLoop
from cuelight.kernel.clock import Clock, LoopClock
from cuelight.kernel.errors import ActorCrashed, RemoteError
from cuelight.kernel.events import Delivered, Tap
from cuelight.kernel.placement import Engagement, Placed, prepare
from cuelight.kernel.ref import Deadlines
from cuelight.kernel.stage import Life, Seat, Stage
from cuelight.kernel.worker import WorkerThread

TURN_MESSAGES = 64
"""After this many messages an actor yields, so that a busy one cannot starve the others or the host's tasks."""


class _Running:
    """What a driver has only from its start to its end, in the event loop of its actors."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.deadlines = Deadlines(loop, LoopClock())
        self.tasks = asyncio.TaskGroup()
        self.grace = anyio.CancelScope()
        """Cancelled when the time for an orderly stop is over."""
        self.host: asyncio.Task[None] | None = None
        """The task that owns `tasks`, once every actor is built."""


class AsyncioDriver(Stage):
    """Runs a cast in one event loop; a subclass says how the life of an actor placed on a thread is run there.

    See `System` for the arguments.
    """

    def __init__(
        self,
        cast: Sequence[ActorSpec[Never]],
        *,
        clock: Clock | None = None,
        chance: random.Random | None = None,
        tap: Tap | None = None,
        on_crash: Callable[[ActorCrashed], None] | None = None,
        on_failure: Callable[[ActorCrashed], None] | None = None,
        on_end: Callable[[], None] | None = None,
        slow_handler_seconds: float = 0.1,
    ) -> None:
        super().__init__(cast, chance, tap)
        self.clock = clock or LoopClock()
        self.on_crash = on_crash or (lambda _: None)
        self._on_failure = on_failure or (lambda _: None)
        self._on_end = on_end or (lambda: None)
        self.slow_handler_seconds = slow_handler_seconds
        self._restarts: WeakSet[asyncio.Task[None]] = WeakSet()
        self._workers: WeakSet[WorkerThread[object]] = WeakSet()
        """Those that have not ended: their threads keep them."""
        self._running: _Running | None = None
        self._starting = asyncio.Lock()
        """Held while it is being started."""
        self._opener: asyncio.Task[object] | None = None

    @abstractmethod
    def run_remote_life(self, connection: socket.socket, spec: Engagement) -> None:
        """Run one life of an actor placed on a thread, in a new event loop of the calling thread."""

    async def start(self) -> None:
        """Build every actor, then run them.

        Raises:
            ActorCrashed: a constructor raised, or the process of an actor did not start, unless its restart policy
                has `restarts_at_start`; nothing is left running.
        """
        assert self._running is None, "a system is started once"
        running = self._running = _Running(asyncio.get_running_loop())
        for part in self._cast:
            self._add_seat(part)
        async with self._starting:
            try:
                await self._build_all()
                started = asyncio.Event()
                running.host = asyncio.create_task(self._run(running, started), name="cuelight system")
                await started.wait()
            except BaseException:  # to its opener it never started, so nobody else will stop it
                self.is_dropping = True
                for seat in self._seats.values():
                    if isinstance(seat.life, Placed):  # nor wait for what its process may be at
                        seat.life.hear_stopped()
                        seat.life.end(drop=True)
                await (self._clear(running) if running.host is None else self.stop())
                raise

    async def _build_all(self) -> None:
        """Build every actor, here or where it is placed. Raises ActorCrashed."""
        for seat in self._seats.values():
            self._prepare(seat)
        for seat in self._seats.values():
            try:
                await self._enter(seat)
            except ActorCrashed as crash:
                if crash.message_type or self._closing.is_set() or not seat.part.restart_policy.restarts_at_start:
                    raise
                # What ended before its first word is over as soon as it is led, and its restart policy decides.

    async def stop(self, *, drop: bool = False, timeout_seconds: float | None = None) -> None:
        """Stop every actor, sources first, after it has handled what waits for it (with `drop`, without).

        Nobody restarts any more. After `timeout_seconds` the rest is dropped, child processes are killed, and threads
        whose work does not return are left to themselves. Without it, waits as long as the actors need. Harmless when
        done twice.
        """
        host = None if self._running is None else self._running.host
        if host is None:
            if self._seats:
                self._closing.set()
            for seat in self._seats.values():  # where it is just being started, that comes to nothing
                self.kill(seat.part.role, "the system was stopped")
            async with self._starting:
                return
        if not host.done():  # maybe long ago, in a loop that is closed by now
            if host.get_loop() is not asyncio.get_running_loop():  # which nobody would wake
                raise RuntimeError("a system is stopped in the event loop in which it was started")
            self.is_dropping = self.is_dropping or drop
            self._closing.set()
            hurry = None if timeout_seconds is None else self.clock.call_later(timeout_seconds, self._hurry)
            with anyio.CancelScope(shield=True):  # a cancelled scope around the system would not let it end
                await asyncio.wait([host])
            if hurry is not None:
                hurry.cancel()
        if not host.cancelled() and (error := host.exception()) is not None:
            raise error

    async def __aenter__(self) -> Self:
        await self.start()
        if self.failure is not None:  # before there was a body to cancel
            await self.stop()
            raise self.failure
        self._opener = asyncio.current_task()
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Stop. Raises ActorCrashed where that ended the system: its body was cancelled then."""
        opener, self._opener = self._opener, None
        # Whoever else has cancelled the body is to find it cancelled.
        is_ours = self.failure is not None and opener is not None and opener.uncancel() == 0
        await self.stop(drop=error is not None)
        if self.failure is not None and (error is None or (is_ours and isinstance(error, asyncio.CancelledError))):
            raise self.failure

    def hire(self, name: str, post: Callable[[object], None]) -> WorkerThread[object]:
        """A thread whose results go to `post`; the system ends it."""
        worker = WorkerThread(f"cuelight {name}", post, asyncio.get_running_loop())
        self._workers.add(worker)
        return worker

    def _prepare(self, seat: Seat) -> None:
        """Asks share their deadlines; messages to an actor that lives elsewhere are made ready at their senders."""
        seat.ref.deadlines = self._started().deadlines
        if not isinstance(seat.part.placement, InLoop):
            prepare(self, seat)

    async def _enter(self, seat: Seat) -> Life:
        """Bring a new life into being, wherever it is to be lived."""
        if isinstance(seat.part.placement, InLoop):
            return self._build(seat)
        try:
            life = Placed(self, seat, self.run_remote_life)
        except BaseException:
            seat.life = None  # which is half made: nothing of it has begun
            raise
        return await life.open()

    def _begin(self, seat: Seat) -> None:
        seat.task = self._started().tasks.create_task(self._live(seat), name=f"cuelight {seat.name}")

    def _started(self) -> _Running:
        assert self._running is not None, "a system lives from its start on"
        return self._running

    async def _run(self, running: _Running, started: asyncio.Event) -> None:
        """The host task: everything the system runs ends before this does."""
        try:
            async with running.tasks:
                for seat in self._seats.values():
                    self._begin(seat)
                started.set()
                await self._closing.wait()
                for restart in list(self._restarts):
                    restart.cancel()
                    await asyncio.wait([restart])
                for seat in reversed(list(self._seats.values())):
                    seat.mailbox.close(drop=self.is_dropping)
                    if seat.task is not None:
                        await asyncio.wait([seat.task])
        finally:
            self._closing.set()
            running.deadlines.close()
            self._on_end()
            await self._clear(running)

    async def _live(self, seat: Seat) -> None:
        """One life of an actor: the only place that awaits on its behalf."""
        crash = None
        try:
            life = seat.life or await self._enter(seat)
            await (life.perform() if isinstance(life, Placed) else self._perform(seat, life))
        except ActorCrashed as error:
            crash = error
        except asyncio.CancelledError:
            self._give_up(seat)  # not our doing, and the others cannot go on without this one
            raise
        self._end(seat, crash)
        crash = None  # whose traceback holds this frame, and what the life that is over has held

    async def _perform(self, seat: Seat, life: Life) -> None:
        """Deliver messages until the mailbox is closed and empty, or the seat is to be left. Raises ActorCrashed."""
        actor, mailbox, moment, now = life.actor, seat.mailbox, self.moment, self.clock.now
        tap, slow = self.tap, self.slow_handler_seconds
        take, urgent, ordinary = mailbox.take, mailbox.urgent, mailbox.ordinary
        self._act(seat, life.seconds, actor.started, "started")
        while not life.is_leaving:
            await mailbox.wait()
            moment.acting, began = seat.name, now()
            try:
                for _ in range(TURN_MESSAGES):
                    if life.is_leaving or not (urgent or ordinary):
                        break
                    _, sender, message = take()
                    moment.seconds = began
                    if tap is not None:
                        tap(Delivered(began, sender, seat.name, message))
                    actor.handle(message)
                    ended = now()
                    if ended - began > slow:
                        self.report_slow(seat.name, type(message).__qualname__, ended - began)
                    began = ended
            except self.interrupts:
                raise
            except BaseException as error:
                raise ActorCrashed(seat.name, type(message).__qualname__, error, message) from error
            finally:
                moment.acting = ""
            message = None  # an idle actor keeps nothing alive
            if urgent or ordinary:
                await asyncio.sleep(0)
            elif mailbox.closed:
                break
        if life.crash is not None:
            raise life.crash
        life.ended_seconds = now()
        self._act(seat, life.ended_seconds, actor.stopped, "stopped")

    def _give_up(self, seat: Seat) -> None:
        """This one can do no more, so all are stopped without handling what waits."""
        self.is_dropping = True
        self._closing.set()
        seat.mailbox.close(drop=True)

    def _fail(self, seat: Seat, crash: ActorCrashed) -> None:
        """Stop everyone, and tell whoever opened the system."""
        self._give_up(seat)
        if self.failure is None:
            self.failure = crash
            if self._opener is not None:
                self._opener.cancel()
            self._on_failure(crash)

    def _begin_restart(self, group: Sequence[Seat], delay_seconds: float) -> None:
        restart = self._restart(group, delay_seconds)
        self._restarts.add(self._started().tasks.create_task(restart, name="cuelight restart"))

    async def _restart(self, group: Sequence[Seat], delay_seconds: float) -> None:
        for seat in reversed(group):
            # Twice where a lesser restart is just bringing it back.
            while seat.restart is group and seat.task is not None and not seat.task.done():
                if seat.life is not None:
                    seat.life.leave()
                await asyncio.wait([seat.task])
        with ExitStack() as exits:
            over = asyncio.Event()
            exits.callback(self.clock.call_later(delay_seconds, over.set).cancel)
            await over.wait()
        # Those that no greater restart has taken over meanwhile, and that have not left the cast.
        for seat in (each for each in group if each.restart is group):
            seat.restart, seat.task = None, asyncio.current_task()
            try:
                await self._enter(seat)
            except ActorCrashed as crash:
                self._end(seat, crash)
            else:
                self._begin(seat)

    def _hurry(self) -> None:
        """The time for an orderly stop is over."""
        self.is_dropping = True
        self._started().grace.cancel()
        for seat in self._seats.values():
            seat.mailbox.close(drop=True)
            if isinstance(seat.life, Placed):
                seat.life.hear_stopped()  # as far as anybody waits for it
                seat.life.ended(RemoteError("it took too long"))

    async def _clear(self, running: _Running) -> None:
        """End whatever the lives have left behind."""
        with anyio.CancelScope(shield=True):
            for seat in list(self._seats.values()):
                seat.mailbox.close(drop=True)
                if seat.life is not None:  # it was cancelled
                    seat.life.end(drop=self.is_dropping)
                if isinstance(seat.life, Placed):
                    await asyncio.wait([seat.life.gone])
            with running.grace:
                for worker in list(self._workers):
                    await worker.ended()
            for worker in list(self._workers):
                worker.close(drop=True)  # there was no time for what it still has to do
