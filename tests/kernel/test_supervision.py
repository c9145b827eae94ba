"""What follows a death: who restarts, when, with which messages; who hears of it; and what ends everything."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable

import anyio
import pytest
from kernel_support import (
    BREAK,
    NET_SECONDS,
    Do,
    ManualClock,
    Note,
    Question,
    Steady,
    Troupe,
    Urgent,
    crash,
    on_each_loop,
    player,
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
"""Restarts alone; 0.05 s after the first crash."""
REST = RestartPolicy(restarts_max=10, strategy=Strategy.REST_FOR_ONE)
ALL = RestartPolicy(restarts_max=10, strategy=Strategy.ONE_FOR_ALL)


def born(*lives: str) -> list[str]:
    """What the diary has about lives that begin together."""
    return [f"{life} built" for life in lives] + [f"{life} started" for life in lives]


# The rule.


def test_each_restart_in_the_window_waits_twice_as_long_up_to_a_maximum() -> None:
    restart_policy = RestartPolicy(restarts_max=100, window_seconds=60.0, backoff_seconds=0.1, backoff_max_seconds=1.0)
    crashes: list[float] = []
    delays = [restart_delay(restart_policy, crashes, number * 0.1, Steady(0.0)) for number in range(100)]
    assert delays[:6] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert set(delays[4:]) == {1.0}


def test_a_random_part_of_up_to_a_half_is_left_out_of_a_wait() -> None:
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
        return restart_delay(restart_policy, crashes, now, Steady(0.0))

    assert [delay(0.0), delay(6.0)] == [0.1, 0.2]
    assert delay(9.9) is None
    assert delay(10.0) == 0.2  # that of 0.0 has just left
    assert delay(15.9) is None
    assert delay(30.0) == 0.1  # a long peace, and the wait is short again


def test_each_actors_crashes_are_its_own() -> None:
    restart_policy, chance = RestartPolicy(restarts_max=1), Steady(0.0)
    crashes: dict[str, list[float]] = {"a": [], "b": []}
    assert restart_delay(restart_policy, crashes["a"], 0.0, chance) is not None
    assert restart_delay(restart_policy, crashes["b"], 0.0, chance) is not None
    assert restart_delay(restart_policy, crashes["a"], 0.0, chance) is None
    assert restart_delay(RestartPolicy(), [], 0.0, chance) is None


@on_each_loop
async def test_whoever_takes_over_a_role_begins_without_the_crashes_of_another() -> None:
    once = RestartPolicy(restarts_max=1)
    troupe = Troupe(a=AGAIN)
    async with troupe.system as system:
        for _ in range(3):
            system.spawn(troupe.part("b", once))
            await troupe.pass_time(0)
            troupe.tell("b", BREAK)
            await troupe.pass_time(100)
            system.dismiss(player("b"))
            await troupe.pass_time(0)
        assert troupe.lives["b"] == 6
        assert not troupe.failures


@pytest.mark.parametrize(
    "wrong",
    [
        {"restarts_max": -1},
        {"window_seconds": 0.0},
        {"backoff_seconds": -0.1},
        {"backoff_seconds": 2.0, "backoff_max_seconds": 1.0},
    ],
)
def test_a_fate_makes_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(AssertionError):
        RestartPolicy(**wrong)


# Who restarts.


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
    troupe = Troupe(a=AGAIN, b=RestartPolicy(restarts_max=1, strategy=strategy), c=AGAIN, d=AGAIN)
    async with troupe.system as system:
        assert await troupe.pass_time(0) == born("a.1", "b.1", "c.1", "d.1")
        refs = [system.find(player(name)) for name in "abcd"]
        troupe.tell("b", BREAK)
        assert await troupe.pass_time(0.049) == [f"{life} stopped" for life in stopped]
        for name in "abcd":
            troupe.tell(name, Note(1))
        bystanders = [life for life in ("a.1", "c.1", "d.1") if life not in stopped]
        assert await troupe.pass_time(0) == [f"{life} Note 1" for life in bystanders]
        waiting = [f"{life} Note 1" for life in restarted]
        assert await troupe.pass_time(0.001) == [
            *[f"{life} built" for life in restarted],
            *[line for life in restarted for line in (f"{life} started", f"{life} Note 1")],
        ]
        assert len(waiting) + len(bystanders) == 4
        assert [system.find(player(name)) for name in "abcd"] == refs
        assert not troupe.failures
    lives = [f"{name}.{troupe.lives[name]}" for name in "dcba"]
    assert troupe.news() == [f"{life} stopped" for life in lives]
    assert troupe.clock.pending == 0


@on_each_loop
async def test_a_restart_waits_until_those_who_leave_have_left() -> None:
    """Whoever must leave finishes the message it is at, and no more; the others wait for it, however long it takes."""
    troupe = Troupe(a=AGAIN, b=REST, c=AGAIN)
    async with troupe.system:
        await troupe.pass_time(0)
        troupe.news()
        for number in range(200):  # several turns' worth
            troupe.tell("c", Note(number))
        troupe.tell("b", BREAK)
        lines = await troupe.pass_time(0.05)
        handled = lines.index("c.1 stopped")
        assert 0 < handled < 200
        assert lines[handled + 1 : handled + 4] == ["b.2 built", "c.2 built", "b.2 started"]
        notes = [line.split(" ", 1)[1] for line in lines if "Note" in line]
        assert notes == [f"Note {number}" for number in range(200)]


@on_each_loop
async def test_a_life_is_told_of_from_its_beginning_to_its_end() -> None:
    troupe = Troupe(a=AGAIN, b=ALL)
    async with troupe.system:
        await troupe.pass_time(0)
        troupe.tell("b", BREAK)
        await troupe.pass_time(0.05)
    lives = [event for event in troupe.events if not isinstance(event, Delivered)]
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
    assert len(set(seeds)) == 4  # each life has its own chance


# Killing.


@on_each_loop
async def test_a_killed_life_ends_as_a_crash_between_two_messages() -> None:
    troupe = Troupe(a=AGAIN, b=REST, c=AGAIN)
    async with troupe.system as system:
        troupe.tell("a", Do(lambda context: context.watch(player("b"))))
        await troupe.pass_time(0)
        troupe.news()
        troupe.tell("a", Do(lambda context: context.kill(player("b"), "too slow")))
        for number in range(3):
            troupe.tell("b", Note(number))
        assert await troupe.pass_time(0) == ["a.1 hears that b crashed and restarts", "c.1 stopped"]
        lines = [f"b.2 Note {number}" for number in range(3)]
        assert await troupe.pass_time(0.05) == ["b.2 built", "c.2 built", "b.2 started", *lines, "c.2 started"]
        heard = [event.message for event in troupe.events if isinstance(event, Delivered) and event.sender == "b"]
        assert heard == [Terminated("b", "actor 'b' died: it was killed: too slow", True, ExitCause.KILLED, "a")]
        assert system.statistics()["b"].dropped == 0
        assert not troupe.failures


@on_each_loop
async def test_an_actor_that_kills_itself_handles_no_more_in_this_life() -> None:
    troupe = Troupe(a=AGAIN)
    async with troupe.system:
        await troupe.pass_time(0)
        troupe.news()
        suicide = Do(lambda context: [context.kill(player("a"), "enough"), context.ref.tell(Note(2))])
        troupe.tell("a", Note(0), suicide, Note(1))
        assert await troupe.pass_time(0.05) == ["a.1 Note 0", "a.2 built", "a.2 started", "a.2 Note 1", "a.2 Note 2"]


@on_each_loop
async def test_what_follows_a_kill_is_said_in_the_fate() -> None:
    troupe = Troupe(a=AGAIN, b=RestartPolicy(restarts_max=1))
    with pytest.raises(ActorCrashed, match="actor 'b' died: it was killed: once more"):
        async with troupe.system as system:
            await troupe.pass_time(0)
            system.kill(player("b"), "once")
            system.kill(player("b"), "which it does not hear any more")
            assert await troupe.pass_time(0.05) == born("b.2")
            system.kill(player("b"), "once more")
            await asyncio.Event().wait()
    assert [str(crash) for crash in troupe.failures] == ["actor 'b' died: it was killed: once more"]
    assert [(crash.cause, crash.killed_by) for crash in troupe.failures] == [(ExitCause.KILLED, "")]


@on_each_loop
async def test_where_no_life_is_lived_there_is_nobody_to_kill() -> None:
    troupe = Troupe(a=AGAIN)
    async with troupe.system as system:
        await troupe.pass_time(0)
        system.kill(player("nobody"), "there is none")
        troupe.tell("a", BREAK)
        await troupe.pass_time(0)
        system.kill(player("a"), "between two lives")
        assert (await troupe.pass_time(0.05))[-1] == "a.2 started"
        system.dismiss(player("a"))
        await troupe.pass_time(0)
        system.kill(player("a"), "it has gone")
        assert not troupe.failures
    system.kill(player("a"), "all have gone")


@on_each_loop
async def test_a_killed_actors_threads_and_timers_end_with_it() -> None:
    troupe = Troupe(a=AGAIN)
    async with troupe.system as system:
        troupe.tell("a", Do(lambda context: context.after(10, Note(1))))
        await troupe.pass_time(0)
        assert troupe.clock.pending == 1
        system.kill(player("a"), "now")
        await troupe.pass_time(0.05)
        assert troupe.clock.pending == 0
        assert troupe.lives["a"] == 2


# What a restart keeps.


@on_each_loop
async def test_what_others_told_it_survives_and_the_message_it_broke_on_does_not() -> None:
    troupe = Troupe(a=AGAIN)

    def act(context: Context[object]) -> None:
        context.ref.tell(Urgent(3))
        context.ref.tell(Note(3))
        raise ValueError("broken")

    async with troupe.system as system:
        await troupe.pass_time(0)
        troupe.news()
        troupe.tell("a", Note(0), Do(act), Note(1), Urgent(1), Note(2), Urgent(2))
        assert await troupe.pass_time(0.01) == ["a.1 Urgent 1", "a.1 Urgent 2", "a.1 Note 0"]
        troupe.tell("a", Urgent(4), Note(4))
        lines = await troupe.pass_time(0.04)
        figures = system.statistics()["a"]
    assert lines[2:] == [f"a.2 {what}" for what in ("Urgent 3", "Urgent 4", "Note 1", "Note 2", "Note 3", "Note 4")]
    assert (figures.delivered, figures.dropped, figures.length) == (10, 0, 0)


@on_each_loop
async def test_the_timers_of_a_life_die_with_it() -> None:
    troupe = Troupe(a=AGAIN)

    def act(context: Context[object]) -> None:
        context.after(0.0, Note(1))
        context.after(0.0, Urgent(1))
        context.after(0.01, Note(2))
        context.after(60.0, Note(3))
        troupe.clock.advance(0.0)  # the first two wait in the mailbox now
        raise ValueError("broken")

    async with troupe.system as system:
        await troupe.pass_time(0)
        troupe.news()
        troupe.tell("a", Do(act))
        assert await troupe.pass_time(100.0) == born("a.2")
        assert system.statistics()["a"].dropped == 2
    assert troupe.clock.pending == 0


@on_each_loop
async def test_what_the_workers_of_a_life_have_to_say_dies_with_it() -> None:
    troupe = Troupe(a=AGAIN)
    begun, may_end, ran = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(NET_SECONDS)

    def act(context: Context[object]) -> None:
        """One result comes at once, one after the crash; of the third job nothing is done."""
        first, later = context.worker("first"), context.worker("later")
        first.submit(lambda: None, done=lambda _: Note(1), failed=lambda _: Note(-1))
        first.close()
        later.submit(work, done=lambda _: Note(3), failed=lambda _: Note(-1))
        later.submit(ran.set, done=lambda _: Note(4), failed=lambda _: Note(-1))
        first._thread.join(NET_SECONDS)
        if first._courier is not None:  # when this one is gone too, the loop has the result
            first._courier.join(NET_SECONDS)
        assert begun.wait(NET_SECONDS)

    async with troupe.system as system:
        await troupe.pass_time(0)
        # A turn takes 64 messages; after it the first result comes, behind the message that brings the crash.
        troupe.tell("a", Do(act), *[Note(0)] * 63, BREAK)
        lines = await troupe.pass_time(0.05)
        assert troupe.lives["a"] == 2
        dropped = system.statistics()["a"].dropped
        assert dropped == 1
        may_end.set()
        await until(lambda: "cuelight a later" not in {thread.name for thread in threading.enumerate()})
        troupe.tell("a", Note(5))
        await settle()
        assert not ran.is_set()
        assert system.statistics()["a"].dropped == dropped
        lines += troupe.news()
    assert lines == [*["a.1 Note 0"] * 63, *born("a.2"), "a.2 Note 5"]


@on_each_loop
async def test_a_question_asked_before_the_crash_is_answered_after_it() -> None:
    troupe = Troupe(a=AGAIN)
    async with troupe.system as system:
        troupe.tell("a", BREAK)
        asking = asyncio.create_task(ask(system.find(player("a")), Question, NET_SECONDS))
        await settle()
        assert not asking.done()
        troupe.clock.advance(0.05)
        assert await asking == 42


# How soon, and how often.


@on_each_loop
async def test_waits_are_those_of_the_injected_clock_and_chance() -> None:
    troupe = Troupe(a=RestartPolicy(restarts_max=5, backoff_seconds=1.0, backoff_max_seconds=5.0), chance=Steady(0.5))
    async with troupe.system:
        for wait in (0.75, 1.5, 3.0, 3.75, 3.75):
            await troupe.pass_time(0)
            troupe.news()
            troupe.tell("a", BREAK)
            assert await troupe.pass_time(wait - 0.01) == []
            assert len(await troupe.pass_time(0.01)) == 2


@on_each_loop
async def test_one_crash_too_many_in_the_window_ends_the_system() -> None:
    troupe = Troupe(sink=AGAIN, a=RestartPolicy(restarts_max=2, window_seconds=10.0, backoff_seconds=0.0))
    with pytest.raises(ActorCrashed) as caught:
        async with troupe.system:
            for pause in (6.0, 6.0, 6.0, 3.9):  # at 0, 6, 12 and 18; each time two within ten seconds
                troupe.tell("a", BREAK)
                await troupe.pass_time(pause)
            assert troupe.lives["a"] == 5
            assert not troupe.failures
            troupe.tell("a", BREAK)
            await asyncio.Event().wait()
    assert (caught.value.actor, caught.value.message_type) == ("a", "Do")
    assert troupe.failures == [caught.value]
    assert troupe.news()[-1] == "sink.1 stopped"


@on_each_loop
async def test_a_constructor_that_raises_at_a_restart_is_tried_again() -> None:
    troupe = Troupe(a=AGAIN, b=RestartPolicy(restarts_max=3, backoff_seconds=0.1))
    async with troupe.system:
        await troupe.pass_time(0)
        troupe.hooks["b built"] = crash
        troupe.tell("b", BREAK, Note(1))
        troupe.news()
        assert await troupe.pass_time(0.1) == ["b.2 built"]
        assert await troupe.pass_time(0.19) == []
        assert await troupe.pass_time(0.01) == ["b.3 built"]
        del troupe.hooks["b built"]
        assert await troupe.pass_time(0.4) == [*born("b.4"), "b.4 Note 1"]
    assert not troupe.failures


@on_each_loop
@pytest.mark.parametrize("built", [None, Actor])
async def test_a_build_that_makes_no_actor_is_a_crash_on_construction(built: object) -> None:
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
async def test_a_constructor_that_goes_on_raising_ends_the_system() -> None:
    troupe = Troupe(a=AGAIN, b=RestartPolicy(restarts_max=3, backoff_seconds=0.0))
    with pytest.raises(ActorCrashed) as caught:
        async with troupe.system:
            await troupe.pass_time(0)
            troupe.hooks["b built"] = crash
            troupe.tell("b", BREAK)
            for _ in range(3):
                await troupe.pass_time(0)
            await asyncio.Event().wait()
    assert caught.value.message_type == "construction"
    assert troupe.lives["b"] == 4
    assert troupe.news()[-1] == "a.1 stopped"


@pytest.mark.parametrize("hook", ["started", "stopped"])
@on_each_loop
async def test_a_hook_that_raises_is_a_crash_like_any(hook: str) -> None:
    troupe = Troupe(a=ALL, b=AGAIN)
    async with troupe.system:
        await troupe.pass_time(0)
        troupe.hooks[f"b {hook}"] = crash
        troupe.news()
        troupe.tell("b", BREAK) if hook == "started" else troupe.tell("a", BREAK)
        await troupe.pass_time(0.05)
        del troupe.hooks[f"b {hook}"]
        await troupe.pass_time(0.1)
        assert troupe.lives["b"] == (3 if hook == "started" else 2)
        assert troupe.diary == []
        troupe.tell("b", Note(1))
        assert await troupe.pass_time(0) == [f"b.{troupe.lives['b']} Note 1"]


# Several at once.


@on_each_loop
async def test_two_that_crash_at_once_restart_each_at_its_time() -> None:
    troupe = Troupe(
        a=RestartPolicy(restarts_max=1, backoff_seconds=0.3),
        b=AGAIN,
        c=RestartPolicy(restarts_max=1, backoff_seconds=0.1),
    )
    async with troupe.system:
        await troupe.pass_time(0)
        troupe.news()
        troupe.tell("a", BREAK, Note(1))
        troupe.tell("b", Note(1))
        troupe.tell("c", BREAK, Note(1))
        assert await troupe.pass_time(0) == ["b.1 Note 1"]
        assert await troupe.pass_time(0.1) == [*born("c.2"), "c.2 Note 1"]
        assert await troupe.pass_time(0.2) == [*born("a.2"), "a.2 Note 1"]


@on_each_loop
async def test_a_group_takes_along_one_that_waits_for_its_own_restart() -> None:
    troupe = Troupe(a=REST, b=RestartPolicy(restarts_max=3, backoff_seconds=0.02), c=AGAIN)
    async with troupe.system:
        await troupe.pass_time(0)
        troupe.news()
        troupe.tell("b", BREAK, Note(1))
        await settle()
        troupe.tell("a", BREAK)
        assert await troupe.pass_time(0.02) == ["c.1 stopped"]
        assert await troupe.pass_time(0.03) == [
            *["a.2 built", "b.2 built", "c.2 built"],
            *["a.2 started", "b.2 started", "b.2 Note 1", "c.2 started"],
        ]
        assert await troupe.pass_time(100) == []


@pytest.mark.parametrize("first", ["a", "c"])
@on_each_loop
async def test_the_crash_of_one_that_restarts_anyway_changes_nothing(first: str) -> None:
    """Of two that crash in one turn of the loop, that restart each other."""
    limit = RestartPolicy(restarts_max=1, strategy=Strategy.ONE_FOR_ALL)
    troupe = Troupe(**dict.fromkeys("abc" if first == "a" else "cba", limit))
    async with troupe.system:
        await troupe.pass_time(0)
        troupe.news()
        troupe.tell("a", BREAK)
        troupe.tell("c", BREAK)
        assert await troupe.pass_time(0.04) == ["b.1 stopped"]
        lines = await troupe.pass_time(0.01)
        assert sorted(lines) == sorted(born("a.2", "b.2", "c.2"))
        assert await troupe.pass_time(100) == []
        assert not troupe.failures


@on_each_loop
async def test_one_that_breaks_while_it_leaves_comes_back_with_the_others() -> None:
    troupe = Troupe(a=ALL, b=RestartPolicy(), c=RestartPolicy())
    troupe.hooks["c stopped"] = crash
    async with troupe.system:
        await troupe.pass_time(0)
        troupe.news()
        troupe.tell("a", BREAK)
        assert await troupe.pass_time(0) == ["c.1 stopped", "b.1 stopped"]
        del troupe.hooks["c stopped"]
        assert await troupe.pass_time(0.05) == born("a.2", "b.2", "c.2")
        assert not troupe.failures


@on_each_loop
async def test_a_group_whose_first_constructor_raises_waits_for_it() -> None:
    troupe = Troupe(a=ALL, b=AGAIN, c=AGAIN)
    async with troupe.system:
        await troupe.pass_time(0)
        troupe.hooks["a built"] = crash
        troupe.news()
        troupe.tell("a", BREAK)
        assert await troupe.pass_time(0.05) == ["c.1 stopped", "b.1 stopped", "a.2 built"]
        del troupe.hooks["a built"]
        assert await troupe.pass_time(0.1) == born("a.3", "b.2", "c.2")
        assert await troupe.pass_time(100) == []


@on_each_loop
async def test_the_others_of_a_group_do_not_wait_for_a_constructor_that_fails_alone() -> None:
    troupe = Troupe(a=ALL, b=RestartPolicy(restarts_max=1, backoff_seconds=1.0), c=AGAIN)
    async with troupe.system:
        await troupe.pass_time(0)
        troupe.hooks["b built"] = crash
        troupe.news()
        troupe.tell("a", BREAK)
        lines = await troupe.pass_time(0.05)
        assert lines[2:] == ["a.2 built", "b.2 built", "c.2 built", "a.2 started", "c.2 started"]
        del troupe.hooks["b built"]
        assert await troupe.pass_time(1.0) == born("b.3")


@on_each_loop
async def test_a_restart_that_is_under_way_is_overtaken_by_one_of_more() -> None:
    """While a new life is still being made ready elsewhere, its sink crashes: it must leave again, and come back."""
    troupe = Troupe(sink=REST, far=RestartPolicy())
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

    playing = Role("far", Note | Urgent, 10)
    cast = [troupe.part("sink", REST), ActorSpec(playing, build, AGAIN, OnThread())]
    clock, events = ManualClock(), troupe.events
    system = System(cast, clock=clock, chance=Steady(0.0), tap=events.append)

    def lives(kind: type[Started] | type[Ended]) -> list[str]:
        return [f"{event.actor}.{event.life}" for event in events if isinstance(event, kind)]

    async with system:
        system.find(playing).tell(Urgent(1))
        await until(lambda: clock.pending == 1)
        clock.advance(0.05)
        await until(lambda: len(builds) == 2)
        system.find(player("sink")).tell(BREAK)
        await until(lambda: "sink.1" in lives(Ended))
        await settle()
        clock.advance(0.05)  # had it not to wait for the other's constructor, it would begin now
        await settle()
        assert lives(Started) == ["sink.1", "far.1", "far.2"]
        may_be_built.release()
        await until(leaves.is_set)
        await settle()
        assert clock.pending == 0  # it is waited for
        may_leave.set()
        await until(lambda: "far.2" in lives(Ended) and clock.pending == 1)
        may_be_built.release()
        clock.advance(0.05)
        await until(lambda: lives(Started)[-2:] == ["sink.2", "far.3"])
        system.find(playing).tell(Note(1))
        await until(lambda: isinstance(events[-1], Delivered) and events[-1].message == Note(1))
    assert lives(Ended) == ["far.1", "sink.1", "far.2", "far.3", "sink.2"]
    assert system.failure is None


# Restarts, and those who are to stop.


@pytest.mark.parametrize("drop", [False, True])
@on_each_loop
async def test_who_waits_for_its_restart_when_the_system_stops_does_not_come_back(drop: bool) -> None:
    troupe = Troupe(a=AGAIN, b=AGAIN, c=AGAIN)
    await troupe.system.start()
    troupe.tell("b", BREAK, Note(1), Note(2))
    await troupe.pass_time(0)
    troupe.news()
    await troupe.system.stop(drop=drop)
    assert troupe.news() == ["c.1 stopped", "a.1 stopped"]
    assert troupe.system.statistics()["b"].dropped == 2
    assert troupe.clock.pending == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


@on_each_loop
async def test_nobody_restarts_in_a_system_that_stops() -> None:
    """Neither who crashes over its last messages, nor who has already stopped in order."""
    troupe = Troupe(a=AGAIN, b=ALL, c=AGAIN)
    troupe.hooks["c stopped"] = lambda context: context.find(player("b")).tell(BREAK)
    async with troupe.system:
        troupe.tell("a", Note(1))
    lines = troupe.news()
    assert [line for line in lines if "stopped" in line] == ["c.1 stopped", "a.1 stopped"]
    assert "a.1 Note 1" in lines
    assert troupe.lives == {"a": 1, "b": 1, "c": 1}
    assert not troupe.failures
    assert troupe.clock.pending == 0


@on_each_loop
async def test_one_that_crashes_before_its_turn_to_stop_does_not_hold_up_the_end() -> None:
    """The mailbox of `a` is still open when it crashes: `b` has yet to stop."""
    troupe = Troupe(a=AGAIN, b=AGAIN)
    troupe.hooks["b stopped"] = lambda context: context.find(player("a")).tell(BREAK)
    system = troupe.system
    await system.start()
    for number in range(200):
        troupe.tell("b", Note(number))
    troupe.tell("a", BREAK, Note(1))
    stopping = asyncio.create_task(system.stop())
    await settle()
    assert stopping.done()
    assert troupe.lives == {"a": 1, "b": 1}
    assert system.statistics()["a"].dropped == 2
    assert troupe.clock.pending == 0


@on_each_loop
async def test_one_that_is_dismissed_while_it_waits_for_its_restart_is_gone() -> None:
    troupe = Troupe(a=AGAIN, b=AGAIN)
    async with troupe.system as system:
        await troupe.pass_time(0)
        troupe.tell("b", BREAK, Note(1))
        await settle()
        troupe.news()
        ref = system.find(player("b"))
        system.dismiss(player("b"))
        assert ref.is_stopped
        with pytest.raises(KeyError):
            system.find(player("b"))
        system.spawn(troupe.part("b")).tell(Note(2))  # its role is free, and has nothing of the old one
        assert await troupe.pass_time(100) == [*born("b.2"), "b.2 Note 2"]
        ref.tell(Note(3))
        assert await troupe.pass_time(0) == []


@on_each_loop
async def test_one_that_is_dismissed_while_its_group_restarts_handles_what_waits_for_it() -> None:
    troupe = Troupe(a=ALL, b=AGAIN)
    async with troupe.system as system:
        await troupe.pass_time(0)
        troupe.news()
        troupe.hooks["b stopped"] = lambda context: context.dismiss(player("b"))
        troupe.tell("a", BREAK)
        troupe.tell("b", *[Note(0)] * 100)
        lines = await troupe.pass_time(0.05)
        assert lines.count("b.1 Note 0") + lines.count("b.2 Note 0") == 100
        assert lines[-1] == "b.2 stopped"
        assert list(system.statistics()) == ["a"]


@on_each_loop
async def test_one_that_is_dismissed_as_soon_as_it_has_left_for_a_restart_is_gone() -> None:
    troupe = Troupe(x=AGAIN, a=REST, b=AGAIN, c=AGAIN)
    dismiss = Do(lambda context: context.dismiss(player("b")))
    troupe.hooks["b stopped"] = lambda context: context.find(player("x")).tell(dismiss)
    async with troupe.system as system:
        await troupe.pass_time(0)
        troupe.news()
        troupe.tell("a", BREAK)
        assert await troupe.pass_time(0.05) == ["c.1 stopped", "b.1 stopped", *born("a.2", "c.2")]
        assert list(system.statistics()) == ["x", "a", "c"]
    assert not troupe.failures


@pytest.mark.parametrize("restart_policy", [AGAIN, RestartPolicy()])
@on_each_loop
async def test_a_crash_over_the_last_messages_of_one_that_is_dismissed(restart_policy: RestartPolicy) -> None:
    """It does not come back; and where its restart policy ends the system, that it is."""
    troupe = Troupe(a=AGAIN)
    system = troupe.system
    await system.start()
    system.spawn(troupe.part("b", restart_policy))
    await troupe.pass_time(0)
    troupe.tell("b", *[Note(0)] * 100, BREAK, Note(1))
    system.dismiss(player("b"))
    await troupe.pass_time(100)
    assert troupe.lives["b"] == 1
    assert bool(troupe.failures) == (restart_policy is not AGAIN)
    if restart_policy is AGAIN:
        assert list(system.statistics()) == ["a"]
    await system.stop()


@pytest.mark.parametrize("phase", ["crash", "wait", "leave"])
@on_each_loop
async def test_the_opener_may_be_cancelled_at_any_moment_of_a_restart(phase: str) -> None:
    for turns in range(25):
        troupe = Troupe(a=ALL, b=AGAIN, c=AGAIN)
        wait = {"crash": 0.0, "wait": 1000.0, "leave": 0.05}[phase]

        async def use(troupe: Troupe, wait: float) -> None:
            async with troupe.system:
                troupe.tell("c", *[Note(0)] * 500)
                troupe.tell("a", BREAK)
                await troupe.pass_time(wait)
                await asyncio.Event().wait()

        opener = asyncio.create_task(use(troupe, wait))
        for _ in range(5 * turns):
            await asyncio.sleep(0)
        opener.cancel()
        await asyncio.wait([opener])
        assert opener.cancelled()
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
        assert troupe.clock.pending == 0
        assert not troupe.failures
        began, ended = (
            [(event.actor, event.life) for event in troupe.events if isinstance(event, kind)]
            for kind in (Started, Ended)
        )
        assert sorted(began) == sorted(ended)


# The end of everything.


@on_each_loop
async def test_the_body_is_cancelled_and_hears_why() -> None:
    troupe = Troupe(a=RestartPolicy(), b=RestartPolicy())
    bodies: list[str] = []
    with pytest.raises(ActorCrashed) as caught:
        async with troupe.system as system:
            await troupe.pass_time(0)
            troupe.tell("a", BREAK)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                bodies.append("cancelled")
                raise
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # this task is not to be cancelled again
    assert bodies == ["cancelled"]
    assert system.failure is caught.value
    assert troupe.failures == [caught.value]
    assert troupe.news()[-1] == "b.1 stopped"
    await system.stop()  # harmless
    assert troupe.failures == [caught.value]


@on_each_loop
async def test_a_crash_while_it_opens_reaches_the_body_too() -> None:
    troupe = Troupe(a=RestartPolicy(), b=RestartPolicy())
    troupe.hooks["a started"] = crash
    with pytest.raises(ActorCrashed):
        async with troupe.system:
            await asyncio.Event().wait()
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@on_each_loop
async def test_a_body_that_has_ended_hears_of_a_crash_over_the_last_messages() -> None:
    troupe = Troupe(a=RestartPolicy())
    ended = False
    with pytest.raises(ActorCrashed) as caught:
        async with troupe.system:
            troupe.tell("a", BREAK)
            ended = True
    assert ended
    assert troupe.failures == [caught.value]
    assert asyncio.current_task().cancelling() == 0


@on_each_loop
async def test_an_error_of_the_bodys_own_is_not_hidden() -> None:
    troupe = Troupe(a=RestartPolicy())
    with pytest.raises(ZeroDivisionError):
        async with troupe.system as system:
            troupe.tell("a", BREAK)
            try:
                await asyncio.Event().wait()
            finally:
                raise ZeroDivisionError
    assert troupe.failures == [system.failure]
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0)


@on_each_loop
async def test_a_body_that_does_not_let_itself_be_cancelled_hears_of_it_at_its_end() -> None:
    troupe = Troupe(a=RestartPolicy())
    with pytest.raises(ActorCrashed):
        async with troupe.system:
            troupe.tell("a", BREAK)
            with pytest.raises(asyncio.CancelledError):
                await asyncio.Event().wait()
            await asyncio.sleep(0)
    assert asyncio.current_task().cancelling() == 0


@pytest.mark.parametrize("turns", range(8))
@on_each_loop
async def test_somebody_else_cancels_the_body_as_well(turns: int) -> None:
    """Before, with or after the crash: whoever cancels a task finds it cancelled."""
    troupe = Troupe(a=RestartPolicy())

    async def use() -> None:
        async with troupe.system:
            troupe.tell("a", BREAK)
            await asyncio.Event().wait()

    opener = asyncio.create_task(use())
    await until(lambda: bool(troupe.events))
    for _ in range(turns):
        await asyncio.sleep(0)
    was_crash_first = bool(troupe.failures)
    opener.cancel()
    await asyncio.wait([opener])
    assert opener.cancelled() or was_crash_first
    assert asyncio.all_tasks() == {asyncio.current_task()}


@on_each_loop
async def test_a_cancelled_body_stays_cancelled_when_its_actors_crash_at_the_end() -> None:
    troupe = Troupe(a=RestartPolicy())
    troupe.hooks["a stopped"] = crash
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            async with troupe.system:
                await asyncio.Event().wait()
    assert len(troupe.failures) == 1
    assert asyncio.current_task().cancelling() == 0


def _plain() -> object:
    return asyncio.timeout(None)


@pytest.mark.parametrize("around", [_plain, asyncio.TaskGroup, anyio.CancelScope, anyio.create_task_group])
@on_each_loop
async def test_a_crash_is_heard_through_whatever_the_body_waits_in(around: Callable[[], object]) -> None:
    troupe = Troupe(a=RestartPolicy())
    with pytest.raises(ActorCrashed):
        async with troupe.system:
            troupe.tell("a", BREAK)
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
async def test_of_two_systems_each_tells_of_its_own_crash() -> None:
    outer, inner = Troupe(a=RestartPolicy()), Troupe(b=RestartPolicy())
    with pytest.raises(ActorCrashed) as caught:
        async with outer.system, inner.system:
            outer.tell("a", BREAK)
            await asyncio.Event().wait()
    assert caught.value is outer.system.failure
    assert inner.system.failure is None
    assert inner.news()[-1] == "b.1 stopped"
    outer, inner = Troupe(a=RestartPolicy()), Troupe(b=RestartPolicy())
    with pytest.raises(ActorCrashed):
        async with outer.system:
            with pytest.raises(ActorCrashed) as caught:
                async with inner.system:
                    inner.tell("b", BREAK)
                    await asyncio.Event().wait()
            assert caught.value is inner.system.failure
            outer.tell("a", BREAK)
            await asyncio.Event().wait()
    assert asyncio.current_task().cancelling() == 0


@on_each_loop
async def test_whoever_starts_and_stops_by_hand_is_told_and_not_cancelled() -> None:
    troupe = Troupe(a=RestartPolicy(), b=RestartPolicy())
    system = troupe.system
    await system.start()
    troupe.tell("a", BREAK)
    troupe.tell("b", BREAK)  # told once, though both crash
    await until(lambda: bool(troupe.failures))
    await settle()
    assert [failure.actor for failure in troupe.failures] == ["a"]
    assert system.failure is troupe.failures[0]
    assert system.find(player("b")).is_stopped
    await system.stop()
    await system.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}


# Death watch.


def watching(name: str) -> Do:
    """Have an actor watch another."""
    return Do(lambda context: context.watch(player(name)))


@on_each_loop
async def test_a_crash_is_told_to_all_who_watch_after_all_that_was_said() -> None:
    troupe = Troupe(a=AGAIN, b=AGAIN, c=AGAIN)

    def act(context: Context[object]) -> None:
        context.find(player("a")).tell(Note(1))
        raise ValueError("last words")

    async with troupe.system:
        troupe.tell("a", watching("b"), watching("b"))  # twice is once
        troupe.tell("c", watching("b"))
        await troupe.pass_time(0)
        troupe.news()
        troupe.tell("b", Do(act))
        assert sorted(await troupe.pass_time(0.05)) == sorted(
            [
                "a.1 Note 1",
                "a.1 hears that b crashed and restarts",
                "c.1 hears that b crashed and restarts",
                *born("b.2"),
            ]
        )
        told = [event for event in troupe.events if isinstance(event, Delivered) and event.actor == "a"]
    assert [event.sender for event in told] == ["", "", "b", "b"]
    assert told[-1].message.error == "actor 'b' crashed on Do: ValueError('last words')"


@on_each_loop
async def test_a_watch_outlives_the_restarts_of_both() -> None:
    troupe = Troupe(a=AGAIN, b=AGAIN)
    async with troupe.system as system:
        troupe.tell("a", watching("b"))
        for _ in range(3):
            troupe.tell("b", BREAK)
            await troupe.pass_time(10)
        troupe.tell("a", BREAK)
        await settle()
        troupe.tell("b", BREAK)  # while the watcher waits for its own restart
        await settle()
        troupe.news()
        assert "a.2 hears that b crashed and restarts" in await troupe.pass_time(10)
        system.dismiss(player("b"))
        lines = await troupe.pass_time(0)
    assert lines == ["b.5 stopped", "a.2 hears that b stopped and is gone"]


@on_each_loop
async def test_those_who_leave_and_come_back_with_others_are_watched_too() -> None:
    troupe = Troupe(w=AGAIN, a=REST, b=AGAIN)
    async with troupe.system:
        troupe.tell("w", watching("a"), watching("b"))
        await troupe.pass_time(0)
        troupe.news()
        troupe.tell("a", BREAK)
        lines = await troupe.pass_time(0.05)
    assert [line for line in lines if "hears" in line] == [
        "w.1 hears that a crashed and restarts",
        "w.1 hears that b stopped and restarts",
    ]


@on_each_loop
async def test_one_that_will_not_come_back_is_gone_to_its_watchers() -> None:
    troupe = Troupe(a=AGAIN)
    system = troupe.system
    async with system:
        for name, last in (("orderly", Note(0)), ("broken", BREAK)):
            system.spawn(troupe.part(name, AGAIN))
            troupe.tell("a", watching(name))
            await settle()
            troupe.tell(name, last)
            system.dismiss(player(name))
            await settle()
        system.spawn(troupe.part("waiting", AGAIN))
        troupe.tell("a", watching("waiting"))
        await settle()
        troupe.tell("waiting", BREAK)
        await settle()
        system.dismiss(player("waiting"))
        lines = await troupe.pass_time(100)
    assert [line for line in lines if "hears" in line] == [
        "a.1 hears that orderly stopped and is gone",
        "a.1 hears that broken crashed and is gone",
        "a.1 hears that waiting crashed and restarts",
        "a.1 hears that waiting stopped and is gone",
    ]


@on_each_loop
async def test_a_sink_hears_of_its_sources_end_and_who_watches_late_hears_at_once() -> None:
    troupe = Troupe(a=RestartPolicy(), b=RestartPolicy(), c=RestartPolicy())
    troupe.hooks["b stopped"] = lambda context: context.find(player("a")).tell(watching("c"))
    async with troupe.system:
        troupe.tell("a", watching("b"))
    lines = [line for line in troupe.news() if "hears" in line or "stopped" in line]
    assert lines == [
        "c.1 stopped",
        "b.1 stopped",
        "a.1 hears that b stopped and is gone",
        "a.1 hears that c stopped and is gone",
        "a.1 stopped",
    ]


@on_each_loop
async def test_a_watcher_that_is_gone_is_told_nothing() -> None:
    troupe = Troupe(a=AGAIN)
    async with troupe.system as system:
        system.spawn(troupe.part("w"))
        troupe.tell("w", watching("a"))
        await settle()
        system.dismiss(player("w"))
        await settle()
        troupe.news()
        system.spawn(troupe.part("w"))  # of the same name, and it has not asked
        troupe.tell("a", BREAK)
        assert sorted(await troupe.pass_time(0.05)) == sorted([*born("w.2"), *born("a.2")])
        troupe.tell("w", watching("a"))
        await settle()
    assert system.statistics()["w"].dropped == 0  # it stopped first, and was not told of the other's end


@on_each_loop
async def test_a_system_forgets_watchers_that_are_gone() -> None:
    troupe = Troupe(a=AGAIN)
    async with troupe.system as system:
        for number in range(10):
            system.spawn(troupe.part(f"w{number}"))
            troupe.tell(f"w{number}", watching("a"))
        await settle()
        for number in range(10):
            system.dismiss(player(f"w{number}"))
        await settle()
        assert not system._slots["a"].watchers
        for number in range(10):
            system.spawn(troupe.part(f"w{number}"))
            troupe.tell("a", watching(f"w{number}"))
        await settle()
        for number in range(10):
            system.dismiss(player(f"w{number}"))
        await settle()
        assert not system._slots["a"].watched


@on_each_loop
async def test_who_may_watch_whom() -> None:
    troupe = Troupe(a=RestartPolicy())
    errors: list[BaseException] = []

    class Deaf(Actor[Do]):
        def __init__(self, context: Context[object]) -> None:
            self._context = context

        def handle(self, message: Do) -> None:
            message.action(self._context)

    def attempt(name: str) -> Do:
        def act(context: Context[object]) -> None:
            with pytest.raises((KeyError, NotAccepted)) as caught:
                context.watch(player(name))
            errors.append(caught.value)

        return Do(act)

    deaf = Role("deaf", Do, 10)
    async with troupe.system as system:
        system.spawn(ActorSpec(deaf, Deaf)).tell(attempt("a"))
        troupe.tell("a", attempt("nobody"))
        await settle()
    assert [type(error) for error in errors] == [NotAccepted, KeyError]
    assert "deaf" in str(errors[0])
