"""ClickHouse embedded: `python -m millstream.clickhouse --data DIR --port N`.

chDB behind ClickHouse's own HTTP interface, on the loopback interface only, so that clickhouse-connect, curl and any
other client work unchanged. In production a ClickHouse server stands in its place and only settings differ.
Kill -9 loses nothing that was answered; SIGTERM ends what reads, waits for what writes, and closes the database.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from granian.constants import Interfaces
from granian.server.embed import Server

from millstream.clickhouse_engine import Engine
from millstream.clickhouse_server import HttpInterface
from wire.errors import MillstreamError
from wire.settings import Settings

log = logging.getLogger(__name__)
HOST = "127.0.0.1"


class PortTaken(MillstreamError):
    """Something else listens on the port."""


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Serve until SIGTERM or SIGINT; 1 when the start fails, with a sentence on stderr."""
    parser = argparse.ArgumentParser(prog="millstream.clickhouse", description="ClickHouse embedded, on this machine.")
    parser.add_argument("--data", type=Path, required=True, help="the data directory; made if it doesn't exist")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--check", action="store_true", help="check the settings and the port, then exit")
    args = parser.parse_args(argv)
    try:
        settings = Settings.from_env(environ)
        logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        _check_port(args.port)
        if not args.check:
            asyncio.run(serve(args.data, args.port, settings))
    except MillstreamError as exc:
        print(f"clickhouse: {exc}", file=sys.stderr)
        return 1
    return 0


async def serve(data: Path, port: int, settings: Settings) -> None:
    """Serve the database of `data` until a signal asks to stop."""
    engine = await asyncio.to_thread(Engine, data)
    access = settings.clickhouse
    interface = HttpInterface(engine, username=access.username, password=access.password)
    server = Server(
        interface, HOST, port, interface=Interfaces.ASGINL, log_enabled=False, websockets=False, backlog=1024
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    log.info("serving %s on http://%s:%d", data, HOST, port)
    serving, stopping = asyncio.create_task(server.serve()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        # in this order: the server waits for its requests, and they for the database
        await interface.stop()
        server.signal_handler_interrupt()  # type: ignore[no-untyped-call]
        await serving
        stopping.cancel()
        await asyncio.to_thread(engine.close)
        log.info("closed %s", data)


def _check_port(port: int) -> None:
    # The server's own listeners share the port with SO_REUSEPORT: without this two servers would halve the requests.
    if not 0 < port < 65536:
        raise PortTaken(f"{port} is no port; choose one from 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as exc:
            raise PortTaken(
                f"port {port} can't be used ({exc.strerror}); stop what listens there or choose another --port"
            ) from exc


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
