"""The system that programs start: the asyncio driver, with `run_life` for actors on threads."""

import socket

from cuelight.kernel.child import run_life
from cuelight.kernel.driver import AsyncioDriver
from cuelight.kernel.placement.remote import RemoteLifeSpec


class System(AsyncioDriver):
    """A cast of actors, started sink to source and stopped source to sink.

    All tasks run under one host task, so a system may be opened and closed from different tasks. A system belongs to
    the event loop and the thread in which it is started, and installs no signal handler.

    Args:
        cast: the specs of the actors, sinks first.
        clock, chance: the actors' source of time and of seeds; by default the machine's clock and a fresh generator.
        tap: called with every event of a life and every delivery. An error that it raises is logged, and it is not
            called again.
        on_crash: called with every crash, before its consequences. Must not raise.
        on_failure: called once when an actor has crashed beyond its restart policy; every actor is stopped then.
        on_end: called once when the actors have ended: stopped, crashed, or cancelled by a host that ends all tasks.
        slow_handler_seconds: a handler that takes longer is logged as `slow_handler`, with actor, message and time.
    """

    def run_remote_life(self, connection: socket.socket, spec: RemoteLifeSpec) -> None:
        """Run one life of an actor placed on a thread, in a new event loop of the calling thread."""
        run_life(connection, spec)
