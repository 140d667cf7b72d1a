"""One request on one engine."""

from __future__ import annotations

from routing.simulator.trace import Arrival

UNKNOWN = -1.0


class Sequence:
    """Where a request stands on an engine. Times in ms; UNKNOWN until they are."""

    __slots__ = (
        "arrival",
        "beside",
        "cached_tokens",
        "computed_tokens",
        "expected_tokens",
        "finish_at",
        "finished_ms",
        "first_token_ms",
        "generated_tokens",
        "pieces",
        "queued_ms",
        "since",
        "started_ms",
    )

    def __init__(self, arrival: Arrival, queued_ms: float) -> None:
        self.arrival = arrival
        self.queued_ms = queued_ms
        """when it came to the engine"""
        self.beside = 0
        """requests that were in flight there"""
        self.started_ms = UNKNOWN
        self.first_token_ms = UNKNOWN
        self.finished_ms = UNKNOWN
        self.cached_tokens = 0
        """of the prompt, found in the cache when it was begun for the first time"""
        self.computed_tokens = 0
        """of the prompt, cached ones included"""
        self.expected_tokens = 0
        """of the prompt, that seemed to be left when it came to the queue"""
        self.generated_tokens = 0
        """those it had when it lost its place; they are computed again like a prompt"""
        self.pieces = 0
        """of its prefix, pinned"""
        self.since = 0
        """the engine's count of decode steps that stands for no generated token"""
        self.finish_at = 0
        """that count, when its last token is generated"""

    @property
    def left_tokens(self) -> int:
        """Still to be computed before the next token is generated."""
        return self.arrival.prompt_tokens + self.generated_tokens - self.computed_tokens

    def __lt__(self, other: Sequence) -> bool:
        return self.finish_at < other.finish_at
