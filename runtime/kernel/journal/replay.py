"""Replay: an actor handles the inbox that a journal recorded, and the messages that it sends are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, Never, TypeVar, cast

from cuelight.kernel.actor import Actor, ActorSpec, InLoop, Role
from cuelight.kernel.clock import ActorClock
from cuelight.kernel.codec import AddressId, Codec, Name, reachable, type_name
from cuelight.kernel.errors import NotAccepted, NotSendable
from cuelight.kernel.events import Ended, Started
from cuelight.kernel.journal.records import JournalError, JournalReader, Recorded
from cuelight.kernel.journal.rehearsal import ExternalRecipient, ReplayContext, SentMessage, SentMessages, id_of
from cuelight.kernel.ref import Recipient, Ref
from cuelight.kernel.supervision import ExitCause, Terminated
from cuelight.kernel.table import ActorTable

M = TypeVar("M")

_TERMINATED: Final = type_name(Terminated)

_DEATHS: Final = (ExitCause.KILLED, ExitCause.SIGNALED, ExitCause.EXITED)
"""Causes of a life's end with which messages may be lost that had been sent to the actor's process."""


@dataclass(frozen=True)
class Difference:
    """The first message whose handling differs from the recording.

    `index` counts the inbox from 1; 0 is the actor's start. A recorded message that is no longer sent is found at the
    next message to the same receiver, or else where it was delivered, so the cause may lie before `index`.
    """

    index: int
    handling: str
    receiver: str
    expected: str
    got: str


@dataclass(frozen=True)
class Replay:
    """The result of a replay: `handled` messages of the inbox, and `compared` messages to other actors.

    `stopped` is the reason why the replay ended before the recorded inbox; the result covers the messages before.
    """

    handled: int
    compared: int
    lives: int
    difference: Difference | None = None
    stopped: str = ""


def replay(
    journal: JournalReader, part: ActorSpec[Never], types: Iterable[object] = (), roles: Iterable[Role[Never]] = ()
) -> Replay:
    """Replay all recorded lives of `part`'s actor, and return the first difference.

    `types` are the types of the messages that the actor posts to itself, beside its protocol; `roles` are roles of the
    cast that the actor does not look up but answers. Only delivered messages are compared: messages that were still
    waiting at the end of the recording are not.

    Raises:
        JournalError: the journal cannot be read or has no such actor; or the actor is placed on a thread or in a
            process, where messages that it posts to itself are not recorded.
        NotSendable: a message type's annotations cannot be resolved.
    """
    if not isinstance(part.placement, InLoop):
        raise JournalError(f"{part.role.name} lives outside the loop, where messages to itself are not recorded")
    return _ReplayRun(cast(ActorSpec[object], part), types, roles).run(journal)


class _ReplayRun:
    def __init__(self, part: ActorSpec[object], types: Iterable[object], roles: Iterable[Role[Never]]) -> None:
        self._part = part
        self._name = part.role.name
        self._roles: dict[str, Role[Never]] = {role.name: role for role in roles}
        self._roles[self._name] = part.role
        self._types = reachable([*types, *(role.accepts for role in self._roles.values())])
        self._codec = Codec(self._types, id_of, self._address)
        self._refs: dict[str, Ref[object]] = {}
        self._external: dict[int, ExternalRecipient] = {}
        self._actor_clock = ActorClock()
        self._actor: Actor[object] | None = None
        self._lives = 0
        self._handled = 0
        self._handling: object = None
        self._raised: BaseException | None = None
        self._stopped = ""
        self._compared = 0
        self._difference: Difference | None = None
        self._sent = SentMessages(self._roles)

    def run(self, journal: JournalReader) -> Replay:
        for record in journal:
            match record:
                case Started(actor=actor, life=life):
                    self._sent.started(actor, life)
                    if actor == self._name:
                        self._begin(record)
                case Recorded(sender=sender, actor=actor):
                    if sender == self._name and record.type_name != _TERMINATED:
                        self._compare(record)
                    if actor == self._name:
                        self._handle(record)
                case Ended(actor=actor):
                    if actor == self._name:
                        self._end(record)
                    elif record.cause in _DEATHS:
                        self._sent.process_died(actor)
        if not self._lives:
            raise JournalError(f"{journal.path} has no actor {self._name!r}")
        if self._raised is not None and not self._is_over:
            self._stopped = f"the actor raised {self._raised!r} in {_text(self._handling)}, where the recording ends"
        return Replay(self._handled, self._compared, self._lives, self._difference, self._stopped)

    @property
    def _is_over(self) -> bool:
        """Whether the replay has ended: only messages sent before are still compared."""
        return bool(self._stopped) or self._difference is not None

    def _begin(self, record: Started) -> None:
        self._lives += 1
        self._raised = None
        if self._is_over:
            return
        ref = self._ref(self._name)
        context = ReplayContext(ref, self._actor_clock, record.seed, self._find, self._sent.spawned)

        def start() -> None:
            self._actor = self._part.build(context)
            self._actor.started()

        self._call(f"the start of life {self._lives}", record.seconds, start)

    def _handle(self, record: Recorded) -> None:
        self._check_not_raised()
        if self._is_over:
            return
        message = self._decoded(record)
        if message is None:
            return
        self._handled += 1
        assert self._actor is not None, "a life's start is recorded before its first message"
        self._call(message, record.seconds, partial(self._actor.handle, message))

    def _end(self, record: Ended) -> None:
        if record.cause is ExitCause.STOPPED:
            self._check_not_raised()
        if not self._is_over and self._actor is not None and self._raised is None:
            # Also where the recorded life crashed and this one did not: the crash may have been in `stopped`.
            self._call(f"the end of life {self._lives}", record.seconds, self._actor.stopped)
        if record.cause is not ExitCause.STOPPED:
            self._sent.crashed_at(self._lives, self._handled)
            self._raised = None
        self._check_not_raised()

    def _call(self, handling: object, seconds: float, act: Callable[[], None]) -> None:
        self._actor_clock.seconds, self._handling = seconds, handling
        try:
            act()
        except ActorTable.interrupts:
            raise
        except BaseException as error:
            self._raised = error

    def _check_not_raised(self) -> None:
        """Report a difference if the actor raised: the recorded actor did not."""
        if self._raised is not None:
            error, self._raised = self._raised, None
            self._differ(self._handled, self._handling, self._name, "no error", f"{error!r} was raised")

    def _keep_sent(self, receiver: str, message: object) -> None:
        """Queue a message that the actor sends to another actor, or to itself."""
        role = self._roles.get(receiver)
        if role is not None and type(message) not in role.message_types():
            raise NotAccepted(f"{receiver} does not accept {type(message).__qualname__}")
        kind = type_name(type(message))
        self._types.setdefault(kind, type(message))
        try:
            body = self._codec.encode(message)
        except NotSendable:
            body = None
        sent = SentMessage(self._lives, self._handled, self._handling, kind, body)
        self._sent.queue_of(receiver, kind, type(message)).append(sent)

    def _compare(self, record: Recorded) -> None:
        queue = self._sent.queue_of(record.actor, record.type_name, self._types.get(record.type_name))
        while queue:
            sent = queue.popleft()
            if self._is_same(sent, record):
                self._compared += 1
                return
            if not self._sent.may_be_missing(sent):
                got = self._shown(sent.kind, sent.body)
                self._differ(sent.index, sent.handling, record.actor, self._expected(record), got)
                return
        if not self._is_over:
            got = "nothing" if self._raised is None else f"nothing: {self._raised!r} was raised"
            self._differ(self._handled, self._handling, record.actor, self._expected(record), got)

    def _is_same(self, sent: SentMessage, record: Recorded) -> bool:
        if sent.kind != record.type_name:
            return False
        if record.opaque or sent.body is None:
            return bool(record.opaque)
        if sent.body == record.body:
            return True
        # Different bytes can decode to equal messages: 1 and 1.0 in a field of floats, for example.
        try:
            return self._codec.decode(sent.kind, sent.body) == self._codec.decode(sent.kind, record.body)
        except (NotAccepted, NotSendable):
            return False

    def _differ(self, index: int, handling: object, receiver: str, expected: str, got: str) -> None:
        if self._difference is None or index < self._difference.index:
            self._difference = Difference(index, _text(handling), receiver, expected, got)

    def _decoded(self, record: Recorded) -> object:
        """Return the message of a record; stop the replay and return None where it cannot be decoded."""
        number = self._handled + 1
        if record.opaque:
            self._stopped = f"message {number} was recorded without its contents: {record.opaque}"
            return None
        try:
            return self._codec.decode(record.type_name, record.body)
        except (NotAccepted, NotSendable) as error:
            self._stopped = f"message {number} cannot be read: {error}"
            return None

    def _expected(self, record: Recorded) -> str:
        return record.opaque or self._shown(record.type_name, record.body)

    def _shown(self, kind: Name, body: bytes | None) -> str:
        if body is None:
            return f"a {kind} that cannot be encoded"
        try:
            return _text(self._codec.decode(kind, body))
        except (NotAccepted, NotSendable):
            return f"a {kind} of {len(body)} bytes"

    def _ref(self, name: str) -> Ref[object]:
        """Return the address of an actor, which queues messages for comparison."""
        if name not in self._refs:
            self._refs[name] = Ref(name, partial(self._keep_sent, name))
        return self._refs[name]

    def _find(self, role: Role[M]) -> Ref[M]:
        self._roles.setdefault(role.name, role)
        return self._ref(role.name)

    def _address(self, address_id: AddressId, _: tuple[type, ...]) -> Recipient[object]:
        if isinstance(address_id, str):
            return self._ref(address_id)
        return self._external.setdefault(address_id, ExternalRecipient(address_id))


def _text(message: object) -> str:
    return message if isinstance(message, str) else repr(message)
