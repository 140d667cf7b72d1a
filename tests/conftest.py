"""Fixtures that every kind of test shares."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from clickhouse_process import RunningClickHouse
from kafka_broker import RunningBroker

from wire.clock import SystemClock
from wire.fleet import Fleet
from wire.kafka import KafkaBus


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """One real Kafka broker for the whole session. Tests keep apart by names: `suffix`, `fleet`."""
    running = RunningBroker(tmp_path_factory.mktemp("kafka"))
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture
def kafka_bus(broker: RunningBroker) -> KafkaBus:
    """A bus on the real broker."""
    return KafkaBus(broker.cluster, SystemClock())


@pytest.fixture(scope="session")
def clickhouse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningClickHouse]:
    """One real chDB behind ClickHouse's HTTP interface for the whole session. Tests keep apart by databases."""
    running = RunningClickHouse(tmp_path_factory.mktemp("clickhouse"))
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture
def suffix() -> str:
    """Makes names of topics, groups and fleets this test's own."""
    return uuid.uuid4().hex[:8]


@pytest.fixture
def fleet(suffix: str) -> Fleet:
    """A fleet of this test's own."""
    return Fleet("local", "cpu", f"test-{suffix}", "1", "sim")
