"""One ingress, put together: what it reads and sends in the background, and the app in front."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.types import ASGIApp

from ingress.app import build_app
from ingress.credentials import Authenticator, hmac_secret
from ingress.demand import Demand
from ingress.dispatches import Broadcast
from ingress.gateway import Gateway
from ingress.life import Patience
from ingress.metrics import Metrics
from ingress.pulse import Pulse
from ingress.relay import Relay
from ingress.replies import Replies
from ingress.router import Router, Weights
from ingress.sender import Sender
from ingress.views import Views
from routing.earlier import EarlierPolicy
from routing.native import weigh
from routing.policy import Policy
from routing.shed import Gate
from wire import ids
from wire.bus import Bus, Producer
from wire.clock import Clock
from wire.follow import dead_letters
from wire.lossy import LossySender
from wire.messages import ReplyTo
from wire.settings import Settings

log = logging.getLogger(__name__)
HOUSEKEEPING_S = 60.0
STOP_FLUSH_S = 1.0
"""for the last Cancels, where the log is away"""


class Ingress:
    """Owns every task of this process but the HTTP server's: `open`, serve `app`, `drain`, `close`."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        *,
        requests: Mapping[str, Producer],
        leader: Producer,
        abroad: Sequence[Producer] = (),
        views: Views,
        router: Router,
        replies: Callable[[Relay], Replies],
        reply: ReplyTo,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._views = views
        self._router = router
        self._producers = [*dict.fromkeys(requests.values()), leader, *abroad]
        self._abroad = [LossySender(producer) for producer in abroad]
        self._pulse = Pulse(clock)
        self._demand = Demand(leader, reply, self._pulse, clock, self._abroad)
        self._broadcast = Broadcast(leader, reply, clock)
        self._sender = Sender(requests, self._pulse, clock)
        self._relay = Relay(
            patience=patience_of(settings),
            sender=self._sender,
            router=router,
            broadcast=self._broadcast,
            demand=self._demand,
            pulse=self._pulse,
            metrics=metrics,
            clock=clock,
        )
        self._replies = replies(self._relay)
        self._metrics = metrics
        self._gateway = Gateway(
            settings=settings,
            authenticator=Authenticator(
                views.credentials, hmac_secret(settings.key_secret), settings.credentials_max_age_ms
            ),
            models=views.models,
            relay=self._relay,
            reply=reply,
            metrics=metrics,
            clock=clock,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self.app: ASGIApp = build_app(self._gateway, self.missing, self._refresh, lambda: ids.uuid7(clock.now_ms()))
        self._failed = asyncio.Event()

    async def open(self) -> None:
        """Begin reading and signalling. The app answers at once; it is ready when /readyz says so."""
        await self._views.start()
        self._spawn("replies", self._replies.run())
        self._spawn("sender", self._sender.run())
        self._spawn("demand", self._demand.run(lambda: self._relay.open))
        for sender in self._abroad:
            self._spawn("signals to another region", sender.run())
        self._spawn("dispatches", self._broadcast.run())
        self._spawn("watch", self._relay.watch())
        self._spawn("housekeeping", self._housekeep())

    async def wait_failed(self) -> None:
        """Returns if a task ends that never should: this process can't serve any more."""
        await self._failed.wait()

    def missing(self) -> list[str]:
        """What is missing before calls can be served; empty = ready."""
        out = self._views.missing(self._settings.credentials_max_age_ms)
        if not self._replies.reading.is_set():
            out.append("the reply slot isn't read yet")
        if self._relay.log_is_away():
            out.append("the log acknowledges nothing")
        if not self._router.engine_known():
            out.append("no engine is known that is ready")
        return out

    async def drain(self, timeout_s: float) -> None:
        """Take no further call, let open ones end; those that don't in time are told and cancelled."""
        self._gateway.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._relay.wait_idle()
        except TimeoutError:
            log.warning("%d requests were still open and are cancelled", self._relay.open)
        self._relay.fail_all()

    async def close(self) -> None:
        """Send what was put, then end every task and connection."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        try:
            async with asyncio.timeout(STOP_FLUSH_S):
                await self._sender.flush()
        except TimeoutError:
            log.warning("the log is away; some Cancels were not sent")
        await self._replies.stop()
        await self._views.stop()
        await asyncio.gather(*(producer.stop() for producer in self._producers))

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"ingress {name}")
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        log.critical("%s ended; this process can't serve without it", task.get_name(), exc_info=task.exception())
        self._failed.set()

    async def _housekeep(self) -> None:
        await self._replies.reading.wait()
        self._gateway.reading = True
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self._gateway.forget_idle()

    def _refresh(self) -> None:
        self._metrics.log_age_seconds.set(self._pulse.age_ms() / 1_000)
        self._metrics.credentials_age_seconds.set(self._views.credentials.age_ms / 1_000)
        self._metrics.shared(self._views.weights.snapshots)


async def build(settings: Settings, buses: Mapping[str, Bus], clock: Clock) -> Ingress:
    """An ingress on these buses (by region). SettingsError for a bad key secret."""
    hmac_secret(settings.key_secret)
    await asyncio.to_thread(weigh.function)  # the first time that takes seconds, which no request should wait for
    bus = buses[settings.region]
    reply = ReplyTo(region=settings.region, slot=settings.slot, incarnation=ids.incarnation(clock.now_ms()))
    metrics = Metrics()
    weights = Weights(reply.region)
    policy = EarlierPolicy if settings.routing_policy == "earlier" else Policy
    gate = partial(Gate, settings.shed_wait_ms, settings.shed_loss or math.inf)
    router = Router(weights, reply.incarnation, metrics, clock, settings.trips_ms(reply.region), policy, gate)
    leader = await bus.producer(acks="leader", client_id="ingress-signals")
    clusters = dict.fromkeys(buses.values())
    producers = {other: await other.producer(client_id="ingress-requests") for other in clusters}
    abroad = [
        await other.producer(acks="leader", client_id="ingress-signals") for other in clusters if other is not bus
    ]
    dead = dead_letters(leader, f"ingress/{reply.slot}", clock)
    reader = await bus.reader(client_id="ingress-replies")
    return Ingress(
        settings,
        clock,
        requests={region: producers[other] for region, other in buses.items()},
        leader=leader,
        abroad=abroad,
        views=Views(bus, reply.region, weights, router, dead, clock),
        router=router,
        replies=lambda relay: Replies(reader, reply, relay.frames, dead, metrics),
        reply=reply,
        metrics=metrics,
    )


def patience_of(settings: Settings) -> Patience:
    """How long requests wait, by the settings."""
    return Patience(
        accept_ms=settings.accept_timeout_ms,
        attempt_ms=settings.attempt_timeout_ms,
        request_ms=settings.request_timeout_ms,
    )
