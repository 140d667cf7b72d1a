"""What a request to ClickHouse's HTTP interface asks for."""

from __future__ import annotations

import gzip
import zlib
from urllib.parse import urlencode

import cramjam
import pytest

from millstream.clickhouse_statement import Refusal, Statement, decompressed, insert_source, joined, statement


def asked(body: bytes = b"", headers: dict[str, str] | None = None, method: str = "POST", **query: str) -> Statement:
    return statement(method, urlencode(query).encode(), headers or {}, body)


def test_settings_parameters_and_transport_are_told_apart() -> None:
    found = asked(
        b"SELECT 1", query_id="q", database="d", max_threads="2", param_x="7", session_id="s", default_format="CSV"
    )
    assert (found.settings, found.params) == ({"max_threads": "2"}, {"x": "7"})
    assert (found.database, found.query_id, found.default_format, found.read_only) == ("d", "q", "CSV", False)


def test_get_changes_nothing() -> None:
    assert asked(query="SELECT 1", method="GET").read_only


def test_database_and_format_may_come_as_headers() -> None:
    found = asked(b"SELECT 1", {"x-clickhouse-database": "d", "x-clickhouse-format": "JSON"})
    assert (found.database, found.default_format) == ("d", "JSON")


def test_the_query_parameter_goes_before_the_body() -> None:
    assert joined(b"SELECT", b"1") == (b"SELECT\n1", None, "")


@pytest.mark.parametrize(
    ("query", "body", "expected"),
    [
        (b"", b"INSERT INTO t FORMAT CSV\n1,2", (b"INSERT INTO t ", b"1,2", "CSV")),
        (b"INSERT INTO t FORMAT CSV", b"1,2", (b"INSERT INTO t ", b"1,2", "CSV")),
        (b"INSERT INTO t FORMAT CSV\n1\n", b"2", (b"INSERT INTO t ", b"1\n2", "CSV")),
        (b"INSERT INTO t", b"(1)", (b"INSERT INTO t", b"(1)", "Values")),
        (b"INSERT INTO t VALUES", b"(1)", (b"INSERT INTO t VALUES\n(1)", None, "")),
        (b"", b"INSERT INTO t VALUES (1)", (b"INSERT INTO t VALUES (1)", None, "")),
        (b"", b"INSERT INTO t SELECT 1 FORMAT CSV", (b"INSERT INTO t SELECT 1 FORMAT CSV", None, "")),
        (b"", b"INSERT INTO t SELECT 1", (b"INSERT INTO t SELECT 1", None, "")),
        (b"", b"insert into t settings a=1 format csv 1", (b"insert into t settings a=1 ", b"1", "csv")),
    ],
)
def test_an_inserts_rows_are_found(query: bytes, body: bytes, expected: object) -> None:
    assert joined(query, body) == expected


@pytest.mark.parametrize("first", range(256))
def test_rows_in_a_binary_format_keep_their_first_byte(first: int) -> None:
    rows = bytes([first]) + b"rest"
    assert joined(b"", b"INSERT INTO t (a) FORMAT Native\n" + rows)[1] == rows
    assert joined(b"INSERT INTO t FORMAT Native", rows)[1] == rows


@pytest.mark.parametrize(
    "sql",
    [
        b"INSERT INTO format FORMAT CSV ",
        b"INSERT INTO TABLE values FORMAT CSV ",
        b'INSERT INTO `select` (`format`, "values") FORMAT CSV ',
        b"INSERT INTO t (format, select) FORMAT CSV ",
        b"INSERT INTO FUNCTION file('FORMAT x', (SELECT 'a)b')) FORMAT CSV ",
        b"-- FORMAT x\n/* VALUES */ INSERT INTO t FORMAT CSV ",
        b"INSERT INTO d.format SETTINGS x = 'it\\'s FORMAT' FORMAT CSV ",
    ],
)
def test_a_word_that_only_looks_like_the_source_is_passed_over(sql: bytes) -> None:
    assert insert_source(sql) == (b"FORMAT", len(sql) - len(b"FORMAT CSV "))


