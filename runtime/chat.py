"""A conversation with the model, turn by turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from cuelight.config import RequestOptions
from cuelight.errors import ChatBusy
from cuelight.messages.request import Turn
from cuelight.stream import Inbox, Stream


class Chat:
    """A conversation whose answers are generated from all turns before them, made by `Engine.chat`.

    The prefix cache keeps the blocks of earlier turns, so that only new turns are computed. A cancelled answer stays in
    the conversation as far as it was generated. A question that was refused, failed, or got no output is not added, so
    it can be asked again.
    """

    def __init__(
        self, submit: Callable[[object, RequestOptions], Stream], system: str | None, options: RequestOptions
    ) -> None:
        self._submit = submit
        self._options = options
        self._turns: list[Turn] = [] if system is None else [Turn("system", system)]
        self._asked: Turn | None = None
        # The answer's inbox, not its stream: a reference to the stream would keep it from being dropped and cancelled.
        self._answer: Inbox | None = None

    def say(self, text: str, **options: Unpack[RequestOptions]) -> Stream:
        """Submit a user message and return the stream of the answer; `options` override those of the chat.

        Raises:
            ChatBusy: the previous answer is still streaming.
            RequestRejected: as for `Engine.stream`.
            EngineUnavailable: as for `Engine.stream`.
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
        """The conversation so far, as a role and content for each message; an answer is added once it has ended."""
        self._settle()
        return [{"role": turn.role, "content": turn.content} for turn in self._turns]

    def _settle(self) -> None:
        """Add the last question and answer to the turns, if the answer has ended."""
        answer = self._answer
        if answer is None or self._asked is None or not answer.over:
            return
        text = "".join(answer.texts)
        if answer.error is None and text:
            self._turns += [self._asked, Turn("assistant", text)]
        self._asked = self._answer = None
