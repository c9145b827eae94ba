"""Another model takes over while the engine serves: which one may, and the executor that loads it beside the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias, TypeVar, assert_never

from cuelight import errors
from cuelight.actors.executor.building import load_model
from cuelight.actors.executor.lasting import LastingMemory
from cuelight.config import EngineConfig, is_one_of, read_facts, shown
from cuelight.ensemble import Ensemble, Lead, Roles, context_length, executor_spec, lasting_memory, load_options
from cuelight.fingerprint import Fingerprint, fingerprint
from cuelight.kernel import ActorSpec, Address, NotSendable, Role, System
from cuelight.messages.executor import ExecutorMessage
from cuelight.messages.observer import Switched, SwitchFailed
from cuelight.messages.scheduler import CancelSwitch, SchedulerMessage, Switch
from cuelight.replay import Origin
from cuelight.store import model_path
from cuelight.threads import in_thread

B = TypeVar("B")

Running: TypeAlias = Literal["finish", "recompute"]
RUNNING: Final = ("finish", "recompute")

LINGER_SECONDS: Final = 5.0
"""For an executor's process to end in order; then it is killed."""

ExecutorSpec: TypeAlias = Callable[[Role[ExecutorMessage], Role[SchedulerMessage]], ActorSpec[ExecutorMessage]]


@dataclass(frozen=True)
class Successor:
    """A model that may take over: what must be known of it, and the executor that would load it."""

    origin: Origin
    part: ExecutorSpec
    lasting: LastingMemory | None = None


def find_successor(model: object, config: EngineConfig) -> Successor:
    """Find a model. Blocks. Raises ModelUnavailable."""
    folder = model_path(model)  # type: ignore[arg-type]  # which says what may be given
    facts = read_facts(folder)
    load, lasting = partial(load_model, load_options(folder, config, facts)), lasting_memory(config)
    origin = Origin(str(model), folder, config, facts, fingerprint(folder))
    return Successor(origin, partial(executor_spec, load, lasting, config), lasting)


def stand_in(name: str, ensemble: Ensemble[B], config: EngineConfig, tokenizer: str) -> Successor:
    """An ensemble in place of a model's folder."""
    origin = Origin(name, None, config, ensemble.facts, Fingerprint(tokenizer, name))
    part = partial(executor_spec, ensemble.load_device, ensemble.lasting, config)
    return Successor(origin, part, ensemble.lasting)


def check_running(running: object) -> bool:
    """Whether what runs is to be recomputed. Raises ConfigError for what is neither that nor to be finished."""
    if not is_one_of(RUNNING, running):
        raise errors.ConfigError(f"running must be one of {', '.join(map(repr, RUNNING))}, not {shown(running)}")
    return running == "recompute"


def check_same_tokens(present: Origin, other: Origin) -> None:
    """Raises ModelMismatch where the other model means other text by the same tokens."""
    before, after = present.facts.vocab_size, other.facts.vocab_size
    if before != after:
        raise errors.ModelMismatch(
            f"{other.name!r} has a vocabulary of {after} tokens, {present.name!r} one of {before}"
        )
    if present.fingerprint.tokenizer != other.fingerprint.tokenizer:
        raise errors.ModelMismatch(f"{other.name!r} has another tokenizer or chat template than {present.name!r}")


@dataclass(frozen=True)
class Stage:
    """Where a change of models happens."""

    system: System
    cast: Roles
    lead: Lead


class Models:
    """The models of one engine, one after the other: at most one at a time is to take over."""

    def __init__(self, config: EngineConfig, find: Callable[[object, EngineConfig], Successor]) -> None:
        self._config = config
        self._find = find
        self._stage: Stage | None = None
        self._origin: Origin | None = None
        self._taken_over: Callable[[Origin], None] = lambda _: None
        self._is_busy = False
        self._reload: Reload | None = None
        self._executors = 1

    def begin(self, stage: Stage, origin: Origin | None, taken_over: Callable[[Origin], None]) -> None:
        """The first one is there. `taken_over` is told of each one that takes over, within a handler."""
        self._stage, self._origin, self._taken_over = stage, origin, taken_over

    @property
    def serving(self) -> str | None:
        """The executor's name, which is another one after each change; None before the first one is there."""
        return None if self._stage is None else self._stage.lead.executor.name

    async def change(self, model: object, recompute: bool, check_available: Callable[[], None]) -> None:
        """Find and load another one, and wait until it has taken over. `check_available` raises where nobody serves.

        Raises as `Engine.reload`.
        """
        if self._is_busy:
            raise errors.ReloadBusy("another model is being loaded already")
        self._is_busy = True
        try:
            other = await in_thread(partial(self._find, model, self._config))
            check_available()
            assert self._origin is not None, "an engine that serves has found its model"
            check_same_tokens(self._origin, other.origin)
            self._reload = reload = self._begin_reload(other, recompute)
        finally:
            self._is_busy = self._reload is not None
        try:
            await reload.outcome
        except asyncio.CancelledError:
            reload.call_off()
            raise

    def _begin_reload(self, other: Successor, recompute: bool) -> Reload:
        assert self._stage is not None
        self._executors += 1
        role = new_role(self._stage.cast.executor, self._executors)
        facts, mark = other.origin.facts, other.origin.fingerprint
        longest = context_length(facts, self._config)

        def switch(reply_to: Address[Switched | SwitchFailed]) -> Switch:
            return Switch(role.name, mark.model, recompute, longest, facts.eos_token_ids, reply_to)

        def over(is_done: bool) -> None:
            self._reload, self._is_busy = None, False
            if is_done:
                self._origin = other.origin
                self._taken_over(other.origin)

        try:
            part = other.part(role, self._stage.cast.scheduler)
            return Reload(self._stage, part, other.lasting, switch, over)
        except NotSendable as error:
            raise errors.ConfigError(str(error)) from error

    def repeat(self) -> None:
        """The scheduler is new, and has heard of nothing."""
        if self._reload is not None:
            self._reload.repeat()

    def end(self, reason: Callable[[], errors.EngineError]) -> None:
        """The engine serves nobody any more."""
        if self._reload is not None:
            self._reload.end(reason())
        if self._stage is not None:
            self._stage.lead.release()


