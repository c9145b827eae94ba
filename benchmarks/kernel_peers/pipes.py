"""The baselines across processes: an echo behind a `multiprocessing.Pipe`, and one behind a socket pair."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import cast

from benchmarks.kernel_peers import ASKS, PROCESS, TIMEOUT_SECONDS, Effort, Outcome, asked, blocking_rate, rate

FRAME_BYTES = 16
"""About what a small message has, and sent whole."""


@contextmanager
def _child(serve: Callable[..., None], *arguments: object) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(target=serve, args=arguments, daemon=True)
    process.start()
    try:
        yield
        process.join(TIMEOUT_SECONDS)
        assert process.exitcode == 0, "the echo ends when its client has closed"
    finally:
        process.kill()


def _serve_pipe(far: Connection[int | None, int | None]) -> None:
    while (value := far.recv()) is not None:
        far.send(value)


def pipe(effort: Effort) -> Outcome:
    """Pickled numbers through a pipe, both sides blocking."""
    near, far = multiprocessing.get_context("spawn").Pipe()

    def batch() -> None:
        for value in range(ASKS):
            near.send(value)
            assert near.recv() == value

    with _child(_serve_pipe, far):
        outcome = asked(blocking_rate(batch, effort.seconds), PROCESS)
        near.send(None)
    return outcome


def _serve_socket(far: socket.socket) -> None:
    with far:
        while frame := far.recv(FRAME_BYTES, socket.MSG_WAITALL):
            far.sendall(frame)


def socketpair(effort: Effort) -> Outcome:
    """Frames through a socket pair, both sides blocking."""
    near, far = socket.socketpair()

    def batch() -> None:
        for value in range(ASKS):
            frame = value.to_bytes(FRAME_BYTES)
            near.sendall(frame)
            assert near.recv(FRAME_BYTES, socket.MSG_WAITALL) == frame

    with _child(_serve_socket, far), near:
        far.close()
        return asked(blocking_rate(batch, effort.seconds), PROCESS)


class _Server(asyncio.Protocol):
    def __init__(self) -> None:
        self.lost = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = cast(asyncio.WriteTransport, transport).write  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        self._write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set_result(None)


class _Client(asyncio.Protocol):
    answer: asyncio.Future[bytes]

    def data_received(self, data: bytes) -> None:
        self.answer.set_result(data)


async def _serve_until_lost(far: socket.socket) -> None:
    _, server = await asyncio.get_running_loop().create_connection(_Server, sock=far)
    await server.lost


def _serve_in_loop(far: socket.socket) -> None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_until_lost(far))


async def socketpair_in_loop(effort: Effort) -> Outcome:
    """The same frames, both sides protocols of an event loop; the child's is uvloop's, as in the libraries compared."""
    loop = asyncio.get_running_loop()
    near, far = socket.socketpair()
    with _child(_serve_in_loop, far):
        far.close()
        transport, client = await loop.create_connection(_Client, sock=near)

        async def batch() -> None:
            for value in range(ASKS):
                frame = value.to_bytes(FRAME_BYTES)
                client.answer = loop.create_future()
                transport.write(frame)
                assert await client.answer == frame

        try:
            return asked(await rate(batch, effort.seconds), PROCESS)
        finally:
            near.shutdown(
                socket.SHUT_RDWR
            )  # seen by the child although this loop takes no further turn before the join
            transport.close()
