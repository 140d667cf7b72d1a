"""A client that costs next to nothing, so that what is measured is the server: one socket, HTTP/1.1, SSE."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from dataclasses import dataclass

import orjson

from millstream.errors import Refused
from millstream.runfile import HOST

_CONTENT = re.compile(rb'"content":\s*"[^"]')
_DONE = b"data: [DONE]"
_LAST_CHUNK = b"0\r\n\r\n"
_READ_BYTES = 1 << 16
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One streamed chat, as its client saw it."""

    ttft_ms: float
    """from sending to the first text; to the end where there was none"""
    total_ms: float
    raw: bytes
    """the body as it came, chunk borders included"""

    @property
    def events(self) -> int:
        """Events with data, [DONE] included."""
        return self.raw.count(b"data: ")

    @property
    def finish_reason(self) -> str | None:
        """The first choice's, if the answer had an ending."""
        found = re.search(rb'"finish_reason":\s*"(\w+)"', self.raw)
        return found[1].decode() if found else None

    @property
    def completion_tokens(self) -> int | None:
        """From the usage event, if it was asked for."""
        found = re.search(rb'"completion_tokens":\s*(\d+)', self.raw)
        return int(found[1]) if found else None

    @property
    def whole(self) -> bool:
        return _DONE in self.raw


class Connection:
    """A kept-alive connection to the API; one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int, key: str) -> None:
        self._reader = reader
        self._writer = writer
        self._head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {HOST}:{port}\r\nAuthorization: Bearer {key}\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()

    @classmethod
    async def open(cls, port: int, key: str) -> Connection:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(reader, writer, port, key)

    def send(self, body: bytes) -> None:
        """Send a chat and leave it at that."""
        self._writer.write(self._head + str(len(body)).encode() + b"\r\n\r\n" + body)

    async def chat(self, body: bytes) -> Answer:
        """A streamed chat to its end. Refused when the status isn't 200 or the stream breaks off."""
        async with asyncio.timeout(_TIMEOUT_S):
            return await self._chat(body)

    async def _chat(self, body: bytes) -> Answer:
        began = time.perf_counter()
        self.send(body)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            text = await self._reader.read(_READ_BYTES)
            raise Refused(f"the API answers {head.split(b' ')[1].decode()}: {text.decode(errors='replace')[:300]}")
        raw, first = b"", None
        while not raw.endswith(_LAST_CHUNK):
            piece = await self._reader.read(_READ_BYTES)
            if not piece:
                raise Refused("the stream broke off")
            raw += piece
            if first is None and _CONTENT.search(raw):
                first = time.perf_counter()
        ended = time.perf_counter()
        return Answer(ttft_ms=((first or ended) - began) * 1000, total_ms=(ended - began) * 1000, raw=raw)

    def close(self) -> None:
        self._writer.close()


def chat_body(model: str, text: str, *, max_tokens: int, seed: int) -> bytes:
    """The body of a streamed chat."""
    return orjson.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": max_tokens,
            "seed": seed,
        }
    )
