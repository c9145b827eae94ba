"""Watchdogs on peers. The time that a peer may take to answer is derived from its recent answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from cuelight.kernel import Timer

FACTOR: Final = 10.0
"""Time that a peer may take, as a multiple of the longest of its recent answers."""

RECENT_ANSWERS: Final = 64

LOOK_SECONDS: Final = 0.001
"""Least seconds between two checks, so that a remainder rounded to 0 does not repeat the timer at once."""

ANSWER_SECONDS: Final = 30.0
"""Least seconds that the cache manager may take; a later answer is logged as an error."""

STEP_SECONDS: Final = 5.0
"""Least seconds that the executor may take for a step; after that it is replaced, if it can be killed."""

FIRST_STEP_SECONDS: Final = 15.0
"""Least seconds that an executor may take for its first step, which may compile kernels or capture graphs."""

START_SECONDS: Final = 30.0
"""Least seconds that an executor may take to start in place of a lost one."""

REPORT_SECONDS: Final = 300.0
"""Seconds that an executor may take for its first report, or for a start if no earlier start was measured."""


CACHE: Final = "cache manager"
EXECUTOR: Final = "executor"
REPORT: Final = "executor whose state was requested"
START: Final = "executor that replaces a lost one"


class _WatchedQuestion(NamedTuple):
    asked_at: float
    size: int


class _WatchedAnswer(NamedTuple):
    seconds: float
    size: int


class Watchdog:
    """One peer's unanswered questions. One timer runs while there are any; it is not reset for each of them.

    The size of a question is in units of work, such as tokens; a larger question than those measured may take longer in
    proportion. A peer may always take `least_seconds`. For the first answer it may take `first_seconds`, or `FACTOR`
    times its load time if that is more. `fixed_seconds` replaces all of these.
    """

    def __init__(
        self,
        wake_after: Callable[[float], Timer],
        least_seconds: float,
        first_seconds: float,
        fixed_seconds: float | None = None,
    ) -> None:
        self._wake_after = wake_after
        self._least_seconds = least_seconds
        self._first_seconds = self._least_first_seconds = first_seconds
        self._fixed_seconds = fixed_seconds
        self._asked: deque[_WatchedQuestion] = deque()
        self._answers: deque[_WatchedAnswer] = deque(maxlen=RECENT_ANSWERS)
        self._longest: _WatchedAnswer | None = None
        self._answered_at = 0.0
        self._timer: Timer | None = None
        self._due = 0.0

    def asked(self, now: float, size: int = 1) -> None:
        """Note that a question of this size was sent."""
        self._asked.append(_WatchedQuestion(now, size))
        if self._timer is None:
            self._wake(now, self._limit(size))

    def answered(self, now: float) -> None:
        """Note that the oldest question was answered, and measure the answer."""
        question = self._asked.popleft()
        answer = _WatchedAnswer(now - self._since(question), question.size)
        is_forgotten = len(self._answers) == RECENT_ANSWERS and self._answers[0] is self._longest
        self._answers.append(answer)
        if is_forgotten:
            self._longest = max(self._answers)
        elif self._longest is None or answer > self._longest:
            self._longest = answer
        self._answered_at = now
        if not self._asked:
            self.give_up()
        elif self._due > now + (limit := self._limit(self._asked[0].size)):
            self._stop()  # the timer was set before this answer shortened the limit
            self._wake(now, limit)

    def give_up(self) -> None:
        """Forget all unanswered questions and stop the timer."""
        self._asked.clear()
        self._stop()

    def learn(self, seconds: float) -> None:
        """Count `seconds` as an answer's time, such as a start that no question preceded."""
        self._longest = max(self._longest or _WatchedAnswer(seconds, 1), _WatchedAnswer(seconds, 1))

    def begin_again(self, seconds: float | None = None) -> None:
        """Clear the questions and measurements for a new peer, which took `seconds` to load, if given."""
        self.give_up()
        if seconds is not None:
            self._first_seconds = max(self._least_first_seconds, FACTOR * seconds)
        self._answers.clear()
        self._longest = None

    def silence(self, now: float) -> float | None:
        """Return the seconds that the oldest question is unanswered, if they exceed the limit; else None.

        Call when the timer fires: the timer is set again.
        """
        self._stop()  # this call may come from a timer that fired just before it was cancelled
        if not self._asked:
            return None
        waited, limit = now - self._since(self._asked[0]), self._limit(self._asked[0].size)
        is_late = waited >= limit
        self._wake(now, limit if is_late else max(limit - waited, LOOK_SECONDS))
        return waited if is_late else None

    def _wake(self, now: float, seconds: float) -> None:
        self._timer, self._due = self._wake_after(seconds), now + seconds

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _since(self, question: _WatchedQuestion) -> float:
        """Return when the peer started on a question: a peer handles one after the other."""
        return max(question.asked_at, self._answered_at)

    def _limit(self, size: int) -> float:
        if self._fixed_seconds is not None:
            return self._fixed_seconds
        if self._longest is None:
            return self._first_seconds
        seconds, most = self._longest
        return max(self._least_seconds, FACTOR * seconds * max(1.0, size / most))


@dataclass(frozen=True)
class Watchdogs:
    """The scheduler's watchdogs: on block requests, steps, the executor's first report and a restarted executor."""

    cache: Watchdog
    executor: Watchdog
    report: Watchdog
    start: Watchdog

    def named(self, name: str) -> Watchdog:
        """Return the watchdog of this name: `CACHE`, `EXECUTOR`, `REPORT` or `START`."""
        return {CACHE: self.cache, EXECUTOR: self.executor, REPORT: self.report, START: self.start}[name]


def build_watchdogs(
    wake_after: Callable[[str], Callable[[float], Timer]], step_timeout_seconds: float | None, *, can_kill: bool
) -> Watchdogs:
    """Build all four. An executor that cannot be killed has more time, as a late answer is only logged."""
    least, first = (STEP_SECONDS, FIRST_STEP_SECONDS) if can_kill else (ANSWER_SECONDS, ANSWER_SECONDS)
    return Watchdogs(
        cache=Watchdog(wake_after(CACHE), ANSWER_SECONDS, ANSWER_SECONDS),
        executor=Watchdog(wake_after(EXECUTOR), least, first, step_timeout_seconds),
        report=Watchdog(wake_after(REPORT), REPORT_SECONDS, REPORT_SECONDS),
        start=Watchdog(wake_after(START), START_SECONDS, REPORT_SECONDS),
    )
