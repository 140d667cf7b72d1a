"""Shedding: by queues and endings, so that no profile that is wrong can refuse anybody."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_world import STEP, fleet, signal

from routing.policy import Choice
from routing.profile import Profile
from routing.shed import MOST, Gate, Waiting, by_priority, refused, wait_ms


def queue(wait_ms: float, *, share: float = 1.0, requests: int = 50, ended_per_s: float = 5.0) -> Waiting:
    return Waiting(share=share, wait_ms=wait_ms, requests=requests, ended_per_s=ended_per_s)


def at(loss: float, wait_ms: float = 0.0, busy: float = 0.0) -> Choice:
    return Choice(fleet(), 0, "loss", loss, 0, wait_ms, busy)


def test_at_the_patience_as_many_are_admitted_as_end() -> None:
    assert refused([queue(10_000)], demand=20.0, patience_ms=10_000) == pytest.approx(1 - 5 / 20)


def test_the_longer_they_wait_the_fewer_are_admitted() -> None:
    assert refused([queue(20_000)], demand=20.0, patience_ms=10_000) == pytest.approx(1 - 2.5 / 20)
    assert refused([queue(6_000)], demand=20.0, patience_ms=10_000) == pytest.approx(1 - 5 / 0.6 / 20)


def test_below_half_the_patience_nobody_is_refused() -> None:
    assert refused([queue(4_999)], demand=1_000.0, patience_ms=10_000) == 0.0


def test_few_that_wait_long_are_no_overload() -> None:
    # one prompt of an hour on an engine that has ended nothing else
    assert refused([queue(3.6e6, requests=4, ended_per_s=0.01)], demand=0.1) == 0.0
    assert refused([queue(3.6e6, requests=5, ended_per_s=0.01)], demand=0.1) > 0


def test_an_engine_that_has_ended_nothing_refuses_nobody() -> None:
    assert refused([queue(3.6e6, ended_per_s=0.0)], demand=100.0) == 0.0


def test_some_are_always_admitted() -> None:
    assert refused([queue(1e9, ended_per_s=0.1)], demand=1_000.0) == MOST


def test_a_queue_that_gets_no_traffic_doesn_t_count() -> None:
    waits = [queue(1e6, share=0.0), queue(100.0, share=1.0)]
    assert refused(waits, demand=100.0) == 0.0


def test_a_wait_is_the_prompts_before_and_where_slots_are_full_the_endings_too() -> None:
    profile = Profile(prefill_tokens_per_s=1_000.0, load=2.0, slots=32)
    assert wait_ms(signal(queued_requests=10, queued_tokens=3_000), profile) == 3_000
    assert wait_ms(signal(queued_requests=10, queued_tokens=3_000, running=32), profile) == 5_000
    # 16,000 tokens in two pieces: 2 · 10 + 160
    stepped = Profile(step=STEP, prefill_tokens_per_s=1.0)
    assert wait_ms(signal(queued_tokens=16_000), stepped) == 180
    assert wait_ms(signal(queued_requests=9, queued_tokens=-1, running=32), Profile()) == 0.0


def test_the_lowest_priorities_are_refused_first() -> None:
    assert by_priority(0.3, {0: 10.0, 1: 20.0, 2: 70.0}) == {0: 1.0, 1: 1.0}
    assert by_priority(0.05, {0: 10.0, 1: 90.0}) == {0: 0.5}
    assert by_priority(0.25, {}) == {0: 0.25}
    assert by_priority(7.0, {-1: 1.0, 1: 0.0}) == {-1: 1.0}
    assert by_priority(0.0, {0: 1.0}) == {}


def test_a_queue_settles_where_the_wait_is_the_patience() -> None:
    """Twice what an engine can do, second by second: the wait goes to the patience and stays."""
    waiting, capacity, demand, patience_ms = 0.0, 10.0, 20.0, 10_000.0
    waits = []
    for _ in range(120):
        wait_ms = waiting * 1_000 / capacity
        part = refused([queue(wait_ms, requests=round(waiting), ended_per_s=capacity)], demand, patience_ms)
        waiting = max(waiting + demand * (1 - part) - capacity, 0.0)
        waits.append(wait_ms)
    assert waits[-1] == pytest.approx(patience_ms, rel=0.01)
    assert max(waits) < 1.1 * patience_ms


class Ingress:
    """A gate that is asked ten times a second."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._now_ms = 0.0

    def refuses(self, share: float, choice: Choice, priority: int = 0) -> bool:
        self._now_ms += 100
        return self._gate.refuses(priority, share, choice, self._now_ms)


