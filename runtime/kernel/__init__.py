"""Actors on asyncio: typed mailboxes, synchronous handlers, one system around a cast. Knows nothing of models."""

from cuelight.kernel.actor import Actor, Context
from cuelight.kernel.clock import Clock, LoopClock, Timer
from cuelight.kernel.errors import (
    ActorCrashed,
    ActorStopped,
    AskTimeout,
    JournalError,
    KernelError,
    MailboxFull,
    MessageTooLarge,
    NotAccepted,
    NotSendable,
    RemoteError,
)
from cuelight.kernel.events import Delivered, Ended, Event, Started, Tap
from cuelight.kernel.faults import Faults, SimulatedCrash, SimulatedKill
from cuelight.kernel.journal import Journal
from cuelight.kernel.log import Logger, get_logger
from cuelight.kernel.mailbox import OWN, Mailbox, MailboxStatistics
from cuelight.kernel.records import JournalReader, Recorded, read_journal
from cuelight.kernel.ref import Address, Ref, ask
from cuelight.kernel.role import InLoop, InProcess, OnThread, Part, Placement, Role
from cuelight.kernel.simulation import Simulation, SimulationError, for_each_seed
from cuelight.kernel.supervision import Fate, Strategy, Terminated
from cuelight.kernel.system import System
from cuelight.kernel.worker import Worker, WorkerThread

__all__ = [
    "Actor",
    "ActorCrashed",
    "ActorStopped",
    "Address",
    "AskTimeout",
    "Clock",
    "Context",
    "Delivered",
    "Ended",
    "Event",
    "Fate",
    "Faults",
    "InLoop",
    "InProcess",
    "Journal",
    "JournalError",
    "JournalReader",
    "KernelError",
    "Logger",
    "LoopClock",
    "Mailbox",
    "MailboxFull",
    "MailboxStatistics",
    "MessageTooLarge",
    "NotAccepted",
    "NotSendable",
    "OWN",
    "OnThread",
    "Part",
    "Placement",
    "Recorded",
    "Ref",
    "RemoteError",
    "Role",
    "SimulatedCrash",
    "SimulatedKill",
    "Simulation",
    "SimulationError",
    "Started",
    "Strategy",
    "System",
    "Tap",
    "Terminated",
    "Timer",
    "Worker",
    "WorkerThread",
    "ask",
    "for_each_seed",
    "get_logger",
    "read_journal",
]
