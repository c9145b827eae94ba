"""What every driver of actors shares: the slots of a cast, their lives, who watches whom, and what the tap sees."""

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
    """A part's place in the cast, over all of its actor's lives."""

    def __init__(self, part: ActorSpec[object], mailbox: Mailbox) -> None:
        self.name = part.role.name
        self.part = part
        self.mailbox = mailbox
        self.ref: Ref[object] = Ref(self.name, mailbox.put, lambda: mailbox.closed)
        self.lives = 0
        self.crashes: list[float] = []
        """When, as far back as its restart policy remembers."""
        self.life: Life | None = None
        self.task: asyncio.Task[None] | None = None
        self.restart: Sequence[ActorSlot] | None = None
        """Those that restart together, where that is under way and will begin this slot's next life."""
        self.is_over = False
        """There will be no other life."""
        self.watchers: dict[str, ActorSlot] = {}
        self.watched: set[ActorSlot] = set()

    def notify(self, news: Terminated) -> None:
        """One whom this one watches has ended."""
        if not self.mailbox.closed:
            self.mailbox.post(news, news.actor)

    def unwatch_all(self) -> None:
        """Watch nobody any more."""
        while self.watched:
            del self.watched.pop().watchers[self.name]


class Life:
    """One life of an actor: its context, and all that must end with it."""

    actor: Actor[object]
    """Where it is lived here, and once it is built."""

    def __init__(self, table: "ActorTable", slot: ActorSlot) -> None:
        slot.lives += 1
        slot.life = self
        slot.mailbox.begin_life()
        self.ref = slot.ref
        self.clock = table.actor_clock
        self.find, self.spawn, self.dismiss, self.kill = table.context_methods
        self.seed = table.seed_of(slot)
        """Of its own source of chance."""
        self.seconds = table.clock.now()
        """When it began."""
        self.ended_seconds: float | None = None
        """When it was told to stop, where that is known."""
        self.is_stop_requested = False
        """It is to end, whatever waits."""
        self.crash: ActorCrashed | None = None
        """What ends it, where that does not come out of its own handler."""
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
        """What this life's threads and timers cause; nothing once it is over."""
        if self._slot.life is self:
            self._slot.mailbox.post(message)

    def watch(self, role: Role[typing.Never]) -> None:
        if Terminated not in self._slot.part.role.message_types():
            raise NotAccepted(f"{self._slot.name} watches, so its protocol needs Terminated")
        self._table.watch(self._slot, role.name)

    def request_stop(self) -> None:
        """End in order, as soon as the present handler has returned."""
        self.is_stop_requested = True
        self._slot.mailbox.wake()

    def crash_with(self, crash: ActorCrashed) -> None:
        """End by this crash, unless by an earlier one, as soon as the present handler has returned."""
        self.crash = self.crash or crash
        self.request_stop()

    def end(self, *, drop: bool) -> None:
        """Void the timers, and let the workers go (with `drop`, before they have done all their work)."""
        for timer in self._timers or ():
            timer.cancel()
        for worker in self._workers:
            worker.close(drop=drop)


