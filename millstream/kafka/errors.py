"""What can go wrong before the broker runs."""

from __future__ import annotations

from millstream.errors import StartFailed


class KafkaSetupError(StartFailed):
    """Kafka can't be set up on this machine; the message says what to do."""
