"""What a stack must find in its stores before it serves: topics, the catalogue, a key, the schema."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable

from billing import prices
from billing.adoption import adopt
from billing.errors import LedgerAway
from millstream import keys
from millstream.errors import StartFailed
from millstream.stack import Stack
from millstream.state import StateDir, write_private
from wire import codec
from wire.bus import Bus
from wire.errors import BusError, MillstreamError
from wire.messages import Limits
from wire.settings import Settings
from wire.topics import CATALOGUE

_INSIST_FOR_S, _AGAIN_AFTER_S = 90.0, 0.3
DEV_TENANT, DEV_PROJECT = "dev", "default"


def is_filled(stack: Stack, state: StateDir) -> bool:
    """Whether an earlier start made the log ready for this very stack, so that its processes may start beside it."""
    try:
        return state.installed_file.read_text() == _digest(stack)
    except OSError:
        return False


def _digest(stack: Stack) -> str:
    topics = [(topic.name, topic.partitions, topic.config()) for topic in stack.topics()]
    return hashlib.sha256(repr((topics, stack.served.catalogue(0))).encode()).hexdigest()


async def fill_log(bus: Bus, stack: Stack, state: StateDir) -> None:
    """Make the topics, write the catalogue and the development key. Doing it again changes nothing."""
    admin = await bus.admin()
    try:
        await admin.create(stack.topics())
    finally:
        await admin.stop()
    await _publish_model(bus, stack)
    await _dev_key(bus, stack.key_secret, state)
    write_private(state.installed_file, _digest(stack))


async def insist(work: Callable[[], Awaitable[None]], what: str) -> None:
    """Do it again while a store that has just been started can't do it yet. StartFailed when time is up."""
    why: MillstreamError | None = None
    try:
        async with asyncio.timeout(_INSIST_FOR_S):
            while True:
                try:
                    return await work()
                except (BusError, LedgerAway) as exc:
                    why = exc
                await asyncio.sleep(_AGAIN_AFTER_S)
    except TimeoutError as exc:
        raise StartFailed(f"{what} can't be made within {_INSIST_FOR_S:.0f} s: {why or 'no answer'}") from exc


async def apply_schema(settings: Settings) -> None:
    """Bring ClickHouse's tables up to date and take the price book into use. BillingErrors say what is wrong."""
    await asyncio.to_thread(_apply_schema, settings)


def _apply_schema(settings: Settings) -> None:
    from billing.store import LedgerStore  # slow to import: by now it holds nothing up

    ledger, book = LedgerStore(settings.clickhouse), prices.load(settings.price_book)
    try:
        ledger.apply_schema()
        adopt(ledger, book, _now_ms())
    finally:
        ledger.close()


async def _publish_model(bus: Bus, stack: Stack) -> None:
    model = stack.served.catalogue(_now_ms())
    producer = await bus.producer(client_id="millstream-catalogue")
    try:
        await (await producer.send(CATALOGUE, codec.encode(model), key=model.name.encode(), partition=0))
    finally:
        await producer.stop()


async def _dev_key(bus: Bus, secret: str, state: StateDir) -> None:
    """See that the state directory holds a key and the log knows it; a new one if there is none or it is void."""
    known = await keys.read_all(bus)
    key = state.key_file.read_text().strip() if state.key_file.exists() else ""
    found = known.get(keys.key_id_of(key) or "")
    if found is not None and found.revoked_ms is None and found.hmac == keys.digest(secret, key):
        return
    if found is not None or keys.key_id_of(key) is None:
        key = keys.new_key()
        write_private(state.key_file, key + "\n")
    await keys.publish(
        bus,
        keys.credential(
            key,
            secret,
            tenant=DEV_TENANT,
            project=DEV_PROJECT,
            name="development key",
            now_ms=_now_ms(),
            limits=Limits(),
        ),
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
