"""Logging that follows the configuration of the host program.

Where the host has configured structlog, events go there. Otherwise they go to the standard library's logging, which is
silent below WARNING by default.
"""

import logging
import sys
import traceback
from contextlib import suppress
from typing import cast


class Logger:
    """The used part of a structlog logger: an event name, then facts as keywords.

    The destination is determined at each event, since hosts often configure logging after their imports.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._standard = logging.getLogger(name)

    def debug(self, event: str, **facts: object) -> None:
        """Log an event of which each step may have some."""
        self._log("debug", logging.DEBUG, event, facts)

    def info(self, event: str, **facts: object) -> None:
        """Log an event of which each request may have some."""
        self._log("info", logging.INFO, event, facts)

    def warning(self, event: str, **facts: object) -> None:
        """Log a degradation: the program works, less well than it could."""
        self._log("warning", logging.WARNING, event, facts)

    def error(self, event: str, **facts: object) -> None:
        """Log a failure."""
        self._log("error", logging.ERROR, event, facts)

    def _log(self, method: str, level: int, event: str, facts: dict[str, object]) -> None:
        """Log an event without raising: an actor must not crash where the host's filter, renderer or log file fails."""
        try:
            if "structlog" in sys.modules:  # otherwise it is not configured, and importing it is slow
                import structlog

                if structlog.is_configured():
                    getattr(structlog.get_logger(self._name), method)(event, **facts)
                    return
            if self._standard.isEnabledFor(level):
                error = cast(BaseException | None, facts.pop("exc_info", None))
                text = " ".join(f"{name}={fact!r}" for name, fact in {"event": event, **facts}.items())
                self._standard.log(level, text, exc_info=error, stacklevel=3)
        except Exception:
            if logging.raiseExceptions:  # as the standard library's handlers do
                with suppress(OSError, ValueError):
                    traceback.print_exc()


get_logger = Logger
"""Return the logger of this name: `get_logger(name)`."""
