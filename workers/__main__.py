"""`python -m workers`: one worker; `--check` only validates its settings."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

from wire.clock import SystemClock
from wire.errors import MillstreamError, SettingsError
from wire.kafka import buses_of
from wire.settings import Settings
from workers.worker import Worker, fleet_of


def main(arguments: list[str]) -> int:
    """Exit status: 0 after a clean end, 2 for settings that are wrong, 1 for everything else."""
    try:
        settings = Settings.from_env(os.environ)
        if not settings.model:
            raise SettingsError("MILLSTREAM_MODEL is not set; give the public name of a model of the catalogue")
        fleet_of(settings)
    except MillstreamError as exc:
        print(f"millstream worker: {exc}", file=sys.stderr)
        return 2
    if "--check" in arguments:
        return 0
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    try:
        asyncio.run(_serve(settings))
    except MillstreamError as exc:
        print(f"millstream worker: {exc}", file=sys.stderr)
        return 1
    return 0


async def _serve(settings: Settings) -> None:
    clock, stopping = SystemClock(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await Worker(settings, buses_of(settings, clock), clock).run(stopping)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
