"""Actors on asyncio: typed mailboxes, synchronous handlers, one system around a cast. Knows nothing of models."""

from cuelight.kernel.actor import Actor, Context
from cuelight.kernel.clock import Clock, LoopClock
from cuelight.kernel.errors import ActorCrashed, AskTimeout, KernelError, MailboxFull, NotAccepted
from cuelight.kernel.log import Logger, get_logger
from cuelight.kernel.mailbox import Mailbox, MailboxStatistics
from cuelight.kernel.ref import Ref, ask
from cuelight.kernel.role import Part, Role
from cuelight.kernel.system import System
from cuelight.kernel.worker import Worker

__all__ = [
    "Actor",
    "ActorCrashed",
    "AskTimeout",
    "Clock",
    "Context",
    "KernelError",
    "Logger",
    "LoopClock",
    "Mailbox",
    "MailboxFull",
    "MailboxStatistics",
    "NotAccepted",
    "Part",
    "Ref",
    "Role",
    "System",
    "Worker",
    "ask",
    "get_logger",
]
