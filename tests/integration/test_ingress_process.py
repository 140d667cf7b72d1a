"""`python -m ingress` as a process: its settings, its start, its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest
from ingress_world import FLEET, KEY, MODEL, SECRET, SHARDS, credential, eventually, model
from kafka_broker import RunningBroker

from millstream.ports import free_port
from wire.codec import encode
from wire.kafka import KafkaBus
from wire.topics import CATALOGUE, CREDENTIALS, all_topics

DEAD_END = '{"local": {"bootstrap": "127.0.0.1:1", "replication": 1}}'


@asynccontextmanager
async def process(*argv: str, **settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The process, killed at the end if it still lives."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MILLSTREAM_")}
    env |= {f"MILLSTREAM_{name}": value for name, value in settings.items()}
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ingress", *argv, env=env, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


async def outcome(*argv: str, **settings: str) -> tuple[int | None, str]:
    async with process(*argv, **settings) as running:
        _, words = await running.communicate()
        return running.returncode, words.decode()


async def test_check_says_nothing_about_good_settings_and_a_sentence_about_bad_ones() -> None:
    assert await outcome("--check", KEY_SECRET=SECRET) == (0, "")
    for settings, word in (
        ({}, "MILLSTREAM_KEY_SECRET"),
        ({"KEY_SECRET": SECRET, "PORT": "x"}, "MILLSTREAM_PORT"),
        ({"KEY_SECRET": SECRET, "LOG_LEVEL": "LOUD"}, "MILLSTREAM_LOG_LEVEL"),
        ({"KEY_SECRET": SECRET, "SLOT": "9"}, "MILLSTREAM_SLOT"),
    ):
        code, words = await outcome("--check", **settings)
        assert code == 2
        assert word in words
        assert words.count("\n") == 1, "a sentence, not a traceback"


async def test_a_taken_port_is_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, words = await outcome(KEY_SECRET=SECRET, PORT=port, REGIONS=DEAD_END)
    assert code == 1
    assert "MILLSTREAM_PORT" in words
    assert "Traceback" not in words


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_without_a_log_it_serves_what_it_can_and_ends_cleanly(number: signal.Signals) -> None:
    port = free_port()
    async with (
        process(KEY_SECRET=SECRET, PORT=str(port), REGIONS=DEAD_END) as running,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        await eventually(lambda: answers(client, "/health", 200))
        ready = await client.get("/readyz")
        assert ready.status_code == 503
        assert "the credentials aren't read to their end yet" in ready.json()["missing"]
        headers = {"Authorization": f"Bearer {KEY}"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 503
        running.send_signal(number)
        assert await running.wait() == 0


@pytest.mark.kafka
async def test_on_a_broker_it_gets_ready_but_for_an_engine(broker: RunningBroker, kafka_bus: KafkaBus) -> None:
    admin, producer = await kafka_bus.admin(), await kafka_bus.producer()
    await admin.create(all_topics([(FLEET, SHARDS)], [("local", 2)]))
    await admin.stop()
    for topic, key, message in ((CREDENTIALS, "dev", credential()), (CATALOGUE, MODEL, model())):
        await (await producer.send(topic, encode(message), key=key.encode(), partition=0))
    await producer.stop()
    port, regions = free_port(), msgspec.json.encode({"local": broker.cluster}).decode()
    async with (
        process(KEY_SECRET=SECRET, PORT=str(port), SLOTS="2", REGIONS=regions) as running,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        headers = {"Authorization": f"Bearer {KEY}"}
        await eventually(lambda: answers(client, "/v1/models", 200, headers))
        assert MODEL in (await client.get("/v1/models", headers=headers)).text
        running.send_signal(signal.SIGTERM)
        assert await running.wait() == 0


async def answers(client: httpx.AsyncClient, path: str, status: int, headers: dict[str, str] | None = None) -> bool:
    try:
        return (await client.get(path, headers=headers)).status_code == status
    except httpx.TransportError:
        return False
