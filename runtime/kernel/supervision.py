"""What follows an actor's death, as a table and a rule: who restarts with whom, how often, how soon.

The strategies and the idea of a limit per window are those of Erlang/OTP's supervisors.
"""

import random
from dataclasses import dataclass
from enum import StrEnum

import msgspec


class Strategy(StrEnum):
    """Who restarts when an actor has crashed. A cast is ordered from sink to source."""

    ONE_FOR_ONE = "one for one"
    """The one that crashed."""
    REST_FOR_ONE = "rest for one"
    """It and those after it in the cast: the sources that build on it."""
    ONE_FOR_ALL = "one for all"
    """Everyone."""


@dataclass(frozen=True)
class RestartPolicy:
    """What follows when this actor crashes: by default, the end of the whole system.

    Up to `restarts_max` restarts within any `window_seconds`; one more crash ends the system. The first restart waits
    `backoff_seconds`, each further one in the window twice as long as the one before, at most `backoff_max_seconds`;
    of that wait, a random part of up to a half is left out. With `restarts_at_start` that holds as well for a process
    that dies before its first word while the system starts; else the start fails.
    """

    restarts_max: int = 0
    window_seconds: float = 60.0
    strategy: Strategy = Strategy.ONE_FOR_ONE
    backoff_seconds: float = 0.05
    backoff_max_seconds: float = 5.0
    restarts_at_start: bool = False

    def __post_init__(self) -> None:
        assert self.restarts_max >= 0, "restarts_max counts restarts"
        assert self.window_seconds > 0, "a window has a length"
        assert 0 <= self.backoff_seconds <= self.backoff_max_seconds, "the back-off grows up to its maximum"


class ExitCause(StrEnum):
    """Why a life of an actor ended: the exit reason of Erlang/OTP."""

    STOPPED = "stopped"
    """In order: the actor was dismissed, restarted with another one, or stopped with its system."""
    CRASHED = "crashed"
    """A constructor, hook or handler raised."""
    KILLED = "killed"
    """`Context.kill` or `System.kill` was called."""
    SIGNALED = "signaled"
    """A signal ended the actor's process."""
    EXITED = "exited"
    """The actor's process or thread ended, or its connection broke, without a last message."""


class Terminated(msgspec.Struct, frozen=True, tag=True):
    """The end of a life, sent to the watchers of an actor after all messages that this life has sent.

    `error` is empty where the actor stopped in order; `is_restarting` says whether another life follows. For
    `ExitCause.KILLED`, `killed_by` is the name of the actor that called `kill`, or "" for code outside the actors; for
    `ExitCause.SIGNALED`, the name of the signal, such as "SIGKILL".
    """

    actor: str
    error: str
    is_restarting: bool
    cause: ExitCause = ExitCause.STOPPED
    killed_by: str = ""


def restart_delay(
    restart_policy: RestartPolicy, crashes: list[float], now: float, chance: random.Random
) -> float | None:
    """Return the seconds until an actor with this restart policy restarts after a crash; None ends the system.

    `crashes` remembers its earlier ones, and this one too where it restarts.
    """
    crashes[:] = [seconds for seconds in crashes if seconds > now - restart_policy.window_seconds]
    if len(crashes) >= restart_policy.restarts_max:
        return None
    wait: float = min(restart_policy.backoff_seconds * 2 ** min(len(crashes), 50), restart_policy.backoff_max_seconds)
    crashes.append(now)
    return wait * (1 - chance.random() / 2)
