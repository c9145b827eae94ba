"""Stop strings in a text that comes in pieces: what of it may be shown, and where it ends. Knows no tokens.

The text ends before the stop string that is complete first, reading character by character; of several complete at
the same character, the longest counts. So the result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


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
