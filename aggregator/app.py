"""What both Faust apps share: how one is made, kept running and ended.

Faust outlives a broker that is killed and comes back, but not everything: a commit that fails for an odd reason
crashes it, it can't start while the broker is away, and its `stop` waits for a broker that is away for ever. So an app
is built anew after a crash, inside the same process, and the end of the process has a deadline of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Literal

import faust

from wire.kafka_logs import tame
from wire.settings import Cluster, Settings

log = logging.getLogger("millstream.aggregator")

REBUILD_PAUSE_S = 1.0
REBUILD_WITHIN_S = 15.0
"""An app that doesn't end in this time after its crash is left behind: its successor takes its place in the group"""
END_S = 4.0
"""A process is gone this long after its signal, at the latest"""

_SESSION_S = 10.0
_REQUEST_S = 11.0


def make_app(
    settings: Settings, name: str, *, reset: Literal["earliest", "latest"] = "earliest", member: str = "0"
) -> faust.App:
    """A Faust app of the consumer group `name` on this region's cluster: raw values, no web server, no stored state.

    `reset`: where to read from while the group has committed nothing. `member` names this process among those of its
    group: restarted under its name it gets its partitions back at once. Topics are never created here.
    """
    datadir = settings.state_dir / "faust" / name
    datadir.mkdir(parents=True, exist_ok=True)  # Faust makes the last of these only; nothing is ever in it
    return faust.App(
        name,
        broker=[f"kafka://{address.strip()}" for address in settings.cluster.bootstrap.split(",")],
        broker_credentials=_credentials(settings.cluster),
        env={},  # Faust lets its own environment variables win over these arguments: there is one source of settings
        datadir=str(datadir),
        store="memory://",
        web_enabled=False,
        key_serializer="raw",
        value_serializer="raw",
        topic_allow_declare=False,
        topic_disable_leader=True,
        consumer_auto_offset_reset=reset,
        consumer_group_instance_id=f"{name}-{member}",
        consumer_metadata_max_age_ms=5_000,
        broker_session_timeout=_SESSION_S,
        broker_rebalance_timeout=_SESSION_S,
        broker_heartbeat_interval=2.0,
        broker_request_timeout=_REQUEST_S,
        broker_commit_interval=1.0,
        producer_request_timeout=_REQUEST_S,
        stream_wait_empty=False,
    )


def serve(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run `main` until SIGTERM or SIGINT sets its event. It is over END_S later, whatever Kafka does.

    Being cut off there is no worse than a crash, which loses nothing: positions are committed only after effects.
    """
    tame()  # while a broker is away aiokafka writes forty lines a second
    for name, level in (("mode", logging.ERROR), ("faust", logging.WARNING)):
        logging.getLogger(name).setLevel(level)
    asyncio.run(_until_signal(main))


async def keep_running(make: Callable[[], faust.App], stop: asyncio.Event) -> None:
    """Run the app that `make` builds until `stop` is set; one that crashed or could not start is built anew."""
    said = ""
    while not stop.is_set():
        app = make()
        stopping = asyncio.ensure_future(stop.wait())
        try:
            why = await _live(app, stopping)
            ending = asyncio.ensure_future(_end(app))
            if stop.is_set():
                await ending
                return
            level, said = (logging.DEBUG if said == str(why) else logging.WARNING), str(why)
            log.log(level, "the %s app can't go on and is built anew: %s", app.conf.id, why)
            await asyncio.wait({ending, stopping}, timeout=REBUILD_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            await asyncio.wait({stopping}, timeout=REBUILD_PAUSE_S)
        finally:
            stopping.cancel()


async def _live(app: faust.App, stopping: asyncio.Future[Any]) -> BaseException | None:
    """Start the app and wait until it must end; the reason, if that isn't `stopping`."""
    app.loop = asyncio.get_running_loop()
    life = asyncio.ensure_future(_start_and_wait(app))
    await asyncio.wait({life, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not life.done():
        life.cancel()
        await asyncio.wait({life}, timeout=END_S)
        return None
    return life.exception() or app.crash_reason


async def _start_and_wait(app: faust.App) -> None:
    await app.start()
    log.info("the %s app runs", app.conf.id)
    await app.wait()


async def _end(app: faust.App) -> None:
    try:
        await app.stop()
    except Exception as exc:
        log.warning("the %s app ended badly: %r", app.conf.id, exc)


async def _until_signal(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    stop = asyncio.Event()

    def end() -> None:
        deadline = threading.Timer(END_S, os._exit, (0,))
        deadline.daemon = True
        deadline.start()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    with suppress(asyncio.CancelledError):
        await main(stop)


def _credentials(cluster: Cluster) -> faust.Credentials | None:
    """Faust's own form of a cluster's TLS and SASL settings; None for a plain connection."""
    context = None
    if cluster.security.endswith("SSL"):
        context = ssl.create_default_context(cafile=cluster.ca_file)
        if cluster.cert_file is not None:
            context.load_cert_chain(cluster.cert_file, cluster.key_file)
    if cluster.security.startswith("SASL"):
        return faust.SASLCredentials(
            username=cluster.sasl_username,
            password=cluster.sasl_password,
            ssl_context=context,
            mechanism=cluster.sasl_mechanism or "PLAIN",
        )
    return None if context is None else faust.SSLCredentials(context=context)
