"""The ledger app: the topic `usage` → rated lines in ClickHouse, one a request whatever is replayed.

The delivery guarantee: a record is acknowledged, and so may be committed, only after its lines are in the ledger. A
crash at any moment, a rebalance or a lost commit makes records come again; the ledger's key makes that no difference.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import faust
from prometheus_client import CollectorRegistry, start_http_server

from aggregator.app import keep_running, make_app
from aggregator.recorder import Metrics, Recorder
from billing.adoption import adopt
from billing.errors import LedgerAway
from billing.prices import PriceBook, load
from billing.store import LedgerStore
from wire.bus import Bus, Record
from wire.clock import Clock, SystemClock
from wire.errors import SettingsError
from wire.follow import dead_letters
from wire.settings import Settings
from wire.topics import USAGE

log = logging.getLogger("millstream.ledger")

GROUP = "ledger"
BATCH_RECORDS = 1_000
BATCH_WITHIN_S = 0.2
PREPARE_PAUSE_S = 1.0


async def run(settings: Settings, bus: Bus, stop: asyncio.Event, member: str = "0") -> None:
    """Write the ledger until `stop` is set. Waits for a database that is away.

    PriceBookError or SchemaError when the price book or the database can't be used as they are.
    """
    for name in ("clickhouse_connect", "urllib3"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what they say of each try is said here once
    book = load(settings.price_book)
    store, clock, registry = LedgerStore(settings.clickhouse), SystemClock(), CollectorRegistry()
    metrics = Metrics(registry)
    serve_metrics(settings.metrics_port, registry)
    if not await prepared(store, book, clock, stop):
        return
    dead = await bus.producer(client_id="ledger-dead")
    recorder = Recorder(store, book, dead_letters(dead, GROUP, clock), clock, metrics)
    try:
        await keep_running(lambda: build(settings, recorder.record, member), stop)
    finally:
        await dead.stop()
        store.close()


def serve_metrics(port: int, registry: CollectorRegistry) -> None:
    """Serve /metrics on the loopback interface; port 0 = don't. SettingsError when the port is taken."""
    if not port:
        return
    try:
        start_http_server(port, "127.0.0.1", registry)
    except OSError as exc:
        raise SettingsError(f"MILLSTREAM_METRICS_PORT is {port}, but {exc.strerror}; choose another") from exc


def build(settings: Settings, record: Callable[[list[Record]], Awaitable[None]], member: str = "0") -> faust.App:
    """The Faust app: one agent, which takes batches, records them and acknowledges in order."""
    app = make_app(settings, GROUP, member=member)

    async def usages(stream: Any) -> None:
        # noack_take, not take: take acknowledges even what raised. One batch at a time, so acks keep the order.
        async for events in stream.noack_take(BATCH_RECORDS, within=BATCH_WITHIN_S):
            try:
                await record([_record(event) for event in events])
            except Exception as exc:
                # Faust would go on with the next batch; only an app built anew reads this one again
                await app.crash(exc)
                raise
            for event in events:
                await stream.ack(event)

    app.agent(app.topic(USAGE), concurrency=1)(usages)
    return app


async def prepared(store: LedgerStore, book: PriceBook, clock: Clock, stop: asyncio.Event) -> bool:
    """Bring the schema up to date and take the price book into use; False when told to stop before that."""
    said = False
    while not stop.is_set():
        try:
            await asyncio.to_thread(store.apply_schema)
            await asyncio.to_thread(adopt, store, book, clock.now_ms())
            return True
        except LedgerAway as exc:
            if not said:
                log.warning("waiting for the database: %s", exc)
            said = True
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({stopping}, timeout=PREPARE_PAUSE_S)
        stopping.cancel()
    return False


def _record(event: Any) -> Record:
    message = event.message
    return Record(
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        key=message.key,
        value=event.value,
        timestamp_ms=int((message.timestamp or 0) * 1000),
    )
