"""What can go wrong before the broker runs."""

from __future__ import annotations

from wire.errors import MillstreamError


class KafkaSetupError(MillstreamError):
    """Kafka can't be set up on this machine; the message says what to do."""
