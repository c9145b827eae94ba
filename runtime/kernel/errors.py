"""The kernel's errors.

* KernelError
  - NotAccepted      a mistake of the sender: the receiver's protocol has no such message
  - NotSendable      a mistake of the sender: a message to a thread or process cannot be encoded
    - MessageTooLarge  …or is larger than the placement allows
  - MailboxFull      the mailbox is full: the protocol lacks back-pressure, or a client must be refused
  - AskTimeout       no answer before the deadline
  - ActorStopped     the asked actor has stopped for good
  - ActorCrashed     a constructor, hook or handler raised, or the actor's process died; the cause is chained
  - RemoteError      such a cause, raised on another thread or in another process
    - ActorKilled      …where `kill` ended the life
    - ProcessKilled    …where a signal ended the process
"""

from cuelight.kernel.supervision import ExitCause


class KernelError(Exception):
    """Base of the kernel's errors."""


class NotAccepted(KernelError, TypeError):
    """Raised at the sender: the message's type is not part of the receiver's protocol."""


class NotSendable(KernelError, TypeError):
    """Raised at the sender of a message that cannot be encoded, and at the start for a `build` that no other process
    can import.
    """


class MessageTooLarge(NotSendable):
    """Raised at the sender: the encoded message is larger than the placement's `message_bytes_max`."""


class MailboxFull(KernelError):
    """Raised at the sender: the receiver's mailbox holds `capacity` messages."""


class AskTimeout(KernelError, TimeoutError):
    """The actor did not answer in time."""


class ActorStopped(KernelError):
    """The actor has stopped for good and will never answer."""


def describe(error: BaseException) -> str:
    """Return the repr of an error as text that UTF-8 can encode; where the repr fails, the name of its type."""
    try:
        return repr(error).encode("utf-8", "backslashreplace").decode()
    except Exception:
        return f"<{type(error).__qualname__}, whose repr failed>"


class RemoteError(KernelError):
    """An error raised on another thread or in another process, with its traceback there; or how a life there ended."""

    def __init__(self, error: str, trace: str = "") -> None:
        super().__init__(error)
        self.trace = trace
        if trace:
            self.add_note(trace)


class ActorKilled(RemoteError):
    """The end of a life by `kill`; `killed_by` is the name of the calling actor, "" for code outside the actors."""

    def __init__(self, error: str, killed_by: str = "") -> None:
        super().__init__(error)
        self.killed_by = killed_by


class ProcessKilled(RemoteError):
    """The end of an actor's process by a signal; `signal` is its name, such as "SIGKILL"."""

    def __init__(self, error: str, signal: str = "") -> None:
        super().__init__(error)
        self.signal = signal


class ActorCrashed(KernelError):
    """An actor's constructor, hook or handler raised, its process died, or it was killed.

    `message_type` is the name of the message's type, "construction", "started", "stopped", or "" for a death;
    `message` is the message that was being handled, or None where that is unknown. `cause` is any `ExitCause` but
    `STOPPED`, and `killed_by` is as in `Terminated`.
    """

    def __init__(self, actor: str, message_type: str, error: BaseException, message: object = None) -> None:
        happened = f"crashed on {message_type}: {describe(error)}" if message_type else f"died: {error}"
        super().__init__(f"actor {actor!r} {happened}")
        self.actor = actor
        self.message_type = message_type
        self.message = message
        self.cause, self.killed_by = _exit_cause(message_type, error)
        self.__cause__ = error

    def __reduce__(self) -> tuple[type["ActorCrashed"], tuple[str, str, BaseException | None]]:
        return type(self), (self.actor, self.message_type, self.__cause__)


def _exit_cause(message_type: str, error: BaseException) -> tuple[ExitCause, str]:
    match error:
        case ActorKilled():
            return ExitCause.KILLED, error.killed_by
        case ProcessKilled():
            return ExitCause.SIGNALED, error.signal
    return ExitCause.CRASHED if message_type else ExitCause.EXITED, ""
