"""The engine's own actors under the seeded simulator: all five, or some of them beside stand-ins for the others.

`cuelight simulate`, the property tests and the benchmarks in virtual time all drive engines through this module. A
`SimulatedEngine` draws everything from one seed and raises the first crash that no injected fault caused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, Never, Protocol, TypeAlias, TypeVar, assert_never

from cuelight.actors.executor.device import DeviceLost
from cuelight.actors.executor.stub import StubBatch
from cuelight.config import EngineConfig
from cuelight.core.parts import ActiveExecutor, EngineParts, actor_specs, executor_spec, roles
from cuelight.core.stub_model import stub_parts
from cuelight.kernel import Actor, ActorSpec, Context, Ended, Event, ExitCause, Role
from cuelight.kernel.errors import ActorCrashed
from cuelight.kernel.events import Tap
from cuelight.kernel.simulation.faults import Faults, SimulatedCrash
from cuelight.kernel.simulation.simulator import NO_FAULTS, Simulation
from cuelight.messages import detokenizer, intake
from cuelight.messages.address import Address
from cuelight.messages.detokenizer import DetokenizerMessage
from cuelight.messages.intake import IntakeMessage
from cuelight.messages.observer import BlockFigures, ObserverMessage, RequestFigures
from cuelight.messages.request import ExecutorId
from cuelight.messages.scheduler import Closed, FailRequest, IntakeStarted, RestoreState, SetPolicy

M = TypeVar("M")

RESTARTS_MAX: Final = 100_000
"""Restarts of any actor: more than any simulation needs."""

EXPECTED_CRASHES: Final = (SimulatedCrash, DeviceLost)
"""Exceptions that faults raise. Any other exception of an actor is a bug, also where the actor recovers from it."""

Build: TypeAlias = Callable[[Context[object]], Actor[Never]]
"""Builds a stand-in for one of the engine's actors, at the start and at each restart."""


class Wrap(Protocol):
    """Wraps an actor in another one, or returns the actor unchanged."""

    def __call__(self, actor: Actor[M], name: str, /) -> Actor[M]: ...


def unwrapped(actor: Actor[M], _name: str, /) -> Actor[M]:
    """Return the actor unchanged."""
    return actor


def engine_specs(
    config: EngineConfig,
    observer: Address[ObserverMessage],
    *,
    parts: EngineParts[StubBatch] | None = None,
    active: ActiveExecutor | None = None,
    stand_ins: Mapping[str, Build] | None = None,
    wrap: Wrap = unwrapped,
) -> list[ActorSpec[Never]]:
    """Return the specs of an engine's five actors, over the stub model by default, for any driver.

    `stand_ins` replaces actors by name; `wrap` is applied to every actor whenever it is built.
    """
    cast = roles(config)
    specs = actor_specs(parts or stub_parts(config), config, cast, observer, active or ActiveExecutor(cast.executors))
    replaced = stand_ins or {}
    return [_rebuilt(spec, replaced.get(spec.role.name, spec.build), wrap) for spec in specs]


def _rebuilt(spec: ActorSpec[Never], build: Build, wrap: Wrap) -> ActorSpec[Never]:
    return replace(spec, build=lambda context: wrap(build(context), spec.role.name))


class SimulatedEngine:
    """One engine whose every delivery, job and timer is drawn from a seed.

    Args:
        seed: determines every draw.
        config: the options of the engine.
        observer: the address that receives the engine's figures and events.
        parts: the parts that the actors are built from; those of the stub model by default.
        stand_ins: by name, the builds of the actors that are not the engine's own.
        wrap: applied to every actor whenever it is built.
        faults: crashes, kills and delays at any message; none by default.
        tap: receives every event of the simulation.
    """

    def __init__(
        self,
        seed: int,
        config: EngineConfig,
        observer: Address[ObserverMessage],
        *,
        parts: EngineParts[StubBatch] | None = None,
        stand_ins: Mapping[str, Build] | None = None,
        wrap: Wrap = unwrapped,
        faults: Faults = NO_FAULTS,
        tap: Tap | None = None,
    ) -> None:
        self.config = config
        self.roles = roles(config)
        self.active = ActiveExecutor(self.roles.executors)
        self.executor_names = {self.roles.executor.name}
        self.actors: dict[str, Actor[Never]] = {}
        """The present actor of each role, without its wrapper."""
        self.deaths: Counter[str] = Counter()
        """Lives that a crash or a kill ended, by actor; all executors count as one."""
        parts = parts or stub_parts(config)
        self._load_device = parts.load_device
        self._stand_ins = stand_ins or {}
        self._wrap = wrap
        self.tap = tap
        specs = engine_specs(
            config, observer, parts=parts, active=self.active, stand_ins=self._stand_ins, wrap=self._noted
        )
        self.simulation = Simulation(
            [_restarting(spec) for spec in specs],
            seed,
            tap=self._see,
            faults=faults,
            record=False,
            on_crash=self._judge,
        )

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self.simulation.clock.now()

    def find(self, role: Role[M]) -> Address[M]:
        """Return the address of the actor that plays `role`."""
        return self.simulation.find(role)

    def role(self, name: str) -> Role[Never]:
        """Return the role of an actor by name; "executor" is the executor that serves at present."""
        if name == "executor":
            return self.active.role
        role: Role[Never] = getattr(self.roles, name)
        return role

    def waiting(self, name: str) -> int:
        """Return the number of messages in the mailbox of an actor."""
        return self.simulation.statistics()[name].length

    def spawn_executor(self, executor_id: ExecutorId, build: Build) -> None:
        """Add another executor to the running engine, placed and restarted as the first one."""
        spec = executor_spec(self._load_device, None, self.config, executor_id, self.roles)
        self.executor_names.add(spec.role.name)
        self.simulation.spawn(_restarting(_rebuilt(spec, build, self._noted)))

    def step(self) -> bool:
        """Take one step; return False where none is possible. Raises the bug that crashes an actor."""
        return self.simulation.step()

    def run(self, *, steps_max: int, until_seconds: float | None = None) -> None:
        """Take steps until none is possible; with `until_seconds`, until none is possible by that time.

        Raises SimulationError when more steps are possible after `steps_max`, and the bug that crashes an actor.
        """
        if until_seconds is None:
            self.simulation.run(steps_max=steps_max)
        else:
            self.simulation.run(steps_max=steps_max, until_seconds=until_seconds)
        if self.simulation.failure is not None:
            raise self.simulation.failure

    def pass_time(self, seconds: float) -> None:
        """Advance the clock and run the timers that become due; deliver nothing."""
        clock = self.simulation.clock
        until = clock.now() + seconds
        clock.call_at(until, lambda: None)
        while (due := clock.next_due()) is not None and due <= until:
            clock.jump()

    def check_at_rest(self) -> None:
        """Assert that no message waits and that no actor has a request left."""
        lengths = {name: figures.length for name, figures in self.simulation.statistics().items() if figures.length}
        assert not lengths, f"messages wait at rest: {lengths}"
        for name in ("intake", "scheduler", "detokenizer"):
            if name not in self._stand_ins:
                remembered = getattr(self.actors[name], "request_count", None)
                assert remembered == 0, f"{name} has {remembered} requests at rest"

    def _noted(self, actor: Actor[M], name: str, /) -> Actor[M]:
        self.actors[name] = actor
        return self._wrap(actor, name)

    def _see(self, event: Event) -> None:
        if isinstance(event, Ended) and event.cause is not ExitCause.STOPPED:
            self.deaths["executor" if event.actor in self.executor_names else event.actor] += 1
        if self.tap is not None:
            self.tap(event)

    @staticmethod
    def _judge(crash: ActorCrashed) -> None:
        if crash.cause is ExitCause.CRASHED and not isinstance(crash.__cause__, EXPECTED_CRASHES):
            raise crash


