"""Identifiers and clocks."""

from __future__ import annotations

import uuid

from wire.clock import ManualClock, SystemClock
from wire.ids import incarnation, time_of, uuid7


def test_uuid7_has_its_version_its_time_and_its_randomness() -> None:
    value = uuid.UUID(uuid7(0x0123456789AB, lambda bits: (1 << bits) - 1))
    assert value.version == 7
    assert value.variant == uuid.RFC_4122
    assert str(value) == "01234567-89ab-7fff-bfff-ffffffffffff"


def test_later_ids_sort_later_and_ids_of_one_millisecond_differ() -> None:
    ids = [uuid7(ms) for ms in range(1_700_000_000_000, 1_700_000_000_100)]
    assert ids == sorted(ids)
    assert len({uuid7(5) for _ in range(100)}) == 100


def test_an_id_tells_when_it_was_made() -> None:
    assert time_of(uuid7(1_700_000_000_123)) == 1_700_000_000_123
    assert time_of(str(uuid.UUID(int=0, version=4))) is None
    assert time_of("nonsense") is None


def test_incarnations_sort_by_time() -> None:
    assert incarnation(255, lambda bits: 1) == "0000000000ff00000001"
    assert incarnation(1_000) < incarnation(2_000)
    assert incarnation(1_000) != incarnation(1_000)


def test_a_manual_clock_moves_when_told() -> None:
    clock = ManualClock(5_000)
    clock.advance(250)
    assert (clock.now_ms(), clock.monotonic_ms()) == (5_250, 250.0)


def test_the_system_clock_goes_on() -> None:
    clock = SystemClock()
    wall_ms, monotonic_ms = clock.now_ms(), clock.monotonic_ms()
    assert clock.now_ms() >= wall_ms > 1_600_000_000_000
    assert clock.monotonic_ms() >= monotonic_ms
