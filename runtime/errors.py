"""Every exception a user of the engine can meet, in one tree.

* EngineError
  - ModelUnavailable      the model cannot be found, fetched, read or served
  - ConfigError           the engine was configured with something it cannot do
      WrongJournal
  - ModelMismatch         a reload with a model that cannot take over (also a ValueError)
  - RequestRejected       refused before any work was done (also a ValueError)
      EmptyPrompt · PromptTooLong · BadPrompt · BadMessage · TokenOutOfRange ·
      BadSampling · BadService · UnknownTenant · UnknownField · WrongType · QueueFull ·
      UnknownRequest · RequestTaken · WrongTenant · BadPosition
  - RequestFailed         accepted, then ended by a failure that was not the client's choice
      DeadlineExceeded
  - EngineUnavailable     NotStarted · EngineClosed · EngineBroken · EngineGaveUp · EngineDraining
  - EngineBusy            too many questions or orders at once, beside the requests
      ReloadBusy
  - ChatBusy              a second `say` while the first still streams
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error this package raises on purpose."""


class ModelUnavailable(EngineError):
    """The model cannot be found, fetched, read or served. The message says what is missing and what to type."""


class ConfigError(EngineError, ValueError):
    """An engine option has a value the engine cannot honour."""


class WrongJournal(ConfigError):
    """A journal that is no journal, or of another version, model or tokenizer, is not resumed; it stays as it is."""


class ModelMismatch(EngineError, ValueError):
    """Another model cannot take over: its tokenizer or vocabulary differs, or its context is too short for a request.

    The model that was there serves on, and no request has noticed.
    """


class RequestRejected(EngineError, ValueError):
    """The request was refused before any work was done for it."""


class EmptyPrompt(RequestRejected):
    """The prompt has no tokens."""


class PromptTooLong(RequestRejected):
    """The prompt does not fit the model's context, or the whole block pool, with one token to spare."""


class BadPrompt(RequestRejected):
    """The prompt's text cannot be encoded (a lone surrogate, for example)."""


class BadMessage(RequestRejected):
    """A chat message lacks its role or content, or the chat template refuses the conversation."""


class TokenOutOfRange(RequestRejected):
    """A token id is negative or beyond the vocabulary."""


class BadSampling(RequestRejected):
    """A sampling option is outside its range."""


class UnknownField(RequestRejected):
    """A request option of this name does not exist."""


class WrongType(RequestRejected):
    """A prompt or an option has the wrong type."""


class BadService(RequestRejected):
    """A priority, tenant or deadline cannot be honoured: a deadline that has passed already, for example."""


class UnknownTenant(RequestRejected):
    """The engine serves certain tenants, and this is none of them."""


class QueueFull(RequestRejected):
    """The engine already holds as many requests as its queue limit allows. Try again later.

    `retry_after_seconds` estimates when there is room, from how fast requests have been finishing; None: too few have.
    """

    def __init__(self, reason: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_seconds = retry_after_seconds


class UnknownRequest(RequestRejected):
    """No request of this id was carried over from an earlier process, or nobody has picked it up in time."""


class RequestTaken(RequestRejected):
    """Somebody has picked this request up already; a stream has one reader."""


class WrongTenant(RequestRejected):
    """The request is another tenant's."""


class BadPosition(RequestRejected):
    """A stream has not come as far as this position yet."""


class RequestFailed(EngineError):
    """The request was accepted and then ended by a failure; other requests are not touched."""


class DeadlineExceeded(RequestFailed):
    """The request's deadline, or the longest time it was to wait for its first blocks, has passed."""


class EngineUnavailable(EngineError):
    """The engine cannot take requests now."""


class NotStarted(EngineUnavailable):
    """The engine has not been started: use `async with Engine(...)`."""


class EngineClosed(EngineUnavailable):
    """The engine is closed or closing."""


class EngineBroken(EngineUnavailable):
    """An actor of the engine crashed; the cause is chained."""


class EngineGaveUp(EngineUnavailable):
    """The executor died again and again without computing anything; the message says of what. Make another engine."""


class EngineDraining(EngineUnavailable):
    """The engine finishes what it has begun and takes nothing new; then it stops."""


class EngineBusy(EngineError):
    """More questions (`explain`) or orders (`set_policy`) at once than the engine takes. Try again in a moment."""


class ReloadBusy(EngineBusy):
    """Another model is being loaded already; that goes on. Try again once it has taken over."""


class ChatBusy(EngineError):
    """The chat's previous answer is still streaming."""
