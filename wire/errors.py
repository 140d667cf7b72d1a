"""One error tree for everything that crosses a process border."""

from __future__ import annotations


class MillstreamError(Exception):
    """Root of every error Millstream raises on purpose."""


class WireError(MillstreamError):
    """Root of the errors of the shared vocabulary: settings, codec, topics, bus."""


class SettingsError(WireError):
    """A setting is missing or wrong; the message names it and says what to put there."""


class DecodeError(WireError):
    """A record could not be decoded. `why` holds no content of the record, so it may be logged."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class BusError(WireError):
    """Root of the errors of the bus."""


class Unavailable(BusError):
    """The log can't be reached just now; what was asked for has not been done or read."""


class SendUnknown(BusError):
    """A send was given up or failed: the record may be in the log, now or later, or not at all (R1, R3)."""


class NotMember(BusError):
    """The consumer group doesn't count this member's generation any more; nothing was committed."""


class UnknownTopic(BusError):
    """A topic that the table doesn't create was asked for."""

    def __init__(self, topic: str) -> None:
        super().__init__(
            f"topic {topic!r} doesn't exist; `millstream up` or wire.topics creates topics, nothing else does"
        )
        self.topic = topic
