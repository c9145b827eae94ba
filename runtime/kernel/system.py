"""The system that programs start: the asyncio driver, with a far side for actors on threads."""

import socket

from cuelight.kernel.child import run_life
from cuelight.kernel.driver import AsyncioDriver
from cuelight.kernel.placement.remote import RemoteLifeSpec


class System(AsyncioDriver):
    """A cast of actors, started sink to source and stopped source to sink.

    All tasks live under one host task of the system's own, so it may be opened and closed from different tasks. It
    belongs to the loop and the thread it was started in, and installs no signal handler.

    Args:
        cast: the parts, sinks first.
        clock, chance: what the actors see as time and randomness; by default the loop's clock and a fresh generator.
        tap: sees every life and every delivery. What it raises is logged, and ends the tapping.
        on_crash: told of every crash, before anything follows from it. Must not raise.
        on_failure: called once when an actor has crashed beyond its restart policy; every actor is stopped then.
        on_end: called once when the actors have ended: stopped, crashed, or cancelled by a host that ends all tasks.
        slow_handler_seconds: a handler that takes longer is logged as `slow_handler`, with actor, message and time.
    """

    def run_remote_life(self, connection: socket.socket, spec: RemoteLifeSpec) -> None:
        """Run one life of an actor placed on a thread, in a new event loop of the calling thread."""
        run_life(connection, spec)
