"""Incremental decoding of one stream's tokens, and the search for stop strings in its text.

The pieces of text, joined, equal one decode of all the tokens. A token's text depends on the tokens beside it (a
character spans tokens, a leading space is dropped once, a byte changes the text of its neighbours), so each piece is
the decoded text of a short window of the latest tokens, without the part that was already returned.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Final, TypeAlias

Decode: TypeAlias = Callable[[Sequence[int]], str]

_REPLACEMENT: Final = "\ufffd"
# An incomplete character has at most three bytes, so at most three tokens; the tokens before them give the window text
# to start with, which absorbs the loss of a leading space or of the first half of a character.
_TOKENS_KEPT: Final = 6
_WINDOW_TOKENS: Final = 12
# If the window's text still does not line up after this many tokens, the decoder does not allow exact pieces.
_WINDOW_TOKENS_MAX: Final = 48


class IncrementalText:
    """Decodes one stream. The work for a token does not grow with the number of tokens before it.

    `byte_tokens` are the ids of single bytes, which are decoded run by run (byte fallback): one invalid byte turns
    its whole run into replacement characters, so the text of a run is settled only by the token after it.
    """

    def __init__(self, decode: Decode, byte_tokens: Container[int] = ()) -> None:
        self._decode = decode
        self._byte_tokens = byte_tokens
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that were returned
        self._run: list[int] = []  # byte tokens since the window's end

    def push(self, token_ids: Sequence[int]) -> str:
        """Add the next tokens and return the text they settle, which never ends in half a character."""
        return "".join([self._push(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """Return the text that was held back; half a character becomes U+FFFD. No token may be pushed after this."""
        self._window += self._run
        self._run = []
        piece = self._decode(self._window)[self._given :]
        self._given += len(piece)
        return piece

    def _push(self, token_id: int) -> str:
        if token_id in self._byte_tokens:
            self._run.append(token_id)
            return ""
        if self._run and self._is_silent(token_id):
            return ""  # a run of bytes continues across a token without text
        self._window += (*self._run, token_id)
        self._run = []
        text = self._decode(self._window)
        # Only the last replacement character can still change: any earlier one was followed by a byte that did not
        # complete it.
        settled = len(text) - text.endswith(_REPLACEMENT)
        piece = text[self._given : settled]
        if not piece and self._is_silent(token_id):
            self._window.pop()
            return ""
        self._given = max(self._given, settled)
        if len(self._window) > _WINDOW_TOKENS:
            piece += self._shorten(text)
        return piece

    def _is_silent(self, token_id: int) -> bool:
        """Return whether decoding skips this token at any position, as it does special tokens.

        A lone space is not skipped, although it may decode to no text at the start.
        """
        return not self._decode([token_id] * 4)

    def _shorten(self, text: str) -> str:
        """Drop all but the window's last tokens, if the text not yet returned can still be found in theirs.

        A window over its maximum is shortened in any case; return the text that would be lost by that, else "".
        """
        kept = self._window[-_TOKENS_KEPT:]
        kept_text = self._decode(kept)
        pending = text[self._given :]
        if len(kept_text) > len(pending) and kept_text.endswith(pending):
            self._window = kept
            self._given = len(kept_text) - len(pending)
            return ""
        if len(self._window) <= _WINDOW_TOKENS_MAX:
            return ""
        self._window = kept
        self._given = len(kept_text)
        return pending


class StopMatcher:
    """Finds stop strings in one text. Holds back only the possible beginning of one; `matched` ends the text."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "a stop string is empty; it would end every text at once"
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False

    def feed(self, text: str) -> str:
        """Add the next piece of text and return the text that no longer can belong to a stop string."""
        assert not self.matched, "the text has ended"
        if not self._stops:
            return text
        text = self._held + text
        match = min(
            ((start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0),
            default=None,
        )
        if match is not None:
            self.matched = True
            self._held = ""
            return text[: match[1]]
        held_from = min(_partial_start(text, stop) for stop in self._stops)
        self._held = text[held_from:]
        return text[:held_from]

    def finish(self) -> str:
        """Return the text held back: the text has ended, so no stop string can be completed."""
        held, self._held = self._held, ""
        return held


def _partial_start(text: str, stop: str) -> int:
    """Return the start of the longest suffix of `text` that is a prefix of `stop`; the text's length if none is."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
