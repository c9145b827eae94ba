"""A chat that remembers what was said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from cuelight.config import RequestOptions
from cuelight.errors import ChatBusy
from cuelight.messages.request import Turn
from cuelight.stream import Inbox, Stream


class Chat:
    """A conversation: each answer is generated from all turns before it, whose K/V the prefix cache keeps.

    An answer that was broken off stays in the conversation as far as it came; one that was refused or failed, or never
    began, leaves no trace, so it can be asked again.
    """

    def __init__(
        self, submit: Callable[[object, RequestOptions], Stream], system: str | None, options: RequestOptions
    ) -> None:
        self._submit = submit
        self._options = options
        self._turns: list[Turn] = [] if system is None else [Turn("system", system)]
        self._asked: Turn | None = None
        # The answer's inbox, not its stream: a stream that nobody else holds must be free to end.
        self._answer: Inbox | None = None

    def say(self, text: str, **options: Unpack[RequestOptions]) -> Stream:
        """Ask, and stream the answer; `options` override the chat's own.

        Raises:
            ChatBusy: the previous answer is still streaming.
            RequestRejected, EngineUnavailable: as `Engine.stream`.
        """
        self._settle()
        if self._answer is not None:
            raise ChatBusy("the previous answer is still streaming: read it to its end or close it first")
        asked = Turn("user", text)
        merged: RequestOptions = {**self._options, **options}
        stream = self._submit([*self._turns, asked], merged)
        self._asked, self._answer = asked, stream.inbox
        return stream

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation so far, as role and content; an answer joins it when it is over."""
        self._settle()
        return [{"role": turn.role, "content": turn.content} for turn in self._turns]

    def _settle(self) -> None:
        """Take the last answer into the conversation if it is over."""
        answer = self._answer
        if answer is None or self._asked is None or not answer.over:
            return
        text = "".join(answer.texts)
        if answer.error is None and text:
            self._turns += [self._asked, Turn("assistant", text)]
        self._asked = self._answer = None
