"""What the log tells this ingress in the background: keys, models, weights, engines, siblings."""

from __future__ import annotations

from ingress.router import Router, Weights
from wire.bus import Bus
from wire.clock import Clock
from wire.follow import Dump, Follower, Tail
from wire.messages import Credential, DemandSignal, Dispatches, EngineSignal, Model, Snapshot
from wire.topics import CATALOGUE, CREDENTIALS, SIGNALS, WEIGHTS, dispatches


class Views:
    """Five topics, followed."""

    def __init__(self, bus: Bus, region: str, weights: Weights, router: Router, dead: Dump, clock: Clock) -> None:
        self.credentials = Follower[Credential](bus, CREDENTIALS, Credential, clock=clock, dead=dead)
        self.models = Follower[Model](bus, CATALOGUE, Model, clock=clock, dead=dead)
        self.weights = weights
        self._readings = (
            self.credentials,
            self.models,
            Follower[Snapshot](bus, WEIGHTS, Snapshot, clock=clock, dead=dead, on_change=weights.changed),
            Tail[EngineSignal | DemandSignal](bus, SIGNALS, EngineSignal | DemandSignal, router.heard, dead=dead),
            Tail[Dispatches](bus, dispatches(region), Dispatches, router.told, dead=dead),
        )

    async def start(self) -> None:
        """Begin reading."""
        for reading in self._readings:
            await reading.start()

    async def stop(self) -> None:
        """End reading."""
        for reading in self._readings:
            await reading.stop()

    def missing(self, credentials_max_age_ms: int) -> list[str]:
        """What is not known yet, or not well enough any more."""
        out = []
        if not self.credentials.caught_up:
            out.append("the credentials aren't read to their end yet")
        elif self.credentials.age_ms > credentials_max_age_ms:
            out.append("the credentials could not be checked against the log for too long")
        if not self.models.caught_up:
            out.append("the catalogue isn't read to its end yet")
        elif not self.models.items:
            out.append("the catalogue holds no model")
        return out
