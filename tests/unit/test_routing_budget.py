"""The retry budget: retries are a bounded share of first attempts, and there is always one for the lonely request."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.budget import HORIZON_MS, RATIO, RetryBudget, ratio_at


def test_a_lone_request_may_try_again_a_few_times() -> None:
    budget = RetryBudget(reserve=3.0)
    budget.first_attempt(0)
    assert [budget.try_retry(0) for _ in range(5)] == [True, True, True, False, False]


def test_an_outage_amplifies_load_by_no_more_than_the_ratio() -> None:
    # 100 requests a second for 60 s, every one fails and wants a second try
    budget, retries, now_ms = RetryBudget(ratio=0.1), 0, 0.0
    for _ in range(6000):
        now_ms += 10
        budget.first_attempt(now_ms)
        retries += budget.try_retry(now_ms)
    assert 0.09 * 6000 < retries <= 0.1 * 6000 + 3 * (1 + 60_000 / HORIZON_MS)


def test_a_calm_hour_saves_up_no_storm() -> None:
    budget, now_ms = RetryBudget(ratio=0.1, reserve=3.0), 0.0
    for _ in range(3600 * 10):
        now_ms += 100
        budget.first_attempt(now_ms)
    # 10 a second over the last 10 s, a tenth of them, and the reserve
    assert budget.cap(now_ms) == pytest.approx(3 + 0.1 * 100, rel=0.02)
    assert sum(budget.try_retry(now_ms) for _ in range(1000)) == 13


def test_unspent_budget_fades_with_the_traffic_that_earned_it() -> None:
    budget = RetryBudget(ratio=0.5, reserve=1.0)
    for _ in range(100):
        budget.first_attempt(0)
    assert budget.cap(0) == pytest.approx(51)
    assert budget.cap(3 * HORIZON_MS) == pytest.approx(1 + 50 * 0.0498, rel=0.01)


def test_the_reserve_comes_back() -> None:
    budget = RetryBudget(reserve=1.0)
    assert budget.try_retry(0)
    assert not budget.try_retry(HORIZON_MS / 2)
    assert budget.try_retry(1.1 * HORIZON_MS)


def test_tightening_stops_earning() -> None:
    budget = RetryBudget(ratio=0.2, reserve=0.0)
    budget.tighten(0.0)
    for _ in range(100):
        budget.first_attempt(0)
    assert budget.ratio == 0.0
    assert not budget.try_retry(0)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_a_ratio_is_a_share(ratio: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        RetryBudget(ratio=ratio)


@given(st.lists(st.tuples(st.floats(-1e4, 1e4), st.booleans()), max_size=200))
def test_what_is_unspent_is_never_negative_and_never_over_the_cap(steps: list[tuple[float, bool]]) -> None:
    budget, now_ms, first, retries = RetryBudget(ratio=0.1, reserve=2.0), 0.0, 0, 0
    latest_ms = 0.0
    for passed_ms, retry in steps:
        now_ms += passed_ms
        latest_ms = max(latest_ms, now_ms)
        if retry:
            retries += budget.try_retry(now_ms)
        else:
            budget.first_attempt(now_ms)
            first += 1
    assert retries <= 2 + 0.1 * first + 2 * latest_ms / HORIZON_MS + 1e-6


@pytest.mark.parametrize(
    ("latency_ms", "request_ms", "ratio"),
    [
        (100.0, 100.0, RATIO),
        (100.0, 200.0, RATIO),  # half is free
        (100.0, 400.0, RATIO / 2),  # a quarter
        (100.0, 10_000.0, RATIO / 50),
        (None, 100.0, RATIO),
        (100.0, None, RATIO),
        (100.0, math.nan, RATIO),
        (100.0, math.inf, RATIO),
        (-1.0, 100.0, RATIO),
    ],
)
def test_the_dearer_one_more_request_is_the_fewer_retries(
    latency_ms: float | None, request_ms: float | None, ratio: float
) -> None:
    assert ratio_at(latency_ms, request_ms, refusing=False) == pytest.approx(ratio)
    assert ratio_at(latency_ms, request_ms, refusing=True) == 0
