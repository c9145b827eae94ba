"""Reloads: checks that another model may take over, spawns an executor for it, and switches the scheduler to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias, assert_never

from cuelight import errors
from cuelight.actors.executor.host_memory import HostMemoryFile
from cuelight.config import is_one_of, shown
from cuelight.core.loaders import ModelLoader, NextModel, in_thread
from cuelight.core.parts import ActiveExecutor, Roles, context_length
from cuelight.journal.origin import Origin
from cuelight.kernel import ActorSpec, NotSendable, Recipient, Role, System
from cuelight.messages.executor import ExecutorMessage
from cuelight.messages.observer import Switched, SwitchFailed
from cuelight.messages.request import FIRST_EXECUTOR, ExecutorId
from cuelight.messages.scheduler import CancelSwitch, Switch

Running: TypeAlias = Literal["finish", "recompute"]
RUNNING: Final = ("finish", "recompute")

LINGER_SECONDS: Final = 5.0
"""Time in which an executor's process may end after it was dismissed; then it is killed."""


def check_running(running: object) -> bool:
    """Return whether running requests are to be recomputed. Raises ConfigError for an unknown value."""
    if not is_one_of(RUNNING, running):
        raise errors.ConfigError(f"running must be one of {', '.join(map(repr, RUNNING))}, not {shown(running)}")
    return running == "recompute"


def check_same_tokens(present: Origin, other: Origin) -> None:
    """Raise ModelMismatch unless both models have the same vocabulary, tokenizer and chat template."""
    before, after = present.facts.vocab_size, other.facts.vocab_size
    if before != after:
        raise errors.ModelMismatch(
            f"{other.name!r} has a vocabulary of {after} tokens, {present.name!r} one of {before}"
        )
    if present.fingerprint.tokenizer != other.fingerprint.tokenizer:
        raise errors.ModelMismatch(f"{other.name!r} has another tokenizer or chat template than {present.name!r}")


@dataclass(frozen=True)
class ReloadTarget:
    """The actor system, and its active executor, which a reload replaces."""

    system: System
    roles: Roles
    active: ActiveExecutor


class Models:
    """The succession of models in one engine; at most one reload is in progress."""

    def __init__(
        self, target: ReloadTarget, origin: Origin, loader: ModelLoader, on_switched: Callable[[Origin], None]
    ) -> None:
        """`origin` is the first model's. `on_switched` is called with the origin of each later one, in a handler."""
        self._target = target
        self._origin = origin
        self._config = origin.config
        self._loader = loader
        self._on_switched = on_switched
        self._is_busy = False
        self._reload: Reload | None = None
        self._latest = FIRST_EXECUTOR

    @property
    def serving(self) -> str:
        """The role name of the active executor; each switch changes it."""
        return self._target.active.role.name

    async def change(self, model: object, recompute: bool, check_available: Callable[[], None]) -> None:
        """Load another model and wait until it has taken over.

        `check_available` raises EngineUnavailable unless the engine serves. Raises as `Engine.reload`.
        """
        if self._is_busy:
            raise errors.ReloadBusy("another reload is in progress: try again once it has ended")
        self._is_busy = True
        try:
            other = await in_thread(partial(self._loader.find_next, model, self._config))
            check_available()
            check_same_tokens(self._origin, other.origin)
            self._reload = reload = self._begin_reload(other, recompute)
        finally:
            self._is_busy = self._reload is not None
        try:
            await reload.outcome
        except asyncio.CancelledError:
            reload.call_off()
            raise

    def _begin_reload(self, other: NextModel, recompute: bool) -> Reload:
        self._latest = executor_id = ExecutorId(self._latest + 1)
        facts, mark = other.origin.facts, other.origin.fingerprint
        longest = context_length(facts, self._config)

        def switch(reply_to: Recipient[Switched | SwitchFailed]) -> Switch:
            return Switch(executor_id, mark.model, recompute, longest, facts.eos_token_ids, reply_to)

        def over(is_done: bool) -> None:
            self._reload, self._is_busy = None, False
            if is_done:
                self._origin = other.origin
                self._on_switched(other.origin)

        try:
            spec = other.build_executor(executor_id, self._target.roles)
            return Reload(self._target, spec, other.lasting, switch, over)
        except NotSendable as error:
            raise errors.ConfigError(str(error)) from error

    def repeat(self) -> None:
        """Send the reload in progress, if any, to a new scheduler."""
        if self._reload is not None:
            self._reload.repeat()

    def end(self, reason: Callable[[], errors.EngineError]) -> None:
        """Fail the reload in progress, and free the host memory that outlives executors."""
        if self._reload is not None:
            self._reload.end(reason())
        self._target.active.release()


