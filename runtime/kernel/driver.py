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
from cuelight.kernel.placement.remote import RemoteLife, RemoteLifeSpec, prepare_mailbox
from cuelight.kernel.ref import AskDeadlines
from cuelight.kernel.table import ActorSlot, ActorTable, Life
from cuelight.kernel.worker import WorkerThread

TURN_MESSAGES = 64
"""Messages after which an actor yields, so that a busy actor cannot starve the others or the host's tasks."""


class _Running:
    """The state of a driver that is bound to the event loop of its actors, from its start to its end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.deadlines = AskDeadlines(loop, LoopClock())
        self.tasks = asyncio.TaskGroup()
        self.grace = anyio.CancelScope()
        """Cancelled when the time for an orderly stop has passed."""
        self.host: asyncio.Task[None] | None = None
        """The task that owns `tasks`, once every actor is built."""


class AsyncioDriver(ActorTable):
    """Runs a cast in one event loop; a subclass runs the lives of actors that are placed on threads.

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
        """The workers that have not ended: a running thread keeps its worker alive."""
        self._running: _Running | None = None
        self._starting = asyncio.Lock()
        """Held while the system starts."""
        self._opener: asyncio.Task[object] | None = None

    @abstractmethod
    def run_remote_life(self, connection: socket.socket, spec: RemoteLifeSpec) -> None:
        """Run one life of an actor placed on a thread, in a new event loop of the calling thread."""

    async def start(self) -> None:
        """Build every actor, then run them.

        Raises:
            ActorCrashed: a constructor raised, or the process of an actor did not start, unless its restart policy
                has `restarts_at_start`. Everything that was started has ended then.
        """
        assert self._running is None, "a system is started once"
        running = self._running = _Running(asyncio.get_running_loop())
        for part in self._cast:
            self._add_slot(part)
        async with self._starting:
            try:
                await self._build_all()
                started = asyncio.Event()
                running.host = asyncio.create_task(self._run(running, started), name="cuelight system")
                await started.wait()
            except BaseException:  # the caller has no started system to stop
                self.is_dropping = True
                for slot in self._slots.values():
                    if isinstance(slot.life, RemoteLife):  # without waiting for its present handler
                        slot.life.on_stopped()
                        slot.life.end(drop=True)
                await (self._clean_up(running) if running.host is None else self.stop())
                raise

    async def _build_all(self) -> None:
        """Build every actor, here or where it is placed. Raises ActorCrashed."""
        for slot in self._slots.values():
            self._prepare(slot)
        for slot in self._slots.values():
            try:
                await self._open_life(slot)
            except ActorCrashed as crash:
                if crash.message_type or self._closing.is_set() or not slot.part.restart_policy.restarts_at_start:
                    raise
                # Otherwise the life's task raises the crash again at once, and the restart policy decides.

    async def stop(self, *, drop: bool = False, timeout_seconds: float | None = None) -> None:
        """Stop every actor, sources first, after it has handled its waiting messages (with `drop`, without).

        Restarts are cancelled. After `timeout_seconds` the waiting messages are dropped, child processes are killed,
        and threads whose work does not return are abandoned; without a timeout, waits as long as the actors need. A
        second call is harmless.
        """
        host = None if self._running is None else self._running.host
        if host is None:
            if self._slots:
                self._closing.set()
            for slot in self._slots.values():  # fails a start in progress
                self.kill(slot.part.role, "the system was stopped")
            async with self._starting:
                return
        if not host.done():  # else the host's loop may be closed
            if host.get_loop() is not asyncio.get_running_loop():  # the events set below would not wake it
                raise RuntimeError("a system is stopped in the event loop in which it was started")
            self.is_dropping = self.is_dropping or drop
            self._closing.set()
            deadline = None if timeout_seconds is None else self.clock.call_later(timeout_seconds, self._end_grace)
            with anyio.CancelScope(shield=True):  # a cancelled scope around the system would interrupt the stop
                await asyncio.wait([host])
            if deadline is not None:
                deadline.cancel()
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
        """Stop. Raises ActorCrashed where a crash has ended the system and cancelled its body."""
        opener, self._opener = self._opener, None
        # A cancellation of the body from elsewhere must propagate.
        is_ours = self.failure is not None and opener is not None and opener.uncancel() == 0
        await self.stop(drop=error is not None)
        if self.failure is not None and (error is None or (is_ours and isinstance(error, asyncio.CancelledError))):
            raise self.failure

    def new_worker(self, name: str, post: Callable[[object], None]) -> WorkerThread[object]:
        """Start a worker whose results go to `post`; the system ends it."""
        worker = WorkerThread(f"cuelight {name}", post, asyncio.get_running_loop())
        self._workers.add(worker)
        return worker

    def _prepare(self, slot: ActorSlot) -> None:
        """Give a slot the deadlines that all asks share; for a placed actor, have messages encoded at their senders."""
        slot.ref.deadlines = self._require_running().deadlines
        if not isinstance(slot.part.placement, InLoop):
            prepare_mailbox(self, slot)

    async def _open_life(self, slot: ActorSlot) -> Life:
        """Build the actor of a new life, or start the thread or process that builds it. Raises ActorCrashed."""
        if isinstance(slot.part.placement, InLoop):
            return self._build(slot)
        try:
            life = RemoteLife(self, slot, self.run_remote_life)
        except BaseException:
            slot.life = None  # set by the constructor that raised
            raise
        return await life.open()

    def _begin_life(self, slot: ActorSlot) -> None:
        slot.task = self._require_running().tasks.create_task(self._run_life(slot), name=f"cuelight {slot.name}")

    def _require_running(self) -> _Running:
        assert self._running is not None, "the system has not been started"
        return self._running

    async def _run(self, running: _Running, started: asyncio.Event) -> None:
        """Run the lives and end them: the host task, which ends after all other tasks of the system."""
        try:
            async with running.tasks:
                for slot in self._slots.values():
                    self._begin_life(slot)
                started.set()
                await self._closing.wait()
                for restart in list(self._restarts):
                    restart.cancel()
                    await asyncio.wait([restart])
                for slot in reversed(list(self._slots.values())):
                    slot.mailbox.close(drop=self.is_dropping)
                    if slot.task is not None:
                        await asyncio.wait([slot.task])
        finally:
            self._closing.set()
            running.deadlines.close()
            self._on_end()
            await self._clean_up(running)

    async def _run_life(self, slot: ActorSlot) -> None:
        """Run one life of an actor: the task that awaits for it."""
        crash = None
        try:
            life = slot.life or await self._open_life(slot)
            await (life.forward_messages() if isinstance(life, RemoteLife) else self._deliver_messages(slot, life))
        except ActorCrashed as error:
            crash = error
        except asyncio.CancelledError:
            self._abort(slot)  # cancelled from outside; the others depend on this actor
            raise
        self._end(slot, crash)
        crash = None  # its traceback refers to this frame and to objects of the ended life

    async def _deliver_messages(self, slot: ActorSlot, life: Life) -> None:
        """Deliver messages until the mailbox is closed and empty, or a stop is requested. Raises ActorCrashed."""
        actor, mailbox, actor_clock, now = life.actor, slot.mailbox, self.actor_clock, self.clock.now
        tap, slow = self.tap, self.slow_handler_seconds
        take, urgent, ordinary = mailbox.take, mailbox.urgent, mailbox.ordinary
        self._call_actor(slot, life.seconds, actor.started, "started")
        while not life.is_stop_requested:
            await mailbox.wait()
            actor_clock.acting, began = slot.name, now()
            try:
                for _ in range(TURN_MESSAGES):
                    if life.is_stop_requested or not (urgent or ordinary):
                        break
                    _, sender, message = take()
                    actor_clock.seconds = began
                    if tap is not None:
                        tap(Delivered(began, sender, slot.name, message))
                    actor.handle(message)
                    ended = now()
                    if ended - began > slow:
                        self.report_slow(slot.name, type(message).__qualname__, ended - began)
                    began = ended
            except self.interrupts:
                raise
            except BaseException as error:
                raise ActorCrashed(slot.name, type(message).__qualname__, error, message) from error
            finally:
                actor_clock.acting = ""
            message = None  # do not keep the last message alive while waiting
            if urgent or ordinary:
                await asyncio.sleep(0)
            elif mailbox.closed:
                break
        if life.crash is not None:
            raise life.crash
        life.ended_seconds = now()
        self._call_actor(slot, life.ended_seconds, actor.stopped, "stopped")

    def _abort(self, slot: ActorSlot) -> None:
        """Stop every actor without handling the waiting messages, because this one has ended for good."""
        self.is_dropping = True
        self._closing.set()
        slot.mailbox.close(drop=True)

    def _fail(self, slot: ActorSlot, crash: ActorCrashed) -> None:
        """Stop every actor, and report the crash to the task that opened the system and to `on_failure`."""
        self._abort(slot)
        if self.failure is None:
            self.failure = crash
            if self._opener is not None:
                self._opener.cancel()
            self._on_failure(crash)

    def _begin_restart(self, group: Sequence[ActorSlot], delay_seconds: float) -> None:
        restart = self._restart(group, delay_seconds)
        self._restarts.add(self._require_running().tasks.create_task(restart, name="cuelight restart"))

    async def _restart(self, group: Sequence[ActorSlot], delay_seconds: float) -> None:
        for slot in reversed(group):
            # Twice where an earlier, smaller restart is just building the actor.
            while slot.restart is group and slot.task is not None and not slot.task.done():
                if slot.life is not None:
                    slot.life.request_stop()
                await asyncio.wait([slot.task])
        with ExitStack() as exits:
            over = asyncio.Event()
            exits.callback(self.clock.call_later(delay_seconds, over.set).cancel)
            await over.wait()
        # Skip slots that a larger restart has taken over meanwhile, and those that have left the cast.
        for slot in (each for each in group if each.restart is group):
            slot.restart, slot.task = None, asyncio.current_task()
            try:
                await self._open_life(slot)
            except ActorCrashed as crash:
                self._end(slot, crash)
            else:
                self._begin_life(slot)

    def _end_grace(self) -> None:
        """Drop waiting messages and end remote lives at once: the time for an orderly stop has passed."""
        self.is_dropping = True
        self._require_running().grace.cancel()
        for slot in self._slots.values():
            slot.mailbox.close(drop=True)
            if isinstance(slot.life, RemoteLife):
                slot.life.on_stopped()  # so that its end counts as no crash
                slot.life.set_exited(RemoteError("it did not stop in time"))

    async def _clean_up(self, running: _Running) -> None:
        """End the lives that were cancelled, and the workers."""
        with anyio.CancelScope(shield=True):
            for slot in list(self._slots.values()):
                slot.mailbox.close(drop=True)
                if slot.life is not None:  # its task was cancelled
                    slot.life.end(drop=self.is_dropping)
                if isinstance(slot.life, RemoteLife):
                    await asyncio.wait([slot.life.exited])
            with running.grace:
                for worker in list(self._workers):
                    await worker.ended()
            for worker in list(self._workers):
                worker.close(drop=True)  # the grace period has passed
