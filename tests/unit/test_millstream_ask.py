"""The small GET, against small servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from millstream.ask import Reply, get
from millstream.ports import free_port


@asynccontextmanager
async def server(answer: bytes) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        listening.close()
        await listening.wait_closed()


@pytest.mark.parametrize(
    ("answer", "reply"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", Reply(200, b"hi")),
        (b"HTTP/1.0 503 Service Unavailable\r\n\r\n" + b"x" * 300_000, Reply(503, b"x" * 300_000)),
        (b"", None),
        (b"SSH-2.0-OpenSSH\r\n", None),
        (b"HTTP/1.1 soon\r\n\r\n", None),
    ],
)
async def test_replies(answer: bytes, reply: Reply | None) -> None:
    async with server(answer) as port:
        assert await get(port, "/") == reply


async def test_nobody_there() -> None:
    assert await get(free_port(), "/") is None
