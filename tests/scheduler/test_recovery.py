"""The scheduler when a peer dies, hangs or loses its state, and a restarted scheduler."""

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


class PoisonedDevice(WatchedDevice):
    """A device that calls `harm` in a step with any of `poison`."""

    harm: Callable[[], object]

    def run(self, batch: StubBatch) -> StepDone:
        if any(chunk.request_id in self.poison for chunk in batch.step.chunks):
            self.harm()
        done: StepDone = super().run(batch)
        return done


def poisoned_core(seed: int, *poison: int, steps_in_flight: int, is_killed: bool = False) -> Core:
    """A core whose executor crashes, or is killed from outside, in a step with any of `poison`."""

    def lose() -> None:
        raise DeviceLost("poisoned")

    def device() -> PoisonedDevice:
        made = PoisonedDevice(100, 4)
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


def received(core: Core, kind: type[object]) -> list[object]:
    return [message for message in core.observer.messages if isinstance(message, kind)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("steps", [20, 60, 90])
def test_streams_continue_after_the_executors_death(seed: int, steps: int) -> None:
    core = Core(seed, device=StubDevice(60, 4), steps_in_flight=seed % 3 + 1, running_max=3)
    admit_all(core, 5)
    for _ in range(steps):
        core.step()
    core.lose_executor("a driver bug")
    finish(core)
    check_outputs(core, 5)
    assert len(received(core, Recovering)) == len(received(core, Recovered)) == 1
    assert [m for m in core.intake.messages if isinstance(m, CapacityChanged)] == [CapacityChanged(236)] * 2


@pytest.mark.parametrize("seed", range(12))
def test_streams_continue_after_the_cache_managers_death(seed: int) -> None:
    core = Core(seed, device=StubDevice(60, 4), running_max=3)
    admit_all(core, 5)
    for _ in range(40 + 3 * seed):
        core.step()
    core.lose_cache()
    finish(core)
    check_outputs(core, 5)
    assert len(received(core, Recovering)) == len(received(core, Recovered)) == 1


def test_answer_to_a_void_round_is_ignored() -> None:
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


def test_nothing_is_planned_until_the_next_executor_is_ready() -> None:
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
    """A kill from outside is weaker evidence against a request than a crash, so two more are allowed."""
    core = poisoned_core(seed, 2, steps_in_flight=2, is_killed=is_killed)
    admit_all(core, 5)
    finish(core)
    assert core.engine.deaths["executor"] == deaths
    check_outputs(core, 5, without=(2,))
    assert core.ends()[2].failure is FailureCause.EXECUTOR_DEATHS
    assert core.ends()[2].error.startswith(f"the executor died {deaths} times with this request, the last time alone")
    assert not received(core, GaveUp)


@pytest.mark.parametrize("seed", range(8))
def test_several_deadly_requests_fail_and_the_others_continue(seed: int) -> None:
    core = poisoned_core(seed, 0, 3, steps_in_flight=3)
    admit_all(core, 5)
    finish(core)
    check_outputs(core, 5, without=(0, 3))
    assert {core.ends()[request_id].reason for request_id in (0, 3)} == {FinishReason.FAILED}


def test_suspect_of_two_deaths_runs_alone_until_it_has_sampled_two_tokens() -> None:
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


def test_deaths_without_a_step_in_between_are_given_up_on() -> None:
    core = Core(0, device=StubDevice(60, 4), restarts_max=2)
    finish(core)
    for deaths in range(1, 5):
        core.lose_executor("it raised")
        finish(core)
        assert len(received(core, GaveUp)) == (deaths > 2), "sent once"
    (gave_up,) = received(core, GaveUp)
    assert isinstance(gave_up, GaveUp)
    assert "died 3 times" in gave_up.reason and "it raised" in gave_up.reason


def test_completed_step_resets_the_count_of_deaths() -> None:
    core = Core(0, device=StubDevice(60, 4), restarts_max=2)
    for number in range(4):
        core.admit(number, [5], Sampling(max_tokens=1))
        finish(core)
        for _ in range(2):
            core.lose_executor("it raised")
            finish(core)
    assert not received(core, GaveUp)


def test_hanging_executor_is_killed() -> None:
    core = Core(0, device=StubDevice(60, 4), executor="process")
    finish(core)
    admit_all(core, 2, max_tokens=40)
    step_until(core, lambda: len(core.outputs().get(1, ())) > 5 and len(scheduler_of(core)._state._steps) > 0)
    core.executor.actor = Unresponsive()
    before = core.now()
    while not core.kills:
        assert core.step()
    assert core.now() - before == pytest.approx(STEP_SECONDS, abs=1), "learnt from the steps before"
    assert core.kills == ["the executor has not answered for 5 s"]
    finish(core)
    check_outputs(core, 2, max_tokens=40)


class Unresponsive:
    """An executor that ignores every message."""

    def started(self) -> None: ...

    def handle(self, _message: object) -> None: ...


def waits_for_a_kill(core: Core) -> float:
    """Seconds until the executor is killed."""
    core.executor.actor = Unresponsive()
    before = core.now()
    while not core.kills:
        assert core.step()
    return core.now() - before


def test_executor_that_hangs_in_its_first_step_is_killed() -> None:
    core = Core(0, device=StubDevice(60, 4), executor="process")
    finish(core)
    admit_all(core, 2)
    assert waits_for_a_kill(core) == pytest.approx(FIRST_STEP_SECONDS, abs=1)


def test_limit_of_the_first_step_grows_with_the_start_time() -> None:
    core = Core(0, device=StubDevice(60, 4), executor="process")
    finish(core)
    core.scheduler.tell(Terminated("executor", "it died", True, ExitCause.CRASHED))
    core.scheduler.tell(ExecutorReady(60, 4, life=7, seconds=20.0))
    admit_all(core, 2)
    assert waits_for_a_kill(core) == pytest.approx(200, abs=1)


def test_executor_that_hangs_while_taking_over_is_killed() -> None:
    core = Core(0, device=StubDevice(60, 4), executor="process")
    finish(core)
    core.scheduler.tell(Terminated("executor", "it died", True, ExitCause.CRASHED))
    assert waits_for_a_kill(core) == pytest.approx(START_SECONDS, abs=1)
    assert "the executor that replaces a lost one" in core.kills[0]


def test_executor_that_does_not_report_is_killed() -> None:
    core = Core(0, device=StubDevice(60, 4), executor="process")
    core.executor.actor = Unresponsive()
    while not core.kills:
        assert core.step()
    assert core.now() == pytest.approx(REPORT_SECONDS, abs=1)
    assert core.kills == ["the executor whose state was requested has not answered for 300 s"]


def test_unloadable_model_fails_the_start_and_is_retried_later() -> None:
    core = Core(0, device=StubDevice(60, 4), executor="process")
    finish(core)
    scheduler_of(core).handle(ExecutorFailed("no weights"))
    step_until(core, lambda: core.kills)
    assert core.kills == ["the executor cannot load the model: no weights"]
    assert not received(core, LoadFailed)
    hopeless = Core(0, device=StubDevice(60, 4))
    scheduler_of(hopeless).handle(ExecutorFailed("no weights"))
    assert received(hopeless, LoadFailed) == [LoadFailed("no weights")]
    assert len(received(hopeless, GaveUp)) == 1, "no other executor can be started"


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


# A restarted scheduler.


def admit_message(number: int, *output: int, max_tokens: int = 4) -> Admit:
    sampling = Sampling(max_tokens=max_tokens)
    return Admit(RequestId(number), (number, 7, 9), sampling, 1000, Service(), 0.0, output=output)


class NewScheduler:
    """A core with a scheduler that has not received its state yet."""

    def __init__(self) -> None:
        self.core = Core(0, device=StubDevice(60, 4), restores=False)
        self.life = scheduler_of(self.core)._life

    def restore(self, *admitted: Admit, aborted: tuple[int, ...] = (), **histories: tuple[int, ...]) -> None:
        told = tuple((RequestId(int(name[1:])), tokens) for name, tokens in histories.items())
        ids = tuple(map(RequestId, aborted))
        self.core.scheduler.tell(RestoreState(self.life, None, admitted, ids, told, has_served=True))

    def run(self) -> Core:
        finish(self.core)
        return self.core


def test_new_scheduler_continues_the_restored_streams() -> None:
    new = NewScheduler()
    tokens, _ = expected_output([1, 7, 9], Sampling(max_tokens=4))
    shorter, longer = tokens[:1], tokens[:3]
    new.restore(admit_message(0), admit_message(1, *shorter), _1=tuple(longer))
    core = new.run()
    assert core.outputs()[1] == tokens[3:]
    assert core.outputs()[0] == expected_output([0, 7, 9], Sampling(max_tokens=4))[0]
    positions = [m.positions for m in core.detokenizer.messages if isinstance(m, detokenizer.TokensReady)]
    assert any(3 in each for each in positions)
    assert core.ends()[1].usage.output_tokens == 4
    assert core.device.steps > 0
    assert received(core, Recovering) and received(core, Recovered)


def test_restored_request_with_all_tokens_ends_at_once() -> None:
    new = NewScheduler()
    tokens, _ = expected_output([1, 7, 9], Sampling(max_tokens=4))
    new.restore(admit_message(1), _1=tuple(tokens))
    core = new.run()
    assert core.outputs() == {}
    assert (core.ends()[1].reason, core.ends()[1].usage) == (FinishReason.LENGTH, Usage(3, 0, 4))


def test_new_scheduler_plans_nothing_before_its_state_is_restored() -> None:
    new = NewScheduler()
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
    new.restore(admit_message(1), admit_message(2), aborted=(2,))
    core = new.run()
    assert set(core.ends()) == {1, 2, 5, 6}
    assert core.ends()[2].reason is core.ends()[5].reason is FinishReason.CANCELLED
    assert (core.ends()[6].reason, core.ends()[6].error) == (FinishReason.FAILED, "crash")
    (histories,) = sent_histories(core)
    assert {ended.request_id for ended, _ in histories.ended} == {2, 5, 6}


def test_restored_request_that_does_not_fit_fails_alone() -> None:
    new = NewScheduler()
    without_room = Admit(RequestId(3), (1, 2), Sampling(), token_limit=2, service=Service(), submitted_at=0.0)
    new.restore(without_room, admit_message(4))
    core = new.run()
    assert core.ends()[3].reason is FinishReason.FAILED
    assert "cannot go on with this request" in core.ends()[3].error
    assert core.ends()[4].reason is FinishReason.LENGTH


def test_restored_requests_with_output_come_first() -> None:
    new = NewScheduler()
    new.restore(admit_message(1, max_tokens=9), admit_message(2, max_tokens=9), _2=(500,))
    while new.core.step():
        waiting = scheduler_of(new.core)._state._queue
        if len(waiting) == 2:
            assert [each.request_id for each in waiting.head(2)] == [2, 1]
            break
    new.run()


# Requests admitted again, and unconfirmed ends.


class UnconfirmingCore:
    """A core whose detokenizer confirms no end by itself."""

    def __init__(self) -> None:
        self.core = Core(0, device=StubDevice(60, 4))
        self.core.confirm_nothing()


def sent_histories(core: Core) -> list[detokenizer.Histories]:
    return [message for message in core.detokenizer.messages if isinstance(message, detokenizer.Histories)]


def test_request_admitted_again_has_its_history_sent_again() -> None:
    core = UnconfirmingCore().core
    core.scheduler.tell(admit_message(1, max_tokens=30))
    step_until(core, lambda: len(core.outputs().get(1, ())) >= 3)
    core.detokenizer.take()
    scheduler_of(core).handle(admit_message(1, max_tokens=30))
    step_until(core, lambda: sent_histories(core))
    (told,) = sent_histories(core)
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
    core = UnconfirmingCore().core
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
def test_ended_stream_is_not_computed(is_ended: bool) -> None:
    core = UnconfirmingCore().core
    core.scheduler.tell(admit_message(1, max_tokens=30))
    step_until(core, lambda: running(core) == 1)
    scheduler_of(core).handle(Closed((RequestId(1),), is_ended))
    assert is_live(core, 1) is not is_ended, "one that had no stream may be heard yet"
    finish(core)


def test_stream_ended_before_its_admission_is_not_computed() -> None:
    """The request was still in the mailbox when the earlier scheduler died."""
    new = NewScheduler()
    for message in (admit_message(5), Closed((RequestId(5),))):
        new.core.scheduler.tell(message)
    new.restore()
    core = new.run()
    assert core.device.steps == 0
    assert scheduler_of(core).request_count == 0


@pytest.mark.parametrize("is_waiting", [True, False])
def test_reused_request_id_gets_no_blocks_or_tokens_of_its_first_use(
    is_waiting: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """An id is admitted again while blocks, or a token, of its first use are under way."""
    core = UnconfirmingCore().core
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


def test_token_of_an_ended_request_is_not_given_to_its_successor() -> None:
    core = UnconfirmingCore().core
    core.scheduler.tell(admit_message(1, max_tokens=30))
    step_until(core, lambda: len(core.outputs().get(1, ())) == 3 and len(scheduler_of(core)._state._steps) > 0)
    scheduler_of(core).handle(Abort(RequestId(1)))
    scheduler_of(core).handle(Closed((RequestId(1),)))
    scheduler_of(core).handle(admit_message(1, max_tokens=30))
    step_until(core, core.ends)
    core.detokenizer.take()
    finish(core)
    assert core.outputs()[1] == expected_output([1, 7, 9], Sampling(max_tokens=30))[0]


class SmallMemoryDevice(WatchedDevice):
    """A device with memory for steps of at most `fits` tokens."""

    fits = 0

    def run(self, batch: StubBatch) -> StepDone:
        if sum(chunk.token_count for chunk in batch.step.chunks) > self.fits:
            raise MemoryError("the device's memory is full")
        done: StepDone = super().run(batch)
        return done


@pytest.mark.parametrize("fits", [1, 2, 7, 30])
def test_steps_that_do_not_fit_are_made_smaller_without_failures(fits: int) -> None:
    device = SmallMemoryDevice(100, 4)
    device.fits = fits
    core = Core(0, device=device)
    admit_all(core, 12)
    finish(core)
    check_outputs(core, 12)
    limits = [event for event in core.observer.messages if isinstance(event, GaveUp)]
    assert not limits
    refused = core.figures().preemptions
    assert refused <= 12 * 7, "the device is not asked again and again for what it cannot do"


def test_limit_that_fits_is_raised_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 32
    monkeypatch.setattr("cuelight.actors.scheduler.planning.STEPS_BEFORE_GROWTH", steps)
    device = SmallMemoryDevice(1000, 4)
    device.fits = 4
    core = Core(0, device=device, token_budget=64)
    admit_all(core, 4, max_tokens=steps * 3)
    step_until(core, lambda: len(device.seen) > 10)
    device.fits = 10**6
    step_until(core, lambda: len(device.seen) > steps * 2 + 20)
    core.admit(100, list(range(40)), Sampling(max_tokens=1))
    finish(core)
    assert max(sum(chunk.token_count for chunk in step.chunks) for step in device.seen) > 4


def test_single_token_that_does_not_fit_fails_its_request() -> None:
    device = SmallMemoryDevice(100, 4)
    core = Core(0, device=device)
    admit_all(core, 3)
    finish(core)
    assert [end.reason for end in core.ends().values()] == [FinishReason.FAILED] * 3
    assert "memory is full" in core.ends()[0].error


def lasting(host_slots: list[int | None] | None = None) -> WatchedDevice:
    """A device with a pool for two of the requests below, and host memory, perhaps that of an earlier device."""
    device = WatchedDevice(13, 4, host_block_count=40)
    device.host = msgspec.structs.replace(device.host, memory=5)
    device._host_slots = device._host_slots if host_slots is None else host_slots
    return device


def admit_long(core: Core, count: int) -> None:
    for request_id in range(count):
        core.admit(request_id, list(range(100 * request_id, 100 * request_id + 20)), Sampling(max_tokens=2))


@pytest.mark.parametrize("lasts", [True, False])
def test_blocks_saved_before_the_executors_death_are_loaded(lasts: bool) -> None:
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


def test_copies_of_unanswered_steps_count_as_not_made() -> None:
    """Copies that no step contains yet count as not made either."""
    core = Core(0, device=lasting())
    admit_long(core, 2)
    finish(core)
    core.executor.actor = Unresponsive()
    core.admit(7, list(range(700, 740)), Sampling(max_tokens=2))
    step_until(core, lambda: core.blocks().blocks_saved > 0 and len(scheduler_of(core)._state._steps) > 0)
    assert core.blocks().host_blocks_used > 0
    core.lose_executor("by a test", lasting(), is_killed=True)  # with empty host memory
    step_until(core, lambda: not core.blocks().host_blocks_used)
    finish(core)
    assert core.ends()[7].reason is FinishReason.LENGTH
    core.admit(8, list(range(20)), Sampling(max_tokens=1))
    finish(core)
    assert core.outputs()[8] == expected_output(list(range(20)), Sampling(max_tokens=1))[0]
