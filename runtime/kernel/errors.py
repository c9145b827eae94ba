"""What can go wrong between actors.

* KernelError
  - NotAccepted    the sender's mistake: this actor's protocol has no such message
  - MailboxFull    the edge's bound was broken: the protocol lacks back-pressure, or a client must be refused
  - AskTimeout     no answer before the deadline
  - ActorCrashed   a constructor or handler raised; the cause is chained
"""

from __future__ import annotations


class KernelError(Exception):
    """Base of the kernel's errors."""


class NotAccepted(KernelError, TypeError):
    """Raised at the sender: the message's type is not part of the receiver's protocol."""


class MailboxFull(KernelError):
    """Raised at the sender: the receiver's mailbox holds as many messages as it may."""


class AskTimeout(KernelError, TimeoutError):
    """The actor did not answer in time."""


class ActorCrashed(KernelError):
    """An actor's constructor or handler raised."""

    def __init__(self, actor: str, message_type: str, error: BaseException) -> None:
        super().__init__(f"actor {actor!r} crashed on {message_type}: {error!r}")
        self.actor = actor
        self.message_type = message_type
        self.__cause__ = error
