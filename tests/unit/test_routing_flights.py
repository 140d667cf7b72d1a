"""What is in flight: counted once, ended once, never negative."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from routing_world import NOW_MS, by_shard, fleet, signal

from routing.flights import TRAVEL_MS, Flights

A, B = (fleet(), 0), (fleet(), 1)


def test_one_long_stream_stays_one() -> None:
    flights = Flights()
    flights.sent("r", 1, A, NOW_MS)
    assert [flights.counts[A] for _ in range(10)] == [1] * 10


def test_an_attempt_ends_once() -> None:
    # the answer of an engine's earlier life comes after the attempt was given up
    flights = Flights()
    flights.sent("r", 1, A, NOW_MS)
    flights.ended("r", 1)
    flights.ended("r", 1)
    flights.ended("never sent", 1)
    assert flights.counts == {}


def test_attempts_are_told_apart_and_sending_again_moves_one() -> None:
    flights = Flights()
    flights.sent("r", 1, A, NOW_MS)
    flights.sent("r", 2, B, NOW_MS)
    assert flights.counts == {A: 1, B: 1}
    flights.sent("r", 1, B, NOW_MS)
    assert flights.counts == {B: 2}


def test_unseen_are_those_younger_than_their_engines_signal() -> None:
    flights = Flights()
    flights.sent("old", 1, A, NOW_MS - 1000)
    flights.sent("on its way", 1, A, NOW_MS - TRAVEL_MS + 1)
    flights.sent("young", 1, A, NOW_MS + 5)
    flights.sent("nothing heard", 1, B, NOW_MS + 5)
    assert flights.unseen(by_shard(signal(0))) == {A: 2}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 2), st.sampled_from([A, B]))))
def test_counts_are_those_of_the_open_attempts(steps: list[tuple[bool, int, int, tuple[object, int]]]) -> None:
    flights, expected = Flights(), {}
    for sent, number, attempt, shard in steps:
        if sent:
            flights.sent(f"{number}", attempt, shard, NOW_MS)  # type: ignore[arg-type]
            expected[number, attempt] = shard
        else:
            flights.ended(f"{number}", attempt)
            expected.pop((number, attempt), None)
    places = list(expected.values())
    assert dict(flights.counts) == {shard: places.count(shard) for shard in set(places)}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["sent", "ended", "signal"]), st.integers(0, 6), st.sampled_from([0, 1]), st.integers(0, 40)
        )
    )
)
def test_unseen_are_the_open_attempts_since_the_last_signal(steps: list[tuple[str, int, int, int]]) -> None:
    flights, now_ms = Flights(), NOW_MS
    sent_ms: dict[str, tuple[int, int]] = {}
    signals = by_shard(signal(0), signal(1))
    for what, number, shard, passed_ms in steps:
        now_ms += passed_ms
        if what == "sent":
            flights.sent(f"{number}", 1, (fleet(), shard), now_ms)
            sent_ms[f"{number}"] = (shard, now_ms)
        elif what == "ended":
            flights.ended(f"{number}", 1)
            sent_ms.pop(f"{number}", None)
        else:
            signals |= by_shard(signal(shard, at_ms=now_ms))
        expected: dict[tuple[object, int], int] = {}
        for place, at_ms in sent_ms.values():
            if at_ms > signals[fleet(), place].at_ms - TRAVEL_MS:
                expected[fleet(), place] = expected.get((fleet(), place), 0) + 1
        assert flights.unseen(signals) == expected
