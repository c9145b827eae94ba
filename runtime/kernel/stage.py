"""What every driver of actors shares: the seats of a cast, their lives, who watches whom, and what the tap sees."""

from __future__ import annotations

import random
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Never, TypeVar

from cuelight.kernel.actor import Actor, Context
from cuelight.kernel.clock import Clock, Moment, Timer
from cuelight.kernel.errors import ActorCrashed, NotAccepted
from cuelight.kernel.events import Ended, Started, Tap, guarded
from cuelight.kernel.log import get_logger
from cuelight.kernel.mailbox import Mailbox
from cuelight.kernel.ref import Ref
from cuelight.kernel.role import Part, Role
from cuelight.kernel.supervision import Supervision, Terminated, Verdict
from cuelight.kernel.worker import Worker

M = TypeVar("M")

INTERRUPTS = (KeyboardInterrupt, SystemExit)
"""The whole program is to end. Whatever else an actor raises is its crash."""

log = get_logger("cuelight.kernel")


class Seat:
    """A part's place in the cast, over all of its actor's lives."""

    __slots__ = (
        "is_leaving",
        "is_over",
        "life",
        "lives",
        "mailbox",
        "name",
        "part",
        "ref",
        "restart",
        "watched",
        "watchers",
    )

    def __init__(self, part: Part[object], mailbox: Mailbox) -> None:
        self.name = part.role.name
        self.part = part
        self.mailbox = mailbox
        self.ref: Ref[object] = Ref(self.name, mailbox.put, self._is_closed)
        self.lives = 0
        self.life: Life | None = None
        self.restart: Verdict | None = None
        """The restart that is under way and will begin this seat's next life."""
        self.is_leaving = False
        """This life must end so that another can begin."""
        self.is_over = False
        """There will be no other life."""
        self.watchers: dict[str, Seat] = {}
        self.watched: set[Seat] = set()

    def _is_closed(self) -> bool:
        return self.mailbox.closed


class _LifeTimer:
    """One that its life forgets when it is cancelled."""

    __slots__ = ("__weakref__", "_others", "_timer")

    def __init__(self, others: set[_LifeTimer], timer: Timer) -> None:
        self._others = others
        self._timer = timer

    def cancel(self) -> None:
        self._others.discard(self)
        self._timer.cancel()


class Life:
    """One life of an actor: what it was given, and all that must end with it."""

    __slots__ = ("_seat", "_stage", "_timers", "ended_seconds", "number", "seconds", "workers")

    def __init__(self, stage: Stage, seat: Seat) -> None:
        seat.lives += 1
        self.number = seat.lives
        self.seconds = stage.clock.now()
        """When it began."""
        self.ended_seconds: float | None = None
        """When it was told to stop, where that is known."""
        self.workers: list[Worker[object]] = []
        self._stage = stage
        self._seat = seat
        self._timers: set[_LifeTimer] = set()

    def post(self, message: object) -> None:
        """What this life's threads and timers cause; nothing once it is over."""
        if self._seat.life is self:
            self._seat.mailbox.post(message)

    def find(self, role: Role[M]) -> Ref[M]:
        return self._stage.find(role)

    def hire(self, name: str) -> Worker[object]:
        worker = self._stage.hire(f"{self._seat.name} {name}", self.post)
        self.workers.append(worker)
        return worker

    def after(self, seconds: float, message: object) -> Timer:
        def fire() -> None:
            self._timers.discard(timer)
            self.post(message)

        timer = _LifeTimer(self._timers, self._stage.clock.call_later(seconds, fire))
        self._timers.add(timer)
        return timer

    def watch(self, role: Role[Never]) -> None:
        if Terminated not in self._seat.part.role.message_types():
            raise NotAccepted(f"{self._seat.name} watches, so its protocol needs Terminated")
        self._stage.watch(self._seat, role.name)

    def spawn(self, part: Part[M]) -> Ref[M]:
        return self._stage.spawn(part)

    def dismiss(self, role: Role[Never], *, drop: bool) -> None:
        self._stage.dismiss(role, drop=drop)

    def end(self, *, drop: bool) -> None:
        """Void the timers, and let the workers go (with `drop`, before they have done all their work)."""
        for timer in list(self._timers):
            timer.cancel()
        for worker in self.workers:
            worker.close(drop=drop)


