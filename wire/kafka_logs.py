"""aiokafka's log lines, tamed: an outage would write hundreds a second."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

SILENCE_S = 30.0


class Tamed(logging.Handler):
    """Passes each kind of warning on once in 30 s, as a warning; everything less is for debugging."""

    def __init__(self, target: logging.Logger, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._target = target
        self._monotonic = monotonic
        self._last: dict[tuple[str, str], float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        level = logging.DEBUG
        if record.levelno >= logging.WARNING:
            kind, now = (record.name, str(record.msg)), self._monotonic()
            if now - self._last.get(kind, float("-inf")) >= SILENCE_S:
                self._last[kind] = now
                level = logging.WARNING
        self._target.log(level, "%s: %s", record.name, record.getMessage(), exc_info=record.exc_info)


def tame() -> None:
    """Send aiokafka's log lines through `Tamed`; doing it again changes nothing."""
    noisy = logging.getLogger("aiokafka")
    if not any(isinstance(handler, Tamed) for handler in noisy.handlers):
        noisy.addHandler(Tamed(logging.getLogger("wire.kafka")))
        noisy.propagate = False
