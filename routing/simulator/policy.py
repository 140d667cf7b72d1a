"""What a policy under test sees, and what it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from routing.simulator.trace import Arrival


class View(Protocol):
    """An engine as somebody sees it: as it is, or as it was when its last signal left."""

    @property
    def in_flight(self) -> int:
        """Requests that haven't ended."""

    @property
    def backlog_tokens(self) -> int:
        """Of prompts, not cached and not computed yet."""

    @property
    def kv_tokens(self) -> int:
        """Logical, of the sequences that decode."""

    @property
    def used_blocks(self) -> int:
        """Of the cache, in use."""

    @property
    def ttft_ms(self) -> float:
        """What requests waited there lately."""

    def cached_tokens(self, prefix: Sequence[int]) -> int:
        """Tokens of a prompt's beginning that the cache holds."""


class Policy(Protocol):
    """Chooses an engine for a request."""

    def choose(self, arrival: Arrival, now_ms: float, engines: Sequence[View]) -> int:
        """The index of an engine. A policy may look at engines, and at what a request's sender knows of it."""
