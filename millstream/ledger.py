"""`millstream bill`, `sql` and `verify`: questions to the ledger of a running stack."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO

import httpx
import orjson

from billing import statement
from billing.store import LedgerStore
from billing.verify import Report
from billing.verify import verify as compare_all
from millstream import runfile
from millstream.errors import Refused
from wire.clock import SystemClock
from wire.kafka import KafkaBus

_READ_ONLY = "2"
"""ClickHouse's `readonly`: nothing can be changed, but a query may still bring settings of its own"""
_COUNTS = "SELECT count(), sum(completion_tokens) FROM ledger"
_TIMEOUT = httpx.Timeout(10.0, read=300.0)


def bill(state_dir: Path, tenant: str, month: str | None, *, as_json: bool) -> str:
    """The statement of a tenant for a month (YYYY-MM in UTC; None = this one). BadStatement, LedgerAway."""
    with _store(state_dir) as store:
        owed = statement.statement(store, tenant, month or datetime.now(UTC).strftime("%Y-%m"))
    if as_json:
        return orjson.dumps(statement.as_json(owed), option=orjson.OPT_INDENT_2).decode()
    return statement.as_text(owed).rstrip("\n")


def sql(state_dir: Path, query: str, fmt: str, *, write: bool, out: BinaryIO) -> None:
    """Stream a query's result to `out`. Refused with ClickHouse's own words when it says no."""
    run = runfile.running(state_dir)
    params = {"database": run.settings().clickhouse.database, "default_format": fmt}
    if not write:
        params["readonly"] = _READ_ONLY
    try:
        with (
            httpx.Client(timeout=_TIMEOUT, trust_env=False) as client,
            client.stream("POST", run.clickhouse_url, params=params, content=query.encode()) as response,
        ):
            if response.status_code != HTTPStatus.OK:
                response.read()
                raise Refused(f"ClickHouse answers: {_reason(response.text, write=write)}")
            for piece in response.iter_raw():
                out.write(piece)
    except httpx.HTTPError as exc:
        raise Refused(f"ClickHouse at {run.clickhouse_url} can't be reached ({exc}); see `millstream status`") from exc
    out.flush()


async def verify(state_dir: Path) -> Report:
    """Compare every journal with the ledger, as they are now. Unavailable, LedgerAway."""
    clock = SystemClock()
    bus = KafkaBus(runfile.running(state_dir).settings().cluster, clock)
    with _store(state_dir) as store:
        return await compare_all(bus, store, clock)


def verdict_text(report: Report) -> str:
    """For people: a verdict, what it rests on, and every difference that was kept."""
    agree = "Journals and ledger agree." if report.content else "Journals and ledger do NOT agree."
    lines = [
        f"{agree} {report.finished} finished attempts, {report.lines} lines,"
        f" {report.records} records in {report.partitions} partitions."
    ]
    if report.pending:
        lines.append(f"{report.pending} attempts are not in the ledger yet; ask again when it has caught up.")
    if report.unpriced:
        lines.append(f"{report.unpriced} lines have no price; see docs/billing.md.")
    lines += [f"  {difference}" for difference in report.differences]
    if report.difference_count > len(report.differences):
        lines.append(f"  and {report.difference_count - len(report.differences)} more")
    return "\n".join(lines)


def verdict_json(report: Report) -> str:
    """For programs."""
    return orjson.dumps(asdict(report) | {"content": report.content}, option=orjson.OPT_INDENT_2).decode()


def counts(state_dir: Path) -> tuple[int, int]:
    """Lines of the ledger, and their completion tokens."""
    out = io.BytesIO()
    sql(state_dir, _COUNTS, "TabSeparated", write=False, out=out)
    lines, tokens = out.getvalue().split()
    return int(lines), int(tokens)


def _reason(text: str, *, write: bool) -> str:
    first = (text.strip().splitlines() or ["nothing"])[0][:1000]
    if "READONLY" in first and not write:
        return f"{first}; statements that change something, or reach outside the database, need --write"
    return first


@contextmanager
def _store(state_dir: Path) -> Iterator[LedgerStore]:
    store = LedgerStore(runfile.running(state_dir).settings().clickhouse)
    try:
        yield store
    finally:
        store.close()
