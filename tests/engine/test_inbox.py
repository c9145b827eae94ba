"""The client's end of a stream takes each token once, also where tokens are sent again."""

from __future__ import annotations

import itertools

import pytest

from cuelight import errors
from cuelight.messages.client import Accepted, Chunk, End, Rejected
from cuelight.messages.request import FinishReason, Refusal, RequestId, Usage
from cuelight.stream import Inbox

ID = RequestId(1)
END = End(ID, FinishReason.LENGTH, Usage(1, 0, 3), 0.0, 0)


@pytest.fixture
def inbox() -> Inbox:
    moments = itertools.count(0.0)
    return Inbox(ID, lambda: next(moments), lambda _: None)


def chunk(position: int, text: str, *token_ids: int) -> Chunk:
    return Chunk(ID, position, token_ids, text)


def test_repeated_chunks_are_ignored(inbox: Inbox) -> None:
    for each in (chunk(0, "a", 97), chunk(1, "b", 98), chunk(0, "a", 97), chunk(1, "b", 98), chunk(2, "c", 99)):
        inbox.tell(each)
    assert (inbox.token_ids, "".join(inbox.texts)) == ([97, 98, 99], "abc")


def test_text_held_back_is_taken_once(inbox: Inbox) -> None:
    for each in (chunk(0, "", 97), chunk(1, "ST"), chunk(0, "", 97), chunk(1, "ST"), END, END, chunk(1, "c", 99)):
        inbox.tell(each)
    assert (inbox.token_ids, "".join(inbox.texts)) == ([97], "ST")
    assert inbox.end == END


def test_missing_token_is_an_assertion_error(inbox: Inbox) -> None:
    inbox.tell(chunk(0, "a", 97))
    with pytest.raises(AssertionError, match="skip"):
        inbox.tell(chunk(2, "c", 99))


def test_first_end_is_final(inbox: Inbox) -> None:
    inbox.tell(Accepted(ID, 1))
    inbox.tell(END)
    ended_at = inbox.ended_at
    inbox.tell(End(ID, FinishReason.FAILED, Usage(), 0.0, 0, "late"))
    inbox.tell(Rejected(ID, Refusal.BAD_PROMPT, "late"))
    inbox.fail(errors.EngineClosed("late"))
    assert (inbox.end, inbox.error, inbox.ended_at) == (END, None, ended_at)


def test_queue_full_after_acceptance_is_ignored(inbox: Inbox) -> None:
    """A copy that was sent before the request was accepted may reach a new intake first."""
    inbox.tell(Accepted(ID, 1))
    inbox.tell(Rejected(ID, Refusal.QUEUE_FULL, "no room"))
    assert inbox.error is None and inbox.ended_at is None
    inbox.tell(Rejected(ID, Refusal.BAD_PROMPT, "no tokens after all"))
    assert isinstance(inbox.error, errors.BadPrompt)
