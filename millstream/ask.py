"""A GET over a socket, for probes: asked ten times a second while a stack starts, it must cost next to nothing."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from millstream.runfile import HOST

_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Reply:
    """What was answered."""

    status: int
    body: bytes


async def get(port: int, path: str) -> Reply | None:
    """The answer of what listens on this machine's `port`; None if there is none in time, or none in HTTP."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                # HTTP/1.0: the connection's end is the body's
                writer.write(f"GET {path} HTTP/1.0\r\nHost: {HOST}:{port}\r\n\r\n".encode())
                return _reply(await reader.read())
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError):
        return None


def _reply(raw: bytes) -> Reply | None:
    head, _, body = raw.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        return None
    return Reply(int(words[1]), body)
