"""Logging that stays out of the host's way.

Where the host program has configured structlog, its configuration is used. Otherwise events go to the standard
library's logging, which is silent below WARNING until the host asks for more.
"""

from __future__ import annotations

import logging
import traceback
from contextlib import suppress
from typing import Final, Protocol, cast

import structlog
from structlog.typing import EventDict

# Not from `logging.getLevelName`: hosts give the levels other names, such as coloured ones.
_METHODS: Final = {
    logging.DEBUG: "debug",
    logging.INFO: "info",
    logging.WARNING: "warning",
    logging.ERROR: "error",
}


class Logger(Protocol):
    """The part of a structlog logger that we use: an event name, then facts as keywords."""

    def debug(self, event: str, **facts: object) -> object:
        """For every step."""

    def info(self, event: str, **facts: object) -> object:
        """For every request."""

    def warning(self, event: str, **facts: object) -> object:
        """For what works less well than it could."""

    def error(self, event: str, **facts: object) -> object:
        """For what is broken."""


_text = structlog.processors.KeyValueRenderer(key_order=["event"])


def _render(logger: object, method: str, event: EventDict) -> tuple[tuple[str], dict[str, object]]:
    """The event as one line; a traceback stays one, for the standard library to lay out."""
    trace = event.pop("exc_info", None)
    return (_text(logger, method, event),), {} if trace is None else {"exc_info": trace}


class _HostLogger:
    """Decides at each event where it goes, since hosts often configure logging after importing us."""

    def __init__(self, name: str) -> None:
        self._standard = logging.getLogger(name)
        self._quiet = structlog.wrap_logger(
            self._standard,
            processors=[
                structlog.stdlib.filter_by_level,
                _render,
            ],
            wrapper_class=structlog.stdlib.BoundLogger,
        )
        self._structured = structlog.get_logger(name)

    def _log(self, level: int, event: str, facts: dict[str, object]) -> None:
        """Never raises: an actor does not crash because the host's filter, renderer or log file fails."""
        try:
            if structlog.is_configured():
                getattr(self._structured, _METHODS[level])(event, **facts)
            elif self._standard.isEnabledFor(level):
                self._quiet.log(level, event, **facts)
        except Exception:
            if logging.raiseExceptions:  # as the standard library's handlers: on standard error, where there is one
                with suppress(OSError, ValueError):
                    traceback.print_exc()

    def debug(self, event: str, **facts: object) -> None:
        self._log(logging.DEBUG, event, facts)

    def info(self, event: str, **facts: object) -> None:
        self._log(logging.INFO, event, facts)

    def warning(self, event: str, **facts: object) -> None:
        self._log(logging.WARNING, event, facts)

    def error(self, event: str, **facts: object) -> None:
        self._log(logging.ERROR, event, facts)


def get_logger(name: str) -> Logger:
    """A logger whose events follow the host's structlog configuration, or else the standard library's logging."""
    return cast(Logger, _HostLogger(name))