class Stage(ABC):
    """The seats of a cast, sinks first. A driver decides when a message is delivered; here is what follows from it."""

    clock: Clock

    def __init__(self, cast: Sequence[Part[Never]], chance: random.Random | None, tap: Tap | None) -> None:
        # Each part's types match within; together they have none in common.
        self._cast: tuple[Part[object], ...] = typing.cast(tuple[Part[object], ...], tuple(cast))
        self._chance = chance or random.Random()
        self._supervision = Supervision(self._chance)
        self.tap = guarded(tap) if tap is not None else None
        self._seats: dict[str, Seat] = {}
        self.moment = Moment()

    @abstractmethod
    def hire(self, name: str, post: Callable[[object], None]) -> Worker[object]:
        """A worker whose results go to `post`."""

    @abstractmethod
    def spawn(self, part: Part[M]) -> Ref[M]:
        """Add an actor at the source's end of the cast."""

    @abstractmethod
    def dismiss(self, role: Role[Never], *, drop: bool = False) -> None:
        """Stop one actor for good, once it has handled what waits for it (with `drop`, before)."""

    @abstractmethod
    def _fail(self, crash: ActorCrashed) -> None:
        """A crash that nobody's fate provides for: the system ends."""

    @abstractmethod
    def _begin_restart(self, verdict: Verdict) -> None:
        """End the lives of those concerned, sources first; later begin new ones, sinks first."""

    def find(self, role: Role[M]) -> Ref[M]:
        """The address of the actor that plays `role`. Raises KeyError for a role outside the cast."""
        return self._find_name(role.name)

    def _find_name(self, name: str) -> Ref[object]:
        if name not in self._seats:
            raise KeyError(f"no actor {name!r} is in the cast that runs; there are {', '.join(self._seats) or 'none'}")
        return self._seats[name].ref

    def watch(self, watcher: Seat, name: str) -> None:
        """From now on `watcher` hears of the end of each life of the actor of this name."""
        seat = self._seats[name]
        seat.watchers[watcher.name] = watcher
        watcher.watched.add(seat)
        if seat.is_over:
            watcher.mailbox.post(Terminated(name, "", is_restarting=False), name)

    def _add_seat(self, part: Part[object]) -> Seat:
        name = part.role.name
        assert name not in self._seats, f"two parts play {name!r}"
        seat = self._seats[name] = Seat(part, self._new_mailbox(part))
        return seat

    def _new_mailbox(self, part: Part[object]) -> Mailbox:
        role = part.role
        return Mailbox(role.name, role.capacity, role.message_types(), role.urgent, self.clock, self.moment)

    def _begin_life(self, seat: Seat) -> int:
        """A new life for this seat; returns the seed of its chance."""
        seat.mailbox.begin_life()
        seat.is_leaving = False
        seat.life = Life(self, seat)
        seed = self._chance.getrandbits(64)
        if self.tap is not None:
            self.tap(Started(seat.life.seconds, seat.name, seat.life.number, seed))
        return seed

    def _build(self, seat: Seat) -> Actor[object]:
        """The seat's actor, for a new life. Raises ActorCrashed."""
        seed = self._begin_life(seat)
        assert seat.life is not None
        moment = self.moment
        outer = moment.acting, moment.seconds
        moment.acting, moment.seconds = seat.name, seat.life.seconds
        try:
            return seat.part.build(Context(seat.ref, self.moment, seed, seat.life))
        except INTERRUPTS:
            raise
        except BaseException as error:
            raise ActorCrashed(seat.name, "construction", error) from error
        finally:
            moment.acting, moment.seconds = outer

    def _end_life(self, seat: Seat, crash: ActorCrashed | None, *, drop: bool = False) -> None:
        """A life is over: tell those who watch, and let supervision decide what follows a crash."""
        life, seat.life = seat.life, None
        assert life is not None, "a life ends once"
        life.end(drop=drop or crash is not None or seat.is_leaving)
        error = "" if crash is None else str(crash)
        now = self.clock.now()
        if self.tap is not None:
            self.tap(Ended(now if life.ended_seconds is None else life.ended_seconds, seat.name, life.number, error))
        verdict, is_beyond_fate = None, False
        if crash is not None:
            self._report_crash(crash)
            if seat.restart is None:
                verdict = self._supervision.judge(seat.name, seat.part.fate, list(self._seats), now)
                is_beyond_fate = verdict is None
                if seat.mailbox.closed:
                    verdict = None  # it was about to stop
        is_restarting = verdict is not None or seat.restart is not None
        seat.is_over = not is_restarting
        self._tell_watchers(seat, error, is_restarting=is_restarting)
        if verdict is not None:
            for name in verdict.names:
                self._seats[name].restart = verdict
            self._begin_restart(verdict)
        elif crash is not None and is_beyond_fate:
            self._fail(crash)

    def _tell_watchers(self, seat: Seat, error: str, *, is_restarting: bool) -> None:
        for watcher in seat.watchers.values():
            if not watcher.mailbox.closed:
                watcher.mailbox.post(Terminated(seat.name, error, is_restarting), seat.name)

    def _leave_cast(self, seat: Seat) -> None:
        """A dismissed actor's role is free again."""
        if seat.restart is not None:
            self._tell_watchers(seat, "", is_restarting=False)  # they expect another life
        seat.is_over, seat.restart = True, None
        for watcher in seat.watchers.values():
            watcher.watched.discard(seat)
        for watched in seat.watched:
            del watched.watchers[seat.name]
        del self._seats[seat.name]
        self._supervision.forget(seat.name)

    def _report_crash(self, crash: ActorCrashed) -> None:
        log.error("actor_crashed", actor=crash.actor, message_type=crash.message_type, exc_info=crash.__cause__)
