"""The traces that come with Millstream; traces/README.md says whose they are."""

from __future__ import annotations

import gzip
from pathlib import Path

from routing.simulator import trace
from routing.simulator.trace import Arrival

DIRECTORY = Path(__file__).parent / "traces"
MOONCAKE, AZURE = "mooncake-conversation.jsonl.gz", "azure-2023-conv.csv.gz"


def mooncake(*, speed: float = 1.0) -> list[Arrival]:
    """Conversations, with what their prompts share."""
    with gzip.open(DIRECTORY / MOONCAKE, "rt") as lines:
        return trace.mooncake(lines, speed=speed)


def azure(*, speed: float = 1.0) -> list[Arrival]:
    """Conversations by times and lengths alone."""
    with gzip.open(DIRECTORY / AZURE, "rt") as lines:
        return trace.azure(lines, speed=speed)
