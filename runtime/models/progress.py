"""Progress of a fetch, a conversion or a start on standard error, shown only on request."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm


def counting_bar(total: int, unit: str, *, shown: bool = True, **options: object) -> tqdm[None]:
    """Return a tqdm bar without tqdm's monitor thread, which would outlive the bar in the host program."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg, misc, unused-ignore]  # tqdm's types, where installed, are generic
        monitor_interval = 0

    return Bar(total=total, unit=unit, **({"disable": not shown} | options))


class Progress:
    """Prints notes, and shows one bar at a time. Bars appear on a terminal only, so that a log has a line per phase."""

    def __init__(self, shown: bool) -> None:
        self.shown = shown
        self._bar: tqdm[None] | None = None
        self._has_phase = False
        self._phase = ""

    def note(self, text: str) -> None:
        """Print one line."""
        if self.shown:
            self.close()
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def phase(self, text: str) -> None:
        """Show the present phase: on a terminal in place of the phase before, else on a line of its own."""
        if text == self._phase:
            return
        self._phase = text
        if not self.shown or not sys.stderr.isatty():
            self.note(text)
            return
        self.close()
        self._has_phase = True
        sys.stderr.write(text)
        sys.stderr.flush()

    def bar(self, what: str, total: int, unit: str) -> None:
        """Show a new bar of `total` units in place of the one before."""
        self.close()
        if self.shown:
            self._bar = counting_bar(total, unit, desc=what, unit_scale=unit == "B", disable=None, leave=False)

    def reach(self, done: int, stage: str = "") -> None:
        """Move the bar to `done` units of its total."""
        if self._bar is not None:
            self._bar.set_postfix_str(stage, refresh=False)
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Remove the bar and the phase."""
        if self._has_phase:
            self._has_phase = False
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
