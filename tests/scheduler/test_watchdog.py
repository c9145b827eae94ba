"""A peer that does not answer is named, and the watchdogs disturb nothing else."""

from __future__ import annotations

import logging
from dataclasses import fields

import pytest
from scheduling import WatchedDevice, explained, finish, scheduler_of
from support import Core

from cuelight.actors.scheduler.watchdog import ANSWER_SECONDS, FACTOR, RECENT_ANSWERS, Watchdog, Watchdogs
from cuelight.kernel import Timer
from cuelight.kernel.simulation.virtual import VirtualClock, VirtualTimer
from cuelight.messages.cache import CacheMessage, Reserve
from cuelight.messages.executor import ExecutorMessage
from cuelight.messages.request import Sampling


class Deaf:
    """Takes messages and never answers."""

    def handle(self, message: ExecutorMessage | CacheMessage) -> None:
        pass


def passes(core: Core, seconds: float) -> None:
    """Deliver everything that happens in that time."""
    until = core.now() + seconds
    core.engine.simulation.at(until, lambda: None)
    while core.now() < until:
        assert core.step()


@pytest.mark.parametrize("who", ["executor", "cache manager"])
def test_whoever_is_silent_is_named_and_explains_the_wait(who: str, caplog: pytest.LogCaptureFixture) -> None:
    core = Core(0, device=WatchedDevice(50, 4))
    finish(core)  # it is ready
    address = core.executor if who == "executor" else core.cache
    address.actor = Deaf()  # type: ignore[assignment]
    core.admit(0, [1, 2, 3], Sampling(max_tokens=4))
    passes(core, ANSWER_SECONDS / 2)
    core.admit(1, [1, 2, 3], Sampling(max_tokens=4))
    assert "stalled" not in caplog.text
    with caplog.at_level(logging.ERROR, "cuelight.scheduler"):
        passes(core, 3 * ANSWER_SECONDS)
    assert caplog.text.count(f"the {who} has not answered for") == 3
    assert explained(core, 1).state == "waiting"
    assert any(f"the {who} has not answered" in moment.why for moment in explained(core, 1).timeline)


def test_it_is_heard_when_it_answers_after_all() -> None:
    core = Core(0, device=WatchedDevice(50, 4))
    finish(core)
    cache_manager, late = core.cache.actor, []

    class Slow:
        def handle(self, message: CacheMessage) -> None:
            late.append(message)

    core.cache.actor = Slow()  # type: ignore[assignment]
    core.admit(0, [1, 2, 3], Sampling(max_tokens=4))
    passes(core, 2 * ANSWER_SECONDS)
    core.cache.actor = cache_manager
    (reserve,) = late
    assert isinstance(reserve, Reserve)
    core.cache.tell(reserve)
    finish(core)
    assert len(core.outputs()[0]) == 4


def test_nobody_is_awaited_at_rest() -> None:
    core = Core(0, device=WatchedDevice(50, 4))
    core.admit(0, [1, 2, 3], Sampling(max_tokens=4))
    finish(core)
    assert core.now() < ANSWER_SECONDS
    assert all(getattr(scheduler_of(core)._watchdogs, each.name)._timer is None for each in fields(Watchdogs))


def test_a_step_that_failed_is_not_waited_for() -> None:
    core = Core(0, device=WatchedDevice(50, 4), steps_in_flight=3)
    assert isinstance(core.device, WatchedDevice)
    core.device.failures = 2
    core.admit(0, [1, 2, 3], Sampling(max_tokens=4))
    finish(core)
    assert core.now() < ANSWER_SECONDS


def test_one_timer_runs_where_a_wake_up_is_heard_after_it_was_given_up() -> None:
    """The timer is over, and before the scheduler hears of it the answer comes and another question goes out."""
    clock = VirtualClock()
    timers: list[VirtualTimer] = []

    def wake_after(seconds: float) -> Timer:
        timers.append(clock.call_at(clock.now() + seconds, lambda: None))
        return timers[-1]

    watchdog = Watchdog(wake_after, ANSWER_SECONDS, ANSWER_SECONDS)
    watchdog.asked(0.0)
    watchdog.answered(ANSWER_SECONDS)
    watchdog.asked(ANSWER_SECONDS)
    assert watchdog.silence(ANSWER_SECONDS) is None
    assert [timer.callback is not None for timer in timers].count(True) == 1
    watchdog.answered(ANSWER_SECONDS)
    assert all(timer.callback is None for timer in timers)


class Watch:
    """A watchdog, and the seconds after which it wanted to be woken."""

    def __init__(self, least: float, first: float, fixed: float | None = None) -> None:
        self.due: list[float] = []
        self._clock = VirtualClock()
        self.watchdog = Watchdog(self._wake_after, least, first, fixed)

    def _wake_after(self, seconds: float) -> Timer:
        self.due.append(seconds)
        return self._clock.call_later(seconds, lambda: None)


def test_whoever_took_long_before_may_take_longer() -> None:
    watch = Watch(30.0, 30.0)
    watchdog, due = watch.watchdog, watch.due
    watchdog.asked(0.0)
    watchdog.answered(20.0)
    watchdog.asked(100.0)
    watchdog.asked(150.0)
    assert due == [30.0, FACTOR * 20.0]
    assert watchdog.silence(250.0) is None and due[-1] == 50.0
    assert watchdog.silence(300.0) == 200.0 and due[-1] == 200.0
    watchdog.answered(310.0)
    assert watchdog.silence(500.0) is None and due[-1] == FACTOR * 210.0 - 190.0, "one after the other"


def test_a_larger_question_may_take_longer_in_proportion() -> None:
    watch = Watch(5.0, 300.0)
    watchdog, due = watch.watchdog, watch.due
    watchdog.asked(0.0, 10)
    assert due == [300.0], "in the first step much is compiled"
    watchdog.answered(200.0)
    for size, seconds in ((10, 2000.0), (40, 8000.0), (1, 2000.0)):
        watchdog.asked(1000.0, size)
        assert due[-1] == seconds
        watchdog.give_up()


def test_only_recent_answers_count_and_none_of_an_executor_before() -> None:
    watch = Watch(5.0, 300.0)
    watchdog, due = watch.watchdog, watch.due
    for number in range(RECENT_ANSWERS + 1):
        watchdog.asked(float(1000 * number), 10)
        watchdog.answered(1000 * number + (0.1 if number else 100.0))
        watchdog.asked(1000 * number + 500.0, 10)
        assert due[-1] == (1000.0 if number < RECENT_ANSWERS else 5.0)
        watchdog.give_up()
    watchdog.asked(1e6)
    watchdog.begin_again()
    assert watchdog.silence(2e6) is None
    watchdog.asked(2e6)
    assert due[-1] == 300.0


def test_a_limit_that_is_set_is_the_limit() -> None:
    watch = Watch(5.0, 300.0, fixed=2.0)
    for size in (1, 1000):
        watch.watchdog.asked(0.0, size)
        watch.watchdog.answered(1.5)
    watch.watchdog.asked(10.0, 7)
    assert set(watch.due) == {2.0}
    assert watch.watchdog.silence(12.0) == 2.0