class Reload:
    """One change of models, from the executor's first breath to the moment that one of the two is dismissed."""

    def __init__(
        self,
        stage: Stage,
        part: ActorSpec[ExecutorMessage],
        lasting: LastingMemory | None,
        switch: Callable[[Address[Switched | SwitchFailed]], Switch],
        on_over: Callable[[bool], None],
    ) -> None:
        """`on_over` is told, within a handler of the scheduler, whether the other model has taken over.

        Raises NotSendable where the executor cannot be begun.
        """
        self._system = stage.system
        self._scheduler = stage.system.find(stage.cast.scheduler)
        self._lead = stage.lead
        self._part = part
        self._lasting = lasting
        """Of the executor that is not needed, in the end."""
        self._switch = switch(self)
        self._on_over = on_over
        self._loop = asyncio.get_running_loop()
        self._is_over = self._is_called_off = False
        self.outcome: asyncio.Future[None] = self._loop.create_future()
        self._system.spawn(part)
        self.repeat()

    def repeat(self) -> None:
        """Say it to the scheduler, or say it again to a new one."""
        self._scheduler.tell(self._switch)
        if self._is_called_off:
            self.call_off()

    def call_off(self) -> None:
        """Nobody wants it any more. The scheduler has the last word, since it may be done."""
        self._is_called_off = True
        if not self._is_over:
            self._scheduler.tell(CancelSwitch(self._switch.executor))

    def tell(self, message: Switched | SwitchFailed, /) -> None:
        """Hear from the scheduler. What a new one begins from is changed before anything else can happen."""
        if self._is_over:
            return
        self._is_over = True
        match message:
            case Switched():
                leaving, self._lead.executor = self._lead.executor, self._part.role
                self._lasting, self._lead.lasting = self._lead.lasting, self._lasting
                self._lead.eos_token_ids = frozenset(self._switch.eos_token_ids)
                self._lead.context_length = self._switch.context_length
                self._settle(None)
            case SwitchFailed(reason=reason, is_mismatch=is_mismatch):
                leaving = self._part.role
                self._settle(errors.ModelMismatch(reason) if is_mismatch else errors.ModelUnavailable(reason))
            case _:
                assert_never(message)
        self._on_over(isinstance(message, Switched))
        self._loop.call_soon(self._dismiss, leaving)

    def end(self, error: errors.EngineError) -> None:
        """The engine serves nobody any more."""
        self._is_over = True
        self._settle(error)
        self._release()

    def _settle(self, error: errors.EngineError | None) -> None:
        if self.outcome.done():
            return
        if error is None:
            self.outcome.set_result(None)
        else:
            self.outcome.set_exception(error)
            self.outcome.exception()  # whoever waited may be gone, which is no reason to complain

    def _dismiss(self, role: Role[ExecutorMessage]) -> None:
        with suppress(KeyError):  # the system has ended
            self._system.dismiss(role, drop=True)
        # A process that hangs, or that still loads, does not end because it is asked to.
        self._loop.call_later(LINGER_SECONDS, self._system.kill, role, "it was dismissed, and did not end")
        self._release()

    def _release(self) -> None:
        if self._lasting is not None:
            self._lasting.close()


def new_role(before: Role[ExecutorMessage], number: int) -> Role[ExecutorMessage]:
    """The same part under another name: the first executor was number 1."""
    name = before.name.partition(" ")[0]
    return Role(f"{name} {number}", before.accepts, before.capacity, before.urgent)
