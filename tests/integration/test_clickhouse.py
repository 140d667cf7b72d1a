"""ClickHouse embedded, as its clients see it: clickhouse-connect, curl and plain HTTP, through kill -9 and SIGTERM."""

from __future__ import annotations

import asyncio
import datetime as dt
import gzip
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import clickhouse_connect
import httpx
import orjson
import pytest
from clickhouse_connect.driver.exceptions import DatabaseError
from clickhouse_process import ROOT, RunningClickHouse
from usages import usage

from billing.charge import rate
from billing.errors import LedgerAway, SchemaError
from billing.prices import load
from billing.queries import SchemaFile, schema_files
from billing.store import LedgerStore
from millstream.ports import free_port

LONG = "SELECT count() FROM numbers(100000000000) WHERE NOT ignore(sipHash64(number))"


@pytest.fixture
def database(clickhouse: RunningClickHouse, suffix: str) -> str:
    name = f"test_{suffix}"
    assert clickhouse.ask(f"CREATE DATABASE {name}").status_code == 200
    return name


@pytest.fixture
def client(clickhouse: RunningClickHouse, database: str) -> Iterator[Any]:
    opened = clickhouse_connect.get_client(host="127.0.0.1", port=clickhouse.port, database=database)
    yield opened
    opened.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RunningClickHouse]:
    """A process that the test may kill."""
    running = RunningClickHouse(tmp_path)
    running.start()
    yield running
    running.stop()


def running(own: RunningClickHouse) -> int:
    """How many long queries run now."""
    return (
        int(
            own.ask(
                "SELECT count() FROM system.processes WHERE query LIKE '%100000000000%' AND query_kind = 'Select'"
            ).text
        )
        - 1
    )


def until(condition: Any) -> None:
    while not condition():
        time.sleep(0.05)


# ---------------------------------------------------------------- what stays inside the database