class Reload:
    """One change of models, from spawning the new executor to dismissing one of the two."""

    def __init__(
        self,
        target: ReloadTarget,
        spec: ActorSpec[ExecutorMessage],
        lasting: HostMemoryFile | None,
        switch: Callable[[Recipient[Switched | SwitchFailed]], Switch],
        on_over: Callable[[bool], None],
    ) -> None:
        """`on_over` is called in a handler of the scheduler, with whether the new model has taken over.

        Raises NotSendable if the executor cannot be sent to a process.
        """
        self._system = target.system
        self._scheduler = target.system.find(target.roles.scheduler)
        self._active = target.active
        self._spec = spec
        self._lasting = lasting
        """Host memory of the new executor; after a switch, of the one before. Closed when the reload ends."""
        self._switch = switch(self)
        self._on_over = on_over
        self._loop = asyncio.get_running_loop()
        self._is_over = self._is_called_off = False
        self.outcome: asyncio.Future[None] = self._loop.create_future()
        self._system.spawn(spec)
        self.repeat()

    def repeat(self) -> None:
        """Send `Switch` to the scheduler, and `CancelSwitch` if the reload was called off."""
        self._scheduler.tell(self._switch)
        if self._is_called_off:
            self.call_off()

    def call_off(self) -> None:
        """Ask the scheduler to cancel the switch; its answer decides, since it may have switched already."""
        self._is_called_off = True
        if not self._is_over:
            self._scheduler.tell(CancelSwitch(self._switch.executor_id))

    def tell(self, message: Switched | SwitchFailed, /) -> None:
        """Receive the scheduler's answer; a switch updates `ActiveExecutor` at once, for the next scheduler to read."""
        if self._is_over:
            return
        self._is_over = True
        match message:
            case Switched():
                leaving, self._active.executor_id = self._active.role, self._switch.executor_id
                self._lasting, self._active.lasting = self._active.lasting, self._lasting
                self._active.eos_token_ids = frozenset(self._switch.eos_token_ids)
                self._active.context_length = self._switch.context_length
                self._settle(None)
            case SwitchFailed(reason=reason, is_mismatch=is_mismatch):
                leaving = self._spec.role
                self._settle(errors.ModelMismatch(reason) if is_mismatch else errors.ModelUnavailable(reason))
            case _:
                assert_never(message)
        self._on_over(isinstance(message, Switched))
        self._loop.call_soon(self._dismiss, leaving)

    def end(self, error: errors.EngineError) -> None:
        """Fail the reload with `error`, since the engine has ended."""
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
            self.outcome.exception()  # a cancelled caller does not retrieve it, which asyncio would log

    def _dismiss(self, role: Role[ExecutorMessage]) -> None:
        with suppress(KeyError):  # the system has ended
            self._system.dismiss(role, drop=True)
        # A process that hangs, or is loading, does not react to the dismissal.
        self._loop.call_later(LINGER_SECONDS, self._system.kill, role, "the executor was dismissed and did not end")
        self._release()

    def _release(self) -> None:
        if self._lasting is not None:
            self._lasting.close()
