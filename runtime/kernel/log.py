"""Logging that stays out of the host's way.

Where the host program has configured structlog, its configuration is used. Otherwise events go to the standard
library's logging, which is silent below WARNING until the host asks for more.
"""

import logging
import sys
import traceback
from contextlib import suppress
from typing import cast


class Logger:
    """The part of a structlog logger that we use: an event name, then facts as keywords.

    Decides at each event where it goes, since hosts often configure logging after importing us.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._standard = logging.getLogger(name)

    def debug(self, event: str, **facts: object) -> None:
        """For every step."""
        self._log("debug", logging.DEBUG, event, facts)

    def info(self, event: str, **facts: object) -> None:
        """For every request."""
        self._log("info", logging.INFO, event, facts)

    def warning(self, event: str, **facts: object) -> None:
        """For what works less well than it could."""
        self._log("warning", logging.WARNING, event, facts)

    def error(self, event: str, **facts: object) -> None:
        """For what is broken."""
        self._log("error", logging.ERROR, event, facts)

    def _log(self, method: str, level: int, event: str, facts: dict[str, object]) -> None:
        """Never raises: an actor does not crash because the host's filter, renderer or log file fails."""
        try:
            if "structlog" in sys.modules:  # else nobody has configured it, and importing it is slow
                import structlog

                if structlog.is_configured():
                    getattr(structlog.get_logger(self._name), method)(event, **facts)
                    return
            if self._standard.isEnabledFor(level):
                error = cast(BaseException | None, facts.pop("exc_info", None))
                text = " ".join(f"{name}={fact!r}" for name, fact in {"event": event, **facts}.items())
                self._standard.log(level, text, exc_info=error, stacklevel=3)
        except Exception:
            if logging.raiseExceptions:  # as the standard library's handlers: on standard error, where there is one
                with suppress(OSError, ValueError):
                    traceback.print_exc()


get_logger = Logger
"""How to get one: its events follow the host's structlog configuration, or else the standard library's logging."""
