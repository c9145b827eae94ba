"""The table of actors, common to all drivers: slots and lives, watches, restarts, and events for the tap."""

import asyncio
import random
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from weakref import WeakSet

from cuelight.kernel.actor import Actor, ActorSpec, InLoop, Role
from cuelight.kernel.clock import ActorClock, Clock, Timer
from cuelight.kernel.errors import ActorCrashed, ActorKilled, NotAccepted
from cuelight.kernel.events import Ended, Event, Started, Tap
from cuelight.kernel.log import get_logger
from cuelight.kernel.mailbox import Mailbox, MailboxStatistics
from cuelight.kernel.ref import Ref
from cuelight.kernel.supervision import ExitCause, Strategy, Terminated, restart_delay
from cuelight.kernel.worker import Worker

M = typing.TypeVar("M")

log = get_logger("cuelight.kernel")


class ActorSlot:
    """The place of one actor in the cast, for all of the actor's lives."""

    def __init__(self, part: ActorSpec[object], mailbox: Mailbox) -> None:
        self.name = part.role.name
        self.part = part
        self.mailbox = mailbox
        self.ref: Ref[object] = Ref(self.name, mailbox.put, lambda: mailbox.closed)
        self.lives = 0
        self.crashes: list[float] = []
        """Times of the crashes within the window of the restart policy."""
        self.life: Life | None = None
        self.task: asyncio.Task[None] | None = None
        self.restart: Sequence[ActorSlot] | None = None
        """The slots that restart together, while the restart that will begin this slot's next life is under way."""
        self.is_over = False
        """Whether the last life has ended."""
        self.watchers: dict[str, ActorSlot] = {}
        self.watched: set[ActorSlot] = set()

    def notify(self, news: Terminated) -> None:
        """Post the end of a watched actor's life to this actor."""
        if not self.mailbox.closed:
            self.mailbox.post(news, news.actor)

    def unwatch_all(self) -> None:
        """End all watches of this actor."""
        while self.watched:
            del self.watched.pop().watchers[self.name]


class Life:
    """One life of an actor: its context, and the workers and timers that end with it."""

    actor: Actor[object]
    """The actor, once it is built; missing where it lives on a thread or in a process."""

    def __init__(self, table: "ActorTable", slot: ActorSlot) -> None:
        slot.lives += 1
        slot.life = self
        slot.mailbox.begin_life()
        self.ref = slot.ref
        self.clock = table.actor_clock
        self.find, self.spawn, self.dismiss, self.kill = table.context_methods
        self.seed = table.seed_of(slot)
        """The seed of `chance`."""
        self.seconds = table.clock.now()
        """The time at which the life began."""
        self.ended_seconds: float | None = None
        """The time at which `stopped` was called, where that is known."""
        self.is_stop_requested = False
        """Whether the life must end without handling the waiting messages."""
        self.crash: ActorCrashed | None = None
        """The crash that must end the life, where the actor's own handler does not raise it."""
        self._table = table
        self._slot = slot
        self._workers: list[Worker[object]] = []
        self._timers: WeakSet[Timer] | None = None
        if table.tap is not None:
            table.tap(Started(self.seconds, slot.name, slot.lives, self.seed))

    @cached_property
    def chance(self) -> random.Random:
        return random.Random(self.seed)

    def worker(self, name: str) -> Worker[object]:
        worker = self._table.new_worker(f"{self._slot.name} {name}", self._post)
        self._workers.append(worker)
        return worker

    def after(self, seconds: float, message: object) -> Timer:
        timer = self._table.clock.call_later(seconds, partial(self._post, message))
        self._timers = self._timers or WeakSet()
        self._timers.add(timer)
        return timer

    def _post(self, message: object) -> None:
        """Post a message of this life's workers and timers; ignore it once the life has ended."""
        if self._slot.life is self:
            self._slot.mailbox.post(message)

    def watch(self, role: Role[typing.Never]) -> None:
        if Terminated not in self._slot.part.role.message_types():
            raise NotAccepted(f"{self._slot.name} watches, so its protocol needs Terminated")
        self._table.watch(self._slot, role.name)

    def request_stop(self) -> None:
        """End the life in order as soon as the present handler has returned."""
        self.is_stop_requested = True
        self._slot.mailbox.wake()

    def crash_with(self, crash: ActorCrashed) -> None:
        """End the life by this crash, or an earlier one, as soon as the present handler has returned."""
        self.crash = self.crash or crash
        self.request_stop()

    def end(self, *, drop: bool) -> None:
        """Cancel the timers and close the workers (with `drop`, without their queued jobs)."""
        for timer in self._timers or ():
            timer.cancel()
        for worker in self._workers:
            worker.close(drop=drop)


