"""What a request to ClickHouse's HTTP interface asks for. Pure: bytes in, a Statement or a refusal out."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.parser import BytesParser
from email.policy import HTTP
from urllib.parse import parse_qsl

import cramjam

from wire.errors import MillstreamError

_TRANSPORT = frozenset(
    {
        "query",
        "database",
        "default_format",
        "query_id",
        "user",
        "password",
        "session_id",
        "session_timeout",
        "session_check",
        "buffer_size",
        "wait_end_of_query",
        "quota_key",
        "role",
        "client_protocol_version",
        "send_progress_in_http_headers",
        "http_headers_progress_interval_ms",
        "enable_http_compression",
        "cancel_http_readonly_queries_on_client_close",
        "compress",
        "decompress",
        "add_http_cors_header",
    }
)
"""Parameters of the transport itself; every other one is a setting of the query."""
_NAME = re.compile(r"[A-Za-z_]\w*\Z")
_SPACE = rb"(?:\s|--[^\n]*(?:\n|\Z)|/\*.*?\*/)*"
_FIRST_WORD = re.compile(_SPACE + rb"\(*" + _SPACE + rb"([A-Za-z]+)", re.S)
_TOKEN = re.compile(
    rb"\s+|--[^\n]*|/\*.*?\*/"
    rb"|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`(?:[^`\\]|\\.)*`"
    rb"|(?P<word>[A-Za-z_]\w*)|(?P<other>.)",
    re.S,
)
_AFTER_FORMAT = re.compile(rb"\s+([A-Za-z]\w*)[ \t\f]*\r?\n?")
_LAST_FORMAT = re.compile(rb"\bFORMAT\s+(\w+)\s*(?:\bSETTINGS\b[^()]*)?;?\s*\Z", re.I)
_RESULTS = frozenset(
    {b"SELECT", b"WITH", b"SHOW", b"DESCRIBE", b"DESC", b"EXISTS", b"EXPLAIN", b"CHECK", b"KILL", b"FROM"}
)
_SOURCES = frozenset({b"FORMAT", b"VALUES", b"SELECT", b"WITH", b"FROM"})
_LITTLE = 64 * 1024


class Refusal(MillstreamError):
    """A request that can't be carried out, as ClickHouse would say it: its error code and an HTTP status."""

    def __init__(self, status: int, code: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def refusal(status: int, code: int, name: str, text: str) -> Refusal:
    """A Refusal in ClickHouse's words."""
    return Refusal(status, code, f"Code: {code}. DB::Exception: {text} ({name})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One statement and all that it needs."""

    sql: bytes
    data: bytes | None = None
    """of an INSERT: the rows, in `data_format`"""
    data_format: str = ""
    default_format: str = "TabSeparated"
    database: str = ""
    query_id: str = ""
    settings: Mapping[str, str]
    params: Mapping[str, str]
    read_only: bool = False
    """asked by GET, which changes nothing"""

    @property
    def verb(self) -> bytes:
        """Its first word, in capitals."""
        match = _FIRST_WORD.match(self.sql)
        return match[1].upper() if match else b""

    @property
    def result_format(self) -> str | None:
        """The format its result will have; None for what gives no result."""
        if self.verb not in _RESULTS:
            return None
        match = _LAST_FORMAT.search(self.sql[-_LITTLE:])
        return match[1].decode() if match else self.default_format


def statement(method: str, query_string: bytes, headers: Mapping[str, str], body: bytes) -> Statement:
    """The statement of a request; `headers` by lower-case name. Refusal when there is none, or it can't be read."""
    pairs = dict(parse_qsl(query_string.decode("latin-1"), keep_blank_values=True, encoding="utf-8"))
    kind = headers.get("content-type", "")
    if kind.startswith("multipart/form-data"):
        pairs |= form_fields(kind, body)
        body = b""
    elif "content-encoding" in headers:
        body = decompressed(body, headers["content-encoding"])
    for asked in ("compress", "decompress"):
        if pairs.get(asked, "0") not in ("0", ""):
            raise refusal(501, 48, "NOT_IMPLEMENTED", f"{asked}=1 isn't offered here; use Content-Encoding")
    sql, data, data_format = joined(pairs.get("query", "").encode("utf-8", "surrogateescape"), body)
    if not sql.strip():
        raise refusal(400, 62, "SYNTAX_ERROR", "Empty query")
    return Statement(
        sql=sql,
        data=data,
        data_format=data_format,
        default_format=pairs.get("default_format") or headers.get("x-clickhouse-format") or "TabSeparated",
        database=pairs.get("database") or headers.get("x-clickhouse-database") or "",
        query_id=pairs.get("query_id", ""),
        settings=_settings(pairs),
        params={name.removeprefix("param_"): value for name, value in pairs.items() if name.startswith("param_")},
        read_only=method == "GET",
    )


def joined(query: bytes, body: bytes) -> tuple[bytes, bytes | None, str]:
    """(statement, rows, their format) of the `query` parameter with the body that follows it.

    An INSERT's rows may stand after FORMAT in either; anything else is one text.
    """
    text = query or body
    rest = body if query else b""
    verb = _FIRST_WORD.match(text)
    if verb is None or verb[1].upper() != b"INSERT":
        return (text + b"\n" + rest if rest else text), None, ""
    word, start = insert_source(text)
    if word == b"FORMAT":
        match = _AFTER_FORMAT.match(text, start + len(b"FORMAT"))
        if match is None:
            raise refusal(400, 62, "SYNTAX_ERROR", "FORMAT names no format")
        return text[:start], text[match.end() :] + rest, match[1].decode()
    if word == b"" and rest:
        return text, rest, "Values"
    return (text + b"\n" + rest if rest else text), None, ""


def insert_source(sql: bytes) -> tuple[bytes, int]:
    """Which word says where an INSERT's rows come from (FORMAT, VALUES, SELECT, WITH, FROM or none), and where it is.

    What follows it may be binary, so nothing after it is looked at.
    """
    depth, before = 0, b""
    for token in _TOKEN.finditer(sql):
        word = (token["word"] or b"").upper()
        if word in _SOURCES and depth == 0 and before not in (b"INTO", b"TABLE", b"FUNCTION", b"."):
            return word, token.start()
        depth += (token["other"] == b"(") - (token["other"] == b")")
        before = word or token["other"] or before
    return b"", len(sql)


def decompressed(body: bytes, encoding: str) -> bytes:
    """The body of a Content-Encoding that clients use; Refusal for others and for damaged ones."""
    ways: dict[str, Callable[[bytes], bytes]] = {
        "identity": lambda b: b,
        "gzip": gzip.decompress,
        "deflate": zlib.decompress,
        "lz4": lambda b: bytes(cramjam.lz4.decompress(b)),
        "zstd": lambda b: bytes(cramjam.zstd.decompress(b)),
        "br": lambda b: bytes(cramjam.brotli.decompress(b)),
    }
    way = ways.get(encoding.strip().lower())
    if way is None:
        raise refusal(501, 89, "UNKNOWN_COMPRESSION_METHOD", f"Unknown HTTP content encoding {encoding[:40]!r}")
    try:
        return way(body)
    except (OSError, EOFError, zlib.error, cramjam.DecompressionError) as exc:
        raise refusal(400, 271, "CANNOT_DECOMPRESS", f"The body isn't {encoding[:40]}") from exc


def form_fields(content_type: str, body: bytes) -> dict[str, str]:
    """The text fields of a multipart form. Refusal for files: external tables aren't offered here."""
    form = BytesParser(policy=HTTP).parsebytes(b"Content-Type: " + content_type.encode("latin-1") + b"\r\n\r\n" + body)
    fields = {}
    for part in form.iter_parts() if form.is_multipart() else ():
        if part.get_filename():
            raise refusal(501, 48, "NOT_IMPLEMENTED", "External tables aren't offered here")
        name = part.get_param("name", header="content-disposition")
        content = part.get_payload(decode=True)
        if isinstance(name, str) and isinstance(content, bytes):
            fields[name] = content.decode("utf-8", "surrogateescape")
    return fields


def _settings(pairs: Mapping[str, str]) -> dict[str, str]:
    settings = {n: v for n, v in pairs.items() if n not in _TRANSPORT and not n.startswith("param_")}
    for name in settings:
        if not _NAME.match(name):
            raise refusal(404, 115, "UNKNOWN_SETTING", f"Unknown setting {name[:80]!r}")
    return settings
