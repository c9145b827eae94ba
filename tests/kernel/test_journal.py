"""The journal: what it keeps of a run, whatever happens to the file, the disk or the process."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support import Recorder

from cuelight.kernel import (
    Actor,
    ActorSpec,
    Context,
    Delivered,
    Ended,
    ExitCause,
    JournalError,
    Recipient,
    Ref,
    Role,
    Started,
    System,
)
from cuelight.kernel.codec import Codec, reachable
from cuelight.kernel.journal.records import LAST_RECORD, MAGIC, VERSION, Record, Recorded, read_journal
from cuelight.kernel.journal.writer import BUFFER_BYTES_MAX, STRONG_ADDRESSES_MAX, Journal

NET_SECONDS = 60


class Note(msgspec.Struct, frozen=True, tag=True):
    number: int
    text: str = ""


class Question(msgspec.Struct, frozen=True, tag=True):
    reply_to: Recipient[Note]


class Odd(msgspec.Struct, frozen=True, tag=True):
    thing: object


class Slotted:
    """An address that nothing can refer to weakly."""

    __slots__ = ()

    def tell(self, message: object, /) -> None: ...


def note(number: int, text: str = "") -> Delivered:
    return Delivered(number / 8, "them", "me", Note(number, text))


def numbers(records: list[Record]) -> list[int]:
    """The notes that were recorded."""
    return [msgspec.msgpack.decode(record.body, type=Note).number for record in records if isinstance(record, Recorded)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some.journal"


@pytest.fixture
def small(path: Path) -> bytes:
    """A small journal, as bytes."""
    with Journal(path, about={"who": "tests"}) as journal:
        journal(Started(0.5, "me", 1, 2**64 - 1))
        for number in range(3):
            journal(note(number))
        journal(Ended(1.5, "me", 1, "ümläut", ExitCause.KILLED, "b"))
    return path.read_bytes()


def whole(path: Path) -> list[Record]:
    return list(read_journal(path))


def test_events_come_back_as_they_were(path: Path, small: bytes) -> None:
    reader = read_journal(path)
    kind = f"{__name__}:Note"
    assert reader.about == {"who": "tests"}
    assert list(reader) == [
        Started(0.5, "me", 1, 2**64 - 1),
        *(Recorded(n / 8, "them", "me", kind, msgspec.msgpack.encode(Note(n))) for n in range(3)),
        Ended(1.5, "me", 1, "ümläut", ExitCause.KILLED, "b"),
    ]
    assert list(reader) == list(reader), "each iteration begins at the beginning"
    assert not reader.is_truncated
    assert reader.damage == ""


class Asker(Actor[Note | Question]):
    def __init__(self, context: Context[object], listener: Recipient[Note]) -> None:
        self._context, self._listener = context, listener

    def handle(self, message: Note | Question) -> None:
        if isinstance(message, Note):
            self._context.ref.tell(Question(self._context.ref if message.number else self._listener))
        else:
            message.reply_to.tell(Note(0))


async def test_a_systems_lives_and_deliveries_are_recorded_with_addresses_as_ids(path: Path) -> None:
    heard: asyncio.Queue[Note] = asyncio.Queue()

    class Listener:
        tell = staticmethod(heard.put_nowait)

    role = Role("asker", Note | Question, capacity=10)
    part = ActorSpec(role, lambda context: Asker(context, Listener()))
    with Journal(path) as journal:
        async with asyncio.timeout(NET_SECONDS), System([part], tap=journal) as system:
            system.find(role).tell(Note(1))  # asks itself, which makes it ask the listener, who hears twice
            await heard.get()
            system.find(role).tell(Note(0))
            await heard.get()
    first, *deliveries, last = whole(path)
    assert isinstance(first, Started)
    assert isinstance(last, Ended)
    codec = Codec(reachable([role.accepts]), lambda _: 0, lambda address_id, _: Ref(f"<{address_id}>", print))
    seen = []
    for record in deliveries:
        assert isinstance(record, Recorded)
        message = codec.decode(record.type_name, record.body)
        seen.append((record.sender, message.reply_to.name if isinstance(message, Question) else message))
    assert seen == [
        ("", Note(1)),
        ("asker", "<asker>"),
        ("asker", Note(0)),
        ("asker", "<1>"),
        ("", Note(0)),
        ("asker", "<1>"),
    ]
    moments = [record.seconds for record in (first, *deliveries, last)]
    assert moments == sorted(moments)


def test_addresses_are_numbered_for_as_long_as_they_live(path: Path) -> None:
    def ids(*addresses: object) -> list[int]:
        for address in addresses:
            journal(Delivered(0, "", "me", Question(address)))  # type: ignore[arg-type]
        journal._write()
        recorded = [record for record in whole(path) if isinstance(record, Recorded)]
        return [msgspec.msgpack.decode(record.body)["reply_to"] for record in recorded][-len(addresses) :]

    with Journal(path) as journal:
        first, second, third = Recorder[Note](), Recorder[Note](), Slotted()
        assert ids(first, second, first, third, third, second) == [1, 2, 1, 3, 3, 2]
        del first
        gc.collect()
        assert len(journal._numbers._weak) == 1, "who is gone is forgotten"
        assert ids(Recorder()) == [4], "and nobody else gets its number"
        assert ids(*(Slotted() for _ in range(STRONG_ADDRESSES_MAX)))[-1] == STRONG_ADDRESSES_MAX + 4
        assert len(journal._numbers._strong) == STRONG_ADDRESSES_MAX
        assert ids(third) == [STRONG_ADDRESSES_MAX + 5], "too many others came between"


@pytest.mark.parametrize("about", [None, {}, {"a": [1, 2.5, None, {"b": "c"}]}])
def test_what_the_program_says_about_itself_comes_back(path: Path, about: dict[str, object] | None) -> None:
    Journal(path, about=about).close()
    assert read_journal(path).about == (about or {})
    assert whole(path) == []


def test_what_msgpack_has_no_room_for_cannot_be_said_about_oneself(path: Path) -> None:
    with pytest.raises(JournalError, match="`about` cannot be encoded"):
        Journal(path, about={"a": object()})
    assert not path.exists()


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Odd(object()), "Odd(thing=<object object at"),
        (Odd(Unshown()), "<Odd instance at"),
        (Note(1, "half \ud83d"), "half \\ud83d"),
        (Note(2**64), str(2**64)),
        (Note(1, "x" * 1000), "<Note of 10"),
        (print, "built-in function print"),
    ],
)
def test_a_message_that_cannot_be_kept_is_opaque(path: Path, message: object, words: str) -> None:
    with Journal(path, record_bytes_max=1000) as journal:
        journal(Delivered(0.0, "a", "b", message))
        journal(note(1))
    opaque, kept = whole(path)
    assert isinstance(opaque, Recorded)
    assert words in opaque.opaque
    assert len(opaque.opaque) < 300
    assert opaque.body == b""
    assert opaque.type_name.endswith(f":{type(message).__qualname__}")
    assert numbers([kept]) == [1]


def test_an_error_text_that_has_no_utf_8_form_is_kept_all_the_same(path: Path) -> None:
    with Journal(path) as journal:
        journal(Ended(0.0, "a", 1, "half \ud83d", ExitCause.CRASHED))
    assert whole(path) == [Ended(0.0, "a", 1, "half \\ud83d", ExitCause.CRASHED)]


def test_cut_anywhere_it_is_whole_up_to_there(path: Path, small: bytes) -> None:
    records = whole(path)
    header = small.index(b"who") + len(b"who") + len(b"\xa5tests")
    found = set()
    for length in range(len(small)):
        path.write_bytes(small[:length])
        if length < header:
            with pytest.raises(JournalError):
                read_journal(path)
            continue
        reader = read_journal(path)
        prefix = list(reader)
        assert prefix == records[: len(prefix)]
        assert reader.is_truncated
        assert reader.damage == "", "there are just too few bytes"
        found.add(len(prefix))
    assert found == set(range(len(records) + 1))


def test_no_flipped_bit_goes_unnoticed(path: Path, small: bytes) -> None:
    records = whole(path)
    damages = 0
    for bit in range(8 * len(small)):
        flipped = bytearray(small)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            reader = read_journal(path)
        except JournalError:
            continue
        prefix = list(reader)
        assert prefix == records[: len(prefix)]
        assert reader.is_truncated
        damages += reader.damage != ""
    assert damages > len(small), "most are told from a file that is too short"


def test_damage_is_named_with_its_place(path: Path, small: bytes) -> None:
    place = small.index(b"me")  # in the first record
    path.write_bytes(small[:place] + b"you"[:2] + small[place + 2 :])
    reader = read_journal(path)
    assert list(reader) == []
    assert "the record at byte" in reader.damage
    assert "checksum" in reader.damage


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"cuelight journey", MAGIC, b"# Notes\n" * 10])
def test_a_foreign_file_is_not_read(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(JournalError, match="no journal"):
        read_journal(path)


def test_another_version_is_not_read(path: Path, small: bytes) -> None:
    path.write_bytes(small.replace(MAGIC + bytes([VERSION]), MAGIC + bytes([VERSION + 1])))
    with pytest.raises(JournalError, match=f"of version {VERSION + 1}"):
        read_journal(path)


def test_what_is_not_there_is_not_read(path: Path, tmp_path: Path) -> None:
    for missing in (path, tmp_path):
        with pytest.raises(JournalError, match="cannot be read"):
            read_journal(missing)


def test_a_foreign_file_is_not_overwritten(path: Path) -> None:
    path.write_bytes(b"precious")
    with pytest.raises(JournalError, match="not overwritten"):
        Journal(path)
    assert path.read_bytes() == b"precious"


@pytest.mark.parametrize("old", [None, b"", MAGIC, MAGIC + b"\xff" + b"anything" * 1000])
def test_an_older_journal_is_overwritten(path: Path, old: bytes | None) -> None:
    if old is not None:
        path.write_bytes(old)
    with Journal(path) as journal:
        journal(note(7))
    assert numbers(whole(path)) == [7]
    assert path.stat().st_size < 200, "nothing of the old one is left"
    assert old is not None or stat.S_IMODE(path.stat().st_mode) == 0o600, "it holds all that was said"


def test_where_none_can_be_created(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(JournalError, match="no ordinary file"):
        Journal(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "no" / "folder", tmp_path / "a\0b"):
        with pytest.raises(JournalError, match="cannot be created"):
            Journal(place)


def test_two_do_not_write_to_one_file(path: Path) -> None:
    with Journal(path) as journal:
        with pytest.raises(JournalError, match="another journal"):
            Journal(path)
        journal(note(1))
    assert numbers(whole(path)) == [1]
    Journal(path).close()
    assert whole(path) == []


def test_after_the_end_nothing_is_recorded(path: Path, small: bytes) -> None:
    journal = Journal(path)
    journal(note(1))
    journal.close()
    journal(note(2))
    journal.close()
    assert numbers(whole(path)) == [1]
    assert journal.error is None


def test_a_journal_can_be_read_while_it_is_written(path: Path) -> None:
    with Journal(path) as journal:
        assert whole(path) == []
        journal(note(1))
        journal._write()
        reader = read_journal(path)
        assert numbers(list(reader)) == [1]
        assert reader.is_truncated, "there may be more to come"


def test_without_a_loop_what_waits_is_bounded(path: Path) -> None:
    text = "x" * 10_000
    most = 0
    with Journal(path) as journal:
        for number in range(400):
            journal(note(number, text))
            most = max(most, journal.buffered_bytes)
    assert 0 < most <= BUFFER_BYTES_MAX
    assert numbers(whole(path)) == list(range(400))


async def test_each_turn_of_the_loop_writes_once_at_its_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    write = os.write

    def counted(file: int, data: bytes) -> int:
        writes.append(len(data))
        return write(file, data)

    monkeypatch.setattr(os, "write", counted)
    with Journal(path) as journal:
        writes.clear()
        for number in range(10):
            journal(note(number))
        assert writes == []
        assert journal.buffered_bytes > 0
        await asyncio.sleep(0)
        assert journal.buffered_bytes == 0
        assert len(writes) == 1
        assert numbers(whole(path)) == list(range(10))
        await asyncio.sleep(0)
        assert len(writes) == 1, "a turn without news writes nothing"


def test_a_loop_that_ended_before_the_end_of_its_turn_does_not_keep_the_next_from_writing(path: Path) -> None:
    with Journal(path) as journal:
        closed = asyncio.new_event_loop()
        closed.call_soon(lambda: (closed.stop(), journal(note(1))))
        closed.run_forever()
        closed.close()

        async def second() -> None:
            journal(note(2))
            await asyncio.sleep(0)
            assert journal.buffered_bytes == 0

        asyncio.run(second())
        assert numbers(whole(path)) == [1, 2]


def full_from(journal: Journal, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """From now on the disk has so many bytes left."""
    write, left = os.write, [room]

    def cramped(file: int, data: bytes) -> int:
        if file != journal._file:
            return write(file, data)
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(file, data[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(os, "write", cramped)


def test_a_disk_that_takes_a_few_bytes_at_a_time_gets_them_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with Journal(path) as journal:
        monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
        for number in range(20):
            journal(note(number))
    assert numbers(whole(path)) == list(range(20))
    assert not read_journal(path).is_truncated


@pytest.mark.parametrize("room", [0, 1, 100, 1000])
def test_a_full_disk_stops_the_recording_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    with Journal(path) as journal:
        full_from(journal, monkeypatch, room)
        for number in range(100):
            journal(note(number))
            journal._write()
        assert journal.error is not None
        assert "No space left" in journal.error
    monkeypatch.undo()
    found = numbers(whole(path))
    assert found == list(range(len(found)))
    assert len(found) < 100
    assert read_journal(path).is_truncated
    assert read_journal(path).damage == ""
    assert [r.levelno for r in caplog.records if "journal_stopped" in r.getMessage()] == [logging.WARNING]
    with Journal(path) as again:
        again(note(5))
    assert numbers(whole(path)) == [5]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
async def test_the_actors_go_on_where_the_disk_is_full(path: Path) -> None:
    heard: asyncio.Queue[Note] = asyncio.Queue()

    class Listener:
        tell = staticmethod(heard.put_nowait)

    role = Role("asker", Note | Question, capacity=10)
    journal = Journal(path)
    part = ActorSpec(role, lambda context: Asker(context, Listener()))
    async with asyncio.timeout(NET_SECONDS), System([part], tap=journal) as system:
        full = os.open("/dev/full", os.O_RDWR)
        assert journal._file is not None
        os.dup2(full, journal._file)
        os.close(full)
        for _ in range(3):
            system.find(role).tell(Note(0))
            await heard.get()
        assert journal.error is not None
    journal.close()
    assert read_journal(path).is_truncated


def test_the_files_bound_stops_the_recording(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Journal(path, bytes_max=2000) as journal:
        for number in range(1000):
            journal(note(number))
        assert journal.error is not None
        assert journal.buffered_bytes == 0
        assert "2000 bytes" in journal.error
    found = numbers(whole(path))
    assert 10 < len(found) < 100
    assert found == list(range(len(found)))
    assert 1900 < path.stat().st_size <= 2000
    assert read_journal(path).is_truncated
    assert sum("journal_stopped" in r.getMessage() for r in caplog.records) == 1


def test_a_recording_that_just_fits_is_complete(path: Path, small: bytes) -> None:
    def record(bytes_max: int) -> Journal:
        with Journal(path, about={"who": "tests"}, bytes_max=bytes_max) as journal:
            journal(Started(0.5, "me", 1, 2**64 - 1))
            for number in range(3):
                journal(note(number))
            journal(Ended(1.5, "me", 1, "ümläut", ExitCause.KILLED, "b"))
        return journal

    assert record(len(small)).error is None
    assert path.read_bytes() == small
    assert record(len(small) - 1).error is not None
    assert path.read_bytes() + LAST_RECORD != small
    assert small.startswith(path.read_bytes())


CHILD = """
import asyncio, sys
import msgspec
from cuelight.kernel import Actor, ActorSpec, Role, System
from cuelight.kernel.journal.writer import Journal

class Note(msgspec.Struct, frozen=True, tag=True):
    number: int

class Counter(Actor[Note]):
    def __init__(self, context):
        self.ref, self.number = context.ref, 0
    def handle(self, message):
        assert message.number == self.number
        self.number += 1
        self.ref.tell(Note(self.number))

async def main(path):
    actors = []
    role = Role("counter", Note, capacity=10)
    part = ActorSpec(role, lambda context: actors.append(Counter(context)) or actors[0])
    async with System([part], tap=Journal(path)) as system:
        system.find(role).tell(Note(0))
        while True:
            handled = actors[0].number
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            print(handled, flush=True)

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("lines", [1, 50, 400])
def test_a_killed_process_loses_at_most_its_last_turn(path: Path, lines: int) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        for _ in range(lines):
            said = child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read()
    told = [line for line in (said + rest).splitlines(keepends=True) if line.endswith("\n")]
    reader = read_journal(path)
    found = numbers(list(reader))
    assert found == list(range(len(found)))
    assert len(found) >= int(told[-1]), "what it said of a turn that was over is there"
    assert reader.is_truncated
    assert reader.damage == ""
