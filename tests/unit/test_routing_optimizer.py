"""The optimizer: all demand routed or refused, the least latency, and prices that say what would help."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing import optimizer
from routing.curve import Curve
from routing.optimizer import HEADROOM, Group, Problem, Solution, solve

PLACES = ("A", "B", "C")
FOUR_MS = {(a, b): 4.0 for a in PLACES for b in PLACES if a < b}


def queue(capacity: float) -> Curve:
    """1 ÷ (capacity − x) seconds."""
    return Curve(base_ms=0.0, scale_ms=1_000 / capacity, capacity=capacity)


def flat(capacity: float) -> Curve:
    """No latency to speak of until it is full: the linear program."""
    return Curve(base_ms=0.0, scale_ms=1e-6, capacity=capacity / HEADROOM)


def three(curve: type[Curve] | object, **fields: object) -> Problem:
    """The worked case: B has more than it can do, C has room, and A has just enough."""
    known: dict[str, object] = {"demand": {"A": 90.0, "B": 120.0, "C": 40.0}, "trips_ms": FOUR_MS}
    groups = tuple(Group(region=r, engines=(curve(c),), version=r) for r, c in zip(PLACES, (100, 100, 80), strict=True))  # type: ignore[operator]
    return Problem(groups=groups, **(known | fields))  # type: ignore[arg-type]


def flow(solution: Solution, origin: str, place: str) -> float:
    return solution.flows.get((origin, PLACES.index(place)), 0.0)


def test_with_a_hard_capacity_exactly_the_twenty_too_many_go_from_b_to_c() -> None:
    solution = solve(three(flat))
    assert {pair: round(value, 3) for pair, value in solution.flows.items()} == {
        ("A", 0): 90.0,
        ("B", 1): 100.0,
        ("B", 2): 20.0,
        ("C", 2): 40.0,
    }
    assert solution.capacity_price_ms[1] == pytest.approx(4.0, abs=0.01)


def test_where_latency_grows_with_load_more_than_the_overflow_moves() -> None:
    solution = solve(three(queue))
    expected = {("A", "A"): 89.64, ("A", "C"): 0.36, ("B", "B"): 89.64, ("B", "C"): 30.36, ("C", "C"): 40.0}
    for (origin, place), requests in expected.items():
        assert flow(solution, origin, place) == pytest.approx(requests, abs=0.01)
    assert solution.latency_ms == pytest.approx(100.2, abs=0.05)
    # one more costs 1 ÷ (1 − 0.8964)² of 10 ms at A and B, and 4 ms less at C, where it needn't travel
    assert solution.demand_price_ms["A"] == pytest.approx(934.4, abs=0.5)
    assert solution.demand_price_ms["C"] == pytest.approx(solution.demand_price_ms["A"] - 4, abs=0.5)


def test_what_no_engine_has_room_for_is_refused_and_no_more() -> None:
    solution = solve(three(queue, demand={"A": 150.0, "B": 150.0, "C": 150.0}))
    assert sum(solution.refused.values()) == pytest.approx(450 - 280 * HEADROOM, rel=1e-6)
    assert all(price > 0 for price in solution.capacity_price_ms)


def test_requests_stay_where_they_must() -> None:
    solution = solve(three(queue, forbidden=frozenset({("B", "A"), ("B", "C")})))
    assert flow(solution, "B", "B") == pytest.approx(95)
    assert solution.refused == {"A": 0.0, "B": pytest.approx(25), "C": 0.0}


def test_a_rollout_is_a_ceiling() -> None:
    solution = solve(three(queue, ceilings={"C": 0.1}))
    assert sum(flow(solution, origin, "C") for origin in PLACES) == pytest.approx(25)
    assert sum(solution.refused.values()) == pytest.approx(250 - 25 - 190)


def test_moving_has_a_price() -> None:
    settled = {("A", 0): 1.0, ("B", 1): 90 / 120, ("B", 2): 30 / 120, ("C", 2): 1.0}
    free, dear = (solve(three(queue, before=settled, move_ms=price)) for price in (0.0, 500.0))
    assert flow(free, "A", "C") == pytest.approx(0.36, abs=0.01)
    assert flow(dear, "A", "C") == 0
    assert flow(dear, "B", "C") == pytest.approx(30, abs=0.01)


def test_two_epochs_after_a_step_in_demand_it_is_at_the_optimum() -> None:
    before = solve(three(queue, demand={"A": 40.0, "B": 60.0, "C": 40.0}))
    after = solve(three(queue))
    for _ in range(2):
        demand = {"A": 90.0, "B": 120.0, "C": 40.0}
        served = {origin: sum(v for (o, _), v in before.flows.items() if o == origin) for origin in PLACES}
        shares = {pair: value / served[pair[0]] for pair, value in before.flows.items()}
        before = solve(three(queue, demand=demand, before=shares, move_ms=1.0))
    for pair, value in after.flows.items():
        assert before.flows.get(pair, 0.0) == pytest.approx(value, abs=0.01 * 250)


def test_tangents_that_never_agree_end_after_some_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "ROUNDS", 1)
    assert solve(three(queue)).latency_ms == pytest.approx(100.2, rel=0.05)


def test_a_region_without_demand_needs_nothing() -> None:
    assert solve(three(queue, demand={"A": 0.0, "B": 10.0})).refused == {"B": 0.0}


def test_little_load_is_shared_by_capacity_and_not_put_on_the_fastest() -> None:
    group = Group(region="A", engines=(queue(100), queue(99)))
    (shares,) = solve(Problem(demand={"A": 1.0}, groups=(group,))).shares
    assert shares == pytest.approx((0.5, 0.5), abs=0.02)


def test_mixed_hardware_is_loaded_alike() -> None:
    # the second is 1.8 times as fast in prefill and 1.5 in decode
    engines = (Curve(base_ms=0, scale_ms=5_000, capacity=2.0), Curve(base_ms=0, scale_ms=3_200, capacity=3.2))
    solution = solve(Problem(demand={"A": 4.2}, groups=(Group(region="A", engines=engines),)))
    loads = [share * 4.2 / curve.capacity for share, curve in zip(solution.shares[0], engines, strict=True)]
    assert max(loads) / (sum(loads) / 2) <= 1.1


curves = st.builds(Curve, base_ms=st.floats(0, 500), scale_ms=st.floats(1, 5_000), capacity=st.floats(0.1, 50))
groups = st.builds(
    Group,
    region=st.sampled_from(PLACES),
    engines=st.lists(curves, min_size=1, max_size=3).map(tuple),
    extra_ms=st.sampled_from([0.0, 1e5]),
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(groups, min_size=1, max_size=5),
    st.dictionaries(st.sampled_from(PLACES), st.floats(0.001, 200), min_size=1),
    st.frozensets(st.tuples(st.sampled_from(PLACES), st.sampled_from(PLACES)), max_size=4),
)
def test_all_demand_is_routed_or_refused_within_capacity(
    made: list[Group], demand: dict[str, float], forbidden: frozenset[tuple[str, str]]
) -> None:
    solution = solve(Problem(demand=demand, groups=tuple(made), trips_ms=FOUR_MS, forbidden=forbidden))
    for region, asked in demand.items():
        served = sum(value for (origin, _), value in solution.flows.items() if origin == region)
        assert served + solution.refused[region] == pytest.approx(asked, rel=1e-6, abs=1e-6)
    for m, group in enumerate(made):
        load = sum(value for (_, place), value in solution.flows.items() if place == m)
        assert load <= HEADROOM * sum(curve.capacity for curve in group.engines) * (1 + 1e-6) + 1e-6
        assert sum(solution.shares[m]) == pytest.approx(1)
        assert all(share >= 0 for share in solution.shares[m])
    assert all(value > 0 and (origin, made[m].region) not in forbidden for (origin, m), value in solution.flows.items())


def test_the_solver_says_nothing_on_standard_output() -> None:
    script = (
        "from routing.curve import Curve; from routing.optimizer import Group, Problem, solve;"
        "group = Group(region='a', engines=(Curve(base_ms=1, scale_ms=1, capacity=1),));"
        "print(len(solve(Problem(demand={'a': 0.5}, groups=(group,))).flows))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
