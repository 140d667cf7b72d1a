"""What a statement may not do through ClickHouse's HTTP interface."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest

from millstream.clickhouse_outside import check
from millstream.clickhouse_statement import Refusal, statement


def refused(sql: str, **params: str) -> str:
    """The name of the error; "" when it may be carried out."""
    try:
        check(statement("POST", urlencode(params).encode(), {}, sql.encode()))
    except Refusal as refusal:
        return str(refusal).rsplit("(", 1)[1].rstrip(")")
    return ""


@pytest.mark.parametrize("readonly", ["0", "2"])
@pytest.mark.parametrize(
    "sql",
    [
        "select 1 into outfile '/tmp/x'",
        "SELECT 1 INTO OUTFILE '/tmp/x' TRUNCATE FORMAT CSV",
        "SELECT 1 INTO/* c */\n-- d\nOUTFILE '/tmp/x'",
        "SHOW TABLES INTO OUTFILE '/tmp/x'",
        "INSERT INTO t SELECT 1 INTO OUTFILE '/tmp/x'",
        "SELECT '\\'' INTO OUTFILE '/tmp/x'",
        "SELECT $a$'$a$ INTO OUTFILE '/tmp/x'",
        "SELECT /* /* */ ' */ 1 INTO OUTFILE '/tmp/x' -- '",
    ],
)
def test_no_statement_writes_a_file(sql: str, readonly: str) -> None:
    assert refused(sql, readonly=readonly) == "INTO_OUTFILE_NOT_ALLOWED"


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 'into outfile'",
        "SELECT 1 -- into outfile 'x'",
        "SELECT 1 /* into outfile 'x' */",
        "SELECT 1 AS `into outfile`",
        "INSERT INTO outfile VALUES (1)",
        "INSERT INTO t VALUES (1, 'into outfile')",
        "SELECT into, outfile FROM t",
        "SELECT $$into outfile 'x'$$",
    ],
)
def test_words_that_only_look_like_it_are_let_through(sql: str) -> None:
    assert refused(sql) == ""


OUTSIDE = [
    "SELECT * FROM file('/etc/passwd', 'LineAsString')",
    "SELECT * FROM file/* c */\n('/etc/passwd')",
    "SELECT * FROM `file`('/etc/passwd')",
    "SELECT * FROM \"file\" ('/etc/passwd')",
    "SELECT * FROM `f\\x69le`('/etc/passwd')",
    "SELECT file('/etc/passwd')",
    "DESCRIBE TABLE url('http://127.0.0.1/')",
    "SELECT * FROM s3('https://b.s3.amazonaws.com/x')",
    "SELECT * FROM s3Cluster('c', 'https://b.s3.amazonaws.com/x')",
    "SELECT * FROM remote('127.0.0.1', system.one)",
    "SELECT * FROM executable('x.sh', TSV, 'a Int8')",
    "SELECT * FROM icebergLocal('/x')",
    "SELECT * FROM mysql('h', 'd', 't', 'u', 'p')",
    "SELECT * FROM python(x)",
    "SELECT * FROM eval('SELECT 1')",
    "SELECT 1 WHERE 1 IN (SELECT 1 FROM url('http://127.0.0.1/'))",
    "CREATE TEMPORARY TABLE t (a Int8) ENGINE = File(CSV, '/tmp/x')",
    "SELECT * FROM '/etc/passwd'",
    'SELECT * FROM "/etc/passwd"',
    "SELECT * FROM default.`/etc/passwd`",
    'SELECT * FROM a, "/etc/passwd"',
]


@pytest.mark.parametrize("sql", OUTSIDE)
def test_reading_only_stays_inside_the_database(sql: str) -> None:
    assert refused(sql, readonly="2") == "READONLY"
    assert refused(sql, readonly="1") == "READONLY"
    assert refused(sql) == ""  # whoever may write, may


def test_what_is_asked_by_get_stays_inside_too() -> None:
    with pytest.raises(Refusal, match="READONLY"):
        check(statement("GET", urlencode({"query": OUTSIDE[0]}).encode(), {}, b""))


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 'file(1)', url FROM t WHERE remote = 1 AND file IN (1, 2)",
        "SELECT 1 -- file('x')\n",
        "SELECT 1 # file('x')\n",
        "SELECT 1 /* url('x') */ AS `s3(x)`",
        "SELECT count(file), sum(cluster) FROM t",
        "SELECT * FROM numbers(10) JOIN merge('db', 'x') ON 1",
        "SELECT a AS \"tokens/s\", 'a/b', '/c' FROM `default`.t",
        "SELECT ‘file(’, $$url('x')$$",
        "SELECT extractURLParameter('http://x/?a=1', 'a'), position('a/b', '/')",
    ],
)
def test_names_that_are_no_functions_are_let_through(sql: str) -> None:
    assert refused(sql, readonly="2") == ""
