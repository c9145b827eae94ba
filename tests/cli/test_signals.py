"""A signal delivered to another thread is handled while the main thread waits."""

from __future__ import annotations

import subprocess
import sys

WAITING = """
import os, signal, threading
from cuelight.cli.terminal import interruptible_by_signals

def told(*_):
    raise SystemExit(7)

def tell():
    # To a thread that is not the main one: so nothing interrupts what that waits for, as when a signal comes too early.
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

signal.signal(signal.SIGTERM, told)
reader, _ = os.pipe()
with interruptible_by_signals():
    ready = threading.Event()
    threading.Thread(target=lambda: (ready.wait(), tell()), daemon=True).start()
    ready.set()
    os.read(reader, 1)
"""


def test_signal_to_another_thread_is_handled() -> None:
    assert subprocess.run([sys.executable, "-c", WAITING], timeout=100, check=False).returncode == 7