def test_format_without_a_name_is_refused() -> None:
    with pytest.raises(Refusal, match="FORMAT names no format"):
        joined(b"", b"INSERT INTO t FORMAT")


@pytest.mark.parametrize(
    ("sql", "verb", "result_format"),
    [
        (b"select 1", b"SELECT", "TabSeparated"),
        (b"SELECT 1 FORMAT JSON", b"SELECT", "JSON"),
        (b"SELECT 1\nformat CSV\n settings max_threads=1;", b"SELECT", "CSV"),
        (b"(SELECT 1)", b"SELECT", "TabSeparated"),
        (b"/* hm */ -- x\n WITH 1 AS x SELECT x", b"WITH", "TabSeparated"),
        (b"CREATE TABLE t (a Int8) ENGINE = Memory", b"CREATE", None),
        (b"'x'", b"", None),
    ],
)
def test_the_result_format_is_told_for_what_gives_a_result(sql: bytes, verb: bytes, result_format: str | None) -> None:
    found = asked(sql)
    assert (found.verb, found.result_format) == (verb, result_format)


@pytest.mark.parametrize("body", [b"", b"  \n"])
def test_an_empty_query_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal, match="Empty query") as refused:
        asked(body)
    assert (refused.value.status, refused.value.code) == (400, 62)


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("identity", b"SELECT 1"),
        ("gzip", gzip.compress(b"SELECT 1", mtime=0)),
        ("deflate", zlib.compress(b"SELECT 1")),
        ("lz4", bytes(cramjam.lz4.compress(b"SELECT 1"))),
        ("zstd", bytes(cramjam.zstd.compress(b"SELECT 1"))),
        ("br", bytes(cramjam.brotli.compress(b"SELECT 1"))),
    ],
)
def test_bodies_may_be_compressed(encoding: str, packed: bytes) -> None:
    assert asked(packed, {"content-encoding": encoding}).sql == b"SELECT 1"


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "lz4", "zstd", "br"])
def test_a_damaged_body_is_refused(encoding: str) -> None:
    with pytest.raises(Refusal, match="isn't"):
        decompressed(b"\x00damaged", encoding)


def test_an_unknown_compression_is_refused() -> None:
    with pytest.raises(Refusal, match="Unknown HTTP content encoding 'snappy'"):
        decompressed(b"", "snappy")


@pytest.mark.parametrize("name", ["compress", "decompress"])
def test_clickhouses_own_compression_is_not_offered(name: str) -> None:
    with pytest.raises(Refusal, match=f"{name}=1 isn't offered"):
        asked(b"SELECT 1", **{name: "1"})


def test_a_setting_that_is_no_name_is_refused() -> None:
    with pytest.raises(Refusal, match="Unknown setting"):
        asked(b"SELECT 1", **{"a = 1, readonly": "0"})


FORM = (
    b'--x\r\nContent-Disposition: form-data; name="query"\r\n\r\nSELECT {a:String}\r\n'
    b'--x\r\nContent-Disposition: form-data; name="param_a"\r\n\r\nv\xc3\xbc\r\n--x--\r\n'
)


def test_a_form_carries_long_parameters() -> None:
    found = asked(FORM, {"content-type": "multipart/form-data; boundary=x"}, max_threads="1")
    assert (found.sql, found.params) == (b"SELECT {a:String}", {"a": "vü"})


def test_external_tables_are_refused() -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="t"; filename="t"\r\n\r\n1\r\n--x--\r\n'
    with pytest.raises(Refusal, match="External tables"):
        asked(form, {"content-type": "multipart/form-data; boundary=x"}, query="SELECT 1")


def test_a_form_that_is_none_asks_nothing() -> None:
    with pytest.raises(Refusal, match="Empty query"):
        asked(b"SELECT 1", {"content-type": "multipart/form-data"})