def test_those_with_most_to_lose_are_refused_as_many_as_is_said() -> None:
    ingress, draw = Ingress(Gate()), Random(1)
    losses = [draw.random() * 2 for _ in range(4_000)]
    met = [(loss, ingress.refuses(0.25, at(loss))) for loss in losses]
    settled = met[500:]
    assert sum(refused for _, refused in settled) / len(settled) == pytest.approx(0.25, abs=0.02)
    assert not any(refused for loss, refused in settled if loss < 1.2)
    assert all(refused for loss, refused in settled if loss > 1.8)


@pytest.mark.parametrize("loss", [0.0, 1.0, 9.0])
def test_requests_that_are_alike_are_refused_in_the_share_that_is_said(loss: float) -> None:
    ingress = Ingress(Gate())
    refused = [ingress.refuses(0.3, at(loss)) for _ in range(2_000)]
    assert sum(refused) / len(refused) == pytest.approx(0.3, abs=0.05)


def test_nobody_is_refused_where_nothing_is_said_and_all_where_all_are() -> None:
    ingress = Ingress(Gate())
    assert not any(ingress.refuses(0.0, at(9.0)) for _ in range(100))
    assert all(ingress.refuses(1.0, at(0.0)) for _ in range(100))
    assert not ingress.refuses(0.0, at(9.0), priority=1)


def test_who_waits_for_longer_than_the_patience_is_refused() -> None:
    ingress = Ingress(Gate(patience_ms=4_000))
    assert ingress.refuses(0.0, at(0.0, wait_ms=4_001))
    assert not ingress.refuses(0.0, at(9.0, wait_ms=3_999, busy=1.0))


@pytest.mark.parametrize(("flex_per_s", "default_per_s"), [(8, 8), (5, 11), (16, 2)])
def test_the_lower_priority_is_refused_while_the_other_finds_room(flex_per_s: int, default_per_s: int) -> None:
    gate, ends_per_s, waiting = Gate(patience_ms=2_000), 12, 0.0
    refused, came = {0: 0, -1: 0}, {0: 0, -1: 0}
    for step in range(60_000):
        for priority, per_s in ((-1, flex_per_s), (0, default_per_s)):
            if step * per_s // 1_000 == (step + 1) * per_s // 1_000:
                continue
            came[priority] += 1
            if gate.refuses(priority, 0.0, at(0.1, wait_ms=waiting * 1_000 / ends_per_s), float(step)):
                refused[priority] += 1
            else:
                waiting += 1
        waiting = max(waiting - ends_per_s / 1_000, 0.0)
    assert refused[0] == 0
    excess = (flex_per_s + default_per_s - ends_per_s) / flex_per_s
    assert refused[-1] == pytest.approx(excess * came[-1], rel=0.1)


def test_a_lower_priority_may_break_fewer_promises() -> None:
    gate = Gate(patience_ms=1e9, most_loss=3.0)
    for second in range(60):
        gate.refuses(0, 0.0, at(0.1, busy=1.0), second * 1_000.0)
    assert not gate.refuses(0, 0.0, at(2.0, busy=1.0), 60_000.0)
    assert gate.refuses(-1, 0.0, at(2.0, busy=1.0), 60_000.0)
    assert not gate.refuses(-1, 0.0, at(1.4, busy=1.0), 60_000.0)


def test_who_breaks_more_promises_than_may_be_is_refused_while_engines_are_busy() -> None:
    ingress = Ingress(Gate(most_loss=1.5))
    assert not ingress.refuses(0.0, at(9.0, busy=1.0)), "a moment says little"
    for _ in range(400):
        ingress.refuses(0.0, at(0.0, busy=0.8))
    assert ingress.refuses(0.0, at(1.6))
    assert not ingress.refuses(0.0, at(1.4, busy=1.0))
    for _ in range(400):
        ingress.refuses(0.0, at(0.0, busy=0.0))
    assert not ingress.refuses(0.0, at(1.6))


def test_a_burst_that_comes_to_idle_engines_is_no_overload() -> None:
    gate = Gate(most_loss=1.5)
    for second in range(100):
        now_ms = 3_000.0 * second
        assert not gate.refuses(0, 0.0, at(0.1, busy=0.0), now_ms)
        assert not any(gate.refuses(0, 0.0, at(9.0, busy=1.0), now_ms) for _ in range(50))


queues = st.builds(
    Waiting,
    share=st.floats(0, 1),
    wait_ms=st.floats(0, 1e9),
    requests=st.integers(0, 10**6),
    ended_per_s=st.floats(0, 1e6),
)


@given(st.lists(queues, max_size=8), st.floats(0, 1e6), st.floats(1, 1e6))
def test_the_part_that_is_refused_is_a_part(engines: list[Waiting], demand: float, patience_ms: float) -> None:
    assert 0 <= refused(engines, demand, patience_ms) <= MOST
