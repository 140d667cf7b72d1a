"""The ledger in ClickHouse, over clickhouse-connect's ordinary client. The calls block; run them in a thread.

Identity rests on the key (tenant, request id, attempt) read with FINAL: whatever is inserted again, in whatever
batches, gives the same rows. Everything else (block deduplication, fsync) only narrows what can go wrong around it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, cast

import clickhouse_connect
import orjson
from clickhouse_connect.driver.exceptions import ClickHouseError

from billing.charge import Line
from billing.errors import LedgerAway, SchemaError
from billing.ledger import Total
from billing.prices import Price
from billing.queries import Query, SchemaFile, load_query, query_names, schema_files
from billing.rows import line_of, row_of
from wire.fleet import Fleet
from wire.settings import ClickHouse

INSERT_SETTINGS: Mapping[str, Any] = {
    "async_insert": 0,
    "insert_deduplicate": 1,
    "deduplicate_blocks_in_dependent_materialized_views": 1,
    "max_insert_threads": 1,
    "max_partitions_per_insert_block": 0,
}
"""A batch is one block, written before the answer; a batch over many months is taken too."""
PRICE_FIELDS = ("price_id", *(field.name for field in fields(Price)))
CONNECT_TIMEOUT_S = 3
ANSWER_TIMEOUT_S = 60
_WINDOW = re.compile(r"non_replicated_deduplication_window = (\d+)")
_VERSIONS = """
CREATE TABLE IF NOT EXISTS schema_versions (version UInt32, name String, checksum String)
ENGINE = ReplacingMergeTree ORDER BY version
"""


class LedgerStore:
    """One database of one ClickHouse server, or of chDB behind the same interface."""

    def __init__(self, where: ClickHouse) -> None:
        """Connects at the first call. `where.database` is made by `apply_schema`."""
        self._where = where
        self._client: Any = None
        self._queries = {name: load_query(name) for name in query_names()}

    def close(self) -> None:
        """Close the connection; a later call opens it again."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def apply_schema(self, files: Sequence[SchemaFile] | None = None) -> Sequence[int]:
        """Bring the database to this version's schema; the versions that were new. May run anywhere, at any time.

        SchemaError when an applied file has changed since, the database is newer, or the deduplication window is 0.
        """
        steps = schema_files() if files is None else files
        with _translated():
            self._make_database()
            self._connected().command(_VERSIONS)
        applied = {row["version"]: row["checksum"] for row in self._rows("schema_versions")}
        todo = pending_steps(steps, applied)
        for step in todo:
            with _translated():
                self._connected().command(step.sql)
                self._insert(
                    "schema_versions", [{"version": step.version, "name": step.name, "checksum": checksum(step)}]
                )
        self._check_window()
        return [step.version for step in todo]

    def insert(self, lines: Sequence[Line]) -> None:
        if lines:
            with _translated():
                self._insert("attempts", [row_of(line) for line in lines])

    def lines(self, requests: Collection[tuple[str, str]]) -> Mapping[str, Line]:
        rows = self._rows("lines", requests=list(requests)) if requests else []
        return {row["request_id"]: line_of(row) for row in rows}

    def totals(self, tenant: str, from_ms: int, to_ms: int, tz: str) -> Sequence[Total]:
        return [Total(**row) for row in self._rows("totals", tenant=tenant, from_ms=from_ms, to_ms=to_ms, tz=tz)]

    def tenants(self, from_ms: int, to_ms: int) -> Sequence[str]:
        return [row["tenant"] for row in self._rows("tenants", from_ms=from_ms, to_ms=to_ms)]

    def attempts_between(
        self, fleet: Fleet, shard: int, from_offset: int, to_offset: int, at_most: int
    ) -> Sequence[Line]:
        where = {"fleet": fleet.name, "shard": shard, "from_offset": from_offset, "to_offset": to_offset}
        return [line_of(row) for row in self._rows("attempts_between", **where, at_most=at_most)]

    def adopted_prices(self) -> Sequence[Price]:
        return [Price(**row) for row in self._rows("prices")]

    def adopt(self, prices: Sequence[Price], now_ms: int) -> None:
        self._record_prices(prices, now_ms, withdrawn=False)

    def withdraw(self, prices: Sequence[Price], now_ms: int) -> None:
        self._record_prices(prices, now_ms, withdrawn=True)

    def attempts_since(self, model: str, tier: str, since_ms: int) -> int:
        (row,) = self._rows("attempts_since", model=model, tier=tier, since_ms=since_ms)
        return int(row["attempts"])

    def _record_prices(self, prices: Sequence[Price], now_ms: int, *, withdrawn: bool) -> None:
        rows = [
            {name: getattr(price, name) for name in PRICE_FIELDS} | {"withdrawn": withdrawn, "recorded_ms": now_ms}
            for price in prices
        ]
        if rows:
            with _translated():
                self._insert("prices", rows)

    def _rows(self, name: str, **params: Any) -> list[dict[str, Any]]:
        query: Query = self._queries[name]
        with _translated():
            result = self._connected().query(query.sql, parameters={p: params[p] for p in query.params})
            return cast(list[dict[str, Any]], list(result.named_results()))

    def _insert(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        block = b"\n".join(orjson.dumps(row) for row in rows)
        self._connected().raw_insert(
            table, list(rows[0]), block, settings=dict(INSERT_SETTINGS), fmt="JSONEachRow", compression=""
        )

    def _connected(self) -> Any:
        if self._client is None:
            self._client = self._connect(self._where.database)
        return self._client

    def _connect(self, database: str) -> Any:
        where = self._where
        return clickhouse_connect.get_client(
            host=where.host,
            port=where.port,
            username=where.username,
            password=where.password,
            secure=where.secure,
            database=database,
            compress=False,
            connect_timeout=CONNECT_TIMEOUT_S,
            send_receive_timeout=ANSWER_TIMEOUT_S,
            autogenerate_session_id=False,  # so that threads may share the client
        )

    def _make_database(self) -> None:
        client = self._connect("default")
        try:
            known = {row[0] for row in client.query("SELECT name FROM system.databases").result_rows}
            if self._where.database not in known:
                client.command(f"CREATE DATABASE IF NOT EXISTS `{self._where.database}`")
        finally:
            client.close()

    def _check_window(self) -> None:
        (row,) = self._rows("definition")
        match = _WINDOW.search(row["create_table_query"])
        if match is None or int(match[1]) == 0:
            raise SchemaError(
                "the table attempts keeps no deduplication window, so a repeated insert could reach materialised views"
                " twice; run ALTER TABLE attempts MODIFY SETTING non_replicated_deduplication_window = 1000"
            )


def checksum(step: SchemaFile) -> str:
    """What tells whether a file is still the one that was applied."""
    return hashlib.sha256(step.sql.encode()).hexdigest()


def pending_steps(steps: Sequence[SchemaFile], applied: Mapping[int, str]) -> Sequence[SchemaFile]:
    """The steps still to be applied; SchemaError when what was applied isn't what the files say. Pure."""
    for step in steps:
        if step.version in applied and applied[step.version] != checksum(step):
            raise SchemaError(
                f"schema file {step.version:03}_{step.name}.sql has changed since it was applied;"
                " restore it and put the change into a new file with the next number"
            )
    newer = applied.keys() - {step.version for step in steps}
    if newer:
        raise SchemaError(f"the ledger's schema is at version {max(newer)}, newer than this program; upgrade it")
    return [step for step in steps if step.version not in applied]


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except ClickHouseError as exc:
        raise LedgerAway(f"the ledger's database: {str(exc).splitlines()[0][:500]}") from exc
