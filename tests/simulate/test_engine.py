"""The simulated engine: bugs are raised, faults are not, and what a core of some actors checks is really checked."""

from __future__ import annotations

import pytest
from scheduling import finish, step_until
from support import Core, Recorder, expected_output

from cuelight.actors.cache.actor import CacheManager
from cuelight.actors.executor.stub import StubDevice
from cuelight.config import EngineConfig
from cuelight.kernel import Delivered, Event
from cuelight.kernel.errors import ActorCrashed
from cuelight.messages.cache import CacheMessage, ForgetPrefixes
from cuelight.messages.request import Sampling
from cuelight.simulate.engine import LatestFigures, SimulatedEngine

CONFIG = EngineConfig(executor="thread", token_budget=16, block_count=20)


def core_with_requests(seed: int = 0) -> Core:
    core = Core(seed, device=StubDevice(60, 4))
    for request_id in range(3):
        core.admit(request_id, [request_id, 7, 9], Sampling(max_tokens=8))
    return core


def test_a_bug_of_an_actor_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(_self: CacheManager, _message: CacheMessage) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(CacheManager, "handle", handle)
    core = core_with_requests()
    with pytest.raises(ActorCrashed, match=r"'cache' crashed on .*a bug"):
        core.run()
    assert not core.engine.deaths["scheduler"]


def test_an_assertion_of_the_device_fails_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_self: StubDevice, _row: object) -> list[int]:
        raise AssertionError("overwritten")

    monkeypatch.setattr(StubDevice, "_read", read)
    with pytest.raises(AssertionError, match="overwritten"):
        core_with_requests().run()


def test_crashes_and_kills_that_are_asked_for_are_counted_and_survived() -> None:
    core = core_with_requests()
    step_until(core, lambda: len(core.outputs()) == 3)
    core.lose_executor("it raised")
    core.lose_executor("from outside", is_killed=True)
    core.lose_cache()
    finish(core)
    assert core.engine.deaths == {"executor": 2, "cache": 1}
    assert core.kills == ["from outside"]
    assert core.outputs() == {i: expected_output([i, 7, 9], Sampling(max_tokens=8))[0] for i in range(3)}


def test_a_message_that_waits_is_not_rest() -> None:
    engine = SimulatedEngine(0, CONFIG, LatestFigures())
    engine.run(steps_max=1000)
    engine.check_at_rest()
    engine.find(engine.roles.cache).tell(ForgetPrefixes())
    with pytest.raises(AssertionError, match=r"messages wait at rest: \{'cache': 1\}"):
        engine.check_at_rest()


def test_figures_of_live_requests_and_held_blocks_are_not_rest() -> None:
    figures = LatestFigures()
    with pytest.raises(AssertionError, match="blocks are held"):
        figures.check_at_rest()
    core = core_with_requests()
    step_until(core, lambda: len(core.outputs()) == 3)
    figures.tell(core.figures())
    with pytest.raises(AssertionError, match="requests are live"):
        figures.check_at_rest()


def test_time_passes_up_to_a_moment_and_its_timers_with_it() -> None:
    engine = SimulatedEngine(0, CONFIG, Recorder())
    fired: list[float] = []
    for seconds in (1.0, 2.0, 3.0):
        engine.simulation.at(seconds, lambda: fired.append(engine.now()))
    engine.pass_time(2.0)
    assert (engine.now(), fired) == (2.0, [1.0, 2.0])


def test_a_seed_gives_one_order_of_deliveries_and_another_seed_another() -> None:
    def order(seed: int) -> list[str]:
        actors: list[str] = []

        def see(event: Event) -> None:
            if isinstance(event, Delivered):
                actors.append(event.actor)

        core = core_with_requests(seed)
        core.engine.tap = see
        finish(core)
        return actors

    assert order(1) == order(1) != order(2)