class ActorTable(ABC):
    """The slots of a cast, sinks first. A driver decides when a message is delivered; here is what follows from it."""

    clock: Clock
    slow_handler_seconds: float
    on_crash: Callable[[ActorCrashed], object]
    """Told of every crash, before anything follows from it."""
    interrupts: tuple[type[BaseException], ...] = (KeyboardInterrupt, SystemExit)
    """The whole program is to end. Whatever else an actor raises is its crash."""

    def __init__(self, cast: Sequence[ActorSpec[typing.Never]], chance: random.Random | None, tap: Tap | None) -> None:
        # Each part's types match within; together they have none in common.
        self._cast: tuple[ActorSpec[object], ...] = typing.cast(tuple[ActorSpec[object], ...], tuple(cast))
        self._chance = chance or random.Random()
        self._own_tap = tap or (lambda _: None)
        self.tap = self._call_tap if tap is not None else None
        self._slots: dict[str, ActorSlot] = {}
        self.context_methods = self.find, self.spawn, self.dismiss, self.kill
        """What each life's context offers, made once."""
        self.actor_clock = ActorClock()
        self._closing = asyncio.Event()
        """All actors are to end: nobody joins or restarts any more."""
        self.is_dropping = False
        """Whether what waits is to be forgotten at the end."""
        self.failure: ActorCrashed | None = None
        """The crash that ended the system."""

    @abstractmethod
    def new_worker(self, name: str, post: Callable[[object], None]) -> Worker[object]:
        """A worker whose results go to `post`."""

    @abstractmethod
    def _prepare(self, slot: ActorSlot) -> None:
        """Make messages cross to whoever lives elsewhere. Raises NotSendable."""

    @abstractmethod
    def _begin_life(self, slot: ActorSlot) -> None:
        """Lead a life, and begin it where it has not begun."""

    @abstractmethod
    def _begin_restart(self, group: Sequence[ActorSlot], delay_seconds: float) -> None:
        """End the lives of these, sources first; later begin new ones, sinks first."""

    @abstractmethod
    def _fail(self, slot: ActorSlot, crash: ActorCrashed) -> None:
        """End the system after a crash that no restart policy covers."""

    def statistics(self) -> dict[str, MailboxStatistics]:
        """Each actor's mailbox, by the role's name."""
        return {name: slot.mailbox.statistics() for name, slot in self._slots.items()}

    def roles(self) -> list[Role[object]]:
        """The cast as it is now, sinks first."""
        return [slot.part.role for slot in self._slots.values()]

    def find(self, role: Role[M]) -> Ref[M]:
        """The address of the actor that plays `role`. Raises KeyError for a role outside the cast."""
        if (ref := self.find_by_name(role.name)) is None:
            there = ", ".join(self._slots) or "none"
            raise KeyError(f"no actor {role.name!r} is in the cast that runs; there are {there}")
        return ref

    def find_by_name(self, name: str) -> Ref[object] | None:
        """The address of the actor of this name, if there is one."""
        return self._slots[name].ref if name in self._slots else None

    def spawn(self, part: ActorSpec[M]) -> Ref[M]:
        """Add an actor at the source's end of the running cast, and return its address.

        Raises:
            ActorCrashed: its constructor raised; nothing is added. Where it lives elsewhere, that is a crash later.
            NotSendable: it cannot live where it should.
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
        """Stop one actor, once it has handled what waits for it (with `drop`, before); its role is free again then.

        Raises KeyError for a role outside the cast.
        """
        slot = self._slots[role.name]
        slot.mailbox.close(drop=drop)
        if slot.life is None and slot.restart is not None:  # it was waiting for its next life, and so do they
            self._notify_watchers(slot, None, is_restarting=False)
            self._remove(slot)

    def kill(self, role: Role[typing.Never], reason: str) -> None:
        """End an actor's present life as a crash, "it was killed: `reason`"; its restart policy decides what follows.

        The process that it lives in is killed at once, and any other actor ends when its handler returns. Harmless
        where no life is lived now.
        """
        self.kill_for(self.actor_clock.acting, role, reason)

    def kill_for(self, killed_by: str, role: Role[typing.Never], reason: str) -> None:
        """Kill an actor as `kill` does, on behalf of the actor `killed_by`, or of code outside the actors where ""."""
        if role.name in self._slots and (life := self._slots[role.name].life) is not None:
            life.crash_with(ActorCrashed(role.name, "", ActorKilled(f"it was killed: {reason}", killed_by)))

    def watch(self, watcher: ActorSlot, name: str) -> None:
        """From now on `watcher` hears of the end of each life of the actor of this name."""
        slot = self._slots[name]
        slot.watchers[watcher.name] = watcher
        watcher.watched.add(slot)
        if slot.is_over:
            watcher.notify(Terminated(name, "", is_restarting=False))

    def _add_slot(self, part: ActorSpec[object]) -> ActorSlot:
        name = part.role.name
        assert name not in self._slots, f"two parts play {name!r}"
        slot = self._slots[name] = ActorSlot(part, self._new_mailbox(part))
        return slot

    def _new_mailbox(self, part: ActorSpec[object]) -> Mailbox:
        return Mailbox(part.role, self.clock, self.actor_clock)

    def seed_of(self, slot: ActorSlot) -> int:
        """A seed for the chance of a new life."""
        return self._chance.getrandbits(64)

    def _build(self, slot: ActorSlot) -> Life:
        """The slot's actor, for a new life. Raises ActorCrashed."""
        life = Life(self, slot)

        def build() -> Actor[object]:
            actor: object = slot.part.build(life)
            if not isinstance(actor, Actor):  # a `return` that was forgotten, for one
                raise TypeError(f"the build of {slot.name!r} must return an actor, not {actor!r}")
            return actor

        life.actor = self._call_actor(slot, life.seconds, build, "construction")
        return life

    def _call_actor(self, slot: ActorSlot, seconds: float, act: Callable[[], M], name: str) -> M:
        """Let an actor do what is called this, at this moment. Raises ActorCrashed."""
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
        """A life is over: tell those who watch, and let supervision decide what follows a crash."""
        life, slot.life = slot.life, None
        assert life is not None, "a life ends once"
        life.end(drop=self.is_dropping or crash is not None or life.is_stop_requested)
        life.crash = None  # whose traceback holds this life
        vars(life).pop("actor", None)  # at once: what it has may be large, and the life and its workers know each other
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
        elif not slot.mailbox.closed and not self._closing.is_set():  # else it was about to stop
            sources = cast[cast.index(slot) :]
            groups = {Strategy.ONE_FOR_ONE: [slot], Strategy.REST_FOR_ONE: sources, Strategy.ONE_FOR_ALL: cast}
            for each in (group := groups[restart_policy.strategy]):
                each.restart = group
            self._begin_restart(group, delay_seconds)

    def _report_end(self, slot: ActorSlot, crash: ActorCrashed | None, seconds: float) -> None:
        """Let the tap see the end of a life."""
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
        """A dismissed actor's role is free again."""
        slot.is_over, slot.restart = True, None
        for watcher in slot.watchers.values():
            watcher.watched.discard(slot)
        slot.unwatch_all()
        del self._slots[slot.name]

    def report_slow(self, actor: str, message_type: str, seconds: float) -> None:
        """A handler has kept its event loop from everything else for that long."""
        log.warning("slow_handler", actor=actor, message_type=message_type, seconds=round(seconds, 3))

    def _report_crash(self, crash: ActorCrashed) -> None:
        log.error("actor_crashed", actor=crash.actor, message_type=crash.message_type, exc_info=crash.__cause__)

    def _call_tap(self, event: Event) -> None:
        """Keep the tap from doing the actors harm: an error of its own is logged once, and then it sees no more."""
        try:
            self._own_tap(event)
        except Exception as error:
            self._own_tap = lambda _: None
            log.error("tap_failed", exc_info=error)
