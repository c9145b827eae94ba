"""Token ids of one stream become text as they come. Knows a decode function; knows nothing of stops or messages.

The promise: the pieces of text, joined, equal one decode of all the tokens. Decoding is not a token's own affair (a
character spans tokens, a leading space is dropped once, a byte changes what its neighbours mean), so each piece is
found by decoding a short window of the latest tokens and leaving out what was already given.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Final, TypeAlias

Decode: TypeAlias = Callable[[Sequence[int]], str]

_REPLACEMENT: Final = "\ufffd"
# An incomplete character hangs on its last three bytes at most, so on three tokens; a fourth gives the window text to
# start with, which takes the loss of a leading space or of the first half of a character.
_TOKENS_KEPT: Final = 6
_WINDOW_TOKENS: Final = 12
# A decoder whose text does not line up after this many tokens is not one that pieces can be cut from exactly.
_WINDOW_TOKENS_MAX: Final = 48


class IncrementalText:
    """The text of one stream. The work for a token does not grow with the tokens before it.

    `byte_tokens` are the ids that spell single bytes and are decoded run by run (byte fallback): one bad byte turns
    its whole run into replacement characters, so the text of a run is settled only by the token after it.
    """

    def __init__(self, decode: Decode, byte_tokens: Container[int] = ()) -> None:
        self._decode = decode
        self._byte_tokens = byte_tokens
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that were given out
        self._run: list[int] = []  # byte tokens since the window's end

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens and return the text they settle. It never ends in half a character."""
        return "".join([self._push(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """Return the text that was held back; half a character becomes U+FFFD. Nothing can be pushed after this."""
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
            return ""  # a run of bytes goes on across a token that has no text
        self._window += (*self._run, token_id)
        self._run = []
        text = self._decode(self._window)
        # Only the last replacement character can still become something else: one before it has been followed by a
        # byte that did not complete it.
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
        """Whether decoding skips this token wherever it stands, as it does special tokens. A lone space is no such
        token, though it may decode to nothing at the start of a text."""
        return not self._decode([token_id] * 4)

    def _shorten(self, text: str) -> str:
        """Keep the window's last tokens only, if the rest of the text can still be told from what was given."""
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
    """Watches one text. Holds back only what may be the beginning of a stop string; `matched` ends the text."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would end every text at once"
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False

    def feed(self, text: str) -> str:
        """Take the next piece of text; return what can be shown now."""
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
        """Return what was held back: no more text comes, so it was no stop string."""
        held, self._held = self._held, ""
        return held


def _partial_start(text: str, stop: str) -> int:
    """Where the longest ending of `text` begins that `stop` begins with; the text's length if there is none."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
