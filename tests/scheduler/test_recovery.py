"""The scheduler when a peer dies, hangs or has lost its state, and a new scheduler in place of another."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from scheduling import WatchedDevice, finish, is_live, running, scheduler_of, step_until, tracked
from support import Core, expected_output

from cuelight.actors.executor.device import DeviceLost
from cuelight.actors.executor.stub import StubBatch, StubDevice
from cuelight.actors.scheduler import recovery
from cuelight.actors.scheduler.watchdog import FIRST_STEP_SECONDS, REPORT_SECONDS, START_SECONDS, STEP_SECONDS
from cuelight.kernel import ExitCause, Terminated
from cuelight.messages import detokenizer
from cuelight.messages.cache import Reset
from cuelight.messages.intake import CapacityChanged, SchedulerStarted
from cuelight.messages.observer import GaveUp, LoadFailed, Recovered, Recovering
from cuelight.messages.request import FailureCause, FinishReason, RequestId, Sampling, Service, Usage
from cuelight.messages.scheduler import (
    Abort,
    Admit,
    Closed,
    ExecutorFailed,
    ExecutorReady,
    FailRequest,
    GetHistories,
    Granted,
    IntakeStarted,
    RestoreState,
    StepDone,
)


class Poisoned(WatchedDevice):
    """A step with any of `poison` in it calls `harm`."""

    harm: Callable[[], object]

    def run(self, batch: StubBatch) -> StepDone:
        if any(chunk.request_id in self.poison for chunk in batch.step.chunks):
            self.harm()
        done: StepDone = super().run(batch)
        return done


def poisoned_core(seed: int, *poison: int, steps_in_flight: int, is_killed: bool = False) -> Core:
    """A core whose executor crashes, or is killed from outside, over a step with any of `poison` in it."""

    def lose() -> None:
        raise DeviceLost("poisoned")

    def device() -> Poisoned:
        made = Poisoned(100, 4)
        made.poison = set(poison)
        made.harm = (lambda: core.kill_executor("by a test")) if is_killed else lose
        return made

    core = Core(seed, device=device(), new_device=device, steps_in_flight=steps_in_flight)
    return core


def admit_all(core: Core, count: int, max_tokens: int = 12) -> None:
    for request_id in range(count):
        core.admit(request_id, [request_id, 7, 9], Sampling(max_tokens=max_tokens))


def check_outputs(core: Core, count: int, max_tokens: int = 12, without: tuple[int, ...] = ()) -> None:
    for request_id in range(count):
        if request_id not in without:
            tokens, reason = expected_output([request_id, 7, 9], Sampling(max_tokens=max_tokens))
            assert core.outputs()[request_id] == tokens
            assert core.ends()[request_id].reason is reason


def heard(core: Core, kind: type[object]) -> list[object]:
    return [message for message in core.observer.messages if isinstance(message, kind)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("steps", [20, 60, 90])
def test_streams_go_on_over_an_executors_death(seed: int, steps: int) -> None:
    core = Core(seed, device=StubDevice(60, 4), steps_in_flight=seed % 3 + 1, running_max=3)
    admit_all(core, 5)
    for _ in range(steps):
        core.step()
    core.lose_executor("a driver bug")
    finish(core)
    check_outputs(core, 5)
    assert len(heard(core, Recovering)) == len(heard(core, Recovered)) == 1
    assert [m for m in core.intake.messages if isinstance(m, CapacityChanged)] == [CapacityChanged(236)] * 2


@pytest.mark.parametrize("seed", range(12))
def test_streams_go_on_over_the_cache_managers_death(seed: int) -> None:
    core = Core(seed, device=StubDevice(60, 4), running_max=3)
    admit_all(core, 5)
    for _ in range(40 + 3 * seed):
        core.step()
    core.lose_cache()
    finish(core)
    check_outputs(core, 5)
    assert len(heard(core, Recovering)) == len(heard(core, Recovered)) == 1


def test_an_answer_to_a_question_that_is_void_is_not_taken() -> None:
    core = Core(0, device=StubDevice(60, 4))
    finish(core)
    admit_all(core, 1)
    state = scheduler_of(core)._state
    step_until(core, lambda: state._block_requests.asked is not None)
    core.lose_cache()
    step_until(core, lambda: core.engine.waiting("scheduler") == 0)
    scheduler_of(core).handle(Granted(0, (), (RequestId(0),)))
    assert is_live(core, 0)
    finish(core)
    check_outputs(core, 1)


def test_nothing_is_planned_until_there_is_another_executor() -> None:
    core = Core(0, device=StubDevice(60, 4))
    admit_all(core, 3)
    step_until(core, lambda: running(core) == 3)
    state = scheduler_of(core)._state
    core.lose_executor("a driver bug")
    step_until(core, lambda: state.pool is None)
    assert (running(core), len(state._steps), state._block_requests.asked) == (0, 0, None)
    before = state._steps._epoch
    finish(core)
    assert state._steps._epoch == before
    check_outputs(core, 3)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("is_killed", "deaths"), [(False, 3), (True, 5)])
def test_a_request_that_kills_the_executor_fails_alone(is_killed: bool, deaths: int, seed: int) -> None:
    """A kill from outside says less of whoever was there, so two more of those are borne."""
    core = poisoned_core(seed, 2, steps_in_flight=2, is_killed=is_killed)
    admit_all(core, 5)
    finish(core)
    assert core.engine.deaths["executor"] == deaths
    check_outputs(core, 5, without=(2,))
    assert core.ends()[2].failure is FailureCause.EXECUTOR_DEATHS
    assert core.ends()[2].error.startswith(f"the executor died {deaths} times with this request, the last time alone")
    assert not heard(core, GaveUp)


@pytest.mark.parametrize("seed", range(8))
def test_several_fail_one_after_another_and_the_others_go_on(seed: int) -> None:
    core = poisoned_core(seed, 0, 3, steps_in_flight=3)
    admit_all(core, 5)
    finish(core)
    check_outputs(core, 5, without=(0, 3))
    assert {core.ends()[request_id].reason for request_id in (0, 3)} == {FinishReason.FAILED}


def test_whoever_was_there_twice_runs_alone_until_it_has_sampled_two_tokens() -> None:
    suspects = [tracked(number) for number in range(3)]
    assert recovery.attribute_crash(suspects, from_outside=False) is None
    assert not any(each.suspect for each in suspects)
    assert recovery.attribute_crash(suspects[:2], from_outside=False) is None
    assert [each.suspect for each in suspects] == [True, True, False]
    first, second, third = suspects
    assert recovery.may_be_in_flight([(first, 1)], [[(first, 1, 0)]])
    assert not recovery.may_be_in_flight([(first, 1)], [[(third, 1, 0)]])
    assert not recovery.may_be_in_flight([(third, 1)], [[(first, 1, 0)]])
    assert recovery.may_be_in_flight([(third, 1)], [[(third, 1, 0)]])
    recovery.count_sampled(first)
    assert first.suspect
    recovery.count_sampled(first)
    assert (first.suspect, first.crashes) == (False, 0)
    assert recovery.attribute_crash([second], from_outside=True) is None
    assert recovery.attribute_crash([second], from_outside=True) is None
    assert recovery.attribute_crash([second], from_outside=True) is second
    assert recovery.attribute_crash([], from_outside=False) is None


@pytest.mark.parametrize(
    ("cause", "killed_by", "is_from_outside"),
    [
        (ExitCause.SIGNALED, "SIGKILL", True),
        (ExitCause.SIGNALED, "SIGTERM", True),
        (ExitCause.SIGNALED, "SIGSEGV", False),
        (ExitCause.KILLED, "", True),
        (ExitCause.KILLED, "another", True),
        (ExitCause.KILLED, "scheduler", False),
        (ExitCause.CRASHED, "", False),
        (ExitCause.EXITED, "", False),
    ],
)
def test_the_cause_of_a_death_says_whether_it_came_from_outside(
    cause: ExitCause, killed_by: str, is_from_outside: bool
) -> None:
    death = Terminated("executor", "it died", True, cause, killed_by)
    assert recovery.is_from_outside(death, "scheduler") is is_from_outside


def test_deaths_without_a_step_in_between_come_to_an_end() -> None:
    core = Core(0, device=StubDevice(60, 4), restarts_max=2)
    finish(core)
    for deaths in range(1, 5):
        core.lose_executor("it raised")
        finish(core)
        assert len(heard(core, GaveUp)) == (deaths > 2), "and it is said once"
    (gave_up,) = heard(core, GaveUp)
    assert isinstance(gave_up, GaveUp)
    assert "died 3 times" in gave_up.reason and "it raised" in gave_up.reason


def test_a_step_that_was_done_is_new_hope() -> None:
    core = Core(0, device=StubDevice(60, 4), restarts_max=2)
    for number in range(4):
        core.admit(number, [5], Sampling(max_tokens=1))
        finish(core)
        for _ in range(2):
            core.lose_executor("it raised")
            finish(core)
    assert not heard(core, GaveUp)


def test_an_executor_that_hangs_is_killed() -> None:
    core = Core(0, device=StubDevice(60, 4), executor="process")
    finish(core)
    admit_all(core, 2, max_tokens=40)
    step_until(core, lambda: len(core.outputs().get(1, ())) > 5 and len(scheduler_of(core)._state._steps) > 0)
    core.executor.actor = Deaf()
    before = core.now()
    while not core.kills:
        assert core.step()
    assert core.now() - before == pytest.approx(STEP_SECONDS, abs=1), "learnt from the steps before"
    assert core.kills == ["the executor has not answered for 5 s"]
    finish(core)
    check_outputs(core, 2, max_tokens=40)


class Deaf:
    """An executor that is there, and does nothing."""

    def started(self) -> None: ...

    def handle(self, _message: object) -> None: ...


def waits_for_a_kill(core: Core) -> float:
    """Seconds until it comes."""
    core.executor.actor = Deaf()
    before = core.now()
    while not core.kills:
        assert core.step()
    return core.now() - before


def test_an_executor_that_hangs_in_its_first_step_is_killed() -> None:
    core = Core(0, device=StubDevice(60, 4), executor="process")
    finish(core)
    admit_all(core, 2)
    assert waits_for_a_kill(core) == pytest.approx(FIRST_STEP_SECONDS, abs=1)


def test_the_first_step_may_take_longer_where_the_start_did() -> None:
    core = Core(0, device=StubDevice(60, 4), executor="process")
    finish(core)
    core.scheduler.tell(Terminated("executor", "it died", True, ExitCause.CRASHED))
    core.scheduler.tell(ExecutorReady(60, 4, life=7, seconds=20.0))
    admit_all(core, 2)
    assert waits_for_a_kill(core) == pytest.approx(200, abs=1)


def test_an_executor_that_hangs_while_it_takes_another_one_s_place_is_killed() -> None:
    core = Core(0, device=StubDevice(60, 4), executor="process")
    finish(core)
    core.scheduler.tell(Terminated("executor", "it died", True, ExitCause.CRASHED))
    assert waits_for_a_kill(core) == pytest.approx(START_SECONDS, abs=1)
    assert "the executor that replaces a lost one" in core.kills[0]


def test_an_executor_that_does_not_report_is_killed() -> None:
    core = Core(0, device=StubDevice(60, 4), executor="process")
    core.executor.actor = Deaf()
    while not core.kills:
        assert core.step()
    assert core.now() == pytest.approx(REPORT_SECONDS, abs=1)
    assert core.kills == ["the executor whose state was requested has not answered for 300 s"]


def test_a_model_that_cannot_be_loaded_fails_the_start_and_is_tried_again_later() -> None:
    core = Core(0, device=StubDevice(60, 4), executor="process")
    finish(core)
    scheduler_of(core).handle(ExecutorFailed("no weights"))
    step_until(core, lambda: core.kills)
    assert core.kills == ["the executor cannot load the model: no weights"]
    assert not heard(core, LoadFailed)
    hopeless = Core(0, device=StubDevice(60, 4))
    scheduler_of(hopeless).handle(ExecutorFailed("no weights"))
    assert heard(hopeless, LoadFailed) == [LoadFailed("no weights")]
    assert len(heard(hopeless, GaveUp)) == 1, "nobody can make another one"


def test_an_executor_is_announced_once() -> None:
    core = Core(0, device=StubDevice(60, 4))
    resets: list[Reset] = []
    finish(core)
    handle = core.cache.actor.handle

    def watched(message: object) -> None:
        if isinstance(message, Reset):
            resets.append(message)
        handle(message)

    core.cache.actor.handle = watched  # type: ignore[method-assign]
    ready = scheduler_of(core)._state.pool
    assert ready is not None
    core.scheduler.tell(ready)
    finish(core)
    assert resets == []
    admit_all(core, 2)
    step_until(core, lambda: running(core) == 2)
    core.scheduler.tell(msgspec.structs.replace(ready, life=ready.life + 1))
    step_until(core, lambda: running(core) == 0)
    assert len(resets) <= 1


# A scheduler that is new.


def admit_message(number: int, *output: int, max_tokens: int = 4) -> Admit:
    sampling = Sampling(max_tokens=max_tokens)
    return Admit(RequestId(number), (number, 7, 9), sampling, 1000, Service(), 0.0, output=output)


class New:
    """A scheduler that has not heard what it is to remember."""

    def __init__(self) -> None:
        self.core = Core(0, device=StubDevice(60, 4), restores=False)
        self.life = scheduler_of(self.core)._life

    def remember(self, *admitted: Admit, aborted: tuple[int, ...] = (), **histories: tuple[int, ...]) -> None:
        told = tuple((RequestId(int(name[1:])), tokens) for name, tokens in histories.items())
        ids = tuple(map(RequestId, aborted))
        self.core.scheduler.tell(RestoreState(self.life, None, admitted, ids, told, has_served=True))

    def run(self) -> Core:
        finish(self.core)
        return self.core


def test_it_begins_where_the_streams_are() -> None:
    new = New()
    tokens, _ = expected_output([1, 7, 9], Sampling(max_tokens=4))
    shorter, longer = tokens[:1], tokens[:3]
    new.remember(admit_message(0), admit_message(1, *shorter), _1=tuple(longer))
    core = new.run()
    assert core.outputs()[1] == tokens[3:]
    assert core.outputs()[0] == expected_output([0, 7, 9], Sampling(max_tokens=4))[0]
    positions = [m.positions for m in core.detokenizer.messages if isinstance(m, detokenizer.TokensReady)]
    assert any(3 in each for each in positions)
    assert core.ends()[1].usage.output_tokens == 4
    assert core.device.steps > 0
    assert heard(core, Recovering) and heard(core, Recovered)


def test_one_whose_last_token_was_given_already_only_lacks_its_end() -> None:
    new = New()
    tokens, _ = expected_output([1, 7, 9], Sampling(max_tokens=4))
    new.remember(admit_message(1), _1=tuple(tokens))
    core = new.run()
    assert core.outputs() == {}
    assert (core.ends()[1].reason, core.ends()[1].usage) == (FinishReason.LENGTH, Usage(3, 0, 4))


def test_until_it_has_heard_it_plans_nothing_and_forgets_nothing() -> None:
    new = New()
    core = new.core
    for message in (
        admit_message(5),
        admit_message(6),
        Abort(RequestId(5)),
        FailRequest(RequestId(6), "crash"),
        GetHistories(),
    ):
        core.scheduler.tell(message)
    core.scheduler.tell(IntakeStarted())
    while core.step():
        pass
    assert core.device.steps == 0
    assert SchedulerStarted(new.life) in core.intake.messages, "an intake that is new has not heard the question"
    core.scheduler.tell(RestoreState(new.life + 1, None, (admit_message(9),), (), ()))
    while core.step():
        pass
    assert not is_live(core, 9), "that was for one before"
    new.remember(admit_message(1), admit_message(2), aborted=(2,))
    core = new.run()
    assert set(core.ends()) == {1, 2, 5, 6}
    assert core.ends()[2].reason is core.ends()[5].reason is FinishReason.CANCELLED
    assert (core.ends()[6].reason, core.ends()[6].error) == (FinishReason.FAILED, "crash")
    (histories,) = told_histories(core)
    assert {ended.request_id for ended, _ in histories.ended} == {2, 5, 6}


def test_one_that_it_cannot_take_does_not_take_the_others_with_it() -> None:
    new = New()
    without_room = Admit(RequestId(3), (1, 2), Sampling(), token_limit=2, service=Service(), submitted_at=0.0)
    new.remember(without_room, admit_message(4))
    core = new.run()
    assert core.ends()[3].reason is FinishReason.FAILED
    assert "cannot go on with this request" in core.ends()[3].error
    assert core.ends()[4].reason is FinishReason.LENGTH


def test_what_has_output_comes_first() -> None:
    new = New()
    new.remember(admit_message(1, max_tokens=9), admit_message(2, max_tokens=9), _2=(500,))
    while new.core.step():
        waiting = scheduler_of(new.core)._state._queue
        if len(waiting) == 2:
            assert [each.request_id for each in waiting.head(2)] == [2, 1]
            break
    new.run()


# Requests that are said again, and ends that are not confirmed.


class Silent:
    """A core whose detokenizer confirms nothing by itself."""

    def __init__(self) -> None:
        self.core = Core(0, device=StubDevice(60, 4))
        self.core.confirm_nothing()


def told_histories(core: Core) -> list[detokenizer.Histories]:
    return [message for message in core.detokenizer.messages if isinstance(message, detokenizer.Histories)]


def test_a_request_that_is_admitted_again_has_its_history_told_again() -> None:
    core = Silent().core
    core.scheduler.tell(admit_message(1, max_tokens=30))
    step_until(core, lambda: len(core.outputs().get(1, ())) >= 3)
    core.detokenizer.take()
    scheduler_of(core).handle(admit_message(1, max_tokens=30))
    step_until(core, lambda: told_histories(core))
    (told,) = told_histories(core)
    ((request_id, tokens),) = told.live
    assert request_id == 1 and len(tokens) >= 3 and told.ended == ()
    finish(core)
    core.detokenizer.take()
    scheduler_of(core).handle(admit_message(1, max_tokens=30))
    finish(core)
    (told,) = core.detokenizer.take()
    ((ended, tokens),) = told.ended
    assert ended.request_id == 1 and list(tokens) == expected_output([1, 7, 9], Sampling(max_tokens=30))[0]
    assert not is_live(core, 1)


def test_ends_are_kept_until_they_are_confirmed() -> None:
    core = Silent().core
    for number in range(3):
        core.scheduler.tell(admit_message(number))
    finish(core)
    assert scheduler_of(core).request_count == 3
    core.scheduler.tell(Closed((RequestId(0),)))
    core.scheduler.tell(Closed((RequestId(1),), is_ended=False))
    finish(core)
    core.detokenizer.take()
    core.scheduler.tell(GetHistories())
    finish(core)
    (told,) = core.detokenizer.take()
    assert [ended.request_id for ended, _ in told.ended] == [2]
    core.scheduler.tell(Closed((RequestId(2), RequestId(77))))
    finish(core)
    assert scheduler_of(core).request_count == 0


@pytest.mark.parametrize("is_ended", [True, False])
def test_nobody_computes_for_a_stream_that_was_ended(is_ended: bool) -> None:
    core = Silent().core
    core.scheduler.tell(admit_message(1, max_tokens=30))
    step_until(core, lambda: running(core) == 1)
    scheduler_of(core).handle(Closed((RequestId(1),), is_ended))
    assert is_live(core, 1) is not is_ended, "one that had no stream may be heard yet"
    finish(core)


def test_a_stream_that_was_ended_early_on_is_not_computed_again() -> None:
    """Its request was still in the mailbox when the scheduler before died."""
    new = New()
    for message in (admit_message(5), Closed((RequestId(5),))):
        new.core.scheduler.tell(message)
    new.remember()
    core = new.run()
    assert core.device.steps == 0
    assert scheduler_of(core).request_count == 0


@pytest.mark.parametrize("is_waiting", [True, False])
def test_one_that_comes_again_has_nothing_of_what_was_asked_for_before(
    is_waiting: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """An id that was over and is admitted anew, while blocks, or a token, for its first time are under way."""
    core = Silent().core
    finish(core)
    state = scheduler_of(core)._state
    core.scheduler.tell(admit_message(1, max_tokens=30))
    step_until(core, lambda: state._block_requests.asked is not None and (running(core) == 0) is is_waiting)
    scheduler_of(core).handle(Abort(RequestId(1)))
    scheduler_of(core).handle(Closed((RequestId(1),)))
    scheduler_of(core).handle(admit_message(1, max_tokens=30))
    step_until(core, core.ends)
    core.detokenizer.take()
    finish(core)
    assert core.outputs()[1] == expected_output([1, 7, 9], Sampling(max_tokens=30))[0]
    assert "step_raised" not in caplog.text


def test_a_token_of_one_that_is_over_is_not_given_to_who_came_since() -> None:
    core = Silent().core
    core.scheduler.tell(admit_message(1, max_tokens=30))
    step_until(core, lambda: len(core.outputs().get(1, ())) == 3 and len(scheduler_of(core)._state._steps) > 0)
    scheduler_of(core).handle(Abort(RequestId(1)))
    scheduler_of(core).handle(Closed((RequestId(1),)))
    scheduler_of(core).handle(admit_message(1, max_tokens=30))
    step_until(core, core.ends)
    core.detokenizer.take()
    finish(core)
    assert core.outputs()[1] == expected_output([1, 7, 9], Sampling(max_tokens=30))[0]


class Small(WatchedDevice):
    """Has memory for so many tokens of a step."""

    fits = 0

    def run(self, batch: StubBatch) -> StepDone:
        if sum(chunk.token_count for chunk in batch.step.chunks) > self.fits:
            raise MemoryError("the device's memory is full")
        done: StepDone = super().run(batch)
        return done


@pytest.mark.parametrize("fits", [1, 2, 7, 30])
def test_steps_that_do_not_fit_are_made_smaller_and_nobody_fails(fits: int) -> None:
    device = Small(100, 4)
    device.fits = fits
    core = Core(0, device=device)
    admit_all(core, 12)
    finish(core)
    check_outputs(core, 12)
    limits = [event for event in core.observer.messages if isinstance(event, GaveUp)]
    assert not limits
    refused = core.figures().preemptions
    assert refused <= 12 * 7, "the device is not asked again and again for what it cannot do"


def test_what_fits_is_tried_again_when_there_may_be_room(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 32
    monkeypatch.setattr("cuelight.actors.scheduler.planning.STEPS_BEFORE_GROWTH", steps)
    device = Small(1000, 4)
    device.fits = 4
    core = Core(0, device=device, token_budget=64)
    admit_all(core, 4, max_tokens=steps * 3)
    step_until(core, lambda: len(device.seen) > 10)
    device.fits = 10**6
    step_until(core, lambda: len(device.seen) > steps * 2 + 20)
    core.admit(100, list(range(40)), Sampling(max_tokens=1))
    finish(core)
    assert max(sum(chunk.token_count for chunk in step.chunks) for step in device.seen) > 4


def test_a_token_that_does_not_fit_by_itself_is_its_request_s_failure() -> None:
    device = Small(100, 4)
    core = Core(0, device=device)
    admit_all(core, 3)
    finish(core)
    assert [end.reason for end in core.ends().values()] == [FinishReason.FAILED] * 3
    assert "memory is full" in core.ends()[0].error


def lasting(host_slots: list[int | None] | None = None) -> WatchedDevice:
    """A pool for two of the requests below, and host memory, which may be what another device has left."""
    device = WatchedDevice(13, 4, host_block_count=40)
    device.host = msgspec.structs.replace(device.host, memory=5)
    device._host_slots = device._host_slots if host_slots is None else host_slots
    return device


def admit_long(core: Core, count: int) -> None:
    for request_id in range(count):
        core.admit(request_id, list(range(100 * request_id, 100 * request_id + 20)), Sampling(max_tokens=2))


@pytest.mark.parametrize("lasts", [True, False])
def test_what_was_saved_before_the_executor_died_is_loaded_and_not_computed(lasts: bool) -> None:
    first = lasting()
    core = Core(0, device=first)
    admit_long(core, 6)
    finish(core)
    used, loaded = core.blocks().host_blocks_used, core.blocks().blocks_loaded
    second = lasting(first._host_slots if lasts else None)
    if not lasts:
        second.host = msgspec.structs.replace(second.host, memory=6)
    core.lose_executor("by a test", second, is_killed=True)
    finish(core)
    assert core.blocks().host_blocks_used == (used if lasts else 0), "at rest, all copies are known to be made"
    core.detokenizer.messages.clear()
    core.admit(9, list(range(20)), Sampling(max_tokens=1))
    finish(core)
    assert core.outputs()[9] == expected_output(list(range(20)), Sampling(max_tokens=1))[0]
    assert core.blocks().blocks_loaded - loaded == (4 if lasts else 0)
    assert second.computed() == (4 if lasts else 20)


def test_copies_of_steps_that_nobody_has_answered_may_not_have_been_made() -> None:
    """Nor has anybody made those that no step has been given yet."""
    core = Core(0, device=lasting())
    admit_long(core, 2)
    finish(core)
    core.executor.actor = Deaf()
    core.admit(7, list(range(700, 740)), Sampling(max_tokens=2))
    step_until(core, lambda: core.blocks().blocks_saved > 0 and len(scheduler_of(core)._state._steps) > 0)
    assert core.blocks().host_blocks_used > 0
    core.lose_executor("by a test", lasting(), is_killed=True)  # where nothing has been saved
    step_until(core, lambda: not core.blocks().host_blocks_used)
    finish(core)
    assert core.ends()[7].reason is FinishReason.LENGTH
    core.admit(8, list(range(20)), Sampling(max_tokens=1))
    finish(core)
    assert core.outputs()[8] == expected_output(list(range(20)), Sampling(max_tokens=1))[0]
