"""The exceptions that the engine's public methods raise, in one tree.

* EngineError
  - ModelUnavailable      the model cannot be found, fetched, read or served
  - ConfigError           an engine option is invalid (also a ValueError)
      WrongJournal
  - ModelMismatch         a reload names a model that cannot take over (also a ValueError)
  - RequestRejected       refused before any work was done (also a ValueError)
      EmptyPrompt · PromptTooLong · BadPrompt · BadMessage · TokenOutOfRange ·
      BadSampling · BadService · UnknownTenant · UnknownField · WrongType · QueueFull ·
      UnknownRequest · RequestTaken · WrongTenant · BadPosition
  - RequestFailed         accepted, then ended by a failure
      DeadlineExceeded
  - EngineUnavailable     NotStarted · EngineClosed · EngineBroken · EngineGaveUp · EngineDraining
  - EngineBusy            too many calls of `explain`, `set_policy` or `forget_prefixes` at once
      ReloadBusy
  - ChatBusy              a second `say` while the previous answer is still streaming
"""

from __future__ import annotations


class EngineError(Exception):
    """Base class of every exception in this module."""


class ModelUnavailable(EngineError):
    """The model cannot be found, fetched, read or served. The message says what to do."""


class ConfigError(EngineError, ValueError):
    """An engine option has an unknown name, or a value or combination of values that cannot work."""


class WrongJournal(ConfigError):
    """The file at `journal` cannot be resumed; it is left unchanged.

    The file is not an engine's journal, or was written by another version or for another model.
    """


class ModelMismatch(EngineError, ValueError):
    """A reload's model has another vocabulary or tokenizer, or a context too short for an open request.

    The present model continues to serve, and no request is affected.
    """


class RequestRejected(EngineError, ValueError):
    """The request was refused before it was scheduled."""


class EmptyPrompt(RequestRejected):
    """The prompt has no tokens."""


class PromptTooLong(RequestRejected):
    """The prompt and one output token do not fit into the context length or the block pool."""


class BadPrompt(RequestRejected):
    """The prompt's text cannot be encoded (a lone surrogate, for example)."""


class BadMessage(RequestRejected):
    """A chat message lacks its role or content, or the chat template refuses the conversation."""


class TokenOutOfRange(RequestRejected):
    """A token id is negative or outside the vocabulary."""


class BadSampling(RequestRejected):
    """A sampling option, or the number of samples, is outside its range."""


class UnknownField(RequestRejected):
    """A request option has an unknown name."""


class WrongType(RequestRejected):
    """A prompt, an option or an argument has the wrong type."""


class BadService(RequestRejected):
    """A service option (priority, tenant, deadline, salt) is outside its range."""


class UnknownTenant(RequestRejected):
    """The request's tenant is not among the engine's `tenant_weights`."""


class QueueFull(RequestRejected):
    """The engine has as many unfinished requests as `queue_limit` allows. Try again later.

    Attributes:
        retry_after_seconds: an estimate of the time until there is room, from the recent rate of finished requests;
            None if too few have finished.
    """

    def __init__(self, reason: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_seconds = retry_after_seconds


class UnknownRequest(RequestRejected):
    """No request of this id was restored from an earlier process, or it was not resumed within `resume_seconds`."""


class RequestTaken(RequestRejected):
    """The request has been resumed before; a request has one stream."""


class WrongTenant(RequestRejected):
    """The request to resume belongs to another tenant."""


class BadPosition(RequestRejected):
    """The position to resume from is negative, or beyond the request's output so far."""


class RequestFailed(EngineError):
    """The request was accepted and then ended by a failure; other requests are not affected."""


class DeadlineExceeded(RequestFailed):
    """The request's `deadline_seconds` passed, or its `queue_seconds` passed before its admission."""


class EngineUnavailable(EngineError):
    """The engine cannot accept requests in its present state, or in this thread or event loop."""


class NotStarted(EngineUnavailable):
    """The engine has not been started: use `async with Engine(...)`."""


class EngineClosed(EngineUnavailable):
    """The engine was stopped, or was started before."""


class EngineBroken(EngineUnavailable):
    """An actor crashed and could not be restarted; `__cause__` is the crash. Make another engine."""


class EngineGaveUp(EngineUnavailable):
    """The executor died more than `restarts_max` times in a row without computing a step. Make another engine.

    The message says why the executor died.
    """


class EngineDraining(EngineUnavailable):
    """The engine is draining: it finishes its present requests, refuses new ones, and then stops."""


class EngineBusy(EngineError):
    """Too many calls of `explain`, `set_policy` or `forget_prefixes` at once. Try again in a moment."""


class ReloadBusy(EngineBusy):
    """Another reload is in progress and continues. Try again once that model has taken over."""


class ChatBusy(EngineError):
    """The chat's previous answer is still streaming; read it to its end, or close it."""
