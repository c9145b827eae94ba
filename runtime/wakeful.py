"""Signals that are noticed at a prompt, whenever they come.

Python runs a signal's handler between two of its own instructions. One that comes after the last of these and before
the system waits for the keyboard would be seen only when the next key is pressed.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NUDGE_SECONDS = 0.05
NUDGES = 20


@contextmanager
def interruptible_by_signals() -> Iterator[None]:
    """Meanwhile whatever the main thread waits for is interrupted some moments after a signal. On the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before, fd_before = signal.signal(signal.SIGURG, lambda *_: None), signal.set_wakeup_fd(writer)
    over = threading.Event()
    nudging = threading.Thread(target=_nudge, args=(reader, threading.get_ident(), over), name="cuelight nudge")
    nudging.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(fd_before)
        os.close(writer)
        nudging.join()
        os.close(reader)
        signal.signal(signal.SIGURG, before)


def _nudge(reader: int, thread: int, over: threading.Event) -> None:
    """Interrupt a thread for a while after each signal: a nudge may come too early as well."""
    while numbers := os.read(reader, 64):
        if set(numbers) <= {signal.SIGURG}:
            continue
        for _ in range(NUDGES):
            if over.wait(NUDGE_SECONDS):
                break
            signal.pthread_kill(thread, signal.SIGURG)
