"""Requests no well-meaning client sends, on raw sockets: an answer below 500 or a closed connection, nothing lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from ingress_world import KEY, MODEL, World, chat_body, silent, world

AUTH = f"Authorization: Bearer {KEY}\r\n".encode()
JSON = b"Content-Type: application/json\r\n"
CHAT = json.dumps(chat_body()).encode()


def status(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer[:200]
    return int(answer.split(b" ", 2)[1])


def envelope(answer: bytes) -> Any:
    return json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]


def request(body: bytes, *lines: bytes, method: bytes = b"POST", path: bytes = b"/v1/chat/completions") -> bytes:
    head = b"".join(line + b"\r\n" for line in (method + b" " + path + b" HTTP/1.1", b"Host: x", *lines))
    return head + AUTH + b"Connection: close\r\n\r\n" + body


def sized(body: bytes, *lines: bytes) -> bytes:
    return request(body, JSON.strip(), b"Content-Length: %d" % len(body), *lines)


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


async def test_bodies_that_are_not_what_they_say() -> None:
    async with world() as w:
        for raw, wanted in (
            (sized(b"{nope"), 400),
            (sized(b"[1]"), 400),
            (sized(b'{"model":"\xff"}'), 400),
            (sized(b'{"model":"\\ud800","messages":[]}'), 400),
            (sized(b'{"a":1,"a":1}'), 400),
            (sized(b'{"a":' + b"[" * 100_000), 400),
            (sized(CHAT, b"Content-Encoding: gzip"), 415),
            (request(CHAT, b"Content-Type: text/plain", b"Content-Length: %d" % len(CHAT)), 415),
            (request(CHAT, b"Content-Type: ;;;=", b"Content-Length: %d" % len(CHAT)), 415),
            (request(b"a=b", b"Content-Type: application/x-www-form-urlencoded", b"Content-Length: 3"), 415),
            (request(b""), 400),
        ):
            answer = await w.raw(raw)
            assert status(answer) == wanted
            assert envelope(answer)["message"]
        assert not w.owner.requests


async def test_a_body_over_the_limit_is_refused_unread() -> None:
    async with world(max_body_bytes=10_000) as w:
        async with w.connection() as (reader, writer):
            writer.write(request(b"", JSON.strip(), b"Content-Length: 52428800"))
            assert status(await reader.readuntil(b"\r\n\r\n")) == 413, "answered though not one byte of it was sent"
        answer = await w.raw(request(b"", JSON.strip(), b"Content-Length: " + b"9" * 19))
        assert status(answer) in (400, 413)


async def test_a_chunked_body_over_the_limit_is_refused_when_it_is() -> None:
    async with world(max_body_bytes=10_000) as w, w.connection() as (reader, writer):
        writer.write(request(b"", JSON.strip(), b"Transfer-Encoding: chunked"))
        writer.write(b"2710\r\n" + b"x" * 10_000 + b"\r\n" + b"1\r\nx\r\n")
        assert status(await reader.readuntil(b"\r\n\r\n")) == 413, "the last chunk was not waited for"


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_chunked_bodies_of_any_grain_are_read(size: int) -> None:
    async with world() as w:
        raw = request(chunked(CHAT, size), JSON.strip(), b"Transfer-Encoding: chunked")
        assert status(await w.raw(raw)) == 200


async def test_a_large_body_is_asked_for_before_it_is_sent() -> None:
    async with world() as w, w.connection() as (reader, writer):
        big = json.dumps(chat_body(messages=[{"role": "user", "content": "x" * 1_200_000}])).encode()
        head = (JSON.strip(), b"Content-Length: %d" % len(big), b"Expect: 100-continue")
        writer.write(request(b"", *head))
        assert status(await reader.readuntil(b"\r\n\r\n")) == 100
        writer.write(big)
        assert status(await reader.readuntil(b"\r\n\r\n")) == 200


@pytest.mark.parametrize(
    "raw",
    [
        request(CHAT, JSON.strip(), b"Host: y", b"Content-Length: %d" % len(CHAT)),
        request(chunked(CHAT, 50), JSON.strip(), b"Content-Length: 3", b"Transfer-Encoding: chunked"),
        request(CHAT, JSON.strip(), b"Content-Length: %d" % len(CHAT), b"Content-Length: 3"),
        request(CHAT, JSON.strip(), b"Content-Length: -1"),
        request(b"zz\r\n", JSON.strip(), b"Transfer-Encoding: chunked"),
        request(b"", b"X: " + b"a" * 1_000_000),
        request(b"", *(b"X-%d: y" % i for i in range(500))),
        request(b"", b"Bad Header: y", method=b"GET"),
        request(b"", method=b"GET", path=b"/v1/models/%00%0d%0a"),
        request(b"", method=b"GET", path=b"/v1/models/../../etc/passwd"),
        request(b"", method=b"GET", path=b"//v1//models"),
        request(b"", method=b"BREW", path=b"/v1/models"),
        request(b"", b"Origin: x", b"Access-Control-Request-Method: \xff\xfe", method=b"OPTIONS"),
        b"GET / HTTP/1.1\r\nAuthorization: \xff\xfe\r\nConnection: close\r\n\r\n",
        b"GET /v1/models HTTP/1.0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 100,
        b"\r\n\r\n\r\n",
        b"GET\r\n\r\n",
    ],
)
async def test_broken_http_is_never_a_500_and_the_next_client_is_served(raw: bytes) -> None:
    async with world() as w:
        answer = b""
        with contextlib.suppress(OSError):  # closed on us, which is an answer too
            async with w.connection() as (reader, writer):
                writer.write(raw)
                writer.write_eof()
                answer = await reader.read()
        if answer.startswith(b"HTTP/1.1 "):
            assert status(answer) < 500, answer
        assert (await w.chat()).status_code == 200


async def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing() -> None:
    async with world() as w:
        async with w.connection() as (_, writer):
            writer.write(request(b"{", JSON.strip(), b"Content-Length: 100"))
            await writer.drain()
        async with w.connection() as (_, writer):
            writer.write(request(b"", JSON.strip(), b"Content-Length: 100", b"X: "))
        assert (await w.chat()).status_code == 200
        assert len(w.owner.requests) == 1
        assert w.ingress._relay.open == 0


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with world() as w:
        first, second = w.post("/v1/chat/completions", chat_body()), w.post("/v1/nope", {}, "Connection: close")
        answer = await w.raw(first + second)
        assert [int(part.split(b" ")[0]) for part in answer.split(b"HTTP/1.1 ")[1:]] == [200, 404]


async def test_a_client_given_url_is_not_honoured() -> None:
    async def taken() -> None:
        reader_writers.append(None)

    reader_writers: list[None] = []
    server = await asyncio.start_server(lambda r, wr: taken(), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with world() as w:
        body = chat_body(api_base=url, base_url=url, chat_template="{{ 1/0 }}", chat_template_kwargs={"x": url})
        assert (await w.client.post("/v1/chat/completions", json=body)).status_code == 200
        sent = w.owner.requests[0][0]
        assert url not in repr(sent)
        assert not reader_writers
    server.close()
    await server.wait_closed()


async def test_keys_with_sql_in_them_meet_nothing() -> None:
    async with world() as w:
        for key in ("' OR '1'='1", "sk-ms-dev-' OR 1=1 --", "sk-ms-dev-%00", "sk-ms-*-x"):
            raw = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nConnection: close\r\n\r\n"
            assert status(await w.raw(raw % key.encode())) == 401


async def test_many_clients_that_vanish_leave_no_call_open() -> None:
    async with world(silent) as w:
        await _vanish(w, 40)
        await w.owner.until(lambda: len(w.owner.cancels) == 40)
        assert w.ingress._relay.open == 0
        assert "millstream_ingress_open_calls 0.0" in (await w.client.get("/metrics")).text


async def _vanish(w: World, count: int) -> None:
    raw = [w.post("/v1/chat/completions", {**chat_body(), "model": MODEL, "stream": bool(i % 2)}) for i in range(count)]
    connections = [await asyncio.open_connection("127.0.0.1", w.port) for _ in raw]
    for (_, writer), data in zip(connections, raw, strict=True):
        writer.write(data)
    await w.owner.until(lambda: len(w.owner.requests) == count)
    for _, writer in connections:
        writer.transport.abort()
