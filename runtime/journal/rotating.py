"""An engine's journal: begun where an earlier process left off, and begun anew when it has grown long.

The file at the journal's path is whole at any moment: another one takes its place only once it has all in its header.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from cuelight.errors import ConfigError, WrongJournal
from cuelight.journal.origin import Origin, about
from cuelight.journal.restore import Header, RestoredRequest, RestoredState, read_state
from cuelight.kernel import Event, JournalError, get_logger
from cuelight.kernel.journal.writer import Journal

if sys.platform != "win32":
    import fcntl

BYTES_MAX: Final = 64 * 1024**2
"""A journal that is to be gone on from is begun anew when it is longer, or twice as long as its header."""

Unfinished: TypeAlias = Callable[[float], tuple[int, tuple[RestoredRequest, ...]]]
"""The next request's id and all requests that have not ended, at a time of the loop's clock."""

log = get_logger("cuelight.engine")


class RotatingJournal:
    """The tap of an engine that its next process may go on from.

    Of a file that has become too long only what has not ended is kept, in the header of the one that replaces it.
    """

    def __init__(self, journal: Journal, origin: Origin, clock: Callable[[], float], unfinished: Unfinished) -> None:
        self._origin = origin
        self._journal = journal
        self._clock = clock
        self._unfinished = unfinished
        self._bytes_max = max(BYTES_MAX, 2 * journal.size_bytes)
        self._is_held = True  # until all that was carried over is under way

    def allow_rotation(self) -> None:
        """Whatever has not ended is known from now on."""
        self._is_held = False

    def __call__(self, event: Event) -> None:
        self._journal(event)
        if self._journal.size_bytes > self._bytes_max:
            self._rotate_soon()

    def model_changed(self, origin: Origin) -> None:
        """Another model serves, and it is its journal from now on."""
        self._origin = origin
        self._rotate_soon()

    def _rotate_soon(self) -> None:
        if not self._is_held:
            self._is_held = True
            asyncio.get_running_loop().call_soon(self._rotate)

    def _rotate(self) -> None:
        """Between two messages: all that was recorded has been done."""
        before = self._journal
        if before.error is not None or before.is_closed:
            return
        now = self._clock()
        next_id, restored = self._unfinished(now)
        try:
            self._journal = _replace(before.path, self._origin, now, next_id, restored)
        except JournalError as error:
            log.warning("journal_not_rotated", path=str(before.path), error=str(error))
        else:
            before.close()
        self._bytes_max = max(BYTES_MAX, 2 * self._journal.size_bytes)
        self._is_held = False

    def flush(self) -> None:
        """Have in the file what was recorded so far."""
        self._journal.flush()

    def close(self) -> None:
        """Nothing is recorded any more. Harmless when done twice."""
        self._journal.close()


def open_journal(
    origin: Origin, clock: Callable[[], float], unfinished: Unfinished
) -> tuple[Journal | RotatingJournal | None, RestoredState | None]:
    """The journal that the configuration asks for, and what it was told by an earlier process, if it is to go on.

    Blocks.

    Raises:
        ConfigError: it cannot be created, or the queue has no room for all that are to go on.
        WrongJournal: it is there, and cannot be gone on from; it stays as it is.
    """
    config = origin.config
    if config.journal is None:
        return None, None
    path = Path(config.journal)
    try:
        if not config.resume:
            return Journal(path, about=_header(origin, clock(), 1, ())), None
        with _locked(path) as is_there:
            if is_there:
                past = _restore(path, origin)
                journal = _replace(path, origin, clock(), past.next_id, past.requests)
                return RotatingJournal(journal, origin, clock, unfinished), past
        journal = Journal(path, about=_header(origin, clock(), 1, ()))
        return RotatingJournal(journal, origin, clock, unfinished), None
    except JournalError as error:
        raise ConfigError(str(error)) from error


def _restore(path: Path, origin: Origin) -> RestoredState:
    config = origin.config
    past = read_state(path, time_of_day=time.time(), recent_seconds=config.resume_seconds)
    mine = origin.fingerprint
    unfinished = [each for each in past.requests if not each.is_over]
    if past.model != mine.model and not unfinished:
        past = replace(past, requests=())  # nobody waits for the other model
    elif past.model != mine.model:
        other = "another model" if past.header.tokenizer == mine.tokenizer else "a model with another tokenizer"
        raise WrongJournal(
            f"{path} is the journal of {other}, {past.header.name!r}: {origin.name!r} cannot go on from it"
        )
    room = config.queue_limit - len(unfinished)
    if room < 0:
        raise ConfigError(f"{len(unfinished)} requests are to go on, and the queue limit is {config.queue_limit}")
    over = [each for each in past.requests if each.is_over]
    kept = {each.request_id for each in unfinished + over[max(0, len(over) - room) :]}
    # What was submitted in the last turn of a killed process may not be in its journal, and its id is somebody's.
    next_id = past.next_id + config.queue_limit
    return replace(past, next_id=next_id, requests=tuple(each for each in past.requests if each.request_id in kept))


def _header(origin: Origin, clock: float, next_id: int, restored: tuple[RestoredRequest, ...]) -> dict[str, object]:
    header = Header(
        name=origin.name,
        tokenizer=origin.fingerprint.tokenizer,
        model=origin.fingerprint.model,
        next_id=next_id,
        written_at=time.time(),
        clock=clock,
        restored=restored,
    )
    fields: dict[str, object] = msgspec.to_builtins(header)
    return about(origin) | fields


def _replace(path: Path, origin: Origin, clock: float, next_id: int, restored: tuple[RestoredRequest, ...]) -> Journal:
    """A new journal with these requests in its header, in place of the one at `path`. Raises JournalError."""
    beside = path.with_name(f"{path.name}.new")
    try:
        beside.unlink(missing_ok=True)  # of a process that was killed just here
        try:
            journal = Journal(beside, about=_header(origin, clock, next_id, restored))
        except JournalError:
            beside.unlink(missing_ok=True)
            raise
        try:
            beside.replace(path)
        except OSError:
            journal.close()
            beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise JournalError(f"the journal {path} cannot be replaced: {error}") from error
    journal.path = path
    return journal


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Nobody else writes to the journal there, nor goes on from it meanwhile. Gives whether there is one.

    Raises JournalError.
    """
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        yield False
        return
    except (OSError, ValueError) as error:
        raise JournalError(f"the journal {path} cannot be read: {error}") from error
    try:
        if sys.platform != "win32":
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise JournalError(f"another journal is being written to {path}") from None
            except OSError:
                pass  # a file system without locks
        with suppress(OSError):
            if not os.path.samestat(os.fstat(file), path.stat()):
                raise JournalError(f"another process has just gone on from {path}")
        yield os.fstat(file).st_size > 0
    finally:
        os.close(file)
