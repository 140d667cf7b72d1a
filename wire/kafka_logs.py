"""aiokafka's log lines, tamed: an outage would write hundreds a second."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

SILENCE_S = 30.0
_NOISY = (
    "aiokafka",
    "aiokafka.cluster",
    "aiokafka.conn",
    "aiokafka.consumer.consumer",
    "aiokafka.consumer.fetcher",
    "aiokafka.consumer.group_coordinator",
    "aiokafka.consumer.subscription_state",
    "aiokafka.producer.sender",
)


class Tamed(logging.Filter):
    """Lets each kind of warning pass once in 30 s, as a warning; what is less passes only where debugging is on."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._monotonic = monotonic
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
        kind, now = str(record.msg), self._monotonic()
        if now - self._last.get(kind, float("-inf")) < SILENCE_S:
            return False
        self._last[kind] = now
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


def tame() -> None:
    """Put `Tamed` before every logger of aiokafka that is noisy; doing it again changes nothing."""
    for name in _NOISY:
        noisy = logging.getLogger(name)
        if not any(isinstance(old, Tamed) for old in noisy.filters):
            noisy.addFilter(Tamed())
