"""What a statement may not do through ClickHouse's HTTP interface: write a file, or, read-only, leave the database.

chDB is an embedded database, made for its own process's user: it carries out INTO OUTFILE itself, and reads every file,
URL and server that a statement names, whatever `readonly` says. Pure: a Statement in, a refusal or nothing out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from millstream.clickhouse_statement import Refusal, Statement, insert_source, refusal

_OUTSIDE = re.compile(
    rb"(?:file|url|s3|hdfs|azureblobstorage|deltalake|hudi|iceberg|paimon)\w*"
    rb"|filesystem|gcs|oss|cosn|remote|remotesecure|cluster|clusterallreplicas"
    rb"|mysql|postgresql|mongodb|redis|sqlite|odbc|jdbc|bigquery|ytsaurus|arrowstream"
    rb"|executable|python|eval|catboostevaluate"
    rb"|ai(?:classify|embed|extract|filter|generate|redact|similarity|translate)",
    re.I,
)
"""functions that reach files, other servers or programs; `eval` hides them in a string"""
_CREATING = frozenset({b"CREATE", b"ATTACH", b"REPLACE", b"BACKUP", b"RESTORE"})
"""`readonly` lets temporary tables be made, and these may be files; no statement could read them, though"""
_TABLE_FOLLOWS = frozenset({b"FROM", b"JOIN", b"TABLE", b"DESCRIBE", b"DESC", b"EXISTS"})
_TOKEN = re.compile(
    rb"(?P<skip>\s+|--[^\n]*|//[^\n]*|#[ !][^\n]*|(?P<comment>/\*))"
    rb"|(?P<text>'(?:[^'\\]|\\.)*'|\xe2\x80\x98.*?\xe2\x80\x99|\$(?P<tag>\w*)\$.*?\$(?P=tag)\$)"
    rb"|(?P<quoted>\"(?:[^\"\\]|\\.)*\"|`(?:[^`\\]|\\.)*`|\xe2\x80\x9c.*?\xe2\x80\x9d)"
    rb"|(?P<word>[A-Za-z_]\w*)|\d\w*|(?P<other>.)",
    re.S,
)
_COMMENT_MARK = re.compile(rb"/\*|\*/")


def check(asked: Statement) -> None:
    """Refuse a statement that does what it may not."""
    read_only = asked.read_only or asked.settings.get("readonly", "0") not in ("0", "", "false")
    if not read_only and b"outfile" not in asked.sql.lower():
        return
    sql = asked.sql
    if asked.verb == b"INSERT":
        source, rows_at = insert_source(sql)
        if source == b"VALUES":
            sql = sql[:rows_at]  # what follows are rows, and may be long
    if read_only and asked.verb in _CREATING:
        raise _read_only(f"Cannot {asked.verb.decode()} in readonly mode")
    before: tuple[bytes, bytes] = (b"", b"")
    for kind, token in _tokens(sql):
        if kind == "word" and token.upper() == b"OUTFILE" and before[1] == b"INTO" and before[0] != b"INSERT":
            raise refusal(400, 358, "INTO_OUTFILE_NOT_ALLOWED", "INTO OUTFILE is not allowed")
        if read_only and kind != "text" and token == b"(":
            _check_function(before[1])
        if read_only and kind in ("text", "quoted"):
            _check_table(before, kind, token)
        before = (before[1], token.upper() if kind == "word" else token)


def _check_function(name: bytes) -> None:
    bare = name[1:-1] if name[:1] in (b"`", b'"') else name.removeprefix(b"\xe2\x80\x9c").removesuffix(b"\xe2\x80\x9d")
    if _OUTSIDE.fullmatch(bare) or (bare != name and b"\\" in bare):
        shown = bare.decode(errors="replace").lower()
        raise _read_only(f"Cannot use function {shown} in readonly mode, since it reaches outside the database")


def _check_table(before: tuple[bytes, bytes], kind: str, token: bytes) -> None:
    """chDB's database `default` takes a path for a table."""
    names = before[1] in _TABLE_FOLLOWS or (before[1] == b"." and before[0].strip(b'`"').upper() == b"DEFAULT")
    named = kind == "quoted" and before[1] in (b",", b"IN")
    if (names and (b"/" in token or b"\\" in token)) or (named and token[1:2] in (b"/", b"\\")):
        raise _read_only("Cannot read a file as a table in readonly mode")


def _read_only(text: str) -> Refusal:
    return refusal(500, 164, "READONLY", text)


def _tokens(sql: bytes) -> Iterator[tuple[str, bytes]]:
    """Kind (text, quoted, word, other) and bytes of everything but space and comments, as ClickHouse's lexer has it."""
    at = 0
    while match := _TOKEN.match(sql, at):
        at = match.end()
        if match["comment"]:
            at = _comment_end(sql, at)
        elif not match["skip"]:
            kind = next((kind for kind in ("text", "quoted", "word") if match[kind]), "other")
            yield kind, match[0]


def _comment_end(sql: bytes, at: int) -> int:
    """Where a comment ends whose inside begins at `at`; ClickHouse's nest."""
    depth = 1
    for mark in _COMMENT_MARK.finditer(sql, at):
        depth += 1 if mark[0] == b"/*" else -1
        if depth == 0:
            return mark.end()
    return len(sql)
