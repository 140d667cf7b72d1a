"""`millstream up`: everything that is checked before anything is started, and then one life of a stack."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

from billing import prices
from millstream import added, runfile, welcome
from millstream.errors import Missing
from millstream.kafka import broker
from millstream.life import Life
from millstream.paths import cache_dir
from millstream.ports import Claims, Wanted, settle
from millstream.runfile import Run
from millstream.stack import Stack, served_of
from millstream.state import StateDir, locked, open_state, secret
from millstream.supervise import kill_group
from millstream.wish import Say, Wish

_REMNANTS_END_WITHIN_S = 5.0


async def run(wish: Wish, say: Say, announce: Callable[[str], None] | None) -> None:
    """Run a stack until a signal ends it (see Life). `announce` gets the block to paste from, when it is ready."""

    def ready(run: Run) -> None:
        if announce is not None:
            announce(welcome.ready_text(run, state, detached=False))

    state = open_state(wish.state_dir)
    with locked(state), Claims() as claims:
        _end_remnants(state, say)
        await Life(plan(wish, state, claims), state, say, ready).run()


def plan(wish: Wish, state: StateDir, claims: Claims) -> Stack:
    """The stack to run, once everything that can be checked without starting anything has been."""
    try:
        broker.java()
    except broker.KafkaSetupError as exc:
        raise Missing(str(exc)) from exc
    stack = Stack(
        state_dir=state.path,
        port=wish.port,
        kafka_port=wish.kafka_port,
        clickhouse_port=wish.clickhouse_port,
        controller_port=0,
        ledger_port=0,
        key_secret=secret(state),
        served=served_of(wish.engine_kind) if wish.model is None else added.served_of(cache_dir(), wish.model),
        workers=wish.workers,
        threads=wish.threads or max(1, (os.cpu_count() or 1) // wish.workers),
        environ=wish.environ,
    )
    prices.load(stack.settings().price_book)
    port, kafka_port, clickhouse_port, controller_port, ledger_port = settle(
        (
            Wanted(wish.port, "the API", "--port"),
            Wanted(wish.kafka_port, "Kafka", "--kafka-port"),
            Wanted(wish.clickhouse_port, "ClickHouse", "--clickhouse-port"),
            Wanted(0, "Kafka's controller", "another try"),
            Wanted(0, "the ledger's metrics", "another try"),
        ),
        claims,
    )
    return replace(
        stack,
        port=port,
        kafka_port=kafka_port,
        clickhouse_port=clickhouse_port,
        controller_port=controller_port,
        ledger_port=ledger_port,
    )


def _end_remnants(state: StateDir, say: Say) -> None:
    """End what a supervisor that was killed left behind; the kernel does so by itself where it can (Linux)."""
    old = runfile.read(state)
    if old is None:
        return
    left = runfile.remnants(old)
    for child in left:
        say(f"{child.name} still runs from a start that was killed; ending it")
        kill_group(child.pid or 0)
    give_up = time.monotonic() + _REMNANTS_END_WITHIN_S
    while runfile.remnants(old) and time.monotonic() < give_up:
        time.sleep(0.05)
    state.run_file.unlink(missing_ok=True)