def test_reading_only_reaches_no_file(clickhouse: RunningClickHouse, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("secret")
    for sql in (f"SELECT * FROM file('{tmp_path}/mine.csv', 'LineAsString')", f"SELECT * FROM '{tmp_path}/mine.csv'"):
        answer = clickhouse.ask(sql, readonly="2")
        assert answer.headers["x-clickhouse-exception-code"] == "164"
        assert "secret" not in answer.text


def test_no_statement_writes_a_file(clickhouse: RunningClickHouse, tmp_path: Path) -> None:
    answer = clickhouse.ask(f"SELECT 1 INTO OUTFILE '{tmp_path}/made'")
    assert (answer.status_code, answer.text.rsplit("(", 1)[1]) == (400, "INTO_OUTFILE_NOT_ALLOWED)\n")
    assert not list(tmp_path.iterdir())


def test_every_table_function_that_this_chdb_has_is_known_to_stay_inside_or_refused(
    clickhouse: RunningClickHouse,
) -> None:
    inside = re.compile(
        r"SQLStandardValues|values|dictionary|format|fuzz\w+|generate\w+|input|loop|merge\w*|null|numbers\w*|primes"
        r"|prometheusQuery\w*|timeSeries\w+|view\w*|zeros\w*"
    )
    names = clickhouse.ask("SELECT name FROM system.table_functions").text.split()
    assert len(names) > 80
    for name in names:
        if not inside.fullmatch(name):
            answer = clickhouse.ask(f"SELECT * FROM {name}('x')", readonly="2")
            assert "in readonly mode" in answer.text, f"{name} isn't known"


# ---------------------------------------------------------------- clickhouse-connect's ordinary client


def test_rows_come_back_as_they_were_inserted(client: Any) -> None:
    client.command(
        "CREATE TABLE t (a Int64, at DateTime64(3, 'UTC'), names Array(String), n Nullable(Int64), b Bool)"
        " ENGINE = MergeTree ORDER BY a"
    )
    noon = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
    rows = [
        [n, noon + dt.timedelta(milliseconds=n), ["x", "ü\n\t'"], n if n % 2 else None, n % 3 == 0]
        for n in range(5_000)
    ]
    summary = client.insert("t", rows, column_names=["a", "at", "names", "n", "b"])
    assert summary.written_rows == 5_000
    found = client.query("SELECT * FROM t ORDER BY a").result_rows
    assert [list(row) for row in found] == [[row[0], row[1].replace(tzinfo=None), *row[2:]] for row in rows]


def test_parameters_are_bound_by_the_server(client: Any) -> None:
    result = client.query(
        "SELECT {a:UInt64}, {b:String}, {c:Array(Tuple(String, String))}, {d:DateTime64(3)}",
        parameters={"a": 2**64 - 1, "b": 'it\'s \\ a "test"', "c": [("a", "b'")], "d": dt.datetime(2026, 1, 1)},
    )
    assert result.result_rows == [(2**64 - 1, 'it\'s \\ a "test"', [("a", "b'")], dt.datetime(2026, 1, 1))]


def test_a_long_parameter_goes_as_a_form(client: Any) -> None:
    assert client.query("SELECT length({x:String})", parameters={"x": "ü" * 20_000}).result_rows == [(40_000,)]


def test_commands_tell_results_from_none(client: Any) -> None:
    assert client.command("SELECT 5") == 5
    assert client.command("SHOW DATABASES LIKE 'system'") == "system"
    assert client.command("CREATE TABLE t (a Int8) ENGINE = Memory").written_rows == 0


def test_columns_of_an_empty_result_are_known(client: Any) -> None:
    assert client.query("SELECT 1 AS a, 'x' AS b LIMIT 0").column_names == ("a", "b")


def test_a_result_is_streamed(client: Any) -> None:
    with client.query_row_block_stream("SELECT number FROM numbers(300000)") as stream:
        assert sum(len(block) for block in stream) == 300_000


@pytest.mark.parametrize("compression", ["", "gzip", "zstd", "lz4"])
def test_raw_inserts_may_be_compressed(client: Any, compression: str) -> None:
    import cramjam

    pack = {"": lambda b: b, "gzip": gzip.compress, "zstd": cramjam.zstd.compress, "lz4": cramjam.lz4.compress}[
        compression
    ]
    client.command("CREATE TABLE t (a Int8) ENGINE = MergeTree ORDER BY a")
    client.raw_insert("t", ["a"], bytes(pack(b'{"a":1}\n{"a":2}\n')), fmt="JSONEachRow", compression=compression)
    assert client.query("SELECT sum(a) FROM t").result_rows == [(3,)]


def test_settings_hold_for_one_query(client: Any) -> None:
    def threads(**settings: int) -> object:
        return client.query("SELECT getSetting('max_threads')", settings=settings).result_rows[0][0]

    assert threads(max_threads=1) == 1
    assert threads(max_threads=3) == 3


def test_errors_have_clickhouses_code_and_name(client: Any) -> None:
    with pytest.raises(DatabaseError) as raised:
        client.query("SELECT * FROM nope")
    assert (raised.value.code, raised.value.name) == (60, "UNKNOWN_TABLE")


# ---------------------------------------------------------------- plain HTTP


def test_curl_works(clickhouse: RunningClickHouse) -> None:
    curl = shutil.which("curl")
    assert curl is not None
    done = subprocess.run(
        [curl, "-sS", clickhouse.url, "--data-binary", "SELECT 1 AS a FORMAT JSON"], capture_output=True, check=True
    )
    assert orjson.loads(done.stdout)["data"] == [{"a": 1}]
    done = subprocess.run(
        [curl, "-sS", "-G", clickhouse.url, "--data-urlencode", "query=SELECT 2"], capture_output=True, check=True
    )
    assert done.stdout == b"2\n"


def test_headers_tell_of_the_answer(clickhouse: RunningClickHouse) -> None:
    answer = clickhouse.ask("SELECT number FROM numbers(3)", query_id="mine", default_format="JSONEachRow")
    assert answer.headers["x-clickhouse-query-id"] == "mine"
    assert answer.headers["x-clickhouse-format"] == "JSONEachRow"
    assert orjson.loads(answer.headers["x-clickhouse-summary"])["read_rows"] == "3"
    assert answer.headers["x-clickhouse-timezone"]


@pytest.mark.parametrize(
    ("sql", "status", "code"),
    [
        ("SELEC 1", 400, "62"),
        ("SELECT 1; SELECT 2", 400, "62"),
        ("", 400, "62"),
        ("SELECT * FROM nowhere.t", 404, "81"),
        ("SELECT 1 SETTINGS no_such_setting = 1", 404, "115"),
        ("SELECT toUInt8('x')", 400, "6"),
        ("SELECT sleep(2) SETTINGS max_execution_time = 1", 408, "159"),
        ("SELECT throwIf(1)", 500, "395"),
        ("SELECT number FROM numbers(1000) SETTINGS max_result_rows = 10, max_block_size = 5", 500, "396"),
        ("SELECT groupArray(number) FROM numbers(100000000) SETTINGS max_memory_usage = 50000000", 500, "241"),
    ],
)
def test_errors_have_a_status_a_code_and_words(clickhouse: RunningClickHouse, sql: str, status: int, code: str) -> None:
    answer = clickhouse.ask(sql)
    assert (answer.status_code, answer.headers["x-clickhouse-exception-code"]) == (status, code)
    assert answer.text.startswith(f"Code: {code}. DB::Exception: ")


def test_get_reads_and_changes_nothing(clickhouse: RunningClickHouse, database: str) -> None:
    answer = httpx.get(clickhouse.url, params={"query": f"DROP DATABASE {database}"})
    assert answer.headers["x-clickhouse-exception-code"] == "164"
    assert httpx.get(clickhouse.url, params={"query": "SELECT 1"}).text == "1\n"


def test_a_reader_may_ask_to_be_kept_from_writing(clickhouse: RunningClickHouse, database: str) -> None:
    answer = clickhouse.ask("CREATE TABLE t (a Int8) ENGINE = Memory", database=database, readonly="2")
    assert answer.headers["x-clickhouse-exception-code"] == "164"
    assert clickhouse.ask("SELECT 1", readonly="2", max_threads="1").text == "1\n"


def test_a_bad_row_fails_its_whole_insert(clickhouse: RunningClickHouse, database: str) -> None:
    clickhouse.ask("CREATE TABLE t (a UInt8) ENGINE = MergeTree ORDER BY a", database=database)
    answer = httpx.post(
        clickhouse.url,
        params={"database": database, "query": "INSERT INTO t FORMAT JSONEachRow"},
        content=b'{"a":1}\n{"a":"x"}\n',
    )
    assert answer.status_code == 400
    assert clickhouse.ask("SELECT count() FROM t", database=database).text == "0\n"


@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Host": "evil.example:8123"}])
def test_web_pages_are_kept_out(clickhouse: RunningClickHouse, headers: dict[str, str]) -> None:
    answer = httpx.post(clickhouse.url, content=b"SELECT 1", headers=headers)
    assert (answer.status_code, answer.headers["x-clickhouse-exception-code"]) == (403, "497")


def test_other_paths_and_methods_are_refused(clickhouse: RunningClickHouse) -> None:
    assert httpx.get(clickhouse.url + "play").status_code == 404
    assert httpx.put(clickhouse.url, content=b"SELECT 1").status_code == 404


def test_a_body_that_is_too_large_is_refused_before_it_is_read(clickhouse: RunningClickHouse) -> None:
    with socket.create_connection(("127.0.0.1", clickhouse.port)) as raw:
        raw.sendall(b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 999999999999\r\n\r\n")
        assert raw.recv(1024).startswith(b"HTTP/1.1 413")


def test_statements_run_at_once_each_with_its_own_settings(clickhouse: RunningClickHouse) -> None:
    async def all_of_them() -> list[str]:
        async with httpx.AsyncClient(timeout=60) as http:
            asked = [
                http.post(
                    clickhouse.url, params={"max_threads": str(n % 7 + 1)}, content=b"SELECT getSetting('max_threads')"
                )
                for n in range(60)
            ]
            return [answer.text for answer in await asyncio.gather(*asked)]

    assert asyncio.run(all_of_them()) == [f"{n % 7 + 1}\n" for n in range(60)]


def test_long_queries_hold_up_neither_ping_nor_inserts(own: RunningClickHouse) -> None:
    own.ask("CREATE TABLE t (a UInt8) ENGINE = MergeTree ORDER BY a")

    async def busy() -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            long = [
                asyncio.create_task(http.post(own.url, content=f"{LONG} SETTINGS max_threads = 1")) for _ in range(8)
            ]
            await asyncio.sleep(0.5)
            assert (await http.get(own.url + "ping")).text == "Ok.\n"
            assert (await http.post(own.url, content="INSERT INTO t VALUES (1)")).status_code == 200
            assert not any(task.done() for task in long)
            for task in long:
                task.cancel()
            await asyncio.gather(*long, return_exceptions=True)

    asyncio.run(busy())
    # whoever asked has left: nothing goes on for nobody
    until(lambda: running(own) <= 0)


# ---------------------------------------------------------------- life and death


def test_kill_9_loses_nothing_that_was_answered(own: RunningClickHouse) -> None:
    own.ask("CREATE TABLE t (a UInt64) ENGINE = MergeTree ORDER BY a SETTINGS fsync_after_insert = 1")
    for n in range(20):
        assert own.ask(f"INSERT INTO t VALUES ({n})").status_code == 200
    own.end(signal.SIGKILL)
    own.start()
    assert own.ask("SELECT count(), uniqExact(a) FROM t").text == "20\t20\n"


def test_sigterm_ends_it_cleanly_even_while_a_query_runs(own: RunningClickHouse) -> None:
    own.ask("CREATE TABLE t (a UInt64) ENGINE = MergeTree ORDER BY a")
    own.ask("INSERT INTO t VALUES (7)")

    async def cut_off() -> int:
        async with httpx.AsyncClient(timeout=60) as http:
            asked = asyncio.create_task(http.post(own.url, content=LONG))
            await asyncio.sleep(0.5)
            status = await asyncio.to_thread(own.end)
            await asyncio.gather(asked, return_exceptions=True)
            return status

    assert asyncio.run(cut_off()) == 0
    own.start()
    assert own.ask("SELECT a FROM t").text == "7\n"


def starting(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "millstream.clickhouse", *args]
    return subprocess.run(
        argv, cwd=ROOT, env={"PATH": "", **env}, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_directory_in_use_is_a_sentence(own: RunningClickHouse) -> None:
    second = starting("--data", str(own.data), "--port", str(free_port()))
    assert second.returncode == 1
    assert re.fullmatch(r"clickhouse: the data directory .* is in use by another process; .*\n", last_line(second))
    assert own.answers()


def test_a_port_in_use_is_a_sentence(own: RunningClickHouse, tmp_path: Path) -> None:
    second = starting("--data", str(tmp_path / "other"), "--port", str(own.port))
    assert second.returncode == 1
    assert last_line(second).startswith(f"clickhouse: port {own.port} can't be used")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--data", "/proc/nowhere", "--port", "{port}"), "can't be written"),
        (("--data", "/tmp/a?b", "--port", "{port}"), "holds a question mark"),
        (("--data", "/tmp/x", "--port", "0"), "0 is no port"),
    ],
)
def test_what_can_not_be_started_is_a_sentence(args: tuple[str, ...], says: str) -> None:
    done = starting(*(arg.format(port=free_port()) for arg in args))
    assert done.returncode == 1
    assert says in last_line(done)
    assert "Traceback" not in done.stderr


def test_check_starts_nothing(tmp_path: Path) -> None:
    assert starting("--data", str(tmp_path / "d"), "--port", str(free_port()), "--check").returncode == 0
    assert not (tmp_path / "d").exists()


def test_a_password_is_asked_for_when_one_is_set(tmp_path: Path) -> None:
    guarded = RunningClickHouse(tmp_path)
    guarded.start(MILLSTREAM_CLICKHOUSE='{"username": "mill", "password": "secret"}')
    try:
        assert guarded.ask("SELECT 1").status_code == 403
        assert guarded.ask("SELECT 1", user="mill", password="wrong").status_code == 403
        assert guarded.ask("SELECT 1", user="mill", password="secret").text == "1\n"
        assert httpx.post(guarded.url, content=b"SELECT 1", auth=("mill", "secret")).text == "1\n"
        headers = {"X-ClickHouse-User": "mill", "X-ClickHouse-Key": "secret"}
        assert httpx.post(guarded.url, content=b"SELECT 1", headers=headers).text == "1\n"
        assert httpx.post(guarded.url, content=b"SELECT 1", headers={"Authorization": "Basic !"}).status_code == 403
    finally:
        guarded.stop()


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.splitlines(keepends=True)[-1]


# ---------------------------------------------------------------- the ledger's schema in it


@pytest.fixture
def store(clickhouse: RunningClickHouse, suffix: str) -> Iterator[LedgerStore]:
    opened = LedgerStore(clickhouse.settings(f"schema_{suffix}"))
    yield opened
    opened.close()


def test_the_schema_is_applied_once(store: LedgerStore) -> None:
    assert store.apply_schema() == [step.version for step in schema_files()]
    assert store.apply_schema() == []


def test_two_appliers_at_once_are_harmless(clickhouse: RunningClickHouse, suffix: str) -> None:
    stores = [LedgerStore(clickhouse.settings(f"both_{suffix}")) for _ in range(4)]

    async def apply() -> None:
        await asyncio.gather(*(asyncio.to_thread(each.apply_schema) for each in stores))

    asyncio.run(apply())
    stores[0].insert([rate(usage(), load(None))])
    assert len(stores[1].lines({("acme", "r1")})) == 1
    for each in stores:
        each.close()


def test_a_schema_file_that_changed_is_refused(store: LedgerStore) -> None:
    store.apply_schema()
    first, *rest = schema_files()
    changed = SchemaFile(version=first.version, name=first.name, sql=first.sql + "-- more\n")
    with pytest.raises(SchemaError, match="has changed since it was applied"):
        store.apply_schema([changed, *rest])


def test_a_table_without_a_deduplication_window_is_refused(
    store: LedgerStore, clickhouse: RunningClickHouse, suffix: str
) -> None:
    store.apply_schema()
    clickhouse.ask(
        "ALTER TABLE attempts MODIFY SETTING non_replicated_deduplication_window = 0", database=f"schema_{suffix}"
    )
    with pytest.raises(SchemaError, match="keeps no deduplication window"):
        store.apply_schema()


def test_the_query_of_the_handbook_proves_every_line(
    store: LedgerStore, clickhouse: RunningClickHouse, suffix: str
) -> None:
    store.apply_schema()
    text = (ROOT / "docs" / "billing.md").read_text()
    proof = text[text.index("    SELECT count() FROM ledger WHERE amount_nanodollars") : text.index("\n\nmust be 0")]
    lines = [rate(usage(f"r{n}", completion_tokens=n, reason=r), load(None)) for n, r in enumerate(("stop", "error"))]
    store.insert(lines)
    assert clickhouse.ask(proof, database=f"schema_{suffix}").text == "0\n"
    store.insert([replace(lines[0], amount_nanodollars=lines[0].amount_nanodollars + 1)])
    assert clickhouse.ask(proof, database=f"schema_{suffix}").text == "1\n"


def test_losers_are_waste(store: LedgerStore, clickhouse: RunningClickHouse, suffix: str) -> None:
    store.apply_schema()
    book = load(None)
    lines = [rate(usage("r1", attempt=n), book) for n in (1, 2, 3)] + [rate(usage("r2"), book)]
    store.insert(lines)
    store.insert(lines)
    asked = "SELECT request_id, attempt, toDate(created) FROM waste ORDER BY attempt"
    answer = clickhouse.ask(asked, database=f"schema_{suffix}")
    assert answer.text == "r1\t1\t2026-01-01\nr1\t2\t2026-01-01\n"


def test_a_line_is_there_before_anything_was_merged(
    store: LedgerStore, clickhouse: RunningClickHouse, suffix: str
) -> None:
    store.apply_schema()
    clickhouse.ask("SYSTEM STOP MERGES attempts", database=f"schema_{suffix}")
    book = load(None)
    for n in range(1, 6):
        store.insert([rate(usage("r1", attempt=n), book), rate(usage("r1"), book)])
    assert clickhouse.ask("SELECT attempt FROM ledger", database=f"schema_{suffix}").text == "5\n"
    assert clickhouse.ask("SELECT attempt, created FROM ledger WHERE tenant = 'acme'", database=f"schema_{suffix}").text


def test_a_database_that_is_away_is_said_and_comes_back(own: RunningClickHouse) -> None:
    store = LedgerStore(own.settings("m"))
    store.apply_schema()
    line = rate(usage(), load(None))
    own.end(signal.SIGKILL)
    with pytest.raises(LedgerAway, match="the ledger's database"):
        store.insert([line])
    own.start()
    store.insert([line])
    assert store.lines({("acme", "r1")}) == {"r1": line}
    store.close()
    store.close()
