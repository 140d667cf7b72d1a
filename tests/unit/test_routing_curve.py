"""Latency against load: convex, with a pole; a group's load is shared where one more request costs the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.curve import Curve, Curves

HEADROOM = 0.95


def queue(capacity: float) -> Curve:
    """1 ÷ (capacity − x) seconds."""
    return Curve(base_ms=0.0, scale_ms=1_000 / capacity, capacity=capacity)


def test_a_queues_latency_has_its_pole_at_the_capacity() -> None:
    assert queue(100).ms(90) == pytest.approx(100)
    assert queue(100).ms(100) == math.inf


def test_what_is_spent_goes_on_rising_where_there_is_no_headroom_any_more() -> None:
    spent = [queue(100).spent_ms(load, 0.9) for load in (0, 50, 90, 91, 101)]
    assert spent[:3] == pytest.approx([0, 50 * 20, 90 * 100])
    assert spent[3] - spent[2] == pytest.approx(1_000), "one more at 90 of 100 adds 100 ÷ (100 − 90)² seconds"
    assert spent[4] - spent[3] == pytest.approx(10_000)


def test_equal_engines_share_equally() -> None:
    shares = Curves([[queue(10)] * 4], HEADROOM).share(np.array([[20.0]]))
    assert shares.tolist() == [pytest.approx([5, 5, 5, 5])]


def test_a_slower_engine_gets_nothing_until_the_fast_one_costs_as_much() -> None:
    # one more costs the first 100 ÷ (1 − x/10)², and the second 400 at least: until x = 5
    curves = Curves([[Curve(base_ms=0, scale_ms=100, capacity=10), Curve(base_ms=300, scale_ms=100, capacity=10)]], 0.9)
    assert curves.share(np.array([[4.0], [5.0], [7.0]]))[:, 1].tolist() == [
        0,
        pytest.approx(0, abs=1e-6),
        pytest.approx(1.73, abs=0.01),
    ]


def test_cost_and_price_are_those_of_the_queue() -> None:
    cost, price = Curves([[queue(100)], [queue(50), queue(50)]], HEADROOM).cost(np.array([[90.0, 80.0]]))
    # x ÷ (μ − x) requests wait: 9 seconds a second, and twice 4; one more adds μ ÷ (μ − x)²
    assert cost.tolist() == [pytest.approx([9_000, 8_000])]
    assert price.tolist() == [pytest.approx([1_000, 500])]


curves = st.builds(Curve, base_ms=st.floats(0, 1_000), scale_ms=st.floats(0.1, 10_000), capacity=st.floats(0.01, 1_000))


@given(st.lists(curves, min_size=1, max_size=6), st.floats(0, 1))
def test_the_shares_are_the_load_and_cost_rises_faster_the_fuller_a_group_is(engines: list[Curve], full: float) -> None:
    group = Curves([engines], HEADROOM)
    loads = np.linspace(0, full, 5)[:, None] * group.capacity
    shares = group.share(loads)
    assert (shares >= 0).all()
    assert shares.sum(axis=1) == pytest.approx(loads[:, 0], rel=1e-6, abs=1e-6)
    cost, price = group.cost(loads)
    assert (np.diff(price[:, 0]) >= -1e-6 * price[:-1, 0]).all()
    assert np.isfinite(cost).all()
