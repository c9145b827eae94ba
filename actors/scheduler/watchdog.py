"""Watchdogs on peers: how long a peer may take to answer is learnt from its recent answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from cuelight.kernel import Timer

FACTOR: Final = 10.0
"""How many times as long as the longest of its recent answers a peer may take."""

RECENT_ANSWERS: Final = 64

LOOK_SECONDS: Final = 0.001
"""Between two looks at least, whatever rounding makes of the time that is left."""

ANSWER_SECONDS: Final = 30.0
"""The least that the cache manager may take; from there on, people are told."""

STEP_SECONDS: Final = 5.0
"""The least that the executor may take for a step; from there on, it is replaced, where it can be."""

FIRST_STEP_SECONDS: Final = 15.0
"""The least that an executor may take for its first step, in which much may be compiled or captured."""

START_SECONDS: Final = 30.0
"""The least that an executor may take to take another one's place."""

REPORT_SECONDS: Final = 300.0
"""For the first word of an executor, or a start that cannot be compared with any before."""


CACHE: Final = "cache manager"
EXECUTOR: Final = "executor"
REPORT: Final = "executor that was asked for a report"
START: Final = "executor that is to take the place of a lost one"


class _WatchedQuestion(NamedTuple):
    asked_at: float
    size: int


class _WatchedAnswer(NamedTuple):
    seconds: float
    size: int


class Watchdog:
    """One peer's unanswered questions. While there are any, a timer runs; it is not moved for each of them.

    A question's size is what the answer takes time for; larger ones than those answered may take longer in proportion.
    `least_seconds` it may always take, and `first_seconds`, or as many times what it took to be there, for the first
    answer; `fixed_seconds` overrides all that.
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
        """It was asked something."""
        self._asked.append(_WatchedQuestion(now, size))
        if self._timer is None:
            self._wake(now, self._limit(size))

    def answered(self, now: float) -> None:
        """It has answered what it was asked first."""
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
            self._stop()  # it was set before so much was known of how long it takes
            self._wake(now, limit)

    def give_up(self) -> None:
        """No answer is awaited any more."""
        self._asked.clear()
        self._stop()

    def learn(self, seconds: float) -> None:
        """An answer that nobody has asked for took so long."""
        self._longest = max(self._longest or _WatchedAnswer(seconds, 1), _WatchedAnswer(seconds, 1))

    def begin_again(self, seconds: float | None = None) -> None:
        """There is another one in its place, which has answered nothing yet, and needed so long to be there."""
        self.give_up()
        if seconds is not None:
            self._first_seconds = max(self._least_first_seconds, FACTOR * seconds)
        self._answers.clear()
        self._longest = None

    def silence(self, now: float) -> float | None:
        """To be called when the timer is over: for how long it has been silent, where that is too long."""
        self._stop()  # what is heard may be from one that was over just before it was cancelled
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
        """It sees to one question after the other."""
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
    """The scheduler's: on blocks asked for, on steps, on the executor's first report, and on a new one's start."""

    cache: Watchdog
    executor: Watchdog
    report: Watchdog
    start: Watchdog

    def named(self, name: str) -> Watchdog:
        """The one on this peer: `CACHE`, `EXECUTOR`, `REPORT` or `START`."""
        return {CACHE: self.cache, EXECUTOR: self.executor, REPORT: self.report, START: self.start}[name]


def build_watchdogs(
    wake_after: Callable[[str], Callable[[float], Timer]], step_timeout_seconds: float | None, *, can_kill: bool
) -> Watchdogs:
    """Build all four; an executor that cannot be killed is given more time: all that follows is a line in the log."""
    least, first = (STEP_SECONDS, FIRST_STEP_SECONDS) if can_kill else (ANSWER_SECONDS, ANSWER_SECONDS)
    return Watchdogs(
        cache=Watchdog(wake_after(CACHE), ANSWER_SECONDS, ANSWER_SECONDS),
        executor=Watchdog(wake_after(EXECUTOR), least, first, step_timeout_seconds),
        report=Watchdog(wake_after(REPORT), REPORT_SECONDS, REPORT_SECONDS),
        start=Watchdog(wake_after(START), START_SECONDS, REPORT_SECONDS),
    )
