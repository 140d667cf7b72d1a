"""`python -m aggregator ledger` and `python -m aggregator control`: two processes; neither ever stops the other."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from aggregator.app import serve
from billing.prices import load
from wire.bus import Bus
from wire.clock import SystemClock
from wire.errors import MillstreamError
from wire.kafka import KafkaBus
from wire.settings import Settings

Run = Callable[[Settings, Bus, asyncio.Event], Coroutine[Any, Any, None]]


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run an app until SIGTERM or SIGINT; 1 with a sentence on stderr when it can't start."""
    parser = argparse.ArgumentParser(prog="aggregator", description="Millstream's two Faust apps.")
    parser.add_argument("app", choices=("ledger", "control"))
    parser.add_argument("--member", default="0", help="names this process where several share the ledger's work")
    parser.add_argument("--check", action="store_true", help="check the settings, then exit")
    args = parser.parse_args(argv)
    try:
        settings = Settings.from_env(environ)
        logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        if args.check:
            load(settings.price_book)
            return 0
        bus, run = KafkaBus(settings.cluster, SystemClock()), _app(args.app, args.member)
        serve(lambda stop: run(settings, bus, stop))
    except MillstreamError as exc:
        print(f"{args.app}: {exc}", file=sys.stderr)
        return 1
    return 0


def _app(name: str, member: str) -> Run:
    if name == "control":
        from aggregator import control

        return control.run
    from aggregator import ledger

    return lambda settings, bus, stop: ledger.run(settings, bus, stop, member)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
