"""granian in this process's own event loop: HTTP/1.1 and HTTP/2, one worker."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading

import psutil
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server
from starlette.types import ASGIApp

from ingress.errors import IngressError

SPARE_CONNECTIONS = 256
"""beyond the open streams: health checks, models, and calls that are told that it's full"""
BACKLOG = 2048
MAX_HEADER_BYTES = 256 * 1024
TRY_S = 0.02
START_TRIES = 500
STOP_TRIES = 100


class PortTaken(IngressError):
    """The address to serve on is in use or not this machine's."""


class HttpServer:
    """Serves an ASGI app until stopped."""

    def __init__(self, app: ASGIApp, host: str, port: int, max_open_streams: int) -> None:
        # granian's own words are few and mostly about clients that left; what is an error still comes through.
        logging.getLogger("_granian").setLevel(logging.ERROR)
        self._host = host
        self._port = port
        self._server = Server(
            app,
            address=host,
            port=port,
            interface=Interfaces.ASGINL,
            http=HTTPModes.auto,
            websockets=False,
            backlog=BACKLOG,
            backpressure=max_open_streams + SPARE_CONNECTIONS,
            http1_settings=HTTP1Settings(max_buffer_size=MAX_HEADER_BYTES),
            log_enabled=False,
        )
        self._task: asyncio.Task[None] | None = None
        self._threads: set[int] = set()

    async def start(self) -> None:
        """Returns once connections are taken. PortTaken if the address can't be used."""
        check_free(self._host, self._port)
        before = foreign_threads()
        self._task = asyncio.create_task(self._server.serve(), name="granian")
        for _ in range(START_TRIES):
            if await self._answers():
                self._threads = foreign_threads() - before
                return
            await asyncio.sleep(TRY_S)
        raise PortTaken(f"nothing answers on {self._host}:{self._port}; the messages above say why")

    async def wait(self) -> None:
        """Returns if the server ends by itself."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def stop(self, timeout_s: float) -> None:
        """Close the listening socket, let open answers end for so long, then cut them."""
        task, self._task = self._task, None
        if task is None:
            return
        self._server.stop()  # type: ignore[no-untyped-call]
        _, late = await asyncio.wait((task,), timeout=timeout_s)
        if late:
            task.cancel()
            await asyncio.wait((task,))
        # granian's threads end a moment after it does. One that still holds Python objects while the interpreter is
        # finalised aborts the process.
        for _ in range(STOP_TRIES):
            if not self._threads & foreign_threads():
                return
            await asyncio.sleep(TRY_S)

    async def _answers(self) -> bool:
        if self._task is not None and self._task.done():
            self._task.result()
        try:
            _, writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            return False
        writer.close()
        return True


def foreign_threads() -> set[int]:
    """Ids of this process's threads that Python didn't start."""
    return {thread.id for thread in psutil.Process().threads()} - {t.native_id for t in threading.enumerate()}


def check_free(host: str, port: int) -> None:
    """PortTaken unless the address can be bound. granian shares ports, so it wouldn't notice."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise PortTaken(
                f"can't serve on {host}:{port} ({exc.strerror}); set MILLSTREAM_PORT and MILLSTREAM_HOST"
                " to a free port of this machine"
            ) from exc
