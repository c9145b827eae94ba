"""Runs a cast of actors inside whatever asyncio loop is running, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
import typing
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Never, Self, TypeVar

import anyio

from cuelight.kernel.actor import Actor, Context
from cuelight.kernel.clock import Clock, LoopClock
from cuelight.kernel.errors import ActorCrashed
from cuelight.kernel.log import get_logger
from cuelight.kernel.mailbox import Mailbox, MailboxStatistics
from cuelight.kernel.ref import Ref
from cuelight.kernel.role import Part, Role
from cuelight.kernel.worker import Worker

M = TypeVar("M")

TURN_MESSAGES = 64
"""After this many messages an actor yields, so that a busy one cannot starve the others or the host's tasks."""

log = get_logger("cuelight.kernel")


class System:
    """A cast of actors, started sink to source and stopped source to sink.

    All tasks live under one host task of the system's own, so it may be opened and closed from different tasks.

    Args:
        cast: the parts, sinks first.
        clock, chance: what the actors see as time and randomness; by default the loop's clock and a fresh generator.
        tap: sees every delivery, as (actor's name, message), before the actor does.
        on_failure: told once when an actor has crashed; every actor is stopped then.
        on_end: called once when the actors have ended: stopped, crashed, or cancelled by a host that ends all tasks.
    """

    def __init__(
        self,
        cast: Sequence[Part[Never]],
        *,
        clock: Clock | None = None,
        chance: random.Random | None = None,
        tap: Callable[[str, object], None] | None = None,
        on_failure: Callable[[ActorCrashed], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        # Each part's types match within; together they have none in common.
        self._cast: tuple[Part[object], ...] = typing.cast(tuple[Part[object], ...], tuple(cast))
        self._clock = clock
        self._chance = chance or random.Random()
        self._tap = tap
        self._on_failure = on_failure
        self._on_end = on_end
        self._mailboxes: dict[str, Mailbox[object]] = {}
        self._refs: dict[str, Ref[object]] = {}
        self._workers: list[Worker[object]] = []
        self._host: asyncio.Task[None] | None = None
        self._drop = False

    async def start(self) -> None:
        """Build every actor, then run them.

        Raises:
            ActorCrashed: a constructor raised; nothing is left running.
        """
        assert self._host is None, "a system is started once"
        clock = self._clock or LoopClock(asyncio.get_running_loop())
        for part in self._cast:
            role = part.role
            assert role.name not in self._mailboxes, f"two parts play {role.name!r}"
            mailbox = Mailbox[object](role.name, role.capacity, role.message_types(), frozenset(role.urgent), clock)
            self._mailboxes[role.name] = mailbox
            self._refs[role.name] = Ref(mailbox)
        try:
            actors = [self._build(part, clock) for part in self._cast]
        except BaseException:
            self._drop = True
            await self._dismiss_workers()
            raise
        self._closing = asyncio.Event()
        started = asyncio.Event()
        self._host = asyncio.create_task(self._run(actors, started), name="cuelight system")
        try:
            await started.wait()
        except asyncio.CancelledError:
            await self.stop(drop=True)  # nobody else will: to its opener it never started
            raise

    async def stop(self, *, drop: bool = False) -> None:
        """Stop every actor, sources first, after it has handled what waits for it (with `drop`, without)."""
        if self._host is None:
            return
        self._drop = drop
        self._closing.set()
        with anyio.CancelScope(shield=True):  # a cancelled scope around the system would not let it end
            if not self._host.done():  # maybe long ago, in a loop that is closed by now
                await asyncio.wait([self._host])
        if not self._host.cancelled() and (error := self._host.exception()) is not None:
            raise error

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop(drop=error is not None)

    def find(self, role: Role[M]) -> Ref[M]:
        """The address of the actor that plays `role`. Raises KeyError for a role outside the cast."""
        return self._refs[role.name]

    def statistics(self) -> dict[str, MailboxStatistics]:
        """Each actor's mailbox, by the role's name."""
        return {name: mailbox.statistics() for name, mailbox in self._mailboxes.items()}

    def _build(self, part: Part[object], clock: Clock) -> Actor[object]:
        mailbox = self._mailboxes[part.role.name]

        def hire(name: str) -> Worker[object]:
            worker = Worker(f"cuelight {part.role.name} {name}", mailbox.put_private, asyncio.get_running_loop())
            self._workers.append(worker)
            return worker

        chance = random.Random(self._chance.getrandbits(64))
        context = Context(self._refs[part.role.name], clock, chance, lambda role: self._refs[role.name], hire)
        try:
            return part.build(context)
        except Exception as error:
            raise ActorCrashed(part.role.name, "construction", error) from error

    async def _run(self, actors: Sequence[Actor[object]], started: asyncio.Event) -> None:
        """The host task: everything the system runs ends before this does."""
        ended = [asyncio.Event() for _ in actors]
        try:
            async with anyio.create_task_group() as group:
                for part, actor, end in zip(self._cast, actors, ended, strict=True):
                    group.start_soon(self._perform, part.role.name, actor, end, name=f"cuelight {part.role.name}")
                started.set()
                await self._closing.wait()
                for part, end in zip(reversed(self._cast), reversed(ended), strict=True):
                    self._mailboxes[part.role.name].close(drop=self._drop)
                    await end.wait()
        finally:
            for mailbox in self._mailboxes.values():
                mailbox.close(drop=True)
            if self._on_end is not None:
                self._on_end()
            with anyio.CancelScope(shield=True):
                await self._dismiss_workers()

    async def _perform(self, name: str, actor: Actor[object], ended: asyncio.Event) -> None:
        """One actor's life: the only place that awaits on its behalf."""
        mailbox = self._mailboxes[name]
        message: object = None
        try:
            actor.started()
            while True:
                await mailbox.wait()
                for _ in range(min(TURN_MESSAGES, len(mailbox))):
                    message = mailbox.take()
                    if self._tap is not None:
                        self._tap(name, message)
                    actor.handle(message)
                message = None  # an idle actor keeps nothing alive
                if len(mailbox):
                    await asyncio.sleep(0)
                elif mailbox.closed:
                    break
            actor.stopped()
        except Exception as error:
            self._fail(ActorCrashed(name, type(message).__qualname__, error))
        except asyncio.CancelledError:
            # Not our doing, and the others cannot go on without this one.
            self._drop = True
            self._closing.set()
            mailbox.close(drop=True)
            raise
        finally:
            ended.set()

    def _fail(self, crash: ActorCrashed) -> None:
        """An actor is gone and nobody replaces it: stop the others too, and say so."""
        log.error("actor_crashed", actor=crash.actor, message_type=crash.message_type, exc_info=crash.__cause__)
        self._drop = True
        self._closing.set()
        self._mailboxes[crash.actor].close(drop=True)
        if self._on_failure is not None:
            on_failure, self._on_failure = self._on_failure, None
            on_failure(crash)

    async def _dismiss_workers(self) -> None:
        for worker in self._workers:
            worker.close(drop=self._drop)
        for worker in self._workers:
            await worker.ended()
