"""Sketches: quantiles within their stated error, whatever was merged in whatever order."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing import sketch
from routing.errors import BadSketch
from wire import codec
from wire.messages import DemandSignal, Sketch

durations = st.floats(min_value=sketch.MIN_MS, max_value=sketch.MAX_MS)


def of(values: list[float]) -> Sketch:
    recorder = sketch.Recorder()
    for value in values:
        recorder.add(value)
    return recorder.take()


def test_nothing_has_no_quantile_and_no_mean() -> None:
    assert sketch.quantile(sketch.empty(), 0.5) is None
    assert sketch.mean(sketch.empty()) is None


def test_quantiles_of_one_to_a_thousand() -> None:
    seen = of([float(n) for n in range(1, 1001)])
    for q, right in ((0.0, 1), (0.5, 500), (0.99, 990), (1.0, 1000)):
        assert sketch.quantile(seen, q) == pytest.approx(right, rel=sketch.RELATIVE_ERROR + 1e-3)
    assert sketch.mean(seen) == pytest.approx(500.5)


@given(st.lists(durations, min_size=1, max_size=80), st.floats(0, 1))
def test_a_quantile_is_off_by_no_more_than_stated(values: list[float], q: float) -> None:
    exact = sorted(values)[math.floor(q * (len(values) - 1))]
    assert sketch.quantile(of(values), q) == pytest.approx(exact, rel=sketch.RELATIVE_ERROR + 1e-9)


@given(st.lists(durations), st.lists(durations))
def test_merging_is_as_if_one_had_seen_all(left: list[float], right: list[float]) -> None:
    merged, whole = sketch.merge((of(left), of(right))), of(left + right)
    assert merged.counts == whole.counts
    assert merged.total == len(left) + len(right)
    assert merged.sum_ms == pytest.approx(whole.sum_ms)
    assert sketch.merge((of(right), of(left))).counts == whole.counts


def test_add_leaves_the_old_sketch_alone() -> None:
    one = sketch.add(sketch.empty(), 10.0)
    three = sketch.add(one, 20.0, times=2)
    assert (one.total, three.total, three.sum_ms) == (1, 3, 50.0)


def test_take_starts_anew() -> None:
    recorder = sketch.Recorder()
    recorder.add(5.0)
    assert recorder.take().total == 1
    assert recorder.take() == sketch.empty()


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_what_is_no_duration_is_refused(value: float) -> None:
    with pytest.raises(ValueError):
        sketch.add(sketch.empty(), value)


def test_zero_and_a_year_stay_in_range() -> None:
    seen = of([0.0, 365 * 86_400_000.0])
    sketch.check(seen)
    assert sketch.quantile(seen, 0) == pytest.approx(sketch.MIN_MS, rel=0.1)


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan])
def test_a_quantile_outside_zero_to_one_is_refused(q: float) -> None:
    with pytest.raises(ValueError):
        sketch.quantile(sketch.empty(), q)


@given(st.lists(durations))
def test_what_a_recorder_made_passes_the_check_after_the_wire(values: list[float]) -> None:
    message = DemandSignal(ingress="i", slot=0, incarnation="a", region="local", model="", at_ms=0, accept=of(values))
    again = codec.decode(codec.encode(message)).accept
    sketch.check(again)
    assert again.counts == message.accept.counts


@pytest.mark.parametrize(
    "bad",
    [
        Sketch(counts={"x": 1}, total=1),
        Sketch(counts={"007": 1}, total=1),
        Sketch(counts={"99999": 1}, total=1),
        Sketch(counts={"-99999": 1}, total=1),
        Sketch(counts={"3": -1}, total=-1),
        Sketch(counts={"3": 1}, total=2),
        Sketch(counts={"3": 1}, total=1, sum_ms=math.nan),
        Sketch(counts={"3": 1}, total=1, sum_ms=-1.0),
    ],
)
def test_what_no_recorder_made_is_refused(bad: Sketch) -> None:
    with pytest.raises(BadSketch):
        sketch.check(bad)
