"""Who routes: an ingress knows what it is told and what it did itself."""

from __future__ import annotations

from collections.abc import Sequence

from routing.simulator.engine import Engine
from routing.simulator.policy import Policy, View
from routing.simulator.sequence import Sequence as Running
from routing.simulator.signals import Index, Seen, Sent, Signal
from routing.simulator.trace import Arrival


class Ingress:
    """What the fleet tells an ingress, and asks it. It is told at once when one of its own requests ends."""

    def choose(self, arrival: Arrival, now_ms: float, tried: frozenset[int]) -> int | None:
        """The engine a request goes to, not one that was tried; None: it is shed, with an answer."""
        raise NotImplementedError

    def hear(self, signal: Signal) -> None:
        """An engine's signal has come."""

    def sent(self, sent: Sent) -> None:
        """A request was sent: by this ingress just now, or by a sibling some time ago."""

    def ended(self, running: Running, attempt: int) -> None:
        """One of its own requests got its last token."""

    def lost(self, arrival: Arrival, attempt: int, engine: int, now_ms: float) -> None:
        """One of its own requests is given up there: the engine died under it, or it had to move."""

    def may_retry(self, now_ms: float) -> bool:
        """Whether a request that was given up may be sent once more."""
        return True

    def silent(self, now_ms: float) -> frozenset[int]:
        """Engines that this ingress takes for dead."""
        return frozenset()


SILENT_MS = 3_000.0
"""Peers take an engine for dead that hasn't been heard of for so long: three missed health checks"""


class PeerIngress(Ingress):
    """Asks a peer's policy. Its view is what signals and sends say; without signals, what is."""

    def __init__(self, policy: Policy, engines: Sequence[Engine], indexes: Sequence[Index] | None) -> None:
        """`indexes`: what signals say of the caches, kept by somebody for all; None: there are no signals."""
        self._policy = policy
        self._seen = [Seen(number, index) for number, index in enumerate(indexes)] if indexes is not None else []
        self._views: Sequence[View] = self._seen or engines

    def choose(self, arrival: Arrival, now_ms: float, tried: frozenset[int]) -> int | None:
        gone = tried | self.silent(now_ms)
        if not gone:
            return self._policy.choose(arrival, now_ms, self._views)
        left = [index for index in range(len(self._views)) if index not in gone] or sorted(gone - tried)
        if not left:
            return None
        return left[self._policy.choose(arrival, now_ms, [self._views[index] for index in left])]

    def hear(self, signal: Signal) -> None:
        self._seen[signal.engine].hear(signal)

    def sent(self, sent: Sent) -> None:
        if self._seen:
            self._seen[sent.engine].sent(sent)

    def silent(self, now_ms: float) -> frozenset[int]:
        return frozenset(seen.engine for seen in self._seen if now_ms - seen.heard_ms > SILENT_MS)