class ActorTable(ABC):
    """The slots of a cast, sinks first, and the consequences of their lives' ends. Drivers deliver the messages."""

    clock: Clock
    slow_handler_seconds: float
    on_crash: Callable[[ActorCrashed], object]
    """Called with every crash, before its consequences."""
    interrupts: tuple[type[BaseException], ...] = (KeyboardInterrupt, SystemExit)
    """Exceptions that end the whole program. Any other exception of an actor is its crash."""

    def __init__(self, cast: Sequence[ActorSpec[typing.Never]], chance: random.Random | None, tap: Tap | None) -> None:
        # The types match within each spec; the specs have no message type in common.
        self._cast: tuple[ActorSpec[object], ...] = typing.cast(tuple[ActorSpec[object], ...], tuple(cast))
        self._chance = chance or random.Random()
        self._own_tap = tap or (lambda _: None)
        self.tap = self._call_tap if tap is not None else None
        self._slots: dict[str, ActorSlot] = {}
        self.context_methods = self.find, self.spawn, self.dismiss, self.kill
        """The bound methods that every context offers, created once."""
        self.actor_clock = ActorClock()
        self._closing = asyncio.Event()
        """Set when all actors must end: none is spawned or restarted then."""
        self.is_dropping = False
        """Whether waiting messages are dropped at the end."""
        self.failure: ActorCrashed | None = None
        """The crash that ended the system."""

    @abstractmethod
    def new_worker(self, name: str, post: Callable[[object], None]) -> Worker[object]:
        """Return a new worker whose results go to `post`."""

    @abstractmethod
    def _prepare(self, slot: ActorSlot) -> None:
        """Have messages to a slot converted where its actor lives on a thread or in a process. Raises NotSendable."""

    @abstractmethod
    def _begin_life(self, slot: ActorSlot) -> None:
        """Run the next life of a slot: call `started`, deliver messages, and end it."""

    @abstractmethod
    def _begin_restart(self, group: Sequence[ActorSlot], delay_seconds: float) -> None:
        """End the lives of a group, sources first; after the delay begin new lives, sinks first."""

    @abstractmethod
    def _fail(self, slot: ActorSlot, crash: ActorCrashed) -> None:
        """End the system after a crash that no restart policy covers."""

    def statistics(self) -> dict[str, MailboxStatistics]:
        """Return the figures of each actor's mailbox, by the role's name."""
        return {name: slot.mailbox.statistics() for name, slot in self._slots.items()}

    def roles(self) -> list[Role[object]]:
        """Return the roles of the present cast, sinks first."""
        return [slot.part.role for slot in self._slots.values()]

    def find(self, role: Role[M]) -> Ref[M]:
        """Return the address of the actor that plays `role`. Raises KeyError for a role outside the cast."""
        if (ref := self.find_by_name(role.name)) is None:
            there = ", ".join(self._slots) or "none"
            raise KeyError(f"no actor {role.name!r} is in the cast that runs; there are {there}")
        return ref

    def find_by_name(self, name: str) -> Ref[object] | None:
        """Return the address of the actor of this name, or None."""
        return self._slots[name].ref if name in self._slots else None

    def spawn(self, part: ActorSpec[M]) -> Ref[M]:
        """Add an actor at the source's end of the running cast, and return its address.

        Raises:
            ActorCrashed: the constructor raised; no actor is added. On a thread or in a process, the constructor runs
                later, and its error is a crash of the added actor.
            NotSendable: the actor cannot be placed there: `build` cannot be imported, or an annotation not resolved.
        """
        slot = self._add_slot(typing.cast(ActorSpec[object], part))
        if self._closing.is_set():
            slot.mailbox.close(drop=True)
            return slot.ref
        try:
            self._prepare(slot)
            if isinstance(part.placement, InLoop):
                self._build(slot)
        except BaseException:
            slot.mailbox.close(drop=True)
            if slot.life is not None:
                slot.life.end(drop=True)
            self._remove(slot)
            raise
        self._begin_life(slot)
        return slot.ref

    def dismiss(self, role: Role[typing.Never], *, drop: bool = False) -> None:
        """Stop an actor once it has handled its waiting messages (with `drop`, without); its role is free again then.

        Raises KeyError for a role outside the cast.
        """
        slot = self._slots[role.name]
        slot.mailbox.close(drop=drop)
        if slot.life is None and slot.restart is not None:  # no life remains whose end would notify the watchers
            self._notify_watchers(slot, None, is_restarting=False)
            self._remove(slot)

    def kill(self, role: Role[typing.Never], reason: str) -> None:
        """End an actor's present life as a crash, "it was killed: `reason`"; the restart policy applies.

        An actor's process is killed at once; any other actor ends when its handler returns. Harmless where the actor
        has no life at present.
        """
        self.kill_for(self.actor_clock.acting, role, reason)

    def kill_for(self, killed_by: str, role: Role[typing.Never], reason: str) -> None:
        """Kill an actor as `kill` does; `killed_by` names the calling actor, or is "" for code outside the actors."""
        if role.name in self._slots and (life := self._slots[role.name].life) is not None:
            life.crash_with(ActorCrashed(role.name, "", ActorKilled(f"it was killed: {reason}", killed_by)))

    def watch(self, watcher: ActorSlot, name: str) -> None:
        """Notify `watcher` of the end of each life of the actor of this name; at once if it has stopped.

        Raises KeyError for a name outside the cast.
        """
        slot = self._slots[name]
        slot.watchers[watcher.name] = watcher
        watcher.watched.add(slot)
        if slot.is_over:
            watcher.notify(Terminated(name, "", is_restarting=False))

    def _add_slot(self, part: ActorSpec[object]) -> ActorSlot:
        name = part.role.name
        assert name not in self._slots, f"two actor specs have the role {name!r}"
        slot = self._slots[name] = ActorSlot(part, self._new_mailbox(part))
        return slot

    def _new_mailbox(self, part: ActorSpec[object]) -> Mailbox:
        return Mailbox(part.role, self.clock, self.actor_clock)

    def seed_of(self, slot: ActorSlot) -> int:
        """Return the seed of a new life's random number generator."""
        return self._chance.getrandbits(64)

    def _build(self, slot: ActorSlot) -> Life:
        """Begin a new life and build its actor. Raises ActorCrashed."""
        life = Life(self, slot)

        def build() -> Actor[object]:
            actor: object = slot.part.build(life)
            if not isinstance(actor, Actor):  # such as None, where `build` lacks its `return`
                raise TypeError(f"the build of {slot.name!r} must return an actor, not {actor!r}")
            return actor

        life.actor = self._call_actor(slot, life.seconds, build, "construction")
        return life

    def _call_actor(self, slot: ActorSlot, seconds: float, act: Callable[[], M], name: str) -> M:
        """Call `act` as this actor, with its clock at `seconds`. Raises ActorCrashed with `name` as message type."""
        outer = self.actor_clock.acting, self.actor_clock.seconds
        self.actor_clock.acting, self.actor_clock.seconds = slot.name, seconds
        try:
            return act()
        except self.interrupts:
            raise
        except BaseException as error:
            raise ActorCrashed(slot.name, name, error) from error
        finally:
            self.actor_clock.acting, self.actor_clock.seconds = outer

    def _end(self, slot: ActorSlot, crash: ActorCrashed | None) -> None:
        """End a life: report its end, apply the restart policy after a crash, and notify the watchers."""
        life, slot.life = slot.life, None
        assert life is not None, "a life ends once"
        life.end(drop=self.is_dropping or crash is not None or life.is_stop_requested)
        life.crash = None  # its traceback refers to this life
        vars(life).pop("actor", None)  # frees the actor now: the life and its workers are a cycle of references
        now = self.clock.now()
        self._report_end(slot, crash, now if life.ended_seconds is None else life.ended_seconds)
        if crash is not None:
            self._report_crash(crash)
            self.on_crash(crash)
            if slot.restart is None:
                self._decide_restart(slot, crash, now)
        slot.is_over = slot.restart is None
        self._notify_watchers(slot, crash, is_restarting=not slot.is_over)
        if slot.is_over and not self._closing.is_set():
            self._remove(slot)

    def _decide_restart(self, slot: ActorSlot, crash: ActorCrashed, now: float) -> None:
        restart_policy, cast = slot.part.restart_policy, list(self._slots.values())
        delay_seconds = restart_delay(restart_policy, slot.crashes, now, self._chance)
        if delay_seconds is None:
            self._fail(slot, crash)
        elif not slot.mailbox.closed and not self._closing.is_set():  # else the actor was about to stop
            sources = cast[cast.index(slot) :]
            groups = {Strategy.ONE_FOR_ONE: [slot], Strategy.REST_FOR_ONE: sources, Strategy.ONE_FOR_ALL: cast}
            for each in (group := groups[restart_policy.strategy]):
                each.restart = group
            self._begin_restart(group, delay_seconds)

    def _report_end(self, slot: ActorSlot, crash: ActorCrashed | None, seconds: float) -> None:
        """Pass the end of a life to the tap."""
        if self.tap is None:
            return
        if crash is None:
            self.tap(Ended(seconds, slot.name, slot.lives, "", ExitCause.STOPPED))
        else:
            self.tap(Ended(seconds, slot.name, slot.lives, str(crash), crash.cause, crash.killed_by))

    def _notify_watchers(self, slot: ActorSlot, crash: ActorCrashed | None, *, is_restarting: bool) -> None:
        news = Terminated(slot.name, "", is_restarting)
        if crash is not None:
            news = Terminated(slot.name, str(crash), is_restarting, crash.cause, crash.killed_by)
        for watcher in slot.watchers.values():
            watcher.notify(news)

    def _remove(self, slot: ActorSlot) -> None:
        """Take a slot out of the cast, so that its role is free again."""
        slot.is_over, slot.restart = True, None
        for watcher in slot.watchers.values():
            watcher.watched.discard(slot)
        slot.unwatch_all()
        del self._slots[slot.name]

    def report_slow(self, actor: str, message_type: str, seconds: float) -> None:
        """Log a handler that has blocked its event loop for `seconds`."""
        log.warning("slow_handler", actor=actor, message_type=message_type, seconds=round(seconds, 3))

    def _report_crash(self, crash: ActorCrashed) -> None:
        log.error("actor_crashed", actor=crash.actor, message_type=crash.message_type, exc_info=crash.__cause__)

    def _call_tap(self, event: Event) -> None:
        """Call the tap. An error that it raises is logged, and the tap is not called again."""
        try:
            self._own_tap(event)
        except Exception as error:
            self._own_tap = lambda _: None
            log.error("tap_failed", exc_info=error)
