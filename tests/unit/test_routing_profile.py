"""Profiles: what an engine has shown, forgotten slowly; an unknown engine is taken for a slow one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_world import NOW_MS, STEP, signal

from routing import sketch
from routing.curve import Curve
from routing.profile import (
    CAUTION,
    HALF_LIFE_MS,
    MOST_CORRECTION,
    UNMEASURED,
    Line,
    Mix,
    Profile,
    curves,
    learn,
    slowed,
)
from wire.messages import Sketch, StepCost

MIX = Mix(prompt_tokens=1_000, answer_tokens=200)


def seen(value_ms: float) -> Sketch:
    return sketch.add(sketch.empty(), value_ms)


def curve(profile: Profile) -> Curve:
    (one,) = curves([profile], MIX)
    return one


# ---------------------------------------------------------------- rates


def test_an_idle_moment_does_not_make_an_engine_slow() -> None:
    busy = learn(UNMEASURED, signal(decode_tokens_per_s=800.0))
    idle = learn(busy, signal(decode_tokens_per_s=20.0, at_ms=NOW_MS + 1000))
    assert idle.decode_tokens_per_s == pytest.approx(800, rel=0.01)


def test_an_engine_that_became_slower_is_noticed() -> None:
    fast = learn(UNMEASURED, signal(decode_tokens_per_s=800.0))
    later = learn(fast, signal(decode_tokens_per_s=300.0, at_ms=NOW_MS + 2 * int(HALF_LIFE_MS)))
    assert later.decode_tokens_per_s == 300.0


def test_a_signal_out_of_order_fades_nothing() -> None:
    profile = Profile(prefill_tokens_per_s=100.0, slots=32, at_ms=NOW_MS)
    assert learn(profile, signal(prefill_tokens_per_s=50.0, at_ms=NOW_MS - 5000)) == profile


@pytest.mark.parametrize("reported", [None, 0.0, -1.0, math.nan, math.inf])
def test_what_is_no_rate_is_unknown(reported: float | None) -> None:
    assert learn(UNMEASURED, signal(decode_tokens_per_s=reported)).decode_tokens_per_s is None
    known = learn(Profile(decode_tokens_per_s=500.0, at_ms=NOW_MS), signal(decode_tokens_per_s=reported))
    assert known.decode_tokens_per_s == 500.0


# ---------------------------------------------------------------- what follows from them


def test_two_capacities_make_one() -> None:
    # 1,000 tokens at 10,000 a second are 100 ms, and 200 at 2,000 another 100: 5 a second
    made = curve(Profile(prefill_tokens_per_s=10_000.0, decode_tokens_per_s=2_000.0, slots=20))
    assert made.capacity == pytest.approx(5)
    # 20 at once at 2,000 a second: 10 ms a token
    assert made.scale_ms == pytest.approx(100 + 10 + 200 * 10)


def test_a_card_that_is_faster_in_prefill_than_in_decode_is_better_by_what_is_asked() -> None:
    slow = Profile(prefill_tokens_per_s=10_000.0, decode_tokens_per_s=2_000.0, slots=20)
    fast = Profile(prefill_tokens_per_s=18_000.0, decode_tokens_per_s=3_000.0, slots=20)
    ratios = []
    for mix in (Mix(prompt_tokens=8_000, answer_tokens=10), Mix(prompt_tokens=100, answer_tokens=1_000)):
        one, other = curves([slow, fast], mix)
        ratios.append(other.capacity / one.capacity)
    assert ratios == [pytest.approx(1.8, abs=0.01), pytest.approx(1.5, abs=0.01)]


def test_what_steps_take_says_more_than_rates() -> None:
    step = StepCost(prefill_fixed_ms=10, prefill_token_ms=0.02, decode_ms=12, decode_token_ms=1e-4, piece_tokens=8_000)
    made = curve(learn(UNMEASURED, signal(step=step, kv_used_tokens=20_000, slots=50, decode_tokens_per_s=1.0)))
    # 30 ms a prompt; 12 − 2 ms a step alone, and 50 × 1,100 tokens add 5.5: 200 × 15.5 ÷ 50 = 62 ms of a step's share
    assert made.capacity == pytest.approx(1_000 / (30 + 62))
    assert made.scale_ms == pytest.approx(30 + 10 + 200 * 10)


def test_a_step_that_costs_nothing_alone_is_not_believed() -> None:
    step = StepCost(prefill_fixed_ms=10, prefill_token_ms=0.02, decode_ms=12, decode_token_ms=1.0)
    made = curve(learn(UNMEASURED, signal(step=step, kv_used_tokens=20_000)))
    assert made.scale_ms == pytest.approx(30 + 201 * 12 / MOST_CORRECTION)


def test_a_new_engine_is_taken_for_half_of_the_worst() -> None:
    known = [Profile(decode_tokens_per_s=1000.0), Profile(decode_tokens_per_s=400.0), UNMEASURED]
    _, slow, new = curves(known, MIX)
    assert new.capacity == pytest.approx(slow.capacity * CAUTION)
    assert new.scale_ms == pytest.approx(slow.scale_ms / CAUTION)


def test_when_nothing_is_known_all_are_alike() -> None:
    one, other = curves([UNMEASURED] * 2, MIX)
    assert one == other
    assert curves([], MIX) == []


def test_an_engine_that_is_not_trusted_has_less_capacity() -> None:
    assert slowed(Curve(base_ms=1, scale_ms=2, capacity=8), 0.25) == Curve(base_ms=1, scale_ms=2, capacity=2)


# ---------------------------------------------------------------- what was seen


def test_a_line_goes_through_its_points() -> None:
    assert Line().add(1, 5).add(3, 9, 2).fit() == pytest.approx((3, 2))


def run(alone_ms: float, capacity: float, loads: list[float], step: StepCost = STEP) -> Profile:
    """A profile after signals of an engine whose TBT is alone_ms ÷ (1 − load/capacity)."""
    profile, at_ms = learn(UNMEASURED, signal(step=step, slots=64)), NOW_MS
    for load in loads:
        for _ in range(120):
            at_ms += 1_000
            tbt = seen(alone_ms / (1 - profile.load / capacity))
            profile = learn(profile, signal(step=step, slots=64, at_ms=at_ms, tbt=tbt, finished=round(load)))
    return profile


def test_load_is_what_ended_lately() -> None:
    assert run(10, 100, [7]).load == pytest.approx(7, rel=0.01)


def test_an_engine_that_is_slower_than_it_says_is_found_out() -> None:
    told = curve(learn(UNMEASURED, signal(step=STEP, slots=64)))
    capacity = told.capacity / 2
    seen_curve = curve(run(20, capacity, [1, capacity * 0.3, capacity * 0.6, 2, capacity * 0.7]))
    assert seen_curve.capacity == pytest.approx(capacity, rel=0.25)
    assert seen_curve.scale_ms == pytest.approx(20 + MIX.answer_tokens * 20, rel=0.2)


def test_what_is_seen_corrects_by_a_bounded_factor() -> None:
    told = curve(learn(UNMEASURED, signal(step=STEP, slots=64)))
    absurd = curve(run(10_000, 1e9, [3]))
    assert absurd.scale_ms <= MOST_CORRECTION * told.scale_ms * 1.01
    falling = curve(Profile(step=STEP, slots=64, tbt=Line().add(0, 0.01, 1e3).add(10, 10.0, 1e3)))
    assert falling.capacity == pytest.approx(told.capacity), "faster under load: no capacity is seen"
    impossible = curve(Profile(step=STEP, slots=64, tbt=Line().add(5, 1e-6, 1e6).add(10, 10.0, 1e6)))
    assert impossible.scale_ms < math.inf


@given(
    st.lists(
        st.tuples(st.integers(0, 3_000), st.integers(-3, 50), st.floats(1e-3, 1e7), st.floats(1e-3, 1e7)), max_size=20
    ),
    st.none() | st.just(STEP),
)
def test_a_curve_is_always_positive_and_finite(
    said: list[tuple[int, int, float, float]], step: StepCost | None
) -> None:
    profile, at_ms = UNMEASURED, NOW_MS
    for passed_ms, finished, ttft_ms, tbt_ms in said:
        at_ms += passed_ms
        profile = learn(
            profile, signal(at_ms=at_ms, finished=finished, ttft=seen(ttft_ms), tbt=seen(tbt_ms), step=step)
        )
    made = curve(profile)
    assert 0 < made.scale_ms < math.inf
    assert 0 < made.capacity < math.inf
