"""Supervision: restart policies, exit causes, and the delay of a restart.

The strategies and the limit of restarts per window are those of Erlang/OTP's supervisors.
"""

import random
from dataclasses import dataclass
from enum import StrEnum

import msgspec


class Strategy(StrEnum):
    """The actors that restart when one has crashed. A cast is ordered from sinks to sources."""

    ONE_FOR_ONE = "one for one"
    """The actor that crashed."""
    REST_FOR_ONE = "rest for one"
    """The actor that crashed and those after it in the cast: the sources that depend on it."""
    ONE_FOR_ALL = "one for all"
    """All actors of the cast."""


@dataclass(frozen=True)
class RestartPolicy:
    """The consequences of an actor's crash: by default, the end of the whole system.

    An actor restarts up to `restarts_max` times within any `window_seconds`; one more crash ends the system. The first
    restart waits `backoff_seconds`, each further one in the window twice as long as the restart before, at most
    `backoff_max_seconds`; each wait is shortened by a random fraction of up to a half. With `restarts_at_start`, the
    policy also covers a process that dies before it is ready while the system starts; otherwise the start fails.
    """

    restarts_max: int = 0
    window_seconds: float = 60.0
    strategy: Strategy = Strategy.ONE_FOR_ONE
    backoff_seconds: float = 0.05
    backoff_max_seconds: float = 5.0
    restarts_at_start: bool = False

    def __post_init__(self) -> None:
        assert self.restarts_max >= 0, "restarts_max must be at least 0"
        assert self.window_seconds > 0, "window_seconds must be positive"
        assert 0 <= self.backoff_seconds <= self.backoff_max_seconds, (
            "backoff_seconds must be between 0 and backoff_max_seconds"
        )


class ExitCause(StrEnum):
    """The reason why a life of an actor ended: the exit reason of Erlang/OTP."""

    STOPPED = "stopped"
    """The life ended in order: the actor was dismissed, restarted with another one, or stopped with its system."""
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

    `crashes` holds the times of earlier crashes within the window; the present one is added where the actor restarts.
    """
    crashes[:] = [seconds for seconds in crashes if seconds > now - restart_policy.window_seconds]
    if len(crashes) >= restart_policy.restarts_max:
        return None
    wait: float = min(restart_policy.backoff_seconds * 2 ** min(len(crashes), 50), restart_policy.backoff_max_seconds)
    crashes.append(now)
    return wait * (1 - chance.random() / 2)
