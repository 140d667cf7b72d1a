"""`python -m ingress`: serve until SIGTERM. `--check` only validates the settings."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any

from ingress.credentials import hmac_secret
from ingress.server import HttpServer
from ingress.service import build
from wire.clock import SystemClock
from wire.errors import MillstreamError
from wire.kafka import buses_of
from wire.settings import Settings

log = logging.getLogger("ingress")
DRAIN_S = 7.0
"""how long open streams may go on after SIGTERM: all of an end fits in the 15 s after which a supervisor kills"""
CUT_S = 1.5
"""for the last bytes of answers to leave"""


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 after a clean end, 2 for settings that can't work, 1 for anything else."""
    parser = argparse.ArgumentParser(prog="python -m ingress", description="Millstream's HTTP front")
    parser.add_argument("--check", action="store_true", help="validate the settings and exit")
    args = parser.parse_args(argv)
    try:
        settings = Settings.from_env(os.environ)
        hmac_secret(settings.key_secret)
    except MillstreamError as exc:
        print(f"ingress: {exc}", file=sys.stderr)
        return 2
    if args.check:
        return 0
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return asyncio.run(serve(settings))
    except MillstreamError as exc:
        print(f"ingress: {exc}", file=sys.stderr)
        return 1


async def serve(settings: Settings) -> int:
    """Serve until told to stop; 1 if a part of this process failed."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    clock = SystemClock()
    buses = buses_of(settings, clock)
    ingress = await build(settings, buses, clock)
    server = HttpServer(ingress.app, settings.host, settings.port, settings.max_open_streams)
    await ingress.open()
    try:
        await server.start()
        # What is there now stays for good: no collection has to look at it again while streams come and go.
        gc.collect()
        gc.freeze()
        log.info("serving on http://%s:%d", settings.host, settings.port)
        await _first_of(stop.wait(), server.wait(), ingress.wait_failed())
        await ingress.drain(DRAIN_S if stop.is_set() else 0.0)
        await server.stop(CUT_S)
    finally:
        await ingress.close()
    return 0 if stop.is_set() else 1


async def _first_of(*works: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.create_task(work) for work in works]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


if __name__ == "__main__":
    sys.exit(main())
