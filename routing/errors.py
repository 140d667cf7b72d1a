"""One error tree for routing."""

from __future__ import annotations

from wire.errors import MillstreamError


class RoutingError(MillstreamError):
    """Root of routing's errors."""


class BadSketch(RoutingError):
    """A sketch that no recorder made: a bucket that can't be, or counts that don't add up."""


class BadSnapshot(RoutingError):
    """A snapshot with a weight that is negative or not a number, or with weights that don't sum to 1."""