def _restarting(spec: ActorSpec[Never]) -> ActorSpec[Never]:
    return replace(spec, restart_policy=replace(spec.restart_policy, restarts_max=RESTARTS_MAX))


class LatestFigures:
    """The observer of a simulated engine: keeps the latest figures and ignores events."""

    def __init__(self) -> None:
        self.requests = RequestFigures()
        self.blocks = BlockFigures()

    def tell(self, message: ObserverMessage, /) -> None:
        """Store the message if it has figures."""
        if isinstance(message, RequestFigures):
            self.requests = message
        elif isinstance(message, BlockFigures):
            self.blocks = message

    def check_at_rest(self) -> None:
        """Assert that no request is live and that every block is free."""
        assert self.requests.running == self.requests.waiting == 0, f"requests are live at rest: {self.requests}"
        assert self.blocks.blocks_free == self.blocks.blocks_total > 0, f"blocks are held at rest: {self.blocks}"


class IntakeStandIn(Actor[IntakeMessage]):
    """An intake without requests: passes every message to `receive` and answers a scheduler that starts."""

    def __init__(self, to_scheduler: Address[RestoreState], receive: Callable[[IntakeMessage], None]) -> None:
        self.answers = True
        self._scheduler = to_scheduler
        self._receive = receive

    def handle(self, message: IntakeMessage) -> None:
        """Pass the message on; answer a scheduler that starts."""
        self._receive(message)
        match message:
            case intake.SchedulerStarted(life):
                if self.answers:
                    self._scheduler.tell(RestoreState(life, None, (), (), ()))
            case intake.Submit() | intake.Cancel() | intake.ResendComplete() | intake.SetTenants():
                pass
            case intake.Opened() | intake.Finished() | intake.Streams() | intake.DetokenizerStarted():
                pass
            case intake.CapacityChanged() | FailRequest() | SetPolicy():
                pass
            case _:
                assert_never(message)


class DetokenizerStandIn(Actor[DetokenizerMessage]):
    """A detokenizer without streams: passes every message to `receive` and confirms every end."""

    def __init__(self, to_scheduler: Address[Closed], receive: Callable[[DetokenizerMessage], None]) -> None:
        self.confirms = True
        self._scheduler = to_scheduler
        self._receive = receive

    def handle(self, message: DetokenizerMessage) -> None:
        """Pass the message on; confirm the end of a request."""
        self._receive(message)
        match message:
            case detokenizer.RequestEnded(request_id):
                if self.confirms:
                    self._scheduler.tell(Closed((request_id,)))
            case detokenizer.Open() | detokenizer.DropStream() | detokenizer.RetainStreams() | IntakeStarted():
                pass
            case detokenizer.TokensReady() | detokenizer.Histories() | detokenizer.Reopened():
                pass
            case detokenizer.GetStreams():
                pass
            case _:
                assert_never(message)


def stand_ins_without_clients(
    config: EngineConfig,
    *,
    intake_receives: Callable[[IntakeMessage], None] = lambda _: None,
    detokenizer_receives: Callable[[DetokenizerMessage], None] = lambda _: None,
) -> dict[str, Build]:
    """Return stand-ins for intake and detokenizer, by name: requests are sent to the scheduler directly, as `Admit`."""
    to = roles(config).scheduler
    return {
        "intake": lambda context: IntakeStandIn(context.find(to), intake_receives),
        "detokenizer": lambda context: DetokenizerStandIn(context.find(to), detokenizer_receives),
    }
