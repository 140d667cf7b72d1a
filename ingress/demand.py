"""What this ingress sees, told to the log each second: the control plane's input, and the proof that it lives (R4)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from ingress.pulse import Pulse
from routing.sketch import Recorder
from wire.bus import Producer
from wire.clock import Clock
from wire.codec import encode
from wire.errors import BusError, UnknownTopic
from wire.lossy import LossySender
from wire.messages import DemandSignal, ReplyTo
from wire.topics import SIGNALS

log = logging.getLogger(__name__)
INTERVAL_S = 1.0


class ModelDemand:
    """One model's counts since the last signal."""

    def __init__(self) -> None:
        self.requests = 0
        """all that came"""
        self.refused = 0
        """of these, before they were sent"""
        self.tokens = 0
        self.prompt_tokens = 0
        self.priorities: Counter[int] = Counter()
        self.failures = 0
        self.accept = Recorder()


class Demand:
    """Counts by model; `run` sends them."""

    def __init__(
        self, producer: Producer, reply: ReplyTo, pulse: Pulse, clock: Clock, abroad: Sequence[LossySender] = ()
    ) -> None:
        """`producer`: acks leader. `abroad`: to the clusters of other regions, whose workers serve this one's
        requests only while they hear it, and whose control has to know what it asks."""
        self._producer = producer
        self._abroad = abroad
        self._reply = reply
        self._pulse = pulse
        self._clock = clock
        self._models: dict[str, ModelDemand] = {}

    def of(self, model: str) -> ModelDemand:
        """The counts of a model, to be added to."""
        return self._models.setdefault(model, ModelDemand())

    async def run(self, open_streams: Callable[[], int]) -> None:
        """Send a signal without a model, and one a model, each second until cancelled; the first at once."""
        last_ms = self._clock.monotonic_ms()
        while True:
            now_ms = self._clock.monotonic_ms()
            self._pulse.sent()
            await self._send(self._alive(open_streams()))
            for model, counts in list(self._models.items()):
                await self._send(self._signal(model, counts, max(now_ms - last_ms, 1.0) / 1_000))
            last_ms = now_ms
            await asyncio.sleep(INTERVAL_S)

    def _alive(self, open_streams: int, model: str = "") -> DemandSignal:
        return DemandSignal(
            ingress=f"{self._reply.region}/{self._reply.slot}",
            slot=self._reply.slot,
            incarnation=self._reply.incarnation,
            region=self._reply.region,
            model=model,
            at_ms=self._clock.now_ms(),
            open_streams=open_streams,
        )

    def _signal(self, model: str, counts: ModelDemand, seconds: float) -> DemandSignal:
        # Counted afresh in place: open requests hold on to the object.
        requests, tokens, failures = counts.requests, counts.tokens, counts.failures
        prompts, priorities, refused = counts.prompt_tokens, counts.priorities, counts.refused
        counts.requests = counts.tokens = counts.failures = counts.prompt_tokens = counts.refused = 0
        counts.priorities = Counter()
        return DemandSignal(
            ingress=f"{self._reply.region}/{self._reply.slot}",
            slot=self._reply.slot,
            incarnation=self._reply.incarnation,
            region=self._reply.region,
            model=model,
            at_ms=self._clock.now_ms(),
            requests_per_s=requests / seconds,
            refused_per_s=refused / seconds,
            tokens_per_s=tokens / seconds,
            prompt_tokens_per_s=prompts / seconds,
            priorities={str(priority): count / seconds for priority, count in priorities.items()},
            accept=counts.accept.take(),
            failures=failures,
        )

    async def _send(self, signal: DemandSignal) -> None:
        value, key = encode(signal), signal.model.encode()
        for sender in self._abroad:
            sender.put(SIGNALS, value, key=key)
        try:
            sent = await self._producer.send(SIGNALS, value, key=key)
        except (BusError, UnknownTopic) as exc:
            log.debug("a signal can't be sent: %s", exc)
            return
        sent.add_done_callback(self._acknowledged)

    def _acknowledged(self, sent: asyncio.Future[int]) -> None:
        if not sent.cancelled() and sent.exception() is None:
            self._pulse.beat()
