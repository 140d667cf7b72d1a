"""When an engine that fell silent counts as lost to what it was sent: look by look. Pure."""

from __future__ import annotations

from ingress.life import Target

LOOK_MS = 100
"""between two looks; the second one comes at most twice as long after an engine fell silent"""
LATE_MS = 2 * LOOK_MS
"""A look this long after the one before it comes after a pause of this process"""


class Looks:
    """What was silent at the latest look.

    One look isn't believed. Signals come in bursts after a pause of the log, one engine's before another's, and those
    that are read first make the others look silent. Nor is the first look after a pause of this process, which may have
    all those signals still to read.
    """

    def __init__(self) -> None:
        self._silent: frozenset[Target] = frozenset()
        self._at_ms = float("-inf")

    def look(self, now_ms: float, silent: frozenset[Target]) -> frozenset[Target]:
        """Of those silent now, the ones that are lost: they were silent at the look before, not long ago."""
        lost = silent & self._silent if now_ms - self._at_ms < LATE_MS else frozenset[Target]()
        self._silent, self._at_ms = silent, now_ms
        return lost
