"""How engines share the load: what it costs that they don't do so best, and whether it swings."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.curve import Curve, Curves
from routing.optimizer import HEADROOM
from routing.shares import LEAST_PER_S, by_window, regret, swing, swing_of_counts

FAST = Curve(base_ms=0.0, scale_ms=100.0, capacity=20.0)
SLOW = Curve(base_ms=0.0, scale_ms=200.0, capacity=10.0)


def best(asked: float) -> tuple[list[float], float]:
    """The best loads of a fast engine and a slow one, and a request's mean time at these."""
    curves = Curves([[FAST, SLOW]], HEADROOM)
    load = np.array([[asked]])
    return curves.share(load)[0].tolist(), curves.cost(load)[0].item() / asked


@pytest.mark.parametrize("asked", [5.0, 15.0, 28.0])
def test_the_best_shares_regret_nothing_and_others_something(asked: float) -> None:
    loads, best_ms = best(asked)
    assert regret([FAST, SLOW], loads, asked, best_ms) == pytest.approx(0, abs=1e-6)
    assert (regret([FAST, SLOW], [asked / 2, asked / 2], asked, best_ms) or 0) > 0.02


@given(st.lists(st.floats(0, 60), min_size=2, max_size=2), st.floats(LEAST_PER_S, 28))
def test_regret_is_a_part(loads: list[float], asked: float) -> None:
    part = regret([FAST, SLOW], loads, asked, best(asked)[1])
    assert part is None if sum(loads) < LEAST_PER_S else part is not None and 0 <= part < 1


def test_what_is_hardly_used_has_no_regret_to_speak_of() -> None:
    assert regret([FAST, SLOW], [0.0, 0.1], 5.0, 10.0) is None
    assert regret([FAST, SLOW], [3.0, 3.0], 0.001, 10.0) is None


def test_shares_that_stay_do_not_swing() -> None:
    assert swing([]) == swing([[0.7, 0.3]] * 5) == 0
    assert swing([[0.9, 0.1], [0.1, 0.9]] * 3) == pytest.approx(0.8)


def test_chance_is_no_swing_and_a_swing_is_more_than_chance() -> None:
    draw = Random(1)
    even = [_counts(draw, [1.0] * 8) for _ in range(12)]
    swinging = [_counts(draw, [2.0, 0.0] * 4 if window % 2 else [0.0, 2.0] * 4) for window in range(12)]
    assert swing([[count / 40 for count in window] for window in even]) > 0.3
    assert swing_of_counts(even) < 0.2
    assert swing_of_counts(swinging) == pytest.approx(1.0, abs=0.15)


def test_windows_in_which_nothing_was_served_say_nothing() -> None:
    assert swing_of_counts([[0, 0], [10, 10], [0, 0]]) == 0
    assert swing_of_counts([[0, 0], [100, 0], [0, 100]]) > 0.9


def _counts(draw: Random, weights: list[float], requests: int = 40) -> list[int]:
    chosen = draw.choices(range(len(weights)), weights, k=requests)
    return [chosen.count(engine) for engine in range(len(weights))]


def test_shares_are_of_a_windows_work() -> None:
    work = [(0.0, "a", 3.0), (5.0, "b", 1.0), (25.0, "b", 2.0)]
    assert by_window(work, ["a", "b"], 10.0) == [[0.75, 0.25], [0.0, 1.0]], "nothing came in the second window"
    assert by_window([], ["a"]) == []
