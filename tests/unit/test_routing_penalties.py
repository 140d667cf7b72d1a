"""Penalties: lost trust halves a weight, time gives it back, nothing takes all of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.penalties import (
    HALF_LIFE_MS,
    MAX_PENALTY,
    Outcome,
    Penalty,
    grown,
    penalty_at,
    punish,
    weight_factor,
)


@pytest.mark.parametrize("outcome", ["failed", "timed_out"])
def test_each_failure_halves_the_weight(outcome: Outcome) -> None:
    once = punish(Penalty(), outcome, 1000)
    twice = punish(once, outcome, 1000)
    assert weight_factor(penalty_at(once, 1000)) == 1 / 2
    assert weight_factor(penalty_at(twice, 1000)) == 1 / 4


@pytest.mark.parametrize("outcome", ["answered", "client_error"])
def test_answers_and_client_errors_are_neutral(outcome: Outcome) -> None:
    # ten requests over the context length say nothing about the engine
    penalty = Penalty()
    for _ in range(10):
        penalty = punish(penalty, outcome, 1000)
    assert penalty.value == 0


def test_being_overloaded_costs_less_than_failing() -> None:
    assert 0 < punish(Penalty(), "overloaded", 0).value < punish(Penalty(), "failed", 0).value


def test_half_is_forgiven_in_a_half_life() -> None:
    penalty = Penalty(4.0, 1000)
    assert penalty_at(penalty, 1000 + int(HALF_LIFE_MS)) == pytest.approx(2.0)
    assert penalty_at(penalty, 1000 + 10 * int(HALF_LIFE_MS)) < 0.01


@given(st.lists(st.tuples(st.integers(-10_000, 10_000), st.floats(-1, 3)), max_size=50))
def test_a_weight_is_never_taken_whole_and_time_never_runs_back(steps: list[tuple[int, float]]) -> None:
    penalty, now_ms = Penalty(), 100_000
    for passed_ms, blame in steps:
        now_ms += passed_ms
        before = penalty
        penalty = grown(penalty, blame, now_ms)
        assert 0 <= penalty.value <= MAX_PENALTY
        assert penalty.at_ms >= before.at_ms
        assert 2**-MAX_PENALTY <= weight_factor(penalty_at(penalty, now_ms)) <= 1
