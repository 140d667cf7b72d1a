"""chDB as a database that answers several statements at once, each alone on its own connection."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream import clickhouse_outside
from millstream.clickhouse_statement import Refusal, Statement, refusal
from wire.errors import MillstreamError

log = logging.getLogger(__name__)

DEFAULTS: Mapping[str, str] = {
    "max_execution_time": "60",
    "max_memory_usage": str(4 * 1024**3),
    "max_result_bytes": str(256 * 1024**2),
    "result_overflow_mode": "throw",
}
"""Bounds of a statement that sets no others: the whole result is held in memory before it is sent."""
_CODE = re.compile(r"Code: (\d+)\. ")
_STATUS = {
    **dict.fromkeys((516, 193, 192, 497), 403),
    **dict.fromkeys((60, 81, 46, 47, 115, 50, 56), 404),
    **dict.fromkeys((62, 36, 26, 27, 6, 41, 38, 53, 70, 72, 43, 42, 44, 69, 117, 349, 457, 456, 16, 10, 73), 400),
    159: 408,
    48: 501,
    202: 503,
    241: 500,
}
"""ClickHouse's error code → the HTTP status that its server gives; 500 for the others"""


class EngineError(MillstreamError):
    """The database can't be opened; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a statement gave."""

    body: bytes
    read_rows: int
    read_bytes: int
    written_rows: int
    written_bytes: int
    elapsed_s: float


class Engine:
    """One chDB data directory. chDB allows one process a directory; each statement gets a connection of its own,

    so settings, the current database and temporary tables of one never reach another. Methods may be called from
    any thread; they block.
    """

    def __init__(self, data: Path) -> None:
        """Open or create the database in `data`. EngineError when it is in use or can't be written."""
        self._lock = _lock(data)
        self._path = str(data.resolve())
        self._root = self._connect()
        self.timezone = self._root.query("SELECT timezone()", "TabSeparated").bytes().decode().strip()

    def run(self, statement: Statement) -> Answer:
        """Carry a statement out. Refusal with ClickHouse's own code and words when it fails."""
        clickhouse_outside.check(statement)
        with _translated(), self._connection(statement) as connection:
            if statement.data is not None:
                return _insert(connection, statement)
            if connection._conn.classify_query(_text(statement.sql))["statement_count"] > 1:
                raise refusal(400, 62, "SYNTAX_ERROR", "Multi-statements are not allowed")
            result = connection.query(statement.sql, statement.default_format, params=dict(statement.params))
            return Answer(
                body=result.bytes() or b"",
                read_rows=result.storage_rows_read(),
                read_bytes=result.storage_bytes_read(),
                written_rows=result.rows_written(),
                written_bytes=result.bytes_written(),
                elapsed_s=result.elapsed(),
            )

    def kill(self, query_id: str) -> None:
        """Stop a running statement: it fails with code 394."""
        self._root.query(f"KILL QUERY WHERE Settings['log_comment'] = {_quoted(query_id)} ASYNC", "Null")

    def kill_reads(self) -> None:
        """Stop everything that only reads; writes end by themselves."""
        self._root.query("KILL QUERY WHERE query_kind NOT IN ('Insert', 'KillQuery') ASYNC", "Null")

    def close(self) -> None:
        """Close the database; nothing may be running."""
        self._root.close()
        os.close(self._lock)

    def _connect(self) -> Any:
        from chdb.state.sqlitelike import Connection

        try:
            return Connection(self._path)
        except RuntimeError as exc:
            raise EngineError(f"the database in {self._path} can't be opened: {exc}") from exc

    @contextlib.contextmanager
    def _connection(self, statement: Statement) -> Iterator[Any]:
        connection = self._connect()
        try:
            if statement.database:
                connection.query(f"USE {_identifier(statement.database)}", "Null")
            settings = {**DEFAULTS, "log_comment": statement.query_id, **statement.settings}
            connection.query("SET " + ", ".join(f"{n} = {_quoted(v)}" for n, v in settings.items()), "Null")
            if statement.read_only:
                connection.query("SET readonly = 2", "Null")
            yield connection
        finally:
            connection.close()


def _insert(connection: Any, statement: Statement) -> Answer:
    # Either every row of the body is parsed before the first is written, or nothing is: an insert that is cancelled
    # before finish() writes no part.
    with connection.send_insert(_text(statement.sql), statement.data_format) as insert:
        insert.append(statement.data)
        result = insert.finish()
    return Answer(
        body=b"",
        read_rows=result.rows_written,
        read_bytes=result.bytes_written,
        written_rows=result.rows_written,
        written_bytes=result.bytes_written,
        elapsed_s=result.elapsed,
    )


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except RuntimeError as exc:  # chDB raises nothing narrower
        text = str(exc)
        match = _CODE.search(text)
        code = int(match[1]) if match else 1002
        message = text[match.start() :] if match else f"Code: 1002. DB::Exception: {text} (UNKNOWN_EXCEPTION)"
        raise Refusal(_STATUS.get(code, 500), code, message) from exc


def _lock(data: Path) -> int:
    if "?" in str(data):
        raise EngineError(f"the data directory {str(data)!r} holds a question mark; choose another")
    try:
        data.mkdir(parents=True, exist_ok=True)
        lock = os.open(data / "millstream.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise EngineError(f"the data directory {data} can't be written: {exc.strerror}") from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(lock)
        raise EngineError(
            f"the data directory {data} is in use by another process; stop that one or choose another directory"
        ) from exc
    return lock


def _text(sql: bytes) -> str:
    return sql.decode("utf-8", "surrogateescape")


def _quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _identifier(name: str) -> str:
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"
