"""One simulated run of the engine's own actors with an executor without weights, drawn from a seed.

Actors crash, and the executor's process is killed, hangs and loses its device. The run is checked from outside: by the
messages that its clients received, and by the requests, blocks and messages that are left at rest.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from typing import Final

from cuelight.core.parts import roles
from cuelight.core.stub_model import END_TOKEN, stub_parts
from cuelight.kernel import Delivered, Ended, Event, ExitCause
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
from cuelight.messages.request import FIRST_EXECUTOR, ExecutorId, FinishReason, RequestId
from cuelight.messages.scheduler import Switch
from cuelight.simulate.client import AllowedOutcomes, SimulatedClient
from cuelight.simulate.engine import Build, LatestFigures, SimulatedEngine
from cuelight.simulate.faults import (
    SurvivingMemory,
    build_faulty_executor,
    draw_config,
    draw_fault_plan,
    draw_kills,
    draw_message_faults,
)
from cuelight.simulate.reloads import SimulatedReloads

CONTEXT_LENGTH: Final = 700

STEPS_MAX: Final = 200_000
"""Steps after which a run counts as endless."""


@dataclass
class RunTotals:
    """The counts of all runs so far."""

    seeds: int = 0
    deliveries: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    refused: int = 0
    crashes: int = 0
    """Lives of all actors that a crash or a kill ended."""
    hangs: int = 0
    changes: int = 0
    """Executors that have taken over from another one in a reload."""
    poisoned: int = 0
    """Poisonous requests that failed."""

    def row(self) -> str:
        """Return the figures, in columns as wide as those of `HEADER`."""
        return "".join(f"{getattr(self, field.name):>11,}" for field in fields(self)) + "\n"

    def count(self, client: SimulatedClient, poison: RequestId | None) -> None:
        """Add the outcome of a request."""
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


def run_seed(seed: int, request_count: int, total: RunTotals) -> None:
    """Run and check the engine of one seed. Raises AssertionError where a check fails."""
    SimulatedRun(seed, request_count).run(total)


class SimulatedRun:
    """The simulated engine of one seed, with its faults and its clients."""

    def __init__(self, seed: int, request_count: int) -> None:
        rng = self._rng = random.Random(f"engine {seed}")
        self._config = draw_config(rng)
        self._plan = draw_fault_plan(rng, self._config, request_count)
        self._observer = RunObserver(self._send_again)
        self._deliveries = 0
        self._kills = draw_kills(rng)
        self._is_open = False
        parts = stub_parts(self._config)
        parts = replace(parts, facts=replace(parts.facts, context_length=CONTEXT_LENGTH))
        self._engine = SimulatedEngine(
            seed,
            self._config,
            self._observer,
            parts=parts,
            stand_ins={"executor": self._executor_build(FIRST_EXECUTOR)},
            faults=draw_message_faults(rng),
            tap=self._see,
        )
        self._clients = [SimulatedClient(RequestId(number), rng, self._engine.now) for number in range(request_count)]
        self._reloads = SimulatedReloads(self._engine, self._executor_build, self._switch_to)
        self._reloads.draw(random.Random(f"changes {seed}"))

    def run(self, total: RunTotals) -> None:
        """Run to the end, and check the outcome."""
        self._draw_requests()
        if self._rng.random() < 0.2:
            forget = partial(self._engine.find(self._engine.roles.cache).tell, ForgetPrefixes())
            self._engine.simulation.at(self._rng.random(), forget)
        self._engine.run(steps_max=STEPS_MAX)
        plan = self._plan
        assert not plan.device_errors, plan.device_errors[0]
        allowed = self._allowed_outcomes()
        for client in self._clients:
            client.check(allowed)
            total.count(client, plan.poison)
        self._observer.check_at_rest()
        self._reloads.check()
        self._engine.check_at_rest()
        total.deliveries += self._deliveries
        total.crashes += self._engine.deaths.total()
        total.hangs += plan.hang_count
        total.changes += self._reloads.switch_count

    def _executor_build(self, executor_id: ExecutorId) -> Build:
        """Return the build of an executor; all its lives share one piece of host memory."""
        memory = SurvivingMemory(self._config, self._plan.rng)
        return partial(
            build_faulty_executor, self._config, self._plan, memory, roles(self._config).scheduler, executor_id
        )

    def _switch_to(self, executor_id: ExecutorId, recompute: bool) -> Switch:
        return Switch(executor_id, "", recompute, CONTEXT_LENGTH, (END_TOKEN,), self._reloads)

    def _see(self, event: Event) -> None:
        if isinstance(event, Delivered):
            self._deliveries += 1
            if (actor := self._kills.get(self._deliveries)) is not None:
                self._engine.simulation.kill(self._engine.role(actor), "drawn")
        elif isinstance(event, Ended) and event.cause is not ExitCause.STOPPED and event.actor == "scheduler":
            self._engine.simulation.at(self._engine.now(), self._reloads.resend)

    def _draw_requests(self) -> None:
        rng, at = self._rng, self._engine.simulation.at
        for first, client in pairwise(self._clients):
            if rng.random() < 0.2:
                client.become_sample_of(first)
        for client in self._clients:
            seconds = rng.random() if rng.random() < 0.8 else 0.5  # some come all at once
            at(seconds, partial(self._send, client))
            if rng.random() < 0.25:
                leaves_at = seconds + rng.choice((0.0, 0.01, 0.3)) * rng.random()
                at(leaves_at, partial(self._leave, client))

    def _send(self, client: SimulatedClient) -> None:
        client.is_sent = True
        if self._is_open:
            self._engine.find(self._engine.roles.intake).tell(client.submit())

    def _leave(self, client: SimulatedClient) -> None:
        client.has_left = True
        if client.end is None and self._is_open:
            self._engine.find(self._engine.roles.intake).tell(client.cancel())

    def _send_again(self) -> None:
        """Send all requests that have not ended to the new intake, which has just reported `Ready`."""
        self._engine.simulation.at(self._engine.now(), self._send_all)

    def _send_all(self) -> None:
        self._is_open = self._plan.is_started = True
        tell = self._engine.find(self._engine.roles.intake).tell
        for client in self._clients:
            if (submit := client.submit_again()) is not None:
                tell(submit)
                if client.has_left:
                    tell(client.cancel())
        tell(ResendComplete())

    def _allowed_outcomes(self) -> AllowedOutcomes:
        assert self._config.block_count is not None
        token_capacity = (self._config.block_count - 1) * self._config.block_size
        return AllowedOutcomes(
            token_limit=min(CONTEXT_LENGTH, token_capacity),
            failed_steps=self._plan.failed_steps,
            executor_deaths=self._engine.deaths["executor"],
            is_calm=not self._engine.deaths,
            poison=self._plan.poison,
        )


class RunObserver(LatestFigures):
    """The observer of a run: also fails the run where the engine gives up."""

    def __init__(self, on_new_intake: Callable[[], None]) -> None:
        super().__init__()
        self._on_new_intake = on_new_intake
        self._is_ready = False

    def tell(self, message: ObserverMessage, /) -> None:
        """Store figures; call back when intake is ready."""
        match message:
            case RequestFigures() | BlockFigures():
                super().tell(message)
            case Ready():
                self._is_ready = True
                self._on_new_intake()
            case Loading() | Loaded() | Recovering() | Recovered():
                pass
            case LoadFailed():  # drawn only after the start
                assert self._is_ready, "loading failed at the start"
            case _:
                raise AssertionError(f"there is no executor: {message}")

    def check_at_rest(self) -> None:
        """Assert that intake was ready, that no request is live and that every block is free."""
        assert self._is_ready, "intake never reported Ready"
        super().check_at_rest()
