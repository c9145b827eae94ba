"""One history of the engine's own actors, around an executor without weights, drawn from a seed.

Actors crash, the executor's process is killed, hangs and loses its device. It is checked from outside: by what its
clients were told, and by what is left when all is at rest.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from typing import Final, Never

from cuelight.actors.executor.device import DeviceLost
from cuelight.actors.executor.stub import StubDevice
from cuelight.config import ModelFacts
from cuelight.ensemble import (
    EXECUTOR_RESTART_POLICY,
    ActiveExecutor,
    EngineParts,
    Roles,
    actor_specs,
    lives_in_process,
    roles,
)
from cuelight.kernel import Actor, ActorSpec, Context, Delivered, Ended, Event, ExitCause, InLoop, InProcess, Role
from cuelight.kernel.errors import ActorCrashed
from cuelight.kernel.faults import SimulatedCrash
from cuelight.kernel.simulation import Simulation
from cuelight.messages.cache import ForgetPrefixes
from cuelight.messages.client import Rejected
from cuelight.messages.intake import ResendComplete
from cuelight.messages.observer import (
    BlockFigures,
    Loaded,
    LoadFailed,
    Loading,
    ObserverMessage,
    Ready,
    Recovered,
    Recovering,
    RequestFigures,
)
from cuelight.messages.request import FIRST_EXECUTOR, ExecutorId, FinishReason, Prompt, RequestId
from cuelight.messages.scheduler import Switch
from cuelight.testing import END_TOKEN, decode, encode
from cuelight.trial_changes import Changes
from cuelight.trial_client import Client, Excuses
from cuelight.trial_device import Remains, build_flaky
from cuelight.trial_draws import drawn_config, drawn_faults, drawn_kills, drawn_mischief

CONTEXT_LENGTH: Final = 700

RESTARTS_MAX: Final = 100_000

STEPS_MAX: Final = 200_000
"""A history that goes on for longer does so for ever."""

MISFORTUNES: Final = (SimulatedCrash, DeviceLost)
"""Whatever else an actor raises is a mistake of ours, from which it recovers all the same."""


@dataclass
class Tally:
    """What has happened in all histories so far."""

    seeds: int = 0
    deliveries: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    refused: int = 0
    crashes: int = 0
    """Lives that did not end in order, of all actors."""
    hangs: int = 0
    changes: int = 0
    """Executors that have taken over from another one that was alive."""
    poisoned: int = 0
    """Requests that were poison, and failed for it."""

    def row(self) -> str:
        """The figures, in columns as wide as those of `HEADER`."""
        return "".join(f"{getattr(self, field.name):>11,}" for field in fields(self)) + "\n"

    def count(self, client: Client, poison: RequestId | None) -> None:
        """Add what became of a request."""
        match client.end:
            case Rejected():
                self.refused += 1
            case None:
                raise AssertionError("every request has an end")
            case end if end.reason is FinishReason.CANCELLED:
                self.aborted += 1
            case end if end.reason is FinishReason.FAILED:
                self.failed += 1
                self.poisoned += client.request_id == poison
            case _:
                self.finished += 1


def run_history(seed: int, request_count: int, total: Tally) -> None:
    """One history, drawn from the seed. Raises AssertionError where a promise is broken."""
    History(seed, request_count).run(total)


class History:
    """The world of one seed: a cast, its faults, its clients, and whoever opened it."""

    def __init__(self, seed: int, request_count: int) -> None:
        chance = self._chance = random.Random(f"engine {seed}")
        self._config = drawn_config(chance)
        self._mischief = drawn_mischief(chance, self._config, request_count)
        self._board = Board(self._send_again)
        self._cast = roles(self._config)
        self._active = ActiveExecutor(self._cast.executors)
        self._actors: dict[str, Actor[Never]] = {}
        self._executor_names: set[str] = set()
        self._deliveries = 0
        self._deaths: Counter[str] = Counter()
        self._kills = drawn_kills(chance)
        self._is_open = False
        faults = drawn_faults(chance)
        self._mistake: ActorCrashed | None = None
        self._simulation = Simulation(
            self._parts(), seed, tap=self._see, faults=faults, record=False, on_crash=self._judge
        )
        now = self._simulation.clock.now
        self._clients = [Client(RequestId(number), chance, now) for number in range(request_count)]
        self._changes = Changes(
            self._simulation, self._cast.scheduler, self._active, self._executor_part, self._switch_to
        )
        self._changes.draw(random.Random(f"changes {seed}"))

    def run(self, total: Tally) -> None:
        """Let it happen, and check it."""
        self._draw_requests()
        if self._chance.random() < 0.2:
            forget = partial(self._simulation.find(self._cast.cache).tell, ForgetPrefixes())
            self._simulation.at(self._chance.random(), forget)
        self._simulation.run(steps_max=STEPS_MAX)
        if self._simulation.failure is not None:
            raise self._simulation.failure
        mischief = self._mischief
        assert not mischief.complaints, mischief.complaints[0]
        excuses = self._excuses()
        for client in self._clients:
            client.check(excuses)
            total.count(client, mischief.poison)
        self._check_rest()
        total.deliveries += self._deliveries
        total.crashes += self._deaths.total()
        total.hangs += mischief.hung
        total.changes += self._changes.taken_over

    def _parts(self) -> list[ActorSpec[Never]]:
        config, cast = self._config, self._cast
        facts = ModelFacts(END_TOKEN + 1, CONTEXT_LENGTH, (END_TOKEN,))
        stub = EngineParts(facts, _Encoder(), decode, partial(StubDevice, 2, 1))  # an executor of its own
        specs = actor_specs(stub, config, cast, self._board, self._active)
        return [
            self._executor_part(FIRST_EXECUTOR) if part.role is cast.executor else _kept(part, self._actors)
            for part in specs
        ]

    def _executor_part(self, executor_id: ExecutorId) -> ActorSpec[Never]:
        role = self._cast.executors[executor_id]
        self._executor_names.add(role.name)
        remains = Remains(self._config, self._mischief.chance)
        build = partial(build_flaky, self._config, self._mischief, remains, self._cast.scheduler, executor_id)
        placement = InProcess() if lives_in_process(self._config) else InLoop()
        return _kept(ActorSpec(role, build, EXECUTOR_RESTART_POLICY, placement), self._actors)

    def _switch_to(self, executor_id: ExecutorId, recompute: bool) -> Switch:
        return Switch(executor_id, "", recompute, CONTEXT_LENGTH, (END_TOKEN,), self._changes)

    def _see(self, event: Event) -> None:
        if isinstance(event, Delivered):
            self._deliveries += 1
            if (actor := self._kills.get(self._deliveries)) is not None:
                role = self._active.role if actor == "executor" else _role(self._cast, actor)
                self._simulation.kill(role, "drawn")
        elif isinstance(event, Ended) and event.cause is not ExitCause.STOPPED:
            self._deaths["executor" if event.actor in self._executor_names else event.actor] += 1
            if event.actor == self._cast.scheduler.name:
                self._simulation.at(self._simulation.clock.now(), self._changes.repeat)
            if self._mistake is not None:
                raise self._mistake

    def _judge(self, crash: ActorCrashed) -> None:
        if crash.cause is ExitCause.CRASHED and not isinstance(crash.__cause__, MISFORTUNES):
            self._mistake = crash

    def _draw_requests(self) -> None:
        chance, at = self._chance, self._simulation.at
        for first, client in pairwise(self._clients):
            if chance.random() < 0.2:
                client.is_sample_of(first)
        for client in self._clients:
            seconds = chance.random() if chance.random() < 0.8 else 0.5  # some come all at once
            at(seconds, partial(self._send, client))
            if chance.random() < 0.25:
                leaves_at = seconds + chance.choice((0.0, 0.01, 0.3)) * chance.random()
                at(leaves_at, partial(self._leave, client))

    def _send(self, client: Client) -> None:
        client.is_sent = True
        if self._is_open:
            self._simulation.find(self._cast.intake).tell(client.submit())

    def _leave(self, client: Client) -> None:
        client.has_left = True
        if client.end is None and self._is_open:
            self._simulation.find(self._cast.intake).tell(client.cancel())

    def _send_again(self) -> None:
        """Intake is new: what has not ended it is told, as soon as it has said that it serves."""
        self._simulation.at(self._simulation.clock.now(), self._send_all)

    def _send_all(self) -> None:
        self._is_open = self._mischief.is_started = True
        tell = self._simulation.find(self._cast.intake).tell
        for client in self._clients:
            if (submit := client.submit_again()) is not None:
                tell(submit)
                if client.has_left:
                    tell(client.cancel())
        tell(ResendComplete())

    def _excuses(self) -> Excuses:
        assert self._config.block_count is not None
        token_capacity = (self._config.block_count - 1) * self._config.block_size
        return Excuses(
            token_limit=min(CONTEXT_LENGTH, token_capacity),
            failed_steps=self._mischief.failures,
            executor_deaths=self._deaths["executor"],
            is_calm=not self._deaths,
            poison=self._mischief.poison,
        )

    def _check_rest(self) -> None:
        self._board.check()
        self._changes.check()
        lengths = {name: figures.length for name, figures in self._simulation.statistics().items() if figures.length}
        assert not lengths, f"messages wait at rest: {lengths}"
        for name in ("intake", "scheduler", "detokenizer"):
            remembered = getattr(self._actors[name], "request_count", None)
            assert remembered == 0, f"{name} knows of {remembered} requests at rest"


def _kept(part: ActorSpec[Never], actors: dict[str, Actor[Never]]) -> ActorSpec[Never]:
    """The same part, whose present actor is among these, and which may crash more often than anybody would stand."""
    build = part.build

    def keep(context: Context[object]) -> Actor[Never]:
        actors[part.role.name] = actor = build(context)
        return actor

    return replace(part, build=keep, restart_policy=replace(part.restart_policy, restarts_max=RESTARTS_MAX))


def _role(cast: Roles, name: str) -> Role[Never]:
    role: Role[Never] = getattr(cast, name)
    return role


class _Encoder:
    def encode(self, prompt: Prompt, token_limit: int) -> tuple[int, ...]:
        return encode(prompt)


class Board:
    """The observer: keeps the latest figures."""

    def __init__(self, on_new_intake: Callable[[], None]) -> None:
        self._on_new_intake = on_new_intake
        self.requests = RequestFigures()
        self.blocks = BlockFigures()
        self.is_ready = False
        self.is_recovering = False

    def tell(self, message: ObserverMessage, /) -> None:
        """Keep what is told."""
        match message:
            case RequestFigures():
                self.requests = message
            case BlockFigures():
                self.blocks = message
            case Ready():
                self.is_ready = True
                self._on_new_intake()
            case Loading() | Loaded():
                pass
            case LoadFailed():  # which only matters at the start, where loading always succeeds
                assert self.is_ready, "the executor cannot be started"
            case Recovering():
                self.is_recovering = True
            case Recovered():
                self.is_recovering = False
            case _:
                raise AssertionError(f"there is no executor: {message}")

    def check(self) -> None:
        """At rest, nothing is live and every block is free."""
        assert self.is_ready, "intake never said that it serves"
        assert self.requests.running == self.requests.waiting == 0, f"requests are live at rest: {self.requests}"
        assert self.blocks.blocks_free == self.blocks.blocks_total > 0, f"blocks are held at rest: {self.blocks}"
