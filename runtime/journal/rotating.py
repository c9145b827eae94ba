"""An engine's journal: its creation, its continuation from an earlier process, and its rotation.

The file at the journal's path is complete at any moment: a new file replaces it only once its header is written.
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
"""Size at which a journal with `resume` is rotated, or twice the size of its header if that is larger."""

Unfinished: TypeAlias = Callable[[float], tuple[int, tuple[RestoredRequest, ...]]]
"""Returns the next request's id and all unfinished requests, given the time of the loop's clock."""

log = get_logger("cuelight.engine")


class RotatingJournal:
    """The tap of an engine with `resume`: a journal that is replaced when its file has grown too large.

    The new file's header has the unfinished and recently ended requests; the old file's records are dropped.
    """

    def __init__(self, journal: Journal, origin: Origin, clock: Callable[[], float], unfinished: Unfinished) -> None:
        self._origin = origin
        self._journal = journal
        self._clock = clock
        self._unfinished = unfinished
        self._bytes_max = max(BYTES_MAX, 2 * journal.size_bytes)
        self._is_held = True  # until all restored requests are submitted

    def allow_rotation(self) -> None:
        """Allow rotation, once `unfinished` returns all unfinished requests."""
        self._is_held = False

    def __call__(self, event: Event) -> None:
        self._journal(event)
        if self._journal.size_bytes > self._bytes_max:
            self._rotate_soon()

    def model_changed(self, origin: Origin) -> None:
        """Rotate to a journal whose header names the model that has taken over."""
        self._origin = origin
        self._rotate_soon()

    def _rotate_soon(self) -> None:
        if not self._is_held:
            self._is_held = True
            asyncio.get_running_loop().call_soon(self._rotate)

    def _rotate(self) -> None:
        """Replace the file. Called between two messages, when all recorded messages have been handled."""
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
        """Write all records so far to the file."""
        self._journal.flush()

    def close(self) -> None:
        """Stop recording and close the file. Does nothing the second time."""
        self._journal.close()


def open_journal(
    origin: Origin, clock: Callable[[], float], unfinished: Unfinished
) -> tuple[Journal | RotatingJournal | None, RestoredState | None]:
    """Open the journal that the options name; with `resume`, also return the state in an earlier process's journal.

    Blocks.

    Raises:
        ConfigError: the journal cannot be created, or the queue has no room for all unfinished requests.
        WrongJournal: the existing journal cannot be resumed; it is left unchanged.
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
        past = replace(past, requests=())  # ended requests of another model are dropped
    elif past.model != mine.model:
        other = "another model" if past.header.tokenizer == mine.tokenizer else "a model with another tokenizer"
        raise WrongJournal(
            f"{path} is the journal of {other}, {past.header.name!r}, and has unfinished requests: "
            f"{origin.name!r} cannot resume it"
        )
    room = config.queue_limit - len(unfinished)
    if room < 0:
        raise ConfigError(
            f"queue_limit is {config.queue_limit}; it must be at least {len(unfinished)}, "
            f"the number of requests to resume from {path}"
        )
    over = [each for each in past.requests if each.is_over]
    kept = {each.request_id for each in unfinished + over[max(0, len(over) - room) :]}
    # Requests of a killed process's last turn may be missing in its journal, and their ids must not be used again.
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
    """Replace the journal at `path` by a new one with these requests in its header. Raises JournalError."""
    beside = path.with_name(f"{path.name}.new")
    try:
        beside.unlink(missing_ok=True)  # left by a process that was killed during a rotation
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
    """Lock the journal at `path` against other processes that write to it or resume it.

    Yields whether the file exists and is not empty. Raises JournalError if another process has locked or replaced it.
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
                raise JournalError(f"the journal {path} is in use by another engine: give another path") from None
            except OSError:
                pass  # a file system without locks
        with suppress(OSError):
            if not os.path.samestat(os.fstat(file), path.stat()):
                raise JournalError(f"the journal {path} was just replaced by another process")
        yield os.fstat(file).st_size > 0
    finally:
        os.close(file)
