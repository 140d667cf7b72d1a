"""ClickHouse's HTTP interface over an engine, as an ASGI application: what clients need of it, and no more.

Statements run in threads: reads in some, inserts in others, so that neither a long query nor many of them keep the
ledger from being written, and none of it keeps /ping from answering.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import orjson

from millstream.clickhouse_engine import Answer, Engine
from millstream.clickhouse_statement import Refusal, Statement, refusal, statement

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY_BYTES = 256 * 1024**2
READERS = 4
WRITERS = 2
MAX_WAITING = 256
KILL_AGAIN_S = 0.2
_CONTENT_TYPES = {"JSON": "application/json", "JSONCompact": "application/json", "CSV": "text/csv; charset=UTF-8"}
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class Job:
    """A statement in a pool: `waiting.cancel()` works until it starts, `done` is for the event loop to wait for."""

    def __init__(self, waiting: Future[Answer]) -> None:
        self.waiting = waiting
        loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = loop.create_future()
        waiting.add_done_callback(lambda _: loop.call_soon_threadsafe(self._end))

    def answer(self) -> Answer:
        """What it gave. Refusal when it failed, or was cancelled before it started."""
        if self.waiting.cancelled():
            raise refusal(503, 236, "ABORTED", "The server is shutting down")
        return self.waiting.result()

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class HttpInterface:
    """The ASGI application. `password` "" = whoever reaches the loopback interface may use it."""

    def __init__(self, engine: Engine, *, username: str = "default", password: str = "") -> None:
        self._engine = engine
        self._username = username
        self._password = password
        self._readers = ThreadPoolExecutor(READERS, "read")
        self._writers = ThreadPoolExecutor(WRITERS, "write")
        self._reading: set[Job] = set()
        self._writing: set[Job] = set()
        self._stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        if scope["path"] in ("/ping", "/replicas_status"):
            await _respond(send, 200, {"Content-Type": "text/plain; charset=UTF-8"}, b"Ok.\n")
            return
        query_id = uuid.uuid4().hex
        try:
            if scope["method"] not in ("GET", "POST") or scope["path"] not in ("/", "/query"):
                raise refusal(404, 1000, "POCO_EXCEPTION", "There is nothing here; ask at / by GET or POST")
            _no_browser(headers)
            self._authenticate(scope["query_string"], headers)
            asked = statement(scope["method"], scope["query_string"], headers, await _body(receive, headers))
            asked = replace(asked, query_id=asked.query_id or query_id)
            answer = await self._run(asked, receive)
        except Refusal as refused:
            await _respond(send, refused.status, _refusal_headers(refused, query_id), f"{refused}\n".encode())
            return
        if answer is not None:
            await _respond(send, 200, self._headers(asked, answer), answer.body)

    async def stop(self) -> None:
        """Take nothing more on, end what only reads, wait for what writes."""
        self._stopping = True
        for job in self._reading | self._writing:
            job.waiting.cancel()
        while reading := [job.done for job in self._reading]:
            await asyncio.to_thread(self._engine.kill_reads)
            await asyncio.wait(reading, timeout=KILL_AGAIN_S)
        while writing := [job.done for job in self._writing]:
            await asyncio.wait(writing)
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=False)

    async def _run(self, asked: Statement, receive: Receive) -> Answer | None:
        """None when the client left meanwhile: what it asked to read is stopped, what it asked to write is not."""
        if self._stopping or len(self._reading) + len(self._writing) >= MAX_WAITING:
            raise refusal(503, 202, "TOO_MANY_SIMULTANEOUS_QUERIES", "Too many simultaneous queries")
        writes = asked.verb == b"INSERT"
        pool, jobs = (self._writers, self._writing) if writes else (self._readers, self._reading)
        job = Job(pool.submit(self._engine.run, asked))
        jobs.add(job)
        leaving = asyncio.create_task(_left(receive))
        try:
            either: list[asyncio.Future[Any]] = [job.done, leaving]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if job.done.done():
                return job.answer()
            while not writes and not job.done.done() and not job.waiting.cancel():
                # one that is only just starting can't be found at once
                await asyncio.to_thread(self._engine.kill, asked.query_id)
                await asyncio.wait([job.done], timeout=KILL_AGAIN_S)
            await asyncio.wait([job.done])
            return None
        finally:
            leaving.cancel()
            jobs.discard(job)

    def _authenticate(self, query_string: bytes, headers: Mapping[str, str]) -> None:
        if not self._password:
            return
        user, password = _credentials(query_string, headers)
        good = hmac.compare_digest(password.encode(), self._password.encode())
        if user != self._username or not good:
            raise refusal(403, 516, "AUTHENTICATION_FAILED", "Authentication failed: password is incorrect")

    def _headers(self, asked: Statement, answer: Answer) -> dict[str, str]:
        summary = {
            "read_rows": str(answer.read_rows),
            "read_bytes": str(answer.read_bytes),
            "written_rows": str(answer.written_rows),
            "written_bytes": str(answer.written_bytes),
            "total_rows_to_read": "0",
            "result_rows": "0",
            "result_bytes": str(len(answer.body)),
            "elapsed_ns": str(int(answer.elapsed_s * 1e9)),
        }
        headers = {
            "X-ClickHouse-Query-Id": asked.query_id,
            "X-ClickHouse-Timezone": self._engine.timezone,
            "X-ClickHouse-Summary": orjson.dumps(summary).decode(),
        }
        form = asked.result_format
        if form is not None:
            headers["X-ClickHouse-Format"] = form
            headers["Content-Type"] = _CONTENT_TYPES.get(form, "text/plain; charset=UTF-8")
        return headers


def _credentials(query_string: bytes, headers: Mapping[str, str]) -> tuple[str, str]:
    scheme, _, encoded = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "basic":
        try:
            user, _, password = base64.b64decode(encoded).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return "", ""
        return user, password
    pairs = dict(parse_qsl(query_string.decode("latin-1")))
    return (
        headers.get("x-clickhouse-user") or pairs.get("user", "default"),
        headers.get("x-clickhouse-key") or pairs.get("password", ""),
    )


def _no_browser(headers: Mapping[str, str]) -> None:
    """A web page that someone has open must not reach the ledger through their own loopback interface."""
    for name in ("host", "origin"):
        value = headers.get(name)
        if value and urlsplit(value if "//" in value else f"//{value}").hostname not in _LOOPBACK:
            raise refusal(403, 497, "ACCESS_DENIED", f"Only this machine is served, not {name} {value[:80]!r}")


async def _body(receive: Receive, headers: Mapping[str, str]) -> bytes:
    too_large = refusal(413, 307, "TOO_MANY_BYTES", f"A body may hold {MAX_BODY_BYTES} bytes; send it in parts")
    length = headers.get("content-length", "0")
    if not length.isdigit() or int(length) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise refusal(400, 210, "NETWORK_ERROR", "The client left before it had sent everything")
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _refusal_headers(refused: Refusal, query_id: str) -> dict[str, str]:
    return {
        "Content-Type": "text/plain; charset=UTF-8",
        "X-ClickHouse-Exception-Code": str(refused.code),
        "X-ClickHouse-Query-Id": query_id,
    }


async def _respond(send: Send, status: int, headers: Mapping[str, str], body: bytes) -> None:
    pairs = [(k.lower().encode(), v.encode("latin-1", "replace")) for k, v in headers.items()]
    pairs += [(b"content-length", str(len(body)).encode()), (b"x-clickhouse-server-display-name", b"millstream")]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
