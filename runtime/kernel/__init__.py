"""Actors on asyncio: typed mailboxes, synchronous handlers, one system around a cast. Independent of models."""

from cuelight.kernel.actor import Actor, ActorSpec, Context, InLoop, InProcess, OnThread, Placement, Role
from cuelight.kernel.clock import Clock, LoopClock, Timer
from cuelight.kernel.errors import (
    ActorCrashed,
    ActorKilled,
    ActorStopped,
    AskTimeout,
    KernelError,
    MailboxFull,
    MessageTooLarge,
    NotAccepted,
    NotSendable,
    ProcessKilled,
    RemoteError,
)
from cuelight.kernel.events import Delivered, Ended, Event, Started, Tap
from cuelight.kernel.journal.records import JournalError, JournalReader, Recorded, read_journal
from cuelight.kernel.journal.writer import Journal
from cuelight.kernel.log import Logger, get_logger
from cuelight.kernel.mailbox import OWN, Mailbox, MailboxStatistics
from cuelight.kernel.ref import Recipient, Ref, ask
from cuelight.kernel.simulation.faults import Faults, SimulatedCrash, SimulatedKill
from cuelight.kernel.simulation.simulator import Simulation, SimulationError, for_each_seed
from cuelight.kernel.supervision import ExitCause, RestartPolicy, Strategy, Terminated
from cuelight.kernel.system import System
from cuelight.kernel.worker import Worker, WorkerThread

__all__ = ["Actor", "Recipient", "Context", "Ref", "System", "ask"]
__all__ += [
    "ExitCause",
    "RestartPolicy",
    "InLoop",
    "InProcess",
    "OnThread",
    "ActorSpec",
    "Placement",
    "Role",
    "Strategy",
    "Terminated",
]
__all__ += ["Clock", "LoopClock", "Mailbox", "MailboxStatistics", "OWN", "Timer", "Worker", "WorkerThread"]
__all__ += ["ActorCrashed", "ActorKilled", "ActorStopped", "AskTimeout", "JournalError", "KernelError", "MailboxFull"]
__all__ += ["MessageTooLarge", "NotAccepted", "NotSendable", "ProcessKilled", "RemoteError", "SimulationError"]
__all__ += ["Delivered", "Ended", "Event", "Journal", "JournalReader", "Recorded", "Started", "Tap", "read_journal"]
__all__ += ["Faults", "SimulatedCrash", "SimulatedKill", "Simulation", "for_each_seed", "Logger", "get_logger"]
