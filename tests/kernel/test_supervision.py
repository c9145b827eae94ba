"""Crashes: which actors restart, when and with which messages; notifications; and the end of the system."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable

import anyio
import pytest
from kernel_support import (
    CRASH,
    NET_SECONDS,
    ConstantRandom,
    Do,
    ManualClock,
    Note,
    Question,
    SystemHarness,
    Urgent,
    crash,
    on_each_loop,
    role_of,
    settle,
    until,
)

from cuelight.kernel import (
    Actor,
    ActorCrashed,
    ActorSpec,
    Context,
    Delivered,
    Ended,
    ExitCause,
    NotAccepted,
    OnThread,
    RestartPolicy,
    Role,
    Started,
    Strategy,
    System,
    Terminated,
    ask,
)
from cuelight.kernel.supervision import restart_delay

AGAIN = RestartPolicy(restarts_max=10)
"""Restarts the actor alone, 0.05 s after its first crash."""
REST = RestartPolicy(restarts_max=10, strategy=Strategy.REST_FOR_ONE)
ALL = RestartPolicy(restarts_max=10, strategy=Strategy.ONE_FOR_ALL)


def start_lines(*lives: str) -> list[str]:
    """Return the log lines of lives that start together."""
    return [f"{life} built" for life in lives] + [f"{life} started" for life in lives]


# Restart delays.


def test_backoff_doubles_in_the_window_up_to_a_maximum() -> None:
    restart_policy = RestartPolicy(restarts_max=100, window_seconds=60.0, backoff_seconds=0.1, backoff_max_seconds=1.0)
    crashes: list[float] = []
    delays = [restart_delay(restart_policy, crashes, number * 0.1, ConstantRandom(0.0)) for number in range(100)]
    assert delays[:6] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert set(delays[4:]) == {1.0}


def test_jitter_shortens_the_backoff_by_up_to_half() -> None:
    restart_policy = RestartPolicy(restarts_max=1000, backoff_seconds=1.0, backoff_max_seconds=1.0)
    chance, same = random.Random(3), random.Random(3)
    crashes: list[float] = []
    delays = [restart_delay(restart_policy, crashes, 0.0, chance) for _ in range(1000)]
    assert delays == [1 - same.random() / 2 for _ in range(1000)]
    assert 0.5 < min(delays) < 0.51
    assert 0.99 < max(delays) <= 1.0


def test_old_crashes_leave_the_window() -> None:
    restart_policy = RestartPolicy(restarts_max=2, window_seconds=10.0, backoff_seconds=0.1)
    crashes: list[float] = []

    def delay(now: float) -> float | None:
        return restart_delay(restart_policy, crashes, now, ConstantRandom(0.0))

    assert [delay(0.0), delay(6.0)] == [0.1, 0.2]
    assert delay(9.9) is None
    assert delay(10.0) == 0.2  # the crash at 0.0 has left the window
    assert delay(15.9) is None
    assert delay(30.0) == 0.1  # no crash in the window, so the backoff is the first one


def test_crashes_are_counted_per_actor() -> None:
    restart_policy, chance = RestartPolicy(restarts_max=1), ConstantRandom(0.0)
    crashes: dict[str, list[float]] = {"a": [], "b": []}
    assert restart_delay(restart_policy, crashes["a"], 0.0, chance) is not None
    assert restart_delay(restart_policy, crashes["b"], 0.0, chance) is not None
    assert restart_delay(restart_policy, crashes["a"], 0.0, chance) is None
    assert restart_delay(RestartPolicy(), [], 0.0, chance) is None


@on_each_loop
async def test_new_actor_of_a_role_starts_without_earlier_crashes() -> None:
    once = RestartPolicy(restarts_max=1)
    harness = SystemHarness(a=AGAIN)
    async with harness.system as system:
        for _ in range(3):
            system.spawn(harness.part("b", once))
            await harness.pass_time(0)
            harness.tell("b", CRASH)
            await harness.pass_time(100)
            system.dismiss(role_of("b"))
            await harness.pass_time(0)
        assert harness.lives["b"] == 6
        assert not harness.failures


@pytest.mark.parametrize(
    "wrong",
    [
        {"restarts_max": -1},
        {"window_seconds": 0.0},
        {"backoff_seconds": -0.1},
        {"backoff_seconds": 2.0, "backoff_max_seconds": 1.0},
    ],
)
def test_invalid_restart_policy_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(AssertionError):
        RestartPolicy(**wrong)


# Restart strategies.


@pytest.mark.parametrize(
    ("strategy", "stopped", "restarted"),
    [
        (Strategy.ONE_FOR_ONE, [], ["b.2"]),
        (Strategy.REST_FOR_ONE, ["d.1", "c.1"], ["b.2", "c.2", "d.2"]),
        (Strategy.ONE_FOR_ALL, ["d.1", "c.1", "a.1"], ["a.2", "b.2", "c.2", "d.2"]),
    ],
)
@on_each_loop
async def test_a_crash_restarts_those_of_its_strategy(
    strategy: Strategy, stopped: list[str], restarted: list[str]
) -> None:
    harness = SystemHarness(a=AGAIN, b=RestartPolicy(restarts_max=1, strategy=strategy), c=AGAIN, d=AGAIN)
    async with harness.system as system:
        assert await harness.pass_time(0) == start_lines("a.1", "b.1", "c.1", "d.1")
        refs = [system.find(role_of(name)) for name in "abcd"]
        harness.tell("b", CRASH)
        assert await harness.pass_time(0.049) == [f"{life} stopped" for life in stopped]
        for name in "abcd":
            harness.tell(name, Note(1))
        bystanders = [life for life in ("a.1", "c.1", "d.1") if life not in stopped]
        assert await harness.pass_time(0) == [f"{life} Note 1" for life in bystanders]
        waiting = [f"{life} Note 1" for life in restarted]
        assert await harness.pass_time(0.001) == [
            *[f"{life} built" for life in restarted],
            *[line for life in restarted for line in (f"{life} started", f"{life} Note 1")],
        ]
        assert len(waiting) + len(bystanders) == 4
        assert [system.find(role_of(name)) for name in "abcd"] == refs
        assert not harness.failures
    lives = [f"{name}.{harness.lives[name]}" for name in "dcba"]
    assert harness.new_lines() == [f"{life} stopped" for life in lives]
    assert harness.clock.pending == 0


@on_each_loop
async def test_group_restart_waits_until_all_lives_have_ended() -> None:
    """A leaving actor finishes only its current message; the restart of the group waits for it."""
    harness = SystemHarness(a=AGAIN, b=REST, c=AGAIN)
    async with harness.system:
        await harness.pass_time(0)
        harness.new_lines()
        for number in range(200):  # enough for several turns
            harness.tell("c", Note(number))
        harness.tell("b", CRASH)
        lines = await harness.pass_time(0.05)
        handled = lines.index("c.1 stopped")
        assert 0 < handled < 200
        assert lines[handled + 1 : handled + 4] == ["b.2 built", "c.2 built", "b.2 started"]
        notes = [line.split(" ", 1)[1] for line in lines if "Note" in line]
        assert notes == [f"Note {number}" for number in range(200)]


@on_each_loop
async def test_tap_receives_start_and_end_of_each_life() -> None:
    harness = SystemHarness(a=AGAIN, b=ALL)
    async with harness.system:
        await harness.pass_time(0)
        harness.tell("b", CRASH)
        await harness.pass_time(0.05)
    lives = [event for event in harness.events if not isinstance(event, Delivered)]
    kinds = [(type(event), event.actor, event.life, event.seconds) for event in lives]
    assert kinds == [
        (Started, "a", 1, 0.0),
        (Started, "b", 1, 0.0),
        (Ended, "b", 1, 0.0),
        (Ended, "a", 1, 0.0),
        (Started, "a", 2, 0.05),
        (Started, "b", 2, 0.05),
        (Ended, "b", 2, 0.05),
        (Ended, "a", 2, 0.05),
    ]
    errors = [event.error for event in lives if isinstance(event, Ended)]
    assert errors == ["actor 'b' crashed on Do: ValueError('broken')", "", "", ""]
    seeds = [event.seed for event in lives if isinstance(event, Started)]
    assert len(set(seeds)) == 4  # each life has a seed of its own


# Killing.


@on_each_loop
async def test_a_killed_life_ends_as_a_crash_between_two_messages() -> None:
    harness = SystemHarness(a=AGAIN, b=REST, c=AGAIN)
    async with harness.system as system:
        harness.tell("a", Do(lambda context: context.watch(role_of("b"))))
        await harness.pass_time(0)
        harness.new_lines()
        harness.tell("a", Do(lambda context: context.kill(role_of("b"), "too slow")))
        for number in range(3):
            harness.tell("b", Note(number))
        assert await harness.pass_time(0) == ["a.1 is notified that b crashed and restarts", "c.1 stopped"]
        lines = [f"b.2 Note {number}" for number in range(3)]
        assert await harness.pass_time(0.05) == ["b.2 built", "c.2 built", "b.2 started", *lines, "c.2 started"]
        received = [event.message for event in harness.events if isinstance(event, Delivered) and event.sender == "b"]
        assert received == [Terminated("b", "actor 'b' died: it was killed: too slow", True, ExitCause.KILLED, "a")]
        assert system.statistics()["b"].dropped == 0
        assert not harness.failures


@on_each_loop
async def test_actor_that_kills_itself_handles_no_more_messages_in_this_life() -> None:
    harness = SystemHarness(a=AGAIN)
    async with harness.system:
        await harness.pass_time(0)
        harness.new_lines()
        suicide = Do(lambda context: [context.kill(role_of("a"), "enough"), context.ref.tell(Note(2))])
        harness.tell("a", Note(0), suicide, Note(1))
        assert await harness.pass_time(0.05) == ["a.1 Note 0", "a.2 built", "a.2 started", "a.2 Note 1", "a.2 Note 2"]


@on_each_loop
async def test_restart_policy_applies_to_a_kill() -> None:
    harness = SystemHarness(a=AGAIN, b=RestartPolicy(restarts_max=1))
    with pytest.raises(ActorCrashed, match="actor 'b' died: it was killed: once more"):
        async with harness.system as system:
            await harness.pass_time(0)
            system.kill(role_of("b"), "once")
            system.kill(role_of("b"), "which it does not hear any more")
            assert await harness.pass_time(0.05) == start_lines("b.2")
            system.kill(role_of("b"), "once more")
            await asyncio.Event().wait()
    assert [str(crash) for crash in harness.failures] == ["actor 'b' died: it was killed: once more"]
    assert [(crash.cause, crash.killed_by) for crash in harness.failures] == [(ExitCause.KILLED, "")]


@on_each_loop
async def test_kill_without_a_running_life_is_ignored() -> None:
    harness = SystemHarness(a=AGAIN)
    async with harness.system as system:
        await harness.pass_time(0)
        system.kill(role_of("nobody"), "there is none")
        harness.tell("a", CRASH)
        await harness.pass_time(0)
        system.kill(role_of("a"), "between two lives")
        assert (await harness.pass_time(0.05))[-1] == "a.2 started"
        system.dismiss(role_of("a"))
        await harness.pass_time(0)
        system.kill(role_of("a"), "it has gone")
        assert not harness.failures
    system.kill(role_of("a"), "all have gone")


@on_each_loop
async def test_a_killed_actors_threads_and_timers_end_with_it() -> None:
    harness = SystemHarness(a=AGAIN)
    async with harness.system as system:
        harness.tell("a", Do(lambda context: context.after(10, Note(1))))
        await harness.pass_time(0)
        assert harness.clock.pending == 1
        system.kill(role_of("a"), "now")
        await harness.pass_time(0.05)
        assert harness.clock.pending == 0
        assert harness.lives["a"] == 2


# State kept over a restart.


@on_each_loop
async def test_mailbox_survives_a_crash_and_the_message_in_hand_does_not() -> None:
    harness = SystemHarness(a=AGAIN)

    def act(context: Context[object]) -> None:
        context.ref.tell(Urgent(3))
        context.ref.tell(Note(3))
        raise ValueError("broken")

    async with harness.system as system:
        await harness.pass_time(0)
        harness.new_lines()
        harness.tell("a", Note(0), Do(act), Note(1), Urgent(1), Note(2), Urgent(2))
        assert await harness.pass_time(0.01) == ["a.1 Urgent 1", "a.1 Urgent 2", "a.1 Note 0"]
        harness.tell("a", Urgent(4), Note(4))
        lines = await harness.pass_time(0.04)
        figures = system.statistics()["a"]
    assert lines[2:] == [f"a.2 {what}" for what in ("Urgent 3", "Urgent 4", "Note 1", "Note 2", "Note 3", "Note 4")]
    assert (figures.delivered, figures.dropped, figures.length) == (10, 0, 0)


@on_each_loop
async def test_timers_of_a_life_end_with_it() -> None:
    harness = SystemHarness(a=AGAIN)

    def act(context: Context[object]) -> None:
        context.after(0.0, Note(1))
        context.after(0.0, Urgent(1))
        context.after(0.01, Note(2))
        context.after(60.0, Note(3))
        harness.clock.advance(0.0)  # the first two messages are in the mailbox now
        raise ValueError("broken")

    async with harness.system as system:
        await harness.pass_time(0)
        harness.new_lines()
        harness.tell("a", Do(act))
        assert await harness.pass_time(100.0) == start_lines("a.2")
        assert system.statistics()["a"].dropped == 2
    assert harness.clock.pending == 0


@on_each_loop
async def test_worker_results_of_a_life_end_with_it() -> None:
    harness = SystemHarness(a=AGAIN)
    begun, may_end, ran = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(NET_SECONDS)

    def act(context: Context[object]) -> None:
        """One result arrives before the crash and one after it; the third job is not started."""
        first, later = context.worker("first"), context.worker("later")
        first.submit(lambda: None, done=lambda _: Note(1), failed=lambda _: Note(-1))
        first.close()
        later.submit(work, done=lambda _: Note(3), failed=lambda _: Note(-1))
        later.submit(ran.set, done=lambda _: Note(4), failed=lambda _: Note(-1))
        first._thread.join(NET_SECONDS)
        if first._courier is not None:  # once the courier is None, the loop has the result
            first._courier.join(NET_SECONDS)
        assert begun.wait(NET_SECONDS)

    async with harness.system as system:
        await harness.pass_time(0)
        # A turn handles 64 messages; the first result arrives after it, behind the message that crashes the actor.
        harness.tell("a", Do(act), *[Note(0)] * 63, CRASH)
        lines = await harness.pass_time(0.05)
        assert harness.lives["a"] == 2
        dropped = system.statistics()["a"].dropped
        assert dropped == 1
        may_end.set()
        await until(lambda: "cuelight a later" not in {thread.name for thread in threading.enumerate()})
        harness.tell("a", Note(5))
        await settle()
        assert not ran.is_set()
        assert system.statistics()["a"].dropped == dropped
        lines += harness.new_lines()
    assert lines == [*["a.1 Note 0"] * 63, *start_lines("a.2"), "a.2 Note 5"]


@on_each_loop
async def test_a_question_asked_before_the_crash_is_answered_after_it() -> None:
    harness = SystemHarness(a=AGAIN)
    async with harness.system as system:
        harness.tell("a", CRASH)
        asking = asyncio.create_task(ask(system.find(role_of("a")), Question, NET_SECONDS))
        await settle()
        assert not asking.done()
        harness.clock.advance(0.05)
        assert await asking == 42


# Backoff and limits.


@on_each_loop
async def test_backoff_uses_the_injected_clock_and_rng() -> None:
    harness = SystemHarness(
        a=RestartPolicy(restarts_max=5, backoff_seconds=1.0, backoff_max_seconds=5.0), chance=ConstantRandom(0.5)
    )
    async with harness.system:
        for wait in (0.75, 1.5, 3.0, 3.75, 3.75):
            await harness.pass_time(0)
            harness.new_lines()
            harness.tell("a", CRASH)
            assert await harness.pass_time(wait - 0.01) == []
            assert len(await harness.pass_time(0.01)) == 2


@on_each_loop
async def test_more_than_restarts_max_crashes_in_the_window_end_the_system() -> None:
    harness = SystemHarness(sink=AGAIN, a=RestartPolicy(restarts_max=2, window_seconds=10.0, backoff_seconds=0.0))
    with pytest.raises(ActorCrashed) as caught:
        async with harness.system:
            for pause in (6.0, 6.0, 6.0, 3.9):  # crashes at 0, 6, 12 and 18: two within any ten seconds
                harness.tell("a", CRASH)
                await harness.pass_time(pause)
            assert harness.lives["a"] == 5
            assert not harness.failures
            harness.tell("a", CRASH)
            await asyncio.Event().wait()
    assert (caught.value.actor, caught.value.message_type) == ("a", "Do")
    assert harness.failures == [caught.value]
    assert harness.new_lines()[-1] == "sink.1 stopped"


@on_each_loop
async def test_raising_constructor_at_a_restart_is_retried() -> None:
    harness = SystemHarness(a=AGAIN, b=RestartPolicy(restarts_max=3, backoff_seconds=0.1))
    async with harness.system:
        await harness.pass_time(0)
        harness.hooks["b built"] = crash
        harness.tell("b", CRASH, Note(1))
        harness.new_lines()
        assert await harness.pass_time(0.1) == ["b.2 built"]
        assert await harness.pass_time(0.19) == []
        assert await harness.pass_time(0.01) == ["b.3 built"]
        del harness.hooks["b built"]
        assert await harness.pass_time(0.4) == [*start_lines("b.4"), "b.4 Note 1"]
    assert not harness.failures


@on_each_loop
@pytest.mark.parametrize("built", [None, Actor])
async def test_build_that_returns_no_actor_is_a_crash_on_construction(built: object) -> None:
    system = System([ActorSpec(Role[Note]("a", Note, capacity=1), lambda _: built)])  # type: ignore[arg-type, return-value]
    with pytest.raises(ActorCrashed, match="'a' must return an actor, not ") as caught:
        await system.start()
    assert caught.value.message_type == "construction"


@on_each_loop
async def test_a_system_is_stopped_in_its_own_loop() -> None:
    system = System([])
    await system.start()
    with pytest.raises(RuntimeError, match="the event loop in which it was started"):
        await asyncio.to_thread(asyncio.run, system.stop())
    await system.stop()


@on_each_loop
async def test_constructor_that_keeps_raising_ends_the_system() -> None:
    harness = SystemHarness(a=AGAIN, b=RestartPolicy(restarts_max=3, backoff_seconds=0.0))
    with pytest.raises(ActorCrashed) as caught:
        async with harness.system:
            await harness.pass_time(0)
            harness.hooks["b built"] = crash
            harness.tell("b", CRASH)
            for _ in range(3):
                await harness.pass_time(0)
            await asyncio.Event().wait()
    assert caught.value.message_type == "construction"
    assert harness.lives["b"] == 4
    assert harness.new_lines()[-1] == "a.1 stopped"


@pytest.mark.parametrize("hook", ["started", "stopped"])
@on_each_loop
async def test_raising_hook_is_restarted_as_a_crash(hook: str) -> None:
    harness = SystemHarness(a=ALL, b=AGAIN)
    async with harness.system:
        await harness.pass_time(0)
        harness.hooks[f"b {hook}"] = crash
        harness.new_lines()
        harness.tell("b", CRASH) if hook == "started" else harness.tell("a", CRASH)
        await harness.pass_time(0.05)
        del harness.hooks[f"b {hook}"]
        await harness.pass_time(0.1)
        assert harness.lives["b"] == (3 if hook == "started" else 2)
        assert harness.log == []
        harness.tell("b", Note(1))
        assert await harness.pass_time(0) == [f"b.{harness.lives['b']} Note 1"]


# Simultaneous crashes.


@on_each_loop
async def test_simultaneous_crashes_restart_each_after_its_backoff() -> None:
    harness = SystemHarness(
        a=RestartPolicy(restarts_max=1, backoff_seconds=0.3),
        b=AGAIN,
        c=RestartPolicy(restarts_max=1, backoff_seconds=0.1),
    )
    async with harness.system:
        await harness.pass_time(0)
        harness.new_lines()
        harness.tell("a", CRASH, Note(1))
        harness.tell("b", Note(1))
        harness.tell("c", CRASH, Note(1))
        assert await harness.pass_time(0) == ["b.1 Note 1"]
        assert await harness.pass_time(0.1) == [*start_lines("c.2"), "c.2 Note 1"]
        assert await harness.pass_time(0.2) == [*start_lines("a.2"), "a.2 Note 1"]


@on_each_loop
async def test_group_restart_includes_an_actor_already_waiting_for_its_restart() -> None:
    harness = SystemHarness(a=REST, b=RestartPolicy(restarts_max=3, backoff_seconds=0.02), c=AGAIN)
    async with harness.system:
        await harness.pass_time(0)
        harness.new_lines()
        harness.tell("b", CRASH, Note(1))
        await settle()
        harness.tell("a", CRASH)
        assert await harness.pass_time(0.02) == ["c.1 stopped"]
        assert await harness.pass_time(0.03) == [
            *["a.2 built", "b.2 built", "c.2 built"],
            *["a.2 started", "b.2 started", "b.2 Note 1", "c.2 started"],
        ]
        assert await harness.pass_time(100) == []


@pytest.mark.parametrize("first", ["a", "c"])
@on_each_loop
async def test_second_crash_in_a_restarting_group_changes_nothing(first: str) -> None:
    """Two actors of one group crash in the same turn of the loop."""
    limit = RestartPolicy(restarts_max=1, strategy=Strategy.ONE_FOR_ALL)
    harness = SystemHarness(**dict.fromkeys("abc" if first == "a" else "cba", limit))
    async with harness.system:
        await harness.pass_time(0)
        harness.new_lines()
        harness.tell("a", CRASH)
        harness.tell("c", CRASH)
        assert await harness.pass_time(0.04) == ["b.1 stopped"]
        lines = await harness.pass_time(0.01)
        assert sorted(lines) == sorted(start_lines("a.2", "b.2", "c.2"))
        assert await harness.pass_time(100) == []
        assert not harness.failures


@on_each_loop
async def test_actor_that_crashes_while_leaving_restarts_with_its_group() -> None:
    harness = SystemHarness(a=ALL, b=RestartPolicy(), c=RestartPolicy())
    harness.hooks["c stopped"] = crash
    async with harness.system:
        await harness.pass_time(0)
        harness.new_lines()
        harness.tell("a", CRASH)
        assert await harness.pass_time(0) == ["c.1 stopped", "b.1 stopped"]
        del harness.hooks["c stopped"]
        assert await harness.pass_time(0.05) == start_lines("a.2", "b.2", "c.2")
        assert not harness.failures


@on_each_loop
async def test_group_waits_for_its_first_constructor_to_succeed() -> None:
    harness = SystemHarness(a=ALL, b=AGAIN, c=AGAIN)
    async with harness.system:
        await harness.pass_time(0)
        harness.hooks["a built"] = crash
        harness.new_lines()
        harness.tell("a", CRASH)
        assert await harness.pass_time(0.05) == ["c.1 stopped", "b.1 stopped", "a.2 built"]
        del harness.hooks["a built"]
        assert await harness.pass_time(0.1) == start_lines("a.3", "b.2", "c.2")
        assert await harness.pass_time(100) == []


@on_each_loop
async def test_group_does_not_wait_for_a_later_constructor_that_fails_alone() -> None:
    harness = SystemHarness(a=ALL, b=RestartPolicy(restarts_max=1, backoff_seconds=1.0), c=AGAIN)
    async with harness.system:
        await harness.pass_time(0)
        harness.hooks["b built"] = crash
        harness.new_lines()
        harness.tell("a", CRASH)
        lines = await harness.pass_time(0.05)
        assert lines[2:] == ["a.2 built", "b.2 built", "c.2 built", "a.2 started", "c.2 started"]
        del harness.hooks["b built"]
        assert await harness.pass_time(1.0) == start_lines("b.3")


@on_each_loop
async def test_restart_under_way_joins_a_larger_group_restart() -> None:
    """The sink crashes while the placed actor is being built: that life must end, and another one start."""
    harness = SystemHarness(sink=REST, far=RestartPolicy())
    builds: list[threading.Event] = []
    may_be_built = threading.Semaphore(1)
    leaves, may_leave = threading.Event(), threading.Event()

    class Far(Actor[Note | Urgent]):
        def handle(self, message: Note | Urgent) -> None:
            if isinstance(message, Urgent):
                raise ValueError("broken")

        def stopped(self) -> None:
            leaves.set()
            may_leave.wait(NET_SECONDS)

    def build(_: Context[object]) -> Far:
        builds.append(threading.Event())
        assert may_be_built.acquire(timeout=NET_SECONDS)
        return Far()

    actor_role = Role("far", Note | Urgent, 10)
    cast = [harness.part("sink", REST), ActorSpec(actor_role, build, AGAIN, OnThread())]
    clock, events = ManualClock(), harness.events
    system = System(cast, clock=clock, chance=ConstantRandom(0.0), tap=events.append)

    def lives(kind: type[Started] | type[Ended]) -> list[str]:
        return [f"{event.actor}.{event.life}" for event in events if isinstance(event, kind)]

    async with system:
        system.find(actor_role).tell(Urgent(1))
        await until(lambda: clock.pending == 1)
        clock.advance(0.05)
        await until(lambda: len(builds) == 2)
        system.find(role_of("sink")).tell(CRASH)
        await until(lambda: "sink.1" in lives(Ended))
        await settle()
        clock.advance(0.05)  # would start now if it did not wait for the constructor
        await settle()
        assert lives(Started) == ["sink.1", "far.1", "far.2"]
        may_be_built.release()
        await until(leaves.is_set)
        await settle()
        assert clock.pending == 0  # the restart waits for it
        may_leave.set()
        await until(lambda: "far.2" in lives(Ended) and clock.pending == 1)
        may_be_built.release()
        clock.advance(0.05)
        await until(lambda: lives(Started)[-2:] == ["sink.2", "far.3"])
        system.find(actor_role).tell(Note(1))
        await until(lambda: isinstance(events[-1], Delivered) and events[-1].message == Note(1))
    assert lives(Ended) == ["far.1", "sink.1", "far.2", "far.3", "sink.2"]
    assert system.failure is None


# Restarts and stops.


@pytest.mark.parametrize("drop", [False, True])
@on_each_loop
async def test_actor_waiting_for_its_restart_does_not_restart_after_stop(drop: bool) -> None:
    harness = SystemHarness(a=AGAIN, b=AGAIN, c=AGAIN)
    await harness.system.start()
    harness.tell("b", CRASH, Note(1), Note(2))
    await harness.pass_time(0)
    harness.new_lines()
    await harness.system.stop(drop=drop)
    assert harness.new_lines() == ["c.1 stopped", "a.1 stopped"]
    assert harness.system.statistics()["b"].dropped == 2
    assert harness.clock.pending == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


@on_each_loop
async def test_no_actor_restarts_in_a_stopping_system() -> None:
    """Neither an actor that crashes while draining, nor one that has already stopped in order."""
    harness = SystemHarness(a=AGAIN, b=ALL, c=AGAIN)
    harness.hooks["c stopped"] = lambda context: context.find(role_of("b")).tell(CRASH)
    async with harness.system:
        harness.tell("a", Note(1))
    lines = harness.new_lines()
    assert [line for line in lines if "stopped" in line] == ["c.1 stopped", "a.1 stopped"]
    assert "a.1 Note 1" in lines
    assert harness.lives == {"a": 1, "b": 1, "c": 1}
    assert not harness.failures
    assert harness.clock.pending == 0


@on_each_loop
async def test_actor_that_crashes_before_its_turn_to_stop_does_not_delay_the_stop() -> None:
    """The mailbox of `a` is still open when it crashes, since `b` has not stopped."""
    harness = SystemHarness(a=AGAIN, b=AGAIN)
    harness.hooks["b stopped"] = lambda context: context.find(role_of("a")).tell(CRASH)
    system = harness.system
    await system.start()
    for number in range(200):
        harness.tell("b", Note(number))
    harness.tell("a", CRASH, Note(1))
    stopping = asyncio.create_task(system.stop())
    await settle()
    assert stopping.done()
    assert harness.lives == {"a": 1, "b": 1}
    assert system.statistics()["a"].dropped == 2
    assert harness.clock.pending == 0


@on_each_loop
async def test_actor_dismissed_while_waiting_for_its_restart_is_removed() -> None:
    harness = SystemHarness(a=AGAIN, b=AGAIN)
    async with harness.system as system:
        await harness.pass_time(0)
        harness.tell("b", CRASH, Note(1))
        await settle()
        harness.new_lines()
        ref = system.find(role_of("b"))
        system.dismiss(role_of("b"))
        assert ref.is_stopped
        with pytest.raises(KeyError):
            system.find(role_of("b"))
        system.spawn(harness.part("b")).tell(Note(2))  # the role is free, without messages of the old actor
        assert await harness.pass_time(100) == [*start_lines("b.2"), "b.2 Note 2"]
        ref.tell(Note(3))
        assert await harness.pass_time(0) == []


@on_each_loop
async def test_actor_dismissed_while_its_group_restarts_handles_its_mailbox() -> None:
    harness = SystemHarness(a=ALL, b=AGAIN)
    async with harness.system as system:
        await harness.pass_time(0)
        harness.new_lines()
        harness.hooks["b stopped"] = lambda context: context.dismiss(role_of("b"))
        harness.tell("a", CRASH)
        harness.tell("b", *[Note(0)] * 100)
        lines = await harness.pass_time(0.05)
        assert lines.count("b.1 Note 0") + lines.count("b.2 Note 0") == 100
        assert lines[-1] == "b.2 stopped"
        assert list(system.statistics()) == ["a"]


@on_each_loop
async def test_actor_dismissed_after_leaving_for_a_restart_is_removed() -> None:
    harness = SystemHarness(x=AGAIN, a=REST, b=AGAIN, c=AGAIN)
    dismiss = Do(lambda context: context.dismiss(role_of("b")))
    harness.hooks["b stopped"] = lambda context: context.find(role_of("x")).tell(dismiss)
    async with harness.system as system:
        await harness.pass_time(0)
        harness.new_lines()
        harness.tell("a", CRASH)
        assert await harness.pass_time(0.05) == ["c.1 stopped", "b.1 stopped", *start_lines("a.2", "c.2")]
        assert list(system.statistics()) == ["x", "a", "c"]
    assert not harness.failures


@pytest.mark.parametrize("restart_policy", [AGAIN, RestartPolicy()])
@on_each_loop
async def test_dismissed_actor_that_crashes_while_draining_does_not_restart(restart_policy: RestartPolicy) -> None:
    """The actor does not restart; where its restart policy ends the system, the system ends."""
    harness = SystemHarness(a=AGAIN)
    system = harness.system
    await system.start()
    system.spawn(harness.part("b", restart_policy))
    await harness.pass_time(0)
    harness.tell("b", *[Note(0)] * 100, CRASH, Note(1))
    system.dismiss(role_of("b"))
    await harness.pass_time(100)
    assert harness.lives["b"] == 1
    assert bool(harness.failures) == (restart_policy is not AGAIN)
    if restart_policy is AGAIN:
        assert list(system.statistics()) == ["a"]
    await system.stop()


@pytest.mark.parametrize("phase", ["crash", "wait", "leave"])
@on_each_loop
async def test_the_opener_may_be_cancelled_at_any_moment_of_a_restart(phase: str) -> None:
    for turns in range(25):
        harness = SystemHarness(a=ALL, b=AGAIN, c=AGAIN)
        wait = {"crash": 0.0, "wait": 1000.0, "leave": 0.05}[phase]

        async def use(harness: SystemHarness, wait: float) -> None:
            async with harness.system:
                harness.tell("c", *[Note(0)] * 500)
                harness.tell("a", CRASH)
                await harness.pass_time(wait)
                await asyncio.Event().wait()

        opener = asyncio.create_task(use(harness, wait))
        for _ in range(5 * turns):
            await asyncio.sleep(0)
        opener.cancel()
        await asyncio.wait([opener])
        assert opener.cancelled()
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
        assert harness.clock.pending == 0
        assert not harness.failures
        began, ended = (
            [(event.actor, event.life) for event in harness.events if isinstance(event, kind)]
            for kind in (Started, Ended)
        )
        assert sorted(began) == sorted(ended)


# The end of the system.


@on_each_loop
async def test_body_is_cancelled_with_the_cause() -> None:
    harness = SystemHarness(a=RestartPolicy(), b=RestartPolicy())
    bodies: list[str] = []
    with pytest.raises(ActorCrashed) as caught:
        async with harness.system as system:
            await harness.pass_time(0)
            harness.tell("a", CRASH)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                bodies.append("cancelled")
                raise
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # this task must not be cancelled again
    assert bodies == ["cancelled"]
    assert system.failure is caught.value
    assert harness.failures == [caught.value]
    assert harness.new_lines()[-1] == "b.1 stopped"
    await system.stop()  # harmless
    assert harness.failures == [caught.value]


@on_each_loop
async def test_crash_while_opening_reaches_the_body() -> None:
    harness = SystemHarness(a=RestartPolicy(), b=RestartPolicy())
    harness.hooks["a started"] = crash
    with pytest.raises(ActorCrashed):
        async with harness.system:
            await asyncio.Event().wait()
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@on_each_loop
async def test_crash_while_draining_is_raised_after_the_body() -> None:
    harness = SystemHarness(a=RestartPolicy())
    ended = False
    with pytest.raises(ActorCrashed) as caught:
        async with harness.system:
            harness.tell("a", CRASH)
            ended = True
    assert ended
    assert harness.failures == [caught.value]
    assert asyncio.current_task().cancelling() == 0


@on_each_loop
async def test_error_of_the_body_is_raised() -> None:
    harness = SystemHarness(a=RestartPolicy())
    with pytest.raises(ZeroDivisionError):
        async with harness.system as system:
            harness.tell("a", CRASH)
            try:
                await asyncio.Event().wait()
            finally:
                raise ZeroDivisionError
    assert harness.failures == [system.failure]
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0)


@on_each_loop
async def test_crash_is_raised_at_the_end_of_a_body_that_suppresses_cancellation() -> None:
    harness = SystemHarness(a=RestartPolicy())
    with pytest.raises(ActorCrashed):
        async with harness.system:
            harness.tell("a", CRASH)
            with pytest.raises(asyncio.CancelledError):
                await asyncio.Event().wait()
            await asyncio.sleep(0)
    assert asyncio.current_task().cancelling() == 0


@pytest.mark.parametrize("turns", range(8))
@on_each_loop
async def test_cancellation_from_outside_beside_a_crash_is_kept(turns: int) -> None:
    """A cancellation before, with or after the crash takes effect."""
    harness = SystemHarness(a=RestartPolicy())

    async def use() -> None:
        async with harness.system:
            harness.tell("a", CRASH)
            await asyncio.Event().wait()

    opener = asyncio.create_task(use())
    await until(lambda: bool(harness.events))
    for _ in range(turns):
        await asyncio.sleep(0)
    was_crash_first = bool(harness.failures)
    opener.cancel()
    await asyncio.wait([opener])
    assert opener.cancelled() or was_crash_first
    assert asyncio.all_tasks() == {asyncio.current_task()}


@on_each_loop
async def test_a_cancelled_body_stays_cancelled_when_its_actors_crash_at_the_end() -> None:
    harness = SystemHarness(a=RestartPolicy())
    harness.hooks["a stopped"] = crash
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            async with harness.system:
                await asyncio.Event().wait()
    assert len(harness.failures) == 1
    assert asyncio.current_task().cancelling() == 0


def _plain() -> object:
    return asyncio.timeout(None)


@pytest.mark.parametrize("around", [_plain, asyncio.TaskGroup, anyio.CancelScope, anyio.create_task_group])
@on_each_loop
async def test_crash_is_raised_through_every_kind_of_scope(around: Callable[[], object]) -> None:
    harness = SystemHarness(a=RestartPolicy())
    with pytest.raises(ActorCrashed):
        async with harness.system:
            harness.tell("a", CRASH)
            scope = around()
            if isinstance(scope, anyio.CancelScope):
                with scope:
                    await anyio.sleep_forever()
            else:
                async with scope:
                    await anyio.sleep_forever()
    assert asyncio.current_task().cancelling() == 0
    await anyio.lowlevel.checkpoint()


@on_each_loop
async def test_nested_systems_report_their_own_crashes() -> None:
    outer, inner = SystemHarness(a=RestartPolicy()), SystemHarness(b=RestartPolicy())
    with pytest.raises(ActorCrashed) as caught:
        async with outer.system, inner.system:
            outer.tell("a", CRASH)
            await asyncio.Event().wait()
    assert caught.value is outer.system.failure
    assert inner.system.failure is None
    assert inner.new_lines()[-1] == "b.1 stopped"
    outer, inner = SystemHarness(a=RestartPolicy()), SystemHarness(b=RestartPolicy())
    with pytest.raises(ActorCrashed):
        async with outer.system:
            with pytest.raises(ActorCrashed) as caught:
                async with inner.system:
                    inner.tell("b", CRASH)
                    await asyncio.Event().wait()
            assert caught.value is inner.system.failure
            outer.tell("a", CRASH)
            await asyncio.Event().wait()
    assert asyncio.current_task().cancelling() == 0


@on_each_loop
async def test_opener_that_starts_and_stops_by_hand_is_not_cancelled() -> None:
    harness = SystemHarness(a=RestartPolicy(), b=RestartPolicy())
    system = harness.system
    await system.start()
    harness.tell("a", CRASH)
    harness.tell("b", CRASH)  # reported once, though both crash
    await until(lambda: bool(harness.failures))
    await settle()
    assert [failure.actor for failure in harness.failures] == ["a"]
    assert system.failure is harness.failures[0]
    assert system.find(role_of("b")).is_stopped
    await system.stop()
    await system.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}


# Death watch.


def watching(name: str) -> Do:
    """Return an action that watches another actor."""
    return Do(lambda context: context.watch(role_of(name)))


@on_each_loop
async def test_all_watchers_receive_a_crash_after_all_earlier_messages() -> None:
    harness = SystemHarness(a=AGAIN, b=AGAIN, c=AGAIN)

    def act(context: Context[object]) -> None:
        context.find(role_of("a")).tell(Note(1))
        raise ValueError("last words")

    async with harness.system:
        harness.tell("a", watching("b"), watching("b"))  # a second watch has no effect
        harness.tell("c", watching("b"))
        await harness.pass_time(0)
        harness.new_lines()
        harness.tell("b", Do(act))
        assert sorted(await harness.pass_time(0.05)) == sorted(
            [
                "a.1 Note 1",
                "a.1 is notified that b crashed and restarts",
                "c.1 is notified that b crashed and restarts",
                *start_lines("b.2"),
            ]
        )
        told = [event for event in harness.events if isinstance(event, Delivered) and event.actor == "a"]
    assert [event.sender for event in told] == ["", "", "b", "b"]
    assert told[-1].message.error == "actor 'b' crashed on Do: ValueError('last words')"


@on_each_loop
async def test_watch_outlives_restarts_of_both_actors() -> None:
    harness = SystemHarness(a=AGAIN, b=AGAIN)
    async with harness.system as system:
        harness.tell("a", watching("b"))
        for _ in range(3):
            harness.tell("b", CRASH)
            await harness.pass_time(10)
        harness.tell("a", CRASH)
        await settle()
        harness.tell("b", CRASH)  # while the watcher waits for its own restart
        await settle()
        harness.new_lines()
        assert "a.2 is notified that b crashed and restarts" in await harness.pass_time(10)
        system.dismiss(role_of("b"))
        lines = await harness.pass_time(0)
    assert lines == ["b.5 stopped", "a.2 is notified that b stopped and does not restart"]


@on_each_loop
async def test_watchers_are_notified_of_group_restarts() -> None:
    harness = SystemHarness(w=AGAIN, a=REST, b=AGAIN)
    async with harness.system:
        harness.tell("w", watching("a"), watching("b"))
        await harness.pass_time(0)
        harness.new_lines()
        harness.tell("a", CRASH)
        lines = await harness.pass_time(0.05)
    assert [line for line in lines if "notified" in line] == [
        "w.1 is notified that a crashed and restarts",
        "w.1 is notified that b stopped and restarts",
    ]


@on_each_loop
async def test_watchers_are_notified_of_a_final_end() -> None:
    harness = SystemHarness(a=AGAIN)
    system = harness.system
    async with system:
        for name, last in (("orderly", Note(0)), ("broken", CRASH)):
            system.spawn(harness.part(name, AGAIN))
            harness.tell("a", watching(name))
            await settle()
            harness.tell(name, last)
            system.dismiss(role_of(name))
            await settle()
        system.spawn(harness.part("waiting", AGAIN))
        harness.tell("a", watching("waiting"))
        await settle()
        harness.tell("waiting", CRASH)
        await settle()
        system.dismiss(role_of("waiting"))
        lines = await harness.pass_time(100)
    assert [line for line in lines if "notified" in line] == [
        "a.1 is notified that orderly stopped and does not restart",
        "a.1 is notified that broken crashed and does not restart",
        "a.1 is notified that waiting crashed and restarts",
        "a.1 is notified that waiting stopped and does not restart",
    ]


@on_each_loop
async def test_late_watcher_is_notified_at_once() -> None:
    harness = SystemHarness(a=RestartPolicy(), b=RestartPolicy(), c=RestartPolicy())
    harness.hooks["b stopped"] = lambda context: context.find(role_of("a")).tell(watching("c"))
    async with harness.system:
        harness.tell("a", watching("b"))
    lines = [line for line in harness.new_lines() if "notified" in line or "stopped" in line]
    assert lines == [
        "c.1 stopped",
        "b.1 stopped",
        "a.1 is notified that b stopped and does not restart",
        "a.1 is notified that c stopped and does not restart",
        "a.1 stopped",
    ]


@on_each_loop
async def test_ended_watcher_receives_nothing() -> None:
    harness = SystemHarness(a=AGAIN)
    async with harness.system as system:
        system.spawn(harness.part("w"))
        harness.tell("w", watching("a"))
        await settle()
        system.dismiss(role_of("w"))
        await settle()
        harness.new_lines()
        system.spawn(harness.part("w"))  # same name, without a watch
        harness.tell("a", CRASH)
        assert sorted(await harness.pass_time(0.05)) == sorted([*start_lines("w.2"), *start_lines("a.2")])
        harness.tell("w", watching("a"))
        await settle()
    assert system.statistics()["w"].dropped == 0  # stopped first, so it was not notified of the other's end


@on_each_loop
async def test_ended_watchers_are_released() -> None:
    harness = SystemHarness(a=AGAIN)
    async with harness.system as system:
        for number in range(10):
            system.spawn(harness.part(f"w{number}"))
            harness.tell(f"w{number}", watching("a"))
        await settle()
        for number in range(10):
            system.dismiss(role_of(f"w{number}"))
        await settle()
        assert not system._slots["a"].watchers
        for number in range(10):
            system.spawn(harness.part(f"w{number}"))
            harness.tell("a", watching(f"w{number}"))
        await settle()
        for number in range(10):
            system.dismiss(role_of(f"w{number}"))
        await settle()
        assert not system._slots["a"].watched


@on_each_loop
async def test_invalid_watches_are_refused() -> None:
    harness = SystemHarness(a=RestartPolicy())
    errors: list[BaseException] = []

    class NoteOnly(Actor[Do]):
        def __init__(self, context: Context[object]) -> None:
            self._context = context

        def handle(self, message: Do) -> None:
            message.action(self._context)

    def attempt(name: str) -> Do:
        def act(context: Context[object]) -> None:
            with pytest.raises((KeyError, NotAccepted)) as caught:
                context.watch(role_of(name))
            errors.append(caught.value)

        return Do(act)

    note_only = Role("note_only", Do, 10)
    async with harness.system as system:
        system.spawn(ActorSpec(note_only, NoteOnly)).tell(attempt("a"))
        harness.tell("a", attempt("nobody"))
        await settle()
    assert [type(error) for error in errors] == [NotAccepted, KeyError]
    assert "note_only" in str(errors[0])
