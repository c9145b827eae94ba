"""The clients of a simulated run: drawn requests, and the check of the messages that each client received."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import msgspec

from cuelight.core.stub_model import END_TOKEN, decode, encode
from cuelight.messages.client import Accepted, Chunk, ClientMessage, End, Rejected
from cuelight.messages.intake import Cancel, Submit
from cuelight.messages.request import FailureCause, FinishReason, Prompt, Refusal, RequestId, Sampling, Service
from cuelight.simulate.faults import ALPHABET, next_token
from cuelight.stream import Inbox


@dataclass(frozen=True)
class AllowedOutcomes:
    """The facts of a run that determine which outcomes of a request are allowed."""

    token_limit: int
    failed_steps: int
    """Steps that raised; two of them may fail a request."""
    executor_deaths: int
    """Executors that died; three deaths may fail a request."""
    is_calm: bool
    """Whether no actor crashed. Then no message may arrive twice, not even one that the inbox would ignore."""
    poison: RequestId | None


class SimulatedClient:
    """A client with one drawn request, which it can send again, and with the library's own inbox."""

    def __init__(self, request_id: RequestId, rng: random.Random, now: Callable[[], float]) -> None:
        self.request_id = request_id
        self.has_left = False
        self.is_sent = False
        self._prompt = _draw_prompt(rng)
        self._sampling = _draw_sampling(rng)
        self._service = Service(tenant=rng.choice("ab"), cache_salt=rng.choice(("", "", "", "salt")))
        self._sample_of: RequestId | None = None
        self._inbox = Inbox(request_id, now, lambda _: None)
        self._received: list[ClientMessage] = []
        """The messages up to the end; the inbox must ignore any later one."""
        self._received_after_end = 0

    def tell(self, message: ClientMessage, /) -> None:
        """Store the message, and pass it to the inbox."""
        if self.end is None:
            self._received.append(message)
        else:
            self._received_after_end += 1
        self._inbox.tell(message)

    def become_sample_of(self, first: SimulatedClient) -> None:
        """Make the request another sample of the prompt of `first`."""
        self._prompt, self._service, self._sample_of = first._prompt, first._service, first.request_id

    def submit(self) -> Submit:
        """Return the request."""
        return Submit(self.request_id, self._prompt, self._sampling, self, self._service, self._sample_of)

    def submit_again(self) -> Submit | None:
        """Return the request with its output so far, or None unless it was sent and has not ended."""
        if not self.is_sent or self.end is not None:
            return None
        inbox = self._inbox
        return msgspec.structs.replace(self.submit(), is_accepted=inbox.is_accepted, output=tuple(inbox.token_ids))

    def cancel(self) -> Cancel:
        """Return the cancellation of the request."""
        return Cancel(self.request_id)

    @property
    def end(self) -> End | Rejected | None:
        """The last message of the request, or None before it."""
        if self._inbox.ended_at is None:
            return None
        last = self._received[-1]
        assert isinstance(last, End | Rejected), f"request {self.request_id} ends with {last}"
        return last

    def check(self, allowed: AllowedOutcomes) -> None:
        """Assert that the client received the output of the request served alone, or an outcome in `allowed`."""
        who = f"request {self.request_id}"
        heard, end = self._received, self.end
        assert all(message.request_id == self.request_id for message in heard), f"{who} receives another's message"
        assert end is not None, f"{who} never ends"
        if allowed.is_calm:
            assert not self._received_after_end, f"{who} ends twice"
            assert not any(isinstance(message, Accepted) for message in heard[1:]), f"{who} is accepted twice"
            self._check_positions()
        if isinstance(end, Rejected):
            assert not any(isinstance(message, Chunk) for message in heard), f"{who} is refused after a chunk"
            assert self._is_fair(end.refusal, allowed), f"{who} is refused without cause: {end}"
            return
        prompt = encode(self._prompt)
        assert heard[0] == Accepted(self.request_id, len(prompt)), f"{who} begins with {heard[0]}"
        self._check_output(end, prompt, allowed)

    def _check_output(self, end: End, prompt: Sequence[int], allowed: AllowedOutcomes) -> None:
        who = f"request {self.request_id}"
        tokens, text = self._inbox.token_ids, "".join(self._inbox.texts)
        expected, expected_text, reason = expected_output(prompt, self._sampling, allowed.token_limit)
        assert tokens == expected[: len(tokens)], f"{who} gets {tokens} instead of {expected}"
        assert decode(tokens).startswith(text), f"{who} gets the text {text!r}, which {tokens} do not decode to"
        is_poison = self.request_id == allowed.poison
        if end.reason is FinishReason.CANCELLED:
            assert self.has_left, f"{who} is cancelled, but its client has not left"
        elif end.reason is FinishReason.FAILED:
            self._check_failure(end, allowed, is_poison=is_poison)
        else:
            assert not is_poison, f"{who} is poisonous, but does not fail"
            assert (tokens, text, end.reason) == (expected, expected_text, reason), (
                f"{who} ends for {end.reason} with {text!r} instead of for {reason} with {expected_text!r}"
            )
            assert end.usage.output_tokens == len(tokens), f"{who} is charged for {end.usage}"
            assert end.usage.prompt_tokens == len(prompt), f"{who} is charged for {end.usage}"

    def _check_failure(self, end: End, allowed: AllowedOutcomes, *, is_poison: bool) -> None:
        who = f"request {self.request_id}"
        if end.failure is FailureCause.EXECUTOR_DEATHS:
            assert allowed.executor_deaths >= 3, f"{who} fails after {allowed.executor_deaths} deaths: {end.error}"
        else:
            failed = allowed.failed_steps
            assert failed >= 2 and not is_poison, f"{who} fails after {failed} failed steps: {end.error}"

    def _check_positions(self) -> None:
        count = 0
        for message in self._received:
            if isinstance(message, Chunk):
                assert message.position == count, f"request {self.request_id} gets {message} at position {count}"
                count += len(message.token_ids)

    def _is_fair(self, refusal: Refusal, allowed: AllowedOutcomes) -> bool:
        length = len(encode(self._prompt))
        match refusal:
            case Refusal.PROMPT_TOO_LONG:
                return length + 1 > allowed.token_limit
            case Refusal.EMPTY_PROMPT:
                return length == 0
        return refusal is Refusal.QUEUE_FULL and not self._inbox.is_accepted


