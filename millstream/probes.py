"""Whether a process serves. For its start, when nothing it says may be older than it, and for `millstream status`."""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus

import orjson

from millstream.ask import get
from millstream.errors import StartFailed
from millstream.kafka import broker
from millstream.observe import Seen
from millstream.runfile import Run
from millstream.stack import engine_of
from millstream.supervise import Probe

_FIRST_ROUTE_WITHIN_S = 60.0


async def answers(port: int, path: str) -> bool:
    """Whether a GET is answered with 200."""
    reply = await get(port, path)
    return reply is not None and reply.status == HTTPStatus.OK


async def clickhouse_answers(run: Run) -> bool:
    return await answers(run.clickhouse_port, "/ping")


async def ledger_answers(run: Run) -> bool:
    return await answers(run.ledger_port, "/metrics")


async def unready(run: Run) -> str:
    """What the ingress lacks before it can take requests; "" when it can."""
    reply = await get(run.port, "/readyz")
    try:
        return "doesn't answer" if reply is None else "; ".join(orjson.loads(reply.body)["missing"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "answers nonsense"


def kafka(bootstrap: str) -> Probe:
    async def serves(_since_ms: int) -> bool:
        return await broker.ready(bootstrap)

    return serves


def clickhouse(run: Run) -> Probe:
    async def serves(_since_ms: int) -> bool:
        return await clickhouse_answers(run)

    return serves


def ingress(run: Run) -> Probe:
    async def serves(_since_ms: int) -> bool:
        return await answers(run.port, "/health")

    return serves


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
        return await ledger_answers(run)

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
