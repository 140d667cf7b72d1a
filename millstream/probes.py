"""Whether a process serves. For its start, when nothing it says may be older than it, and for `millstream status`."""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus

import httpx

from millstream.errors import StartFailed
from millstream.kafka import broker
from millstream.observe import Seen
from millstream.runfile import HOST, Run
from millstream.stack import engine_of
from millstream.supervise import Probe

_HTTP_TIMEOUT_S = 2.0
_FIRST_ROUTE_WITHIN_S = 60.0


async def answers(url: str) -> bool:
    """Whether a GET of `url` is answered with 200."""
    try:
        async with httpx.AsyncClient(timeout=_HTTP_TIMEOUT_S, trust_env=False) as client:
            return (await client.get(url)).status_code == HTTPStatus.OK
    except httpx.HTTPError:
        return False


async def unready(run: Run) -> str:
    """What the ingress lacks before it can take requests; "" when it can."""
    try:
        async with httpx.AsyncClient(timeout=_HTTP_TIMEOUT_S, trust_env=False) as client:
            response = await client.get(f"http://{HOST}:{run.port}/readyz")
            return "; ".join(response.json()["missing"])
    except (httpx.HTTPError, ValueError, KeyError):
        return "doesn't answer"


def health_url(run: Run) -> str:
    return f"http://{HOST}:{run.port}/health"


def ping_url(run: Run) -> str:
    """Where ClickHouse says that it lives."""
    return f"http://{HOST}:{run.clickhouse_port}/ping"


def kafka(bootstrap: str) -> Probe:
    async def serves(_since_ms: int) -> bool:
        return await broker.ready(bootstrap)

    return serves


def clickhouse(run: Run) -> Probe:
    async def serves(_since_ms: int) -> bool:
        return await answers(ping_url(run))

    return serves


def ingress(run: Run) -> Probe:
    async def serves(_since_ms: int) -> bool:
        return await answers(health_url(run))

    return serves


def ledger_url(run: Run) -> str:
    return f"http://{HOST}:{run.ledger_port}/metrics"


def worker(seen: Seen, index: int) -> Probe:
    """Ready when a signal of the process's own life says so: a signal of the life before it proves nothing."""

    async def serves(since_ms: int) -> bool:
        signal = seen.engines.get(engine_of(index))
        return signal is not None and signal.state == "ready" and began_ms(signal.incarnation) >= since_ms

    return serves


def control(seen: Seen, model: str) -> Probe:
    """Ready when it has published weights."""

    async def serves(since_ms: int) -> bool:
        snapshot = seen.snapshots.get(model)
        return snapshot is not None and snapshot.created_ms >= since_ms

    return serves


def ledger(run: Run) -> Probe:
    async def serves(_since_ms: int) -> bool:
        return await answers(ledger_url(run))

    return serves


def began_ms(incarnation: str) -> int:
    """When the life that an incarnation names began (`wire.ids.incarnation`)."""
    return int(incarnation[:12], 16)


async def first_route(run: Run) -> None:
    """Wait until the ingress knows an engine for its first request. StartFailed when it doesn't come to that."""
    give_up = time.monotonic() + _FIRST_ROUTE_WITHIN_S
    while missing := await unready(run):
        if time.monotonic() > give_up:
            raise StartFailed(
                f"the API can't take requests after {_FIRST_ROUTE_WITHIN_S:.0f} s ({missing}); see logs/ingress.log and"
                f" logs/control.log below {run.state_dir}"
            )
        await asyncio.sleep(0.1)