def expected_output(
    prompt: Sequence[int],
    sampling: Sampling,
    token_limit: int,
    *,
    next_token: Callable[[Sequence[int]], int] = next_token,
    end_tokens: Collection[int] = (END_TOKEN,),
) -> tuple[list[int], str, FinishReason]:
    """Return the tokens, text and finish reason of a request served alone, computed the slow, obvious way.

    Supports at most one stop string.
    """
    tokens: list[int] = []
    limit = min(sampling.max_tokens, token_limit - len(prompt))
    while True:
        tokens.append(next_token([*prompt, *tokens]))
        text = decode(tokens)
        begin = len(decode(tokens[: sampling.min_tokens]))
        for stop in sampling.stop:
            if (found := text.find(stop, begin)) >= 0:
                return tokens, text[:found], FinishReason.STOP
        is_last = tokens[-1] in sampling.stop_token_ids or (tokens[-1] in end_tokens and not sampling.ignore_eos)
        if is_last and len(tokens) >= sampling.min_tokens:
            return tokens, text, FinishReason.STOP
        if len(tokens) >= limit:
            return tokens, text, FinishReason.LENGTH


_BEGINNINGS: Final = ("", "a bad cafe faced", "a bad cafe faced a bee and fed a beef cage ", "deaf")


def _draw_prompt(rng: random.Random) -> Prompt:
    """Draw a prompt: often with a prefix that others share, rarely empty or long."""
    length = rng.choice((0, 3, 10, 30, 30, 30, 420 if rng.random() < 0.2 else 5))
    letters = bytes(islice(iter(lambda: rng.choice(ALPHABET), None), length))
    text = rng.choice(_BEGINNINGS) + letters.decode()
    return text if rng.random() < 0.7 else tuple(text.encode())


def _draw_sampling(rng: random.Random) -> Sampling:
    max_tokens = rng.choice((1, 5, 20, 40))
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, 3)) if max_tokens > 3 else 0,
        seed=rng.choice((None, 7)),
        stop=rng.choice(((), (), ("ab",), ("e",), ("g fa",))),
        stop_token_ids=rng.choice(((), (), (ALPHABET[0],))),
        ignore_eos=rng.random() < 0.3,
    )
